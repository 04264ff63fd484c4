"""The verbs of the control protocol. All that is known of one is declared here, once.

Args ─┬─▶ ControlServer: what a request may say (``protocol.py``)
      ├─▶ ControlBackend: a method each
      ├─▶ headrace ctl: a command each, with its help
      └─▶ docs/control_protocol.md: the table of verbs
"""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Final

import msgspec

RequestId = int | str


class Args(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A verb, by its arguments, in a class that is named as the verb is; the docstring is its help.

    Without ``job`` the only job there is is meant.
    """

    gives: ClassVar[str] = "`{}`"
    """The result, as the table says it."""
    writes: ClassVar[bool] = False
    """Whether it changes something, so that read-only keys are refused."""
    streams: ClassVar[bool] = False
    of_server: ClassVar[bool] = False
    """Whether the server answers it by itself; then it is no command of ctl."""


def _arg(about: str, option: str = "", *, least: float | None = None, word: str = "") -> msgspec.Meta:
    """What people are told of an argument.

    Args:
        option: how ctl calls it, such as ``--job``; empty: it is written without a name.
        least: the least number that ctl takes.
        word: how ctl's help calls one that is written without a name; empty: by its own name.
    """
    return msgspec.Meta(description=about, extra={"option": option, "least": least, "word": word})


_JOB: Final = "The job's name; not needed if there is only one."
Job = Annotated[str | None, _arg(_JOB)]
JobOption = Annotated[str | None, _arg(_JOB, "--job")]
ServiceName = Annotated[str, _arg("The training service's name.", word="name")]


class Ping(Args, frozen=True):
    """Whether the server is there."""

    of_server = True


class Version(Args, frozen=True):
    """The protocol version and the verbs."""

    gives = "`{version, ops, counters}`"
    of_server = True


class Jobs(Args, frozen=True):
    """Every job with its state and step."""

    gives = "list of `{job, state, step, steps, run_dir, …}`"


class Tree(Args, frozen=True):
    """Every actor: name, role, node, pid, state, incarnation, restarts."""

    gives = "list of `{name, role, node, pid, state, incarnation, restarts, …}`, parents first"
    job: JobOption = None


class Nodes(Args, frozen=True):
    """Every machine: its slots, its devices, and who has which."""

    gives = (
        "list of `{node, kind, state, slots, slots_used, devices, free, given}`, where what is given says for each "
        "device which processes have it"
    )


class Stalls(Args, frozen=True):
    """Who waits for whom in every process, oldest first; and which process does not answer."""

    gives = "who waits for whom: list of `{process, waiter, waits_for, kind, what, since_s}`, oldest first"
    longer_than_s: Annotated[float, _arg("Seconds that a wait has lasted.", "--longer-than", least=0.0)] = 1.0


class DeadLetters(Args, frozen=True):
    """Messages that found no receiver: counted by reason, and the newest of each process."""

    gives = "`{counts, newest}`: messages without a receiver, by process and reason, and the newest ones"


class Metrics(Args, frozen=True):
    """The last rows of metrics.jsonl."""

    gives = "the newest rows of `metrics.jsonl`, oldest first"
    job: JobOption = None
    last: Annotated[int, _arg("Rows.", "--last", least=1)] = 1


class Logs(Args, frozen=True):
    """The last log lines of an actor."""

    gives = "list of lines, oldest first"
    job: JobOption = None
    actor: Annotated[str | None, _arg("An actor's name; all if left out.")] = None
    lines: Annotated[int, _arg("Lines.", "--lines", least=1)] = 100


class Watch(Args, frozen=True):
    """Events as they happen, until the job ends."""

    gives = "a stream of events, then `{events, missed}`"
    streams = True
    job: Job = None
    credit: int = 64
    """How many may be sent before more is granted."""


class Credit(Args, frozen=True):
    """Grant an open watch more events."""

    gives = "`{credit}`"
    of_server = True
    watch: RequestId
    events: int = 64


class Unwatch(Args, frozen=True):
    """End an open watch."""

    of_server = True
    watch: RequestId


class Services(Args, frozen=True):
    """Training services: whom each serves, where states lie, how much of its time it computes, and what it saves."""

    gives = "list of `{service, state, serves, holder, residency, bubble, saving, jobs, …}`"


class Queue(Args, frozen=True):
    """Jobs that wait for a training service, and for what."""

    gives = "jobs that wait for a training service: list of `{job, service, why, …}`"


class Models(Args, frozen=True):
    """Models that clients train on a head that serves them: whose each is, and what it waits for."""

    gives = "list of `{tenant, model, base_model, rank, operations, waiting, awake, why}`"


class ServiceAdd(Args, frozen=True):
    """Start a training service."""

    gives = "`{service, state}`"
    writes = True
    service: Annotated[dict[str, Any], _arg("An entry of a services file as a map.")]


class ServiceDrain(Args, frozen=True):
    """Let a training service take no further job; ``undrain`` takes it back."""

    gives = "`{service, state, serves}`"
    writes = True
    service: ServiceName


class ServiceRemove(Args, frozen=True):
    """End a training service that serves no job."""

    gives = "`{service, state}`"
    writes = True
    service: ServiceName


class Submit(Args, frozen=True):
    """Start a job on a head."""

    gives = "`{job, run_dir, …}`"
    writes = True
    job: Annotated[dict[str, Any], _arg("A job file's content as a map.")]


class Pause(Args, frozen=True):
    """Stop generating and training after the samples under way; nothing is lost."""

    gives = "`{job, state, …}`"
    writes = True
    job: Job = None


class Resume(Args, frozen=True):
    """Go on after a pause."""

    gives = "`{job, state, …}`"
    writes = True
    job: Job = None


class Cancel(Args, frozen=True):
    """End a job for good, after a checkpoint."""

    gives = "`{job, state, …}`"
    writes = True
    job: Job = None


class Scale(Args, frozen=True):
    """Set how many rollout workers a job has."""

    gives = "`{job, workers, …}`"
    writes = True
    workers: Annotated[int, _arg("Rollout workers.", least=0)]
    job: JobOption = None


class Drain(Args, frozen=True):
    """Take a node or a worker out of service in good order; its samples go on elsewhere."""

    gives = "`{target, state, …}`"
    writes = True
    target: Annotated[str, _arg("A node or a worker, by name.")]


class Undrain(Args, frozen=True):
    """Take a drained node or training service back, unless the node goes by itself."""

    gives = "`{target}`"
    writes = True
    target: Annotated[str, _arg("A node or a training service, by name.")]


class Checkpoint(Args, frozen=True):
    """Write a checkpoint after the step under way."""

    gives = "`{job, step, path, …}` once it is durable"
    writes = True
    job: Job = None


class Inject(Args, frozen=True):
    """Do harm on purpose: commit one fault on the run's real processes, now."""

    gives = "`{job, kind, hit, …}` once it is committed"
    writes = True
    fault: Annotated[dict[str, Any], _arg("One fault of a plan as a map.")]
    job: JobOption = None


VERBS: Final[dict[str, type[Args]]] = {
    re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind.__name__).lower(): kind for kind in Args.__subclasses__()
}
