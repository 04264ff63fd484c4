"""Limits of every process: of its links, its actors and its supervision. ``limits.py`` adds the rest."""

from __future__ import annotations

from typing import TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

N = TypeVar("N", int, float)


def limit(default: N, why: str, **bounds: float) -> N:
    """A field of limits: its default, and the reason for it. ``bounds``: as of pydantic's ``Field``."""
    return Field(default=default, description=why, **bounds)  # pyright: ignore[reportCallIssue, reportArgumentType]


class ProcessLimits(BaseModel):
    """Holds the limits that a process obeys whatever its role."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    # transport: queues
    signal_queue_frames: int = limit(256, "a Down notice must never wait behind more than this")
    message_queue_frames: int = limit(4096, "about a second of control traffic")
    bulk_queue_frames: int = limit(16, "16 chunks of 4 MiB are enough to keep a link busy")
    bulk_sockets: int = limit(1, "of the bulk lane; one connection and I/O thread carry some 25 Gbit/s", ge=1, le=8)
    message_max_bytes: int = limit(64 << 20, "one message; larger things are bulk streams")
    bulk_chunk_bytes: int = limit(4 << 20, "at 4 MiB a pull costs 10 % less CPU than at 2")
    drain_max_messages: int = limit(
        32,
        "taken in one turn of the loop, so that it stays fair; what a turn has handled is answered before "
        "the next one, so that both ends of a link work at once instead of in turns",
    )
    drain_max_ms: float = limit(2.0, "the same in time")
    malformed_max: int = limit(64, "a peer that sends this many unreadable messages is cut off")
    stranger_bytes: int = limit(
        1 << 14, "from a connection that has not proven its key; a handshake takes a tenth of it"
    )
    strangers_max: int = limit(512, "such connections at one socket; the oldest goes, and may come again")
    handshakes_max: int = limit(1024, "handshakes under way at one listener; more are refused")
    early_messages: int = limit(
        1024,
        "bulk messages that overtook others on another connection of their link, for each connection; more "
        "than fit into its queues, so one is missing",
    )
    names_remembered: int = limit(
        4096, "names of peers of which a process remembers which life is the newest; the oldest go"
    )
    lives_remembered: int = limit(32, "lives of one name that it remembers; older ones stay fenced")
    # transport: time
    connect_timeout_s: float = limit(10.0, "a process that starts on a busy machine needs seconds")
    connect_retry_first_s: float = limit(0.02, "pause before an endpoint is dialled again")
    connect_retry_max_s: float = limit(0.5, "the pause doubles up to this")
    heartbeat_interval_s: float = limit(0.5, "ZMTP heartbeat; runs in libzmq's own thread")
    heartbeat_timeout_s: float = limit(1.5, "a stopped process is unreachable within 2 s")
    keepalive_s: float = limit(
        54.0,
        "TCP: silence after which the kernel asks for the other end, and as long again until it gives up: "
        "a machine that vanishes leaves connections on lanes without heartbeats",
    )
    close_timeout_s: float = limit(1.0, "flush and goodbye")
    flush_look_s: float = limit(
        0.005, "how often a socket that closes is asked whether all of it has left; nothing tells"
    )
    settle_max_s: float = limit(
        0.25, "a lost link's last messages are read for this long at most before its Down is told"
    )
    # actors
    mailbox_messages: int = limit(4096, "beyond it the sender is told Refused")
    concurrent_handlers: int = limit(1024, "messages that one actor works on at once (@concurrent)")
    pending_asks: int = limit(65536, "open questions per process")
    ask_timeout_s: float = limit(10.0, "a question whose handler computes nothing long")
    stream_credit_items: int = limit(64, "default window of a stream")
    stream_credit_bytes: int = limit(64 << 20, "the same in bytes")
    dead_letters_kept: int = limit(64, "newest messages without a receiver that a process remembers; all are counted")
    # supervision
    ready_timeout_s: float = limit(180.0, "process start to ready; a large model loads in minutes")
    stop_timeout_s: float = limit(10.0, "orderly stop before SIGKILL")
    kill_timeout_s: float = limit(
        10.0, "after SIGKILL the kernel may hold a process in a driver or a dead disk: it is given up"
    )
    cancellations_max: int = limit(
        3, "an actor that swallows this many cancellations, stop_timeout_s apart, is left behind"
    )
    blocking_call_s: float = limit(600.0, "one call on an actor's own thread; a longer one means that a disk hangs")
    restart_max: int = limit(10, "restarts per supervisor within restart_window_s before it gives up")
    restart_window_s: float = limit(120.0, "the window of restart_max")
    stop_without_workers_s: float = limit(
        15.0, "a job that is to stop waits this long for a worker to finish its step; one may be restarting"
    )
    stop_silence_s: float = limit(
        60.0, "a job that is to stop leaves its step as it is once no sample of it has moved for this long", gt=0
    )
    restart_healthy_s: float = limit(
        120.0, "a child that ran this long was well; restart_max shorter lives in a row without a step are a loop"
    )
    fruitless_lives_max: int = limit(30, "lives of one child in a row, however long, in which no step was committed")
    backoff_first_s: float = limit(0.1, "pause before what failed is tried again, at first")
    backoff_max_s: float = limit(10.0, "the pause doubles up to this")
    machine_retry_s: float = limit(
        5.0, "pause after a cluster's machine failed: it asks a scheduler that others use, too", gt=0
    )
    machine_retry_max_s: float = limit(300.0, "that pause doubles up to this")
    machine_join_s: float = limit(
        600.0,
        "a machine that its cluster runs joins the head within this, or is ended as failed; an environment "
        "that unpacks an image takes minutes",
        gt=0,
    )
    machine_log_lines: int = limit(
        5, "last lines of the log of a cluster's machine that go with the news of its failure", ge=1
    )
    machine_log_chars: int = limit(600, "and no more than so many characters of them", ge=1)
    cluster_look_s: float = limit(
        4.0, "how often a cluster is asked for its jobs; more seldom than it answers squeue", gt=0
    )
    cluster_answer_s: float = limit(
        30.0, "a cluster answers within this; Slurm's own patience is 10 s, some tries long"
    )
    cluster_early_s: float = limit(60.0, "Slurm tells jobs of the end of their time up to a minute earlier than asked")
    cluster_end_s: float = limit(
        60.0,
        "beyond its notice, what was told to go is gone within this: Slurm kills after KillWait, 30 s by "
        "default, and a Kubernetes node that is lost says nothing",
    )
    cluster_list_s: float = limit(
        60.0, "Kubernetes: all pods are listed so often, should a watch have gone silent", gt=0
    )
    slurm_claim_s: float = limit(
        60.0,
        "Slurm: a head that is silent for this long owns its jobs no more; a controller that comes back "
        "may keep one of its three signs of life waiting for cluster_answer_s",
        gt=0,
    )
    cluster_claim_s: float = limit(15.0, "Kubernetes: a head that is silent for this long owns its pods no more", gt=0)
    start_attempts_max: int = limit(3, "a child that was never ready is not tried more often in a row")
    spawn_overhead_s: float = limit(5.0, "an ask's deadline above that of the process start or stop it asks for")
    parked_process_s: float = limit(
        300.0, "a process that has left its job waits so long for another one; it holds memory meanwhile", gt=0
    )
    parked_processes_max: int = limit(8, "such processes at a machine; the one that waits longest goes", ge=0)
    role_niceness: int = limit(
        5, "role processes give way to heads and node agents, whose work is small and urgent", ge=0, le=19
    )
    rank_leader_s: float = limit(
        600.0,
        "from a follower's start to its leader's first word; the leader starts at the same time, and may "
        "compile or load before; then the follower ends",
        gt=0,
    )
    rank_orphan_s: float = limit(
        20.0, "a follower outlives its leader by this at most; a supervisor that lives ends both at once", gt=0
    )
    rank_patience_s: float = limit(
        3.0, "a follower that cannot be reached for this long is lost; a link that broke is there again sooner", gt=0
    )
    health_check_s: float = limit(0.25, "how often a node agent judges its processes")
    stopped_grace_s: float = limit(0.8, "a process stopped by a signal for longer is hung; with the check < 2 s")
    link_grace_s: float = limit(3.0, "an own process whose heartbeats ceased, on a machine too busy to answer")
    model_preparation_timeout_s: float = limit(1800.0, "making and warm-starting a tiny model")
    reward_training_timeout_s: float = limit(
        86400.0, "training a reward model before a run; a day on one device is 10^5 pairs at 8B"
    )
    reward_cache_bytes: int = limit(
        256 << 20, "a larger reward model is kept in its run alone, not in the user's cache too"
    )
    model_cache_entries: int = limit(
        16, "tiny models that the user's cache keeps, some 1 to 20 MB each; the oldest go", ge=1
    )
    model_cache_s: float = limit(
        30.0, "one use of that cache; a home on a network may hang, and the run goes on without it"
    )
    step_lines_s: float = limit(
        1.0, "a head's terminal shows a job's steps no more often, so that several can share it"
    )
    model_making_look_s: float = limit(0.5, "how often the making of a tiny model is looked at")
    model_download_timeout_s: float = limit(
        14400.0, "fetching a model by its hub name; 140 GB take this long at 10 MB/s"
    )
    data_download_timeout_s: float = limit(
        14400.0, "fetching a data set by its hub name and writing it down; 100 GB take this long"
    )
    model_download_stall_s: float = limit(
        300.0, "a download that gets no byte for this long; the hub's client retries earlier"
    )
    source_lookup_s: float = limit(30.0, "a new interpreter says where modules are; a disk on a network may be slow")
    hub_probe_s: float = limit(5.0, "one look whether a hub knows a name; the run asks again anyway")
    hub_answer_s: float = limit(30.0, "one question to a model hub, before its download begins")
    model_progress_s: float = limit(5.0, "how often a download says how far it is")
    beacon_interval_s: float = limit(1.0, "a role process says that its event loop turns")
    beacon_budget_s: float = limit(120.0, "and may be silent for this long: longer than any blocking call")
    orphan_grace_s: float = limit(
        30.0, "how long an orphan seeks its owner, may be adopted, and keeps its memory for whoever adopts it"
    )
    process_log_max_bytes: int = limit(16 << 20, "stdout and stderr of one process; the older half goes")
    events_max_bytes: int = limit(
        256 << 20, "events.jsonl and the part before it; 64 workers write 4 KiB/s, so most of a day"
    )
    trace_max_bytes: int = limit(256 << 20, "trace.json and the part before it; 64 workers write 14 KiB/s: five hours")
    log_trim_s: float = limit(5.0, "how often the length of the processes' logs is looked at")
    open_files_max: int = limit(
        1 << 16,
        "the soft limit of descriptors is raised to the hard one, and no further than this: some libraries "
        "go through all possible numbers when they start a process",
    )
    birth_clock_s: float = limit(
        5.0,
        "by this much the system's word on when a process began may change, as its clock is set; numbers "
        "of processes return later",
    )
    early_exits: int = limit(64, "ends of processes that came before the answer to their start; the oldest go")
    exit_reason_characters: int = limit(
        1500, "text of the error that ends a process; with its class it fits a pipe's 4 KiB"
    )
    exit_log_lines: int = limit(20, "last lines of the log that go with the news of an exit")
    rejoin_patience_s: float = limit(30.0, "a node asks for a head that is gone for this long")
    nodes_return_s: float = limit(10.0, "a job's nodes join a restarted head again; later it goes on without them")
    node_slots_max: int = limit(100_000, "rollout workers of one machine; it says how many")
    node_devices_max: int = limit(128, "devices of one machine, as it says; 16 GPUs in 7 instances (MIG) each are 112")
    device_search_s: float = limit(
        30.0, "nvidia-smi -L; where the driver is not kept loaded it takes a second a device"
    )
    cut_off_nodes: int = limit(256, "unreachable machines that a head remembers: they may come back with what they run")
    unreachable_grace_s: float = limit(2.0, "how long a cut-off process may come back before it is fenced")

    @field_validator("*")
    @classmethod
    def _positive(cls, value: float, info: ValidationInfo) -> float:
        """A queue of 0 would stop its part for good; times and counts of retries and restarts may be 0."""
        name = info.field_name or ""
        if value < 0 or (value == 0 and isinstance(value, int) and not name.endswith(("_retries", "restart_max"))):
            raise ValueError("a number above 0")
        return value
