"""Every bound and every time-out of the system, each with its unit in the name and its reason beside it.

Every wait has a deadline, every queue a bound; no such number stands anywhere else, and each has one meaning
(``tests/style/test_limits_have_one_home.py`` lists the few that are facts of a format). Values are defaults;
``Limits`` is a frozen model, so a job, a test or an operator may pass another one, but never change one in place.
Limits of links, actors and supervision are in ``process_limits.py``.
"""

from __future__ import annotations

from configs.process_limits import ProcessLimits, limit


class Limits(ProcessLimits):
    """Holds all limits, grouped by the part that obeys them."""

    # episodes
    episode_grace_s: float = limit(
        10.0, "an episode whose time is over has so long to be scored; then its process is killed"
    )
    episode_result_bytes: int = limit(1 << 16, "what an episode's process says of its end")
    episode_log_bytes: int = limit(1 << 20, "output of one episode, of which the newest half stays")
    episode_file_bytes: int = limit(
        4 << 30, "one file that an episode writes; a larger one is an accident that fills the disk"
    )
    episode_metrics: int = limit(64, "numbers that an environment tells of one episode")
    episodes_kept: int = limit(
        16, "directories of failed episodes that an environment worker keeps, for people to look at"
    )
    gateway_silence_s: float = limit(
        60.0, "a model's answer without a byte; the gateway sends white space twice a second"
    )
    episode_look_s: float = limit(1.0, "how often the length of what episodes print is looked at")
    gateway_rendered_tokens: int = limit(
        4 << 20, "tokens in all renderings that the gateway keeps at hand; they take 36 bytes each"
    )
    gateway_look_s: float = limit(0.1, "how often a worker looks whether the gateway listens yet")
    tool_server_start_s: float = limit(30.0, "an MCP server starts, and says which tools it has")
    tools_of_server: int = limit(128, "tools of one MCP server; no model reads more schemas")
    tool_answer_bytes: int = limit(4 << 20, "one answer of an MCP server; a longer one is an error")
    tool_output_chars: int = limit(
        16_000, "of what a tool says, the model reads so many, from its beginning and its end"
    )

    # gateway
    gateway_request_bytes: int = limit(16 << 20, "one request; a million token ids as JSON are 8 MB")
    gateway_requests: int = limit(
        4096, "requests answered at once; more are told to come back, so that memory stays bounded"
    )
    gateway_questions: int = limit(16, "questions of one episode that wait for its turns; more are told to come back")
    gateway_threads: int = limit(
        4, "requests read, rendered and tokenized at once, one of each key; a long one keeps a core busy for seconds"
    )
    gateway_episodes: int = limit(
        1024, "episodes whose rows are kept at hand, some hundred kB each; others are asked of the ledger again"
    )
    gateway_renderings: int = limit(
        4096, "renderings, and turns as read, kept at hand: conversations are compared by looking them up"
    )
    gateway_stops: int = limit(16, "stop texts of a request; OpenAI takes 4, and each is looked for in the whole turn")
    gateway_alive_s: float = limit(
        0.5, "between two signs of life while a turn runs; read time-outs of clients are longer", gt=0
    )
    gateway_read_s: float = limit(60.0, "the body of one request, its rendering, and one write to a client")
    gateway_busy_s: float = limit(1.0, "after which a client that was told to come back should")

    # tinker: the server of the Tinker API
    tinker_request_bytes: int = limit(
        32 << 20, "one request; the client cuts batches into some 5 MB, and one datum of 10^6 tokens is 16 MB"
    )
    tinker_json_bytes: int = limit(1 << 20, "one request with neither datums nor a prompt; a step has some hundred")
    tinker_requests: int = limit(
        8192, "requests answered at once, most of them polls that wait; more are told to come back"
    )
    tinker_tenant_requests: int = limit(4096, "of them, those of one tenant; so that one cannot keep all others out")
    tinker_read_s: float = limit(60.0, "the body of one request, and the reading of it", gt=0)
    tinker_threads: int = limit(4, "requests read, and answers written, at once; one of each tenant")
    tinker_busy_s: float = limit(1.0, "after which a client that was told to come back should")
    tinker_poll_s: float = limit(25.0, "one poll for an answer; the client itself gives up after 45 s", gt=0)
    tinker_inline_bytes: int = limit(
        1 << 20, "an answer that is larger is announced by its size first, so that the client can bound its memory"
    )
    tinker_sessions: int = limit(64, "live sessions of one tenant; a session is one client program")
    tinker_session_s: float = limit(
        1800.0, "a session without a heartbeat for this long has ended; the client sends one every 10 s", gt=0
    )
    tinker_look_s: float = limit(10.0, "how often sessions and weights are looked at for the end of their time", gt=0)
    tinker_models: int = limit(64, "live models of one tenant")
    tinker_burst_s: float = limit(
        60.0, "of the rate of a tenant's training tokens, kept while it computes nothing, to be used at once", gt=0
    )
    tinker_samplers: int = limit(4096, "live sampling sessions of one tenant")
    tinker_weights: int = limit(4096, "saved weights of one tenant; a recipe saves some dozens")
    tinker_snapshots: int = limit(
        128, "unnamed snapshots of one model; the one that was sampled from least recently goes", ge=2
    )
    tinker_waiting_operations: int = limit(4096, "operations of one model that wait for their turn")
    tinker_waiting_bytes: int = limit(2 << 30, "the same in bytes; they wait on the disk")
    tinker_waiting_samples: int = limit(8192, "samples of one tenant that wait; the client sends 2000 at once")
    tinker_samples_at_once: int = limit(1024, "samples that are handed to the samplers at once")
    tinker_answers: int = limit(
        16384, "newest answers kept of each model and each sampling session, should a client ask again"
    )
    tinker_answer_bytes: int = limit(256 << 20, "the same in bytes; the newest answer is always kept")
    tinker_replay_operations: int = limit(
        256, "operations since the saved state beyond which the next step saves it; they are what a death costs"
    )
    tinker_replay_bytes: int = limit(512 << 20, "the same in bytes of their requests")
    tinker_replay_s: float = limit(60.0, "the same in seconds of computing", gt=0)
    tinker_batch_operations: int = limit(
        1 << 16, "calls whose gradients add up before a step; each is executed again after a death"
    )
    tinker_idle_s: float = limit(
        600.0, "a model that nothing was asked of for this long gives its memory back, and is loaded when it is", gt=0
    )
    tinker_operation_s: float = limit(
        3600.0, "one call to what computes or samples; one that takes longer hangs, and is made again", gt=0
    )
    tinker_attempts: int = limit(
        3, "lives of what computes that one operation may end; then it is taken to be the cause, and fails", ge=1
    )
    tinker_log_s: float = limit(60.0, "one transaction of the operation log; a longer one means that the disk hangs")
    tinker_datums: int = limit(8192, "datums of one request; the client cuts at 1024")
    tinker_cells: int = limit(1 << 24, "numbers of one request once sparse ones are laid out; 64 MiB")
    tinker_samples: int = limit(1024, "samples of one request")
    tinker_stops: int = limit(64, "stop texts and tokens of one request")
    tinker_topk: int = limit(128, "likeliest tokens told at each position of a prompt, or of a sequence")

    # scheduler
    lease_s: float = limit(
        15.0, "a worker that its scheduler does not confirm for this long fences itself; a head restarts sooner"
    )
    lease_margin_s: float = limit(
        1.0, "the holder's lease ends this much earlier: it stops before its scheduler gives it up"
    )
    assign_max_samples: int = limit(1024, "samples in one Assign message")
    infrastructure_retries: int = limit(100, "a sample may move this often before it is dropped")
    pending_samples_max: int = limit(
        8, "rlboost: given to a worker beyond what its engine runs at once, to begin as others end"
    )
    balance_interval_s: float = limit(0.2, "rlboost: the queues of all workers are compared no more often than this")
    balance_moves_max: int = limit(
        8, "rlboost: a sample that has been handed out this often is no longer moved for balance"
    )
    seeding_patience_s: float = limit(
        30.0, "seeding: the trainer waits this long for an engine beside it to fall asleep"
    )
    seeding_look_s: float = limit(
        0.2, "seeding_end estimated: what the trainer would wait for is estimated no more often"
    )
    plan_patience_s: float = limit(5.0, "planned: a job's first plan waits this long for its own workers to register")
    wake_patience_s: float = limit(
        30.0, "planned: a worker that is waking or starting keeps its part this long, until it was measured"
    )
    hand_over_s: float = limit(
        2.0, "before its notice ends a worker hands back what runs: a step, and the last tokens' way"
    )
    function_start_s: float = limit(
        60.0, "functions: a machine that was ordered joins within this time, or is given up"
    )
    function_look_s: float = limit(
        0.25, "functions: how often it is looked which are idle or late; starts take longer", gt=0
    )
    unsound_reports_max: int = limit(
        3, "reports of a worker with tokens that no sound engine draws; then it loses its lease, and its process ends"
    )
    data_retries: int = limit(2, "a prompt that fails this often is set aside")
    end_news_s: float = limit(0.25, "a machine says of a process of its own at once how it ended; this is for the way")
    ended_lives: int = limit(
        256, "workers' lives whose link and machine have not both told of their end; the oldest go"
    )
    engine_crashes_max: int = limit(
        2, "a prompt that was alone under suspicion when this many engines crashed is set aside"
    )
    episodes_driven_max: int = limit(
        512, "episodes that are driven at once; each may have a question that waits for its turn"
    )
    turns_waiting_max: int = limit(
        768, "questions that wait for a turn: retries come on top of one an episode; below concurrent_handlers"
    )
    episode_overdue_s: float = limit(
        30.0, "a driver ends an episode at episode_s, or kills it soon after; this is for both"
    )
    environment_metrics_max: int = limit(
        32, "different numbers of an environment's own that are averaged over a step; others go"
    )
    score_retries: int = limit(2, "repeats of a verifier that gave no result")
    score_batch_samples: int = limit(256, "samples in one Score message")
    journal_flush_s: float = limit(0.05, "group commit of the journal's write-behind lane")
    journal_queue_bytes: int = limit(
        64 << 20, "events that wait for the disk before the scheduler waits too; 25 bytes a token"
    )
    disk_reserve_bytes: int = limit(
        8 << 20, "a disk with less free is full: the journal's next transactions need some of it"
    )
    journal_stall_s: float = limit(30.0, "a disk that confirms nothing for this long has failed")
    next_batch_s: float = limit(5.0, "a commit's answer waits this long to learn whether data goes on")
    score_linger_s: float = limit(
        0.05, "finished samples gather for this long while others are being generated or scored"
    )
    score_requests: int = limit(8, "Score requests in flight; more samples per request instead of more of them")
    pull_patience_s: float = limit(2.0, "work is kept for a worker that is loading a version for this long")
    entry_tokens: int = limit(1 << 13, "tokens that a scheduler enters before the head's loop turns to others", ge=1)
    scheduler_tick_s: float = limit(0.5, "how often the scheduler looks for what no message will tell it")
    look_timeout_s: float = limit(2.0, "a process that is asked who waits in it; one that hangs is shown as silent")
    health_interval_s: float = limit(5.0, "how often a process tells metrics of its loop's lag")
    reattach_s: float = limit(
        2.0, "samples wait this long, after a restart of the head, for who generates them already"
    )
    stall_report_s: float = limit(5.0, "nothing has moved for this long: say who waits for whom")
    first_service_s: float = limit(
        30.0, "a service that has not registered is missed aloud; its process takes so long on a busy machine"
    )
    workers_per_core: int = limit(
        8, "rollout workers on one machine; each is a process with a model, more only take turns"
    )
    empty_steps_max: int = limit(
        3, "steps in a row without a sample to train; then the run takes its checkpoint and fails"
    )
    warn_after_steps: int = limit(
        4, "steps in a row that teach nothing, or whose answers are cut, before people are warned"
    )
    warn_fraction: float = limit(
        0.1, "share of a step's samples that were dropped; from here on people are warned", le=1
    )
    warn_truncated_fraction: float = limit(
        0.5, "share of a step's responses cut at max_tokens; above it people are warned", le=1
    )
    drop_reasons_told: int = limit(8, "most frequent reasons of a step's drops that are told on")
    troubles_kept: int = limit(
        64, "troubles kept for a job's actor that is away, and kinds that it counts; the oldest go"
    )
    length_prompts: int = limit(262_144, "prompts whose lengths or scores are remembered; about 100 bytes each")
    # ranker
    ranker_pairs: int = limit(
        4096, "newest (prompt, length) pairs that it learns from; older ones are of an older policy"
    )
    ranker_refresh_pairs: int = limit(256, "new pairs after which it is fine-tuned again")
    ranker_refresh_slices: int = limit(
        4, "slices of gradient steps in one refresh; questions are answered between them"
    )
    # rollout
    outbox_messages: int = limit(1024, "reports that wait for an unreachable scheduler; then the engine waits")
    reports_under_way: int = limit(
        4, "of one worker, that the scheduler has not taken; times workers < mailbox_messages", ge=2
    )
    report_patience_s: float = limit(10.0, "without a word of what it has taken; then a worker goes on saying")
    report_interval_s: float = limit(
        0.05, "between two reports of a worker in which no sample ends; faster engine steps leave as one", ge=0
    )
    merged_tokens: int = limit(4096, "of engine steps that wait for a scheduler and leave as one")
    early_commands: int = limit(
        1024, "commands that overtake the answer to a worker's offer; a healthy scheduler sends few"
    )
    prefix_cache_bytes: int = limit(
        256 << 20, "torch engine: beginnings of prompts kept in a worker; of a 0.5B model 20,000 tokens; 0: none"
    )
    engine_step_s: float = limit(
        900.0, "one step of an engine; a first compile takes minutes, a device that hangs for ever"
    )
    server_answer_s: float = limit(
        30.0, "a short answer of a server of rollout.servers, which its engine gives between two steps; then it is gone"
    )
    server_start_s: float = limit(
        60.0, "a worker waits this long for its server of rollout.servers to answer; then it says so, and waits on"
    )
    server_absence_s: float = limit(
        3600.0, "a worker whose server was away for so long fails, which costs restarts; until then it costs none"
    )
    replay_tokens: int = limit(
        65536, "newest tokens that a worker remembers: more than journal_flush_s of them; 12 bytes each"
    )
    orphan_tokens: int = limit(1 << 20, "generated without a scheduler, while the lease lasts; then the engine waits")
    span_interval_s: float = limit(1.0, "how often a worker sends its spans of the trace")
    # sampling of snapshots
    sampling_patience_s: float = limit(
        2.0, "a snapshot's request waits this long; then no more of another one join those that run", ge=0
    )
    sampling_memory_bytes: int = limit(
        1 << 30, "tensors of adapters that a sampler keeps at hand, and again in the engine; rank 32 of an 8B: 170 MB"
    )
    sampling_snapshots: int = limit(
        4096, "snapshots that a sampler knows; one that comes again is looked at again", ge=1
    )
    sampling_load_s: float = limit(600.0, "one snapshot is read, or loaded; a whole model comes from a disk")
    sampling_start_s: float = limit(900.0, "a sampler's engine starts: it reads the model, and may compile")
    sampling_restarts: int = limit(
        3, "starts of a sampler's engine in a row without a request that was served; then the sampler ends"
    )
    sampling_score_tokens: int = limit(
        8192, "of prompts that are scored between two steps of an engine; sequences wait meanwhile", ge=1
    )
    sampling_samples: int = limit(1024, "sequences of one request to a sampler", ge=1)
    sampling_stops: int = limit(64, "tokens or texts that end a sequence; all are looked for at each token")
    sampling_stop_chars: int = limit(1000, "of a text that ends a sequence; so much text is kept at hand")
    sampling_top_logprobs: int = limit(128, "likeliest tokens at each position of a prompt; 8 bytes each")

    # rewards
    first_verdict_s: float = limit(30.0, "the verifier's first call, at the start: it may import what it needs")
    error_text_chars: int = limit(400, "of the text of an error of the verifier, which may hold a whole response")
    read_timeout_s: float = limit(
        60.0, "one answer of a process that reads prompts; it means to answer after read_slice_s"
    )
    read_slice_s: float = limit(
        2.0, "prompts are read and tokenised for this long; then it answers, and goes on when asked"
    )
    evaluation_prompts: int = limit(10_000, "prompts of one evaluation, at most, where eval.prompts says nothing")
    overlap_rows: int = limit(
        200_000, "rows of a source that are looked at for prompts that training and evaluation share"
    )
    read_attempts_max: int = limit(
        5, "a process that fails this often in a row while it reads prompts is killed by the data"
    )
    score_gather_s: float = limit(0.01, "verdicts of a scorer process leave together: the oldest waits this long")
    batch_answer_s: float = limit(
        2.0, "beyond reward.timeout_s, in which a process that scores batches says why it has none"
    )
    remote_reply_bytes: int = limit(
        4 << 20, "of a remote scorer; 256 rewards take 6 KB, and some servers add columns to log"
    )
    remote_error_chars: int = limit(200, "of what a remote scorer says with a refusal")
    # weights
    versions_held: int = limit(4, "versions that the weight server keeps")
    pull_timeout_s: float = limit(120.0, "one version, all of it")
    chunk_retries: int = limit(4, "rounds of fetching chunks that are missing or corrupt")
    relay_children: int = limit(2, "machines that one machine feeds with a version, the trainer's among them", ge=1)
    relay_retry_s: float = limit(
        600.0,
        "machines of which one could not feed the other are tried again: an attempt costs 10 s where "
        "packets just vanish between them",
    )
    weights_settle_s: float = limit(1.0, "before memory is made for the next version: the engine loads this one first")
    publish_timeout_s: float = limit(120.0, "one version, all of it")
    # trainer
    train_step_timeout_s: float = limit(3600.0, "one micro-batch; first calls may compile")
    checkpoint_timeout_s: float = limit(600.0, "one checkpoint")
    rank_settle_s: float = limit(
        5.0,
        "one rank of a backend has failed: so long the others are waited for, that the error told is that "
        "of whoever failed first, and not of those who waited for it",
    )
    service_move_timeout_s: float = limit(
        600.0,
        "a training service: a job's state is in another tier (memory, host, disk) within this time, those "
        "that have to leave for it included; if not, the service starts again",
    )
    trainer_patience_s: float = limit(60.0, "for this long a question to the scheduler or weight server is repeated")
    open_step_repeat_s: float = limit(120.0, "a step without news for this long is opened again")
    diverged_steps: int = limit(10, "steps in a row with a non-finite gradient before the trainer gives up")
    engine_mismatch: float = limit(
        1e-3, "nats by which trainer and engine may differ on a token, on average, in float32; rounding is 1e-5", gt=0
    )
    engine_mismatch_half: float = limit(
        0.2, "the same in bfloat16, where kernels of other orders are 0.01 to 0.05 apart", gt=0
    )
    service_wait_s: float = limit(
        3600.0,
        "trainer.service: a call waits this long for its slice, while other jobs compute; no part of it "
        "counts as computing",
    )
    service_patience_s: float = limit(
        3.0,
        "a training service, or one of its trainers, that cannot be reached for this long has lost what it "
        "shared with the other; a link that broke is there again sooner",
    )
    service_deaths_isolated: int = limit(
        2, "a job in whose calls a training service died this often computes alone from now", ge=1
    )
    service_deaths_max: int = limit(
        4, "in a row, without a burst of that job in between; then it is not served any more", ge=1
    )
    trainer_spans: int = limit(1024, "spans of the trace between two steps; more are dropped")
    service_spans: int = limit(
        256, "spans of the trace of one job of a training service in span_interval_s; more are lost"
    )
    lending_look_s: float = limit(
        5.0, "between two divisions of slots that jobs share; one that passes costs a second", gt=0
    )
    lending_stay_s: float = limit(
        30.0, "a slot stays with a job that needs it; many times what its passing costs", ge=0
    )
    # samples for people
    samples_interval_s: float = limit(
        0.5, "between two steps of which samples are written as text; fast loops skip some"
    )
    samples_random: int = limit(2, "samples of a step that are shown beside the best and the worst")
    sample_text_chars: int = limit(20_000, "of a prompt, or of all turns, that is kept; the middle is left out")
    sample_shown_chars: int = limit(
        4_000, "of a prompt, or of all turns, that headrace samples prints; the middle is left out"
    )
    samples_file_bytes: int = limit(32 << 20, "samples.jsonl; when it would grow beyond, half of its steps go")
    samples_table_s: float = limit(60.0, "between two tables of samples for W&B, each an upload")
    # sinks
    sink_flush_s: float = limit(
        6.0, "for what sinks still have to take when a run ends; less than ask_timeout_s and stop_timeout_s"
    )
    prometheus_clients: int = limit(8, "connections to the port of the gauges at once; of more, the oldest is closed")
    prometheus_timeout_s: float = limit(5.0, "one connection to the port of the gauges, from its start to its end")
    # faults
    fault_target_wait_s: float = limit(30.0, "a fault waits this long for a victim that is just being restarted")
    fault_order_timeout_s: float = limit(5.0, "an order to commit a fault")
    fault_moment_s: float = limit(5.0, "a fault that is to strike at a message waits this long for one of its kind")
    run_patience_s: float = limit(180.0, "a test that waits for a step or an event of a real run")
    run_finish_s: float = limit(600.0, "a test that waits for the end of a real run")
    # control
    control_request_bytes: int = limit(1 << 20, "one request of the control socket")
    control_timeout_s: float = limit(30.0, "one request, unless it names its own deadline")
    control_event_queue: int = limit(1024, "events kept for a slow watcher before it is told that it lags")
    control_requests: int = limit(64, "requests of the control socket under way at once; more are refused")
    control_watches: int = limit(64, "open event streams; each keeps a queue of events")
    control_requests_of_client: int = limit(
        16, "of them, those of one client; so that one cannot keep all others waiting"
    )
    control_watches_of_client: int = limit(16, "open event streams of one client")
    control_read_bytes: int = limit(
        16 << 20, "read of a run's files for one request; the oldest rows or lines are left out"
    )
    control_timeout_max_s: float = limit(3600.0, "the longest deadline that a control request may name")
    control_linger_s: float = limit(
        0.2, "last words to a client on the same machine; more would hold up the end of a run"
    )
    control_alive_s: float = limit(5.0, "a quiet event stream says that it lives; finds watchers that are gone")
    control_peers: int = limit(1024, "clients of the control socket whose malformed frames are counted apart")
    run_record_bytes: int = limit(
        256 << 20, "newest part of a file of a run that commands read; rows of 100,000 steps, in some seconds"
    )
    # runs that a program has started
    held_end_s: float = limit(
        600.0, "for its last step and checkpoint, a run whose program has let go of it; then it is killed"
    )
    # console
    console_clients: int = limit(
        16, "connections of browsers at once: pages, and what they fetch; more are told to wait"
    )
    console_queue_updates: int = limit(
        32, "a page that is further behind is hung up on, and begins anew with the whole picture"
    )
    console_request_bytes: int = limit(
        8192, "head of a browser's request, or of one for the gauges; a body is never read"
    )
    console_timeout_s: float = limit(10.0, "one request from a browser, or one write to it")
    console_look_s: float = limit(1.0, "between two looks at a run's files")
    console_ask_s: float = limit(2.0, "between two questions to a run's control socket")
    console_stall_s: float = limit(1.0, "waits that last longer are shown, as ctl stalls does")
    console_alive_s: float = limit(
        5.0, "a quiet feed says that it lives; a page that hears nothing for three times as long says so"
    )
    console_tail_bytes: int = limit(
        32 << 20, "newest part of a trace or of events that is read: some days of a run, in a second"
    )
    console_steps: int = limit(10_000, "newest steps in the charts; 2 MB for a page that opens")
    console_lane_steps: int = limit(24, "newest steps whose bars are shown, lane by lane")
    console_bars: int = limit(2000, "newest bars of all lanes; a browser draws them within a frame")
    console_spans: int = limit(20_000, "newest spans kept, of which those of the last steps are shown")
    console_events: int = limit(200, "newest events in the list")
    console_sample_steps: int = limit(500, "newest steps of which samples are kept in memory")
    console_text_chars: int = limit(20_000, "of a prompt or a response; a page says what it leaves out")


DEFAULT_LIMITS = Limits()
