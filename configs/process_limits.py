"""Limits of whatever runs as a process: its links, its actors, its supervision. ``limits.py`` adds the rest."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator


class ProcessLimits(BaseModel):
    """Holds the limits that a process obeys whatever its role."""

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
    keepalive_s: float = Field(
        default=54.0,
        description="TCP: silence after which the kernel asks for the other end, and as long again until it gives up: "
        "a machine that vanishes leaves connections on lanes without heartbeats",
    )
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
    stop_without_workers_s: float = Field(
        default=15.0,
        description="a job that is to stop waits this long for a worker to finish its step; one may be restarting",
    )
    restart_healthy_s: float = Field(
        default=120.0,
        description="a child that ran this long was well; restart_max shorter lives in a row without a step are a loop",
    )
    fruitless_lives_max: int = Field(
        default=30, description="lives of one child in a row, however long, in which no step was committed"
    )
    backoff_first_s: float = Field(default=0.1, description="pause before what failed is tried again, at first")
    backoff_max_s: float = Field(default=10.0, description="the pause doubles up to this")
    machine_retry_s: float = Field(
        default=5.0,
        gt=0,
        description="pause after a cluster's machine failed: it asks a scheduler that others use, too",
    )
    machine_retry_max_s: float = Field(default=300.0, description="that pause doubles up to this")
    machine_join_s: float = Field(
        default=600.0,
        gt=0,
        description="a machine that its cluster runs joins the head within this, or is ended as failed; an environment "
        "that unpacks an image takes minutes",
    )
    machine_log_lines: int = Field(
        default=5, ge=1, description="last lines of the log of a cluster's machine that go with the news of its failure"
    )
    machine_log_chars: int = Field(default=600, ge=1, description="and no more than so many characters of them")
    cluster_look_s: float = Field(
        default=4.0, gt=0, description="how often a cluster is asked for its jobs; more seldom than it answers squeue"
    )
    cluster_answer_s: float = Field(
        default=30.0,
        description="a cluster answers within this; Slurm's own patience is 10 s, some tries long",
    )
    cluster_early_s: float = Field(
        default=60.0, description="Slurm tells jobs of the end of their time up to a minute earlier than asked"
    )
    cluster_end_s: float = Field(
        default=60.0,
        description="beyond its notice, what was told to go is gone within this: Slurm kills after KillWait, 30 s by "
        "default, and a Kubernetes node that is lost says nothing",
    )
    cluster_list_s: float = Field(
        default=60.0, gt=0, description="Kubernetes: all pods are listed so often, should a watch have gone silent"
    )
    slurm_claim_s: float = Field(
        default=60.0,
        gt=0,
        description="Slurm: a head that is silent for this long owns its jobs no more; a controller that comes back "
        "may keep one of its three signs of life waiting for cluster_answer_s",
    )
    cluster_claim_s: float = Field(
        default=15.0, gt=0, description="Kubernetes: a head that is silent for this long owns its pods no more"
    )
    start_attempts_max: int = Field(
        default=3, description="a child that was never ready is not tried more often in a row"
    )
    spawn_overhead_s: float = Field(
        default=5.0, description="an ask's deadline above that of the process start or stop it asks for"
    )
    parked_process_s: float = Field(
        default=300.0,
        gt=0,
        description="a process that has left its job waits so long for another one; it holds memory meanwhile",
    )
    parked_processes_max: int = Field(
        default=8, ge=0, description="such processes at a machine; the one that waits longest goes"
    )
    role_niceness: int = Field(
        default=5,
        ge=0,
        le=19,
        description="role processes give way to heads and node agents, whose work is small and urgent",
    )
    rank_leader_s: float = Field(
        default=600.0,
        gt=0,
        description="from a follower's start to its leader's first word; the leader starts at the same time, and may "
        "compile or load before; then the follower ends",
    )
    rank_orphan_s: float = Field(
        default=20.0,
        gt=0,
        description="a follower outlives its leader by this at most; a supervisor that lives ends both at once",
    )
    rank_patience_s: float = Field(
        default=3.0,
        gt=0,
        description="a follower that cannot be reached for this long is lost; a link that broke is there again sooner",
    )
    health_check_s: float = Field(default=0.25, description="how often a node agent judges its processes")
    stopped_grace_s: float = Field(
        default=0.8, description="a process stopped by a signal for longer is hung; with the check < 2 s"
    )
    link_grace_s: float = Field(
        default=3.0, description="an own process whose heartbeats ceased, on a machine too busy to answer"
    )
    model_preparation_timeout_s: float = Field(default=1800.0, description="making and warm-starting a tiny model")
    reward_training_timeout_s: float = Field(
        default=86400.0, description="training a reward model before a run; a day on one device is 10^5 pairs at 8B"
    )
    reward_cache_bytes: int = Field(
        default=256 << 20, description="a larger reward model is kept in its run alone, not in the user's cache too"
    )
    model_cache_entries: int = Field(
        default=16, ge=1, description="tiny models that the user's cache keeps, some 1 to 20 MB each; the oldest go"
    )
    model_cache_s: float = Field(
        default=30.0, description="one use of that cache; a home on a network may hang, and the run goes on without it"
    )
    step_lines_s: float = Field(
        default=1.0,
        description="a head's terminal shows a job's steps no more often, so that several can share it",
    )
    model_making_look_s: float = Field(default=0.5, description="how often the making of a tiny model is looked at")
    model_download_timeout_s: float = Field(
        default=14400.0, description="fetching a model by its hub name; 140 GB take this long at 10 MB/s"
    )
    data_download_timeout_s: float = Field(
        default=14400.0, description="fetching a data set by its hub name and writing it down; 100 GB take this long"
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
    events_max_bytes: int = Field(
        default=256 << 20, description="events.jsonl and the part before it; 64 workers write 4 KiB/s, so most of a day"
    )
    trace_max_bytes: int = Field(
        default=256 << 20, description="trace.json and the part before it; 64 workers write 14 KiB/s: five hours"
    )
    log_trim_s: float = Field(default=5.0, description="how often the length of the processes' logs is looked at")
    open_files_max: int = Field(
        default=1 << 16,
        description="the soft limit of descriptors is raised to the hard one, and no further than this: some libraries "
        "go through all possible numbers when they start a process",
    )
    birth_clock_s: float = Field(
        default=5.0,
        description="by this much the system's word on when a process began may change, as its clock is set; numbers "
        "of processes return later",
    )
    early_exits: int = Field(
        default=64, description="ends of processes that came before the answer to their start; the oldest go"
    )
    exit_reason_characters: int = Field(
        default=1500, description="text of the error that ends a process; with its class it fits a pipe's 4 KiB"
    )
    exit_log_lines: int = Field(default=20, description="last lines of the log that go with the news of an exit")
    rejoin_patience_s: float = Field(default=30.0, description="a node asks for a head that is gone for this long")
    nodes_return_s: float = Field(
        default=10.0, description="a job's nodes join a restarted head again; later it goes on without them"
    )
    node_slots_max: int = Field(default=100_000, description="rollout workers of one machine; it says how many")
    node_devices_max: int = Field(
        default=128, description="devices of one machine, as it says; 16 GPUs in 7 instances (MIG) each are 112"
    )
    device_search_s: float = Field(
        default=30.0, description="nvidia-smi -L; where the driver is not kept loaded it takes a second a device"
    )
    cut_off_nodes: int = Field(
        default=256, description="unreachable machines that a head remembers: they may come back with what they run"
    )
    unreachable_grace_s: float = Field(
        default=2.0, description="how long a cut-off process may come back before it is fenced"
    )

    @field_validator("*")
    @classmethod
    def _positive(cls, value: float, info: ValidationInfo) -> float:
        """A queue of 0 would stop its part for good; times and counts of retries and restarts may be 0."""
        name = info.field_name or ""
        if value < 0 or (value == 0 and isinstance(value, int) and not name.endswith(("_retries", "restart_max"))):
            raise ValueError("a number above 0")
        return value
