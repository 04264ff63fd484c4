"""Every bound and every time-out of the system, each with its unit in the name and its reason beside it.

No wait without a deadline, no queue without a bound, no number of that kind anywhere else, and one meaning a number
(``tests/style/test_limits_have_one_home.py`` lists the few that are facts of a format). Values are defaults;
``Limits`` is a frozen model, so a job, a test or an operator may hand in another one, never change one in place.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator


class Limits(BaseModel):
    """Holds all limits, grouped by the part that obeys them."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    # transport: queues
    signal_queue_frames: int = Field(default=256, description="a Down notice must never wait behind more than this")
    message_queue_frames: int = Field(default=4096, description="about a second of control traffic")
    bulk_queue_frames: int = Field(default=16, description="16 chunks of 4 MiB are enough to keep a link busy")
    bulk_sockets: int = Field(
        default=1, ge=1, le=8, description="of the bulk lane; one connection and I/O thread carry some 25 Gbit/s"
    )
    message_max_bytes: int = Field(default=64 << 20, description="one message; larger things are bulk streams")
    bulk_chunk_bytes: int = Field(default=4 << 20, description="at 4 MiB a pull costs 10 % less CPU than at 2")
    drain_max_messages: int = Field(
        default=32,
        description="taken in one turn of the loop, so that it stays fair; what a turn has handled is answered before "
        "the next one, so that both ends of a link work at once instead of in turns",
    )
    drain_max_ms: float = Field(default=2.0, description="the same in time")
    malformed_max: int = Field(default=64, description="a peer that sends this many unreadable messages is cut off")
    stranger_bytes: int = Field(
        default=1 << 14, description="from a connection that has not proven its key; a handshake takes a tenth of it"
    )
    strangers_max: int = Field(
        default=512, description="such connections at one socket; the oldest goes, and may come again"
    )
    handshakes_max: int = Field(default=1024, description="handshakes under way at one listener; more are refused")
    early_messages: int = Field(
        default=1024,
        description="bulk messages that overtook others on another connection of their link, for each connection; more "
        "than fit into its queues, so one is missing",
    )
    names_remembered: int = Field(
        default=4096, description="names of peers of which a process remembers which life is the newest; the oldest go"
    )
    lives_remembered: int = Field(default=32, description="lives of one name that it remembers; older ones stay fenced")
    # transport: time
    connect_timeout_s: float = Field(default=10.0, description="a process that starts on a busy machine needs seconds")
    connect_retry_first_s: float = Field(default=0.02, description="pause before an endpoint is dialled again")
    connect_retry_max_s: float = Field(default=0.5, description="the pause doubles up to this")
    heartbeat_interval_s: float = Field(default=0.5, description="ZMTP heartbeat; runs in libzmq's own thread")
    heartbeat_timeout_s: float = Field(default=1.5, description="a stopped process is unreachable within 2 s")
    close_timeout_s: float = Field(default=1.0, description="flush and goodbye")
    flush_look_s: float = Field(
        default=0.005, description="how often a socket that closes is asked whether all of it has left; nothing tells"
    )
    settle_max_s: float = Field(
        default=0.25, description="a lost link's last messages are read for this long at most before its Down is told"
    )
    # actors
    mailbox_messages: int = Field(default=4096, description="beyond it the sender is told Refused")
    concurrent_handlers: int = Field(default=1024, description="messages that one actor works on at once (@concurrent)")
    pending_asks: int = Field(default=65536, description="open questions per process")
    ask_timeout_s: float = Field(default=10.0, description="a question whose handler computes nothing long")
    stream_credit_items: int = Field(default=64, description="default window of a stream")
    stream_credit_bytes: int = Field(default=64 << 20, description="the same in bytes")
    dead_letters_kept: int = Field(
        default=64, description="newest messages without a receiver that a process remembers; all are counted"
    )
    # supervision
    ready_timeout_s: float = Field(default=180.0, description="process start to ready; a large model loads in minutes")
    stop_timeout_s: float = Field(default=10.0, description="orderly stop before SIGKILL")
    kill_timeout_s: float = Field(
        default=10.0,
        description="after SIGKILL the kernel may hold a process in a driver or a dead disk: it is given up",
    )
    cancellations_max: int = Field(
        default=3, description="an actor that swallows this many cancellations, stop_timeout_s apart, is left behind"
    )
    blocking_call_s: float = Field(
        default=600.0, description="one call on an actor's own thread; a longer one means that a disk hangs"
    )
    restart_max: int = Field(
        default=10, description="restarts per supervisor within restart_window_s before it gives up"
    )
    restart_window_s: float = Field(default=120.0, description="the window of restart_max")
    backoff_first_s: float = Field(default=0.1, description="pause before what failed is tried again, at first")
    backoff_max_s: float = Field(default=10.0, description="the pause doubles up to this")
    start_attempts_max: int = Field(
        default=3, description="a child that was never ready is not tried more often in a row"
    )
    spawn_overhead_s: float = Field(
        default=5.0, description="an ask's deadline above that of the process start or stop it asks for"
    )
    role_niceness: int = Field(
        default=5,
        ge=0,
        le=19,
        description="role processes give way to heads and node agents, whose work is small and urgent",
    )
    health_check_s: float = Field(default=0.25, description="how often a node agent judges its processes")
    stopped_grace_s: float = Field(
        default=0.8, description="a process stopped by a signal for longer is hung; with the check < 2 s"
    )
    link_grace_s: float = Field(
        default=3.0, description="an own process whose heartbeats ceased, on a machine too busy to answer"
    )
    model_preparation_timeout_s: float = Field(default=1800.0, description="making and warm-starting a tiny model")
    model_download_timeout_s: float = Field(
        default=14400.0, description="fetching a model by its hub name; 140 GB take this long at 10 MB/s"
    )
    model_download_stall_s: float = Field(
        default=300.0, description="a download that gets no byte for this long; the hub's client retries earlier"
    )
    hub_probe_s: float = Field(
        default=5.0, description="one look whether a hub knows a name; the run asks again anyway"
    )
    hub_answer_s: float = Field(default=30.0, description="one question to a model hub, before its download begins")
    model_progress_s: float = Field(default=5.0, description="how often a download says how far it is")
    beacon_interval_s: float = Field(default=1.0, description="a role process says that its event loop turns")
    beacon_budget_s: float = Field(
        default=120.0, description="and may be silent for this long: longer than any blocking call"
    )
    orphan_grace_s: float = Field(
        default=30.0,
        description="how long an orphan seeks its owner, may be adopted, and keeps its memory for whoever adopts it",
    )
    process_log_max_bytes: int = Field(
        default=16 << 20, description="stdout and stderr of one process; the older half goes"
    )
    log_trim_s: float = Field(default=5.0, description="how often the length of the processes' logs is looked at")
    early_exits: int = Field(
        default=64, description="ends of processes that came before the answer to their start; the oldest go"
    )
    exit_log_lines: int = Field(default=20, description="last lines of the log that go with the news of an exit")
    rejoin_patience_s: float = Field(default=30.0, description="a node asks for a head that is gone for this long")
    nodes_return_s: float = Field(
        default=10.0, description="a job's nodes join a restarted head again; later it goes on without them"
    )
    cut_off_nodes: int = Field(
        default=256, description="unreachable machines that a head remembers: they may come back with what they run"
    )
    unreachable_grace_s: float = Field(
        default=2.0, description="how long a cut-off process may come back before it is fenced"
    )
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
    hand_over_s: float = Field(
        default=2.0,
        description="before its notice ends a worker hands back what runs: a step, and the last tokens' way",
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
    score_retries: int = Field(default=2, description="repeats of a verifier that gave no result")
    score_batch_samples: int = Field(default=256, description="samples in one Score message")
    journal_flush_s: float = Field(default=0.05, description="group commit of the journal's write-behind lane")
    journal_queue_bytes: int = Field(
        default=64 << 20, description="events that wait for the disk before the scheduler waits too; 25 bytes a token"
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
    read_timeout_s: float = Field(default=60.0, description="reading and tokenising the prompts of one step")
    score_gather_s: float = Field(
        default=0.01, description="verdicts of a scorer process leave together: the oldest waits this long"
    )
    # weights
    versions_held: int = Field(default=4, description="versions that the weight server keeps")
    pull_timeout_s: float = Field(default=120.0, description="one version, all of it")
    chunk_retries: int = Field(default=4, description="rounds of fetching chunks that are missing or corrupt")
    relay_children: int = Field(
        default=2, ge=1, description="machines that one machine feeds with a version, the trainer's among them"
    )
    weights_settle_s: float = Field(
        default=1.0, description="before memory is made for the next version: the engine loads this one first"
    )
    publish_timeout_s: float = Field(default=120.0, description="one version, all of it")
    # trainer
    train_step_timeout_s: float = Field(default=3600.0, description="one micro-batch; first calls may compile")
    checkpoint_timeout_s: float = Field(default=600.0, description="one checkpoint")
    trainer_patience_s: float = Field(
        default=60.0, description="for this long a question to the scheduler or weight server is repeated"
    )
    open_step_repeat_s: float = Field(default=120.0, description="a step without news for this long is opened again")
    diverged_steps: int = Field(
        default=10, description="steps in a row with a non-finite gradient before the trainer gives up"
    )
    trainer_spans: int = Field(default=1024, description="spans of the trace between two steps; more are dropped")
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

    @field_validator("*")
    @classmethod
    def _positive(cls, value: float, info: ValidationInfo) -> float:
        """A queue of 0 would stop its part for good; times and counts of retries and restarts may be 0."""
        name = info.field_name or ""
        if value < 0 or (value == 0 and isinstance(value, int) and not name.endswith(("_retries", "restart_max"))):
            raise ValueError("a number above 0")
        return value


DEFAULT_LIMITS = Limits()
