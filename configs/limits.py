"""Every bound and every time-out of the system, each with its unit in the name and its reason beside it.

No wait without a deadline, no queue without a bound, no number of that kind anywhere else, and one meaning a number
(``tests/style/test_limits_have_one_home.py`` lists the few that are facts of a format). Values are defaults;
``Limits`` is a frozen model, so a job, a test or an operator may hand in another one, never change one in place.
Those of links, actors and supervision stand in ``process_limits.py``, those of episodes and of the gateway in
``environment_limits.py``.
"""

from __future__ import annotations

from pydantic import Field

from configs.environment_limits import EnvironmentLimits


class Limits(EnvironmentLimits):
    """Holds all limits, grouped by the part that obeys them."""

    # scheduler
    lease_s: float = Field(
        default=15.0,
        description="a worker that its scheduler does not confirm for this long fences itself; a head restarts sooner",
    )
    lease_margin_s: float = Field(
        default=1.0, description="the holder's term is shorter by this: it stops before its scheduler gives it up"
    )
    assign_max_samples: int = Field(default=1024, description="samples in one Assign message")
    infrastructure_retries: int = Field(default=100, description="a sample may move this often before it is dropped")
    pending_samples_max: int = Field(
        default=8, description="rlboost: given to a worker beyond what its engine runs at once, to begin as others end"
    )
    balance_interval_s: float = Field(
        default=0.2, description="rlboost: the queues of all workers are compared no more often than this"
    )
    balance_moves_max: int = Field(
        default=8, description="rlboost: a sample that has been handed out this often is no longer moved for balance"
    )
    seeding_patience_s: float = Field(
        default=30.0, description="seeding: the trainer waits this long for an engine beside it to fall asleep"
    )
    seeding_look_s: float = Field(
        default=0.2, description="seeding_end estimated: what the trainer would wait for is estimated no more often"
    )
    plan_patience_s: float = Field(
        default=5.0, description="planned: a job's first plan waits this long for its own workers to register"
    )
    wake_patience_s: float = Field(
        default=30.0,
        description="planned: a worker that is waking or starting keeps its part this long, until it was measured",
    )
    hand_over_s: float = Field(
        default=2.0,
        description="before its notice ends a worker hands back what runs: a step, and the last tokens' way",
    )
    function_start_s: float = Field(
        default=60.0, description="functions: a machine that was ordered joins within this time, or is given up"
    )
    function_look_s: float = Field(
        default=0.25, gt=0, description="functions: how often it is looked which are idle or late; starts take longer"
    )
    data_retries: int = Field(default=2, description="a prompt that fails this often is set aside")
    end_news_s: float = Field(
        default=0.25, description="a machine says of a process of its own at once how it ended; this is for the way"
    )
    ended_lives: int = Field(
        default=256, description="workers' lives whose link and machine have not both told of their end; the oldest go"
    )
    engine_crashes_max: int = Field(
        default=2, description="a prompt that was alone under suspicion when this many engines crashed is set aside"
    )
    episodes_driven_max: int = Field(
        default=512, description="episodes that are driven at once; each may have a question that waits for its turn"
    )
    turns_waiting_max: int = Field(
        default=768,
        description="questions that wait for a turn: retries come on top of one an episode; below concurrent_handlers",
    )
    episode_overdue_s: float = Field(
        default=30.0, description="a driver ends an episode at episode_s, or kills it soon after; this is for both"
    )
    environment_metrics_max: int = Field(
        default=32, description="different numbers of an environment's own that are averaged over a step; others go"
    )
    score_retries: int = Field(default=2, description="repeats of a verifier that gave no result")
    score_batch_samples: int = Field(default=256, description="samples in one Score message")
    journal_flush_s: float = Field(default=0.05, description="group commit of the journal's write-behind lane")
    journal_queue_bytes: int = Field(
        default=64 << 20, description="events that wait for the disk before the scheduler waits too; 25 bytes a token"
    )
    disk_reserve_bytes: int = Field(
        default=8 << 20, description="a disk with less free is full: the journal's next transactions need some of it"
    )
    journal_stall_s: float = Field(default=30.0, description="a disk that confirms nothing for this long has failed")
    next_batch_s: float = Field(
        default=5.0, description="a commit's answer waits this long to learn whether data goes on"
    )
    score_linger_s: float = Field(
        default=0.05, description="finished samples gather for this long while others are being generated or scored"
    )
    score_requests: int = Field(
        default=8, description="Score requests in flight; more samples per request instead of more of them"
    )
    pull_patience_s: float = Field(
        default=2.0, description="work is kept for a worker that is loading a version for this long"
    )
    entry_tokens: int = Field(
        default=1 << 13, ge=1, description="tokens that a scheduler enters before the head's loop turns to others"
    )
    scheduler_tick_s: float = Field(
        default=0.5, description="how often the scheduler looks for what no message will tell it"
    )
    look_timeout_s: float = Field(
        default=2.0, description="a process that is asked who waits in it; one that hangs is shown as silent"
    )
    health_interval_s: float = Field(default=5.0, description="how often a process tells metrics of its loop's lag")
    reattach_s: float = Field(
        default=2.0, description="samples wait this long, after a restart of the head, for who generates them already"
    )
    stall_report_s: float = Field(default=5.0, description="nothing has moved for this long: say who waits for whom")
    first_service_s: float = Field(
        default=30.0,
        description="a service that has not registered is missed aloud; its process takes so long on a busy machine",
    )
    workers_per_core: int = Field(
        default=8, description="rollout workers on one machine; each is a process with a model, more only take turns"
    )
    empty_steps_max: int = Field(
        default=3, description="steps in a row without a sample to train; then the run takes its checkpoint and fails"
    )
    warn_after_steps: int = Field(
        default=4, description="steps in a row that teach nothing, or whose answers are cut, before people are warned"
    )
    warn_fraction: float = Field(
        default=0.1, le=1, description="share of a step's samples that were dropped; from here on people are warned"
    )
    warn_truncated_fraction: float = Field(
        default=0.5, le=1, description="share of a step's responses cut at max_tokens; above it people are warned"
    )
    drop_reasons_told: int = Field(default=8, description="most frequent reasons of a step's drops that are told on")
    troubles_kept: int = Field(
        default=64, description="troubles kept for a job's actor that is away, and kinds that it counts; the oldest go"
    )
    length_prompts: int = Field(
        default=262_144, description="prompts whose lengths or scores are remembered; about 100 bytes each"
    )
    # ranker
    ranker_pairs: int = Field(
        default=4096, description="newest (prompt, length) pairs that it learns from; older ones are of an older policy"
    )
    ranker_refresh_pairs: int = Field(default=256, description="new pairs after which it is fine-tuned again")
    ranker_refresh_slices: int = Field(
        default=4, description="slices of gradient steps in one refresh; questions are answered between them"
    )
    # rollout
    outbox_messages: int = Field(
        default=1024, description="reports that wait for an unreachable scheduler; then the engine waits"
    )
    reports_under_way: int = Field(
        default=4, ge=2, description="of one worker, that the scheduler has not taken; times workers < mailbox_messages"
    )
    report_patience_s: float = Field(
        default=10.0, description="without a word of what it has taken; then a worker goes on saying"
    )
    report_interval_s: float = Field(
        default=0.05,
        ge=0,
        description="between two reports of a worker in which no sample ends; faster engine steps leave as one",
    )
    merged_tokens: int = Field(default=4096, description="of engine steps that wait for a scheduler and leave as one")
    early_commands: int = Field(
        default=1024, description="commands that overtake the answer to a worker's offer; a healthy scheduler sends few"
    )
    prefix_cache_bytes: int = Field(
        default=256 << 20,
        description="torch engine: beginnings of prompts kept in a worker; of a 0.5B model 20,000 tokens; 0: none",
    )
    engine_step_s: float = Field(
        default=900.0, description="one step of an engine; a first compile takes minutes, a device that hangs for ever"
    )
    replay_tokens: int = Field(
        default=65536,
        description="newest tokens that a worker remembers: more than journal_flush_s of them; 12 bytes each",
    )
    orphan_tokens: int = Field(
        default=1 << 20, description="generated without a scheduler, while the lease lasts; then the engine waits"
    )
    span_interval_s: float = Field(default=1.0, description="how often a worker sends its spans of the trace")
    # rewards
    first_verdict_s: float = Field(
        default=30.0, description="the verifier's first call, at the start: it may import what it needs"
    )
    error_text_chars: int = Field(
        default=400, description="of the text of an error of the verifier, which may hold a whole response"
    )
    read_timeout_s: float = Field(
        default=60.0, description="one answer of a process that reads prompts; it means to answer after read_slice_s"
    )
    read_slice_s: float = Field(
        default=2.0, description="prompts are read and tokenised for this long; then it answers, and goes on when asked"
    )
    evaluation_prompts: int = Field(
        default=10_000, description="prompts of one evaluation, at most, where eval.prompts says nothing"
    )
    overlap_rows: int = Field(
        default=200_000,
        description="rows of a source that are looked at for prompts that training and evaluation share",
    )
    read_attempts_max: int = Field(
        default=5, description="a process that fails this often in a row while it reads prompts is killed by the data"
    )
    score_gather_s: float = Field(
        default=0.01, description="verdicts of a scorer process leave together: the oldest waits this long"
    )
    batch_answer_s: float = Field(
        default=2.0, description="beyond reward.timeout_s, in which a process that scores batches says why it has none"
    )
    remote_reply_bytes: int = Field(
        default=4 << 20, description="of a remote scorer; 256 rewards take 6 KB, and some servers add columns to log"
    )
    remote_error_chars: int = Field(default=200, description="of what a remote scorer says with a refusal")
    # weights
    versions_held: int = Field(default=4, description="versions that the weight server keeps")
    pull_timeout_s: float = Field(default=120.0, description="one version, all of it")
    chunk_retries: int = Field(default=4, description="rounds of fetching chunks that are missing or corrupt")
    relay_children: int = Field(
        default=2, ge=1, description="machines that one machine feeds with a version, the trainer's among them"
    )
    relay_retry_s: float = Field(
        default=600.0,
        description="machines of which one could not feed the other are tried again: an attempt costs 10 s where "
        "packets just vanish between them",
    )
    weights_settle_s: float = Field(
        default=1.0, description="before memory is made for the next version: the engine loads this one first"
    )
    publish_timeout_s: float = Field(default=120.0, description="one version, all of it")
    # trainer
    train_step_timeout_s: float = Field(default=3600.0, description="one micro-batch; first calls may compile")
    checkpoint_timeout_s: float = Field(default=600.0, description="one checkpoint")
    rank_settle_s: float = Field(
        default=5.0,
        description="one rank of a backend has failed: so long the others are waited for, that the error told is that "
        "of whoever failed first, and not of those who waited for it",
    )
    service_move_timeout_s: float = Field(
        default=600.0,
        description="a training service: a job's state is in another tier (memory, host, disk) within this time, those "
        "that have to leave for it included; if not, the service starts again",
    )
    trainer_patience_s: float = Field(
        default=60.0, description="for this long a question to the scheduler or weight server is repeated"
    )
    open_step_repeat_s: float = Field(default=120.0, description="a step without news for this long is opened again")
    diverged_steps: int = Field(
        default=10, description="steps in a row with a non-finite gradient before the trainer gives up"
    )
    engine_mismatch: float = Field(
        default=1e-3,
        gt=0,
        description="nats by which trainer and engine may differ on a token, on average, in float32; rounding is 1e-5",
    )
    engine_mismatch_half: float = Field(
        default=0.2, gt=0, description="the same in bfloat16, where kernels of other orders are 0.01 to 0.05 apart"
    )
    service_wait_s: float = Field(
        default=3600.0,
        description="trainer.service: a call waits this long for its slice, while other jobs compute; no part of it "
        "counts as computing",
    )
    service_patience_s: float = Field(
        default=3.0,
        description="a training service, or one of its trainers, that cannot be reached for this long has lost what it "
        "shared with the other; a link that broke is there again sooner",
    )
    service_deaths_isolated: int = Field(
        default=2, ge=1, description="a job in whose calls a training service died this often computes alone from now"
    )
    service_deaths_max: int = Field(
        default=4, ge=1, description="in a row, without a burst of that job in between; then it is not served any more"
    )
    trainer_spans: int = Field(default=1024, description="spans of the trace between two steps; more are dropped")
    service_spans: int = Field(
        default=256, description="spans of the trace of one job of a training service in span_interval_s; more are lost"
    )
    lending_look_s: float = Field(
        default=5.0, gt=0, description="between two divisions of slots that jobs share; one that passes costs a second"
    )
    lending_stay_s: float = Field(
        default=30.0, ge=0, description="a slot stays with a job that needs it; many times what its passing costs"
    )
    # samples for people
    samples_interval_s: float = Field(
        default=0.5, description="between two steps of which samples are written as text; fast loops skip some"
    )
    samples_random: int = Field(default=2, description="samples of a step that are shown beside the best and the worst")
    sample_text_chars: int = Field(
        default=20_000, description="of a prompt, or of all turns, that is kept; the middle is left out"
    )
    sample_shown_chars: int = Field(
        default=4_000, description="of a prompt, or of all turns, that headrace samples prints; the middle is left out"
    )
    samples_file_bytes: int = Field(
        default=32 << 20, description="samples.jsonl; when it would grow beyond, half of its steps go"
    )
    samples_table_s: float = Field(default=60.0, description="between two tables of samples for W&B, each an upload")
    # faults
    fault_target_wait_s: float = Field(
        default=30.0, description="a fault waits this long for a victim that is just being restarted"
    )
    fault_order_timeout_s: float = Field(default=5.0, description="an order to commit a fault")
    fault_moment_s: float = Field(
        default=5.0, description="a fault that is to strike at a message waits this long for one of its kind"
    )
    run_patience_s: float = Field(default=180.0, description="a test that waits for a step or an event of a real run")
    run_finish_s: float = Field(default=600.0, description="a test that waits for the end of a real run")
    # control
    control_request_bytes: int = Field(default=1 << 20, description="one request of the control socket")
    control_timeout_s: float = Field(default=30.0, description="one request, unless it names its own deadline")
    control_event_queue: int = Field(
        default=1024, description="events kept for a slow watcher before it is told that it lags"
    )
    control_requests: int = Field(
        default=64, description="requests of the control socket under way at once; more are refused"
    )
    control_watches: int = Field(default=64, description="open event streams; each keeps a queue of events")
    control_requests_of_client: int = Field(
        default=16, description="of them, those of one client; so that one cannot keep all others waiting"
    )
    control_watches_of_client: int = Field(default=16, description="open event streams of one client")
    control_read_bytes: int = Field(
        default=16 << 20, description="read of a run's files for one request; the oldest rows or lines are left out"
    )
    control_timeout_max_s: float = Field(
        default=3600.0, description="the longest deadline that a control request may name"
    )
    control_linger_s: float = Field(
        default=0.2, description="last words to a client on the same machine; more would hold up the end of a run"
    )
    control_alive_s: float = Field(
        default=5.0, description="a quiet event stream says that it lives; finds watchers that are gone"
    )
    control_peers: int = Field(
        default=1024, description="clients of the control socket whose malformed frames are counted apart"
    )
    # runs that a program has started
    held_end_s: float = Field(
        default=600.0,
        description="for its last step and checkpoint, a run whose program has let go of it; then it is killed",
    )
    # console
    console_clients: int = Field(
        default=16, description="connections of browsers at once: pages, and what they fetch; more are told to wait"
    )
    console_queue_updates: int = Field(
        default=32, description="a page that is further behind is hung up on, and begins anew with the whole picture"
    )
    console_request_bytes: int = Field(default=8192, description="head of a browser's request; a body is never read")
    console_timeout_s: float = Field(default=10.0, description="one request from a browser, or one write to it")
    console_look_s: float = Field(default=1.0, description="between two looks at a run's files")
    console_ask_s: float = Field(default=2.0, description="between two questions to a run's control socket")
    console_stall_s: float = Field(default=1.0, description="waits that last longer are shown, as ctl stalls does")
    console_alive_s: float = Field(
        default=5.0,
        description="a quiet feed says that it lives; a page that hears nothing for three times as long says so",
    )
    console_tail_bytes: int = Field(
        default=32 << 20,
        description="newest part of a trace or of events that is read: some days of a run, in a second",
    )
    console_steps: int = Field(default=10_000, description="newest steps in the charts; 2 MB for a page that opens")
    console_lane_steps: int = Field(default=24, description="newest steps whose bars are shown, lane by lane")
    console_bars: int = Field(default=2000, description="newest bars of all lanes; a browser draws them within a frame")
    console_spans: int = Field(
        default=20_000, description="newest spans kept, of which those of the last steps are shown"
    )
    console_events: int = Field(default=200, description="newest events in the list")
    console_sample_steps: int = Field(default=500, description="newest steps of which samples are kept in memory")
    console_text_chars: int = Field(
        default=20_000, description="of a prompt or a response; a page says what it leaves out"
    )


DEFAULT_LIMITS = Limits()
