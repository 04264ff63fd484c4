"""The control protocol's maps and verbs. ``docs/control_protocol.md`` is the same for people; a test compares them.

Invariants
- Every readable request gets exactly one final reply, ``{v, id, ok: true, result}`` or ``{v, id, ok: false, error}``; a
  stream's events, ``{v, id, event}``, come before it.
- Decoding trusts nothing: size, depth, types and unknown keys are checked before a verb sees anything.
- Additions to a reply, a verb's optional argument or a new verb keep the version; anything else raises it.
"""

from __future__ import annotations

import difflib
import re
from typing import Any, ClassVar, Final, TypeVar, cast

import msgspec

from actors.control.errors import (
    BadArgs,
    ControlError,
    MalformedRequest,
    TooLarge,
    UnknownOp,
    WrongVersion,
)
from configs.names import NAME_CHARACTERS_MAX, name_problem

VERSION: Final = 1

ID_CHARACTERS_MAX: Final = 128
RequestId = int | str


class Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Is one request, as it stands on the wire."""

    v: int
    id: RequestId
    op: str
    args: dict[str, Any] = {}
    timeout_s: float | None = None
    """The client's own deadline; unset: ``limits.control_timeout_s``."""


class Args(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Is the base of the verbs' arguments, named as the verbs are. Without ``job`` the only job there is is meant."""

    writes: ClassVar[bool] = False
    """Whether it changes something, so that read-only keys are refused."""
    streams: ClassVar[bool] = False


class Ping(Args, frozen=True):
    """Whether the server is there."""


class Version(Args, frozen=True):
    """The protocol version and the verbs."""


class Jobs(Args, frozen=True):
    """Every job with its state and step."""


class Tree(Args, frozen=True):
    """Every actor with name, role, node, pid, state, incarnation and restarts."""

    job: str | None = None


class Nodes(Args, frozen=True):
    """Every machine: its slots and devices, which of them are free, and which process has which."""


class Stalls(Args, frozen=True):
    """Who waits for whom, since when: every wait of every process, oldest first. A silent process is in it too."""

    longer_than_s: float = 1.0


class DeadLetters(Args, frozen=True):
    """Messages that found no receiver: counts by process and reason, and the newest ones."""


class Metrics(Args, frozen=True):
    """The last rows of metrics.jsonl."""

    job: str | None = None
    last: int = 1


class Logs(Args, frozen=True):
    """The last log lines of an actor, or of all."""

    job: str | None = None
    actor: str | None = None
    lines: int = 100


class Watch(Args, frozen=True):
    """Events as they happen: a stream. ``credit`` is how many may be sent before more is granted."""

    streams = True
    job: str | None = None
    credit: int = 64


class Credit(Args, frozen=True):
    """Grant an open watch more events."""

    watch: RequestId
    events: int = 64


class Unwatch(Args, frozen=True):
    """End an open watch."""

    watch: RequestId


class Services(Args, frozen=True):
    """Every training service: its jobs, where their state lies, how much of the time it computes, what it saves."""


class Queue(Args, frozen=True):
    """Jobs that wait for a training service, and for what."""


class ServiceAdd(Args, frozen=True):
    """Start a training service: ``service`` is an entry of a services file as a map."""

    writes = True
    service: dict[str, Any]


class ServiceDrain(Args, frozen=True):
    """Let a training service take no further job; ``undrain`` takes it back."""

    writes = True
    service: str


class ServiceRemove(Args, frozen=True):
    """End a training service that serves no job."""

    writes = True
    service: str


class Submit(Args, frozen=True):
    """Start a job: ``job`` is a job file's content as a map."""

    writes = True
    job: dict[str, Any]


class Pause(Args, frozen=True):
    """Stop generating and training after the samples under way; nothing is lost."""

    writes = True
    job: str | None = None


class Resume(Args, frozen=True):
    """Go on after a pause."""

    writes = True
    job: str | None = None


class Cancel(Args, frozen=True):
    """End a job for good, after a checkpoint."""

    writes = True
    job: str | None = None


class Scale(Args, frozen=True):
    """Set how many rollout workers a job has."""

    writes = True
    workers: int
    job: str | None = None


class Drain(Args, frozen=True):
    """Take a node or a worker out of service in good order; its samples go on elsewhere."""

    writes = True
    target: str


class Undrain(Args, frozen=True):
    """Take a drained node into service again, unless it goes by itself."""

    writes = True
    target: str


class Checkpoint(Args, frozen=True):
    """Write a checkpoint after the step under way."""

    writes = True
    job: str | None = None


class Inject(Args, frozen=True):
    """Do harm on purpose, now: ``fault`` is one fault of a plan as a map."""

    writes = True
    fault: dict[str, Any]
    job: str | None = None


VERBS: Final[dict[str, type[Args]]] = {
    re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind.__name__).lower(): kind for kind in Args.__subclasses__()
}

A = TypeVar("A", bound=Args)
_request_decoder = msgspec.msgpack.Decoder(Request)
_encoder = msgspec.msgpack.Encoder()


def read_request(payload: bytes, *, max_bytes: int) -> Request:
    """Decode one request frame.

    Raises:
        TooLarge, MalformedRequest, WrongVersion: what the reply's error says.
    """
    if len(payload) > max_bytes:
        raise TooLarge(f"the request has {len(payload)} bytes, {max_bytes} are allowed", "Split it")
    try:
        request = _request_decoder.decode(payload)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        version = _field(payload, "v")
        if isinstance(version, int) and not isinstance(version, bool) and version != VERSION:
            raise _wrong_version(version) from error
        raise MalformedRequest(
            f"this is no request: {error}",
            "Send a map {v, id, op, args}; see docs/control_protocol.md",
        ) from error
    if request.v != VERSION:
        raise _wrong_version(request.v)
    if isinstance(request.id, str) and len(request.id) > ID_CHARACTERS_MAX:
        raise MalformedRequest(
            f"the id has {len(request.id)} characters, {ID_CHARACTERS_MAX} are allowed",
            "Shorten it",
        )
    return request


def _wrong_version(version: int) -> WrongVersion:
    older = "the client" if version < VERSION else "the server"
    return WrongVersion(
        f"protocol version {version} was asked for, {VERSION} is spoken here",
        f"Upgrade {older}, it is the older one",
    )


def request_id_of(payload: bytes, *, max_bytes: int) -> RequestId | None:
    """The id of a request that could not be read, so that its error can be told apart; None if there is none."""
    if len(payload) > max_bytes:
        return None
    found = _field(payload, "id")
    if isinstance(found, bool) or not isinstance(found, int | str):
        return None
    return found if isinstance(found, int) or len(found) <= ID_CHARACTERS_MAX else None


def _field(payload: bytes, name: str) -> object:
    try:
        value: object = msgspec.msgpack.decode(payload)
    except (msgspec.DecodeError, ValueError, TypeError, RecursionError):
        return None
    return cast("dict[object, object]", value).get(name) if isinstance(value, dict) else None


def read_args(request: Request) -> Args:
    """The typed arguments of ``request.op``.

    Raises:
        UnknownOp: no such verb; the hint names the nearest.
        BadArgs: they do not fit it; the message names the argument.
    """
    kind = VERBS.get(request.op)
    if kind is None:
        near = difflib.get_close_matches(request.op, VERBS, n=1)
        raise UnknownOp(
            f"there is no op {request.op[:64]!r}",
            f"Did you mean {near[0]!r}?" if near else f"Use one of: {', '.join(VERBS)}",
        )
    try:
        args = msgspec.convert(request.args, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        known = ", ".join(kind.__struct_fields__)
        raise BadArgs(
            f"{request.op}: {error}",
            f"It takes: {known}" if known else "It takes no arguments",
        ) from error
    _check_counts(request.op, args)
    _check_names(request.op, args)
    _check_seconds(request, args)
    return args


_COUNTS: Final = {
    "credit": (0, 65_536),
    "events": (1, 65_536),
    "last": (1, 10_000),
    "lines": (1, 10_000),
    "workers": (0, 100_000),
}


_NAMES: Final = ("job", "actor", "target", "service")
"""Arguments that name a job, an actor, a machine or a service."""
_NAME_CHARACTERS_MAX: Final = 2 * NAME_CHARACTERS_MAX
"""A worker on a machine is called after it, so it has a longer name."""


def _check_names(op: str, args: Args) -> None:
    for name in _NAMES:
        value = getattr(args, name, None)
        if isinstance(value, str) and (problem := name_problem(value, longest=_NAME_CHARACTERS_MAX)):
            raise BadArgs(f"{op}: {name} {problem}", "Give a name as jobs and tree list them")


def _check_seconds(request: Request, args: Args) -> None:
    for name, value in (("timeout_s", request.timeout_s), ("longer_than_s", getattr(args, "longer_than_s", None))):
        if isinstance(value, int | float) and not value >= 0:  # not a number is neither
            raise BadArgs(f"{request.op}: {name} is {value}", "Give seconds from 0")


def _check_counts(op: str, args: Args) -> None:
    for name, (low, high) in _COUNTS.items():
        value = getattr(args, name, None)
        if isinstance(value, int) and not low <= value <= high:
            raise BadArgs(f"{op}: {name} is {value}", f"Give a whole number from {low} to {high}")


def result_frame(request_id: RequestId, result: object) -> bytes:
    """The final reply of a request that worked. Raises TypeError for a result that is no plain value."""
    return _encoder.encode({"v": VERSION, "id": request_id, "ok": True, "result": result})


def error_frame(request_id: RequestId | None, error: ControlError) -> bytes:
    """The final reply of a request that did not work; ``id`` is nil if it could not be read."""
    body = {"type": error.kind, "message": error.message, "hint": error.hint}
    return _encoder.encode({"v": VERSION, "id": request_id, "ok": False, "error": body})


def event_frame(request_id: RequestId, event: object) -> bytes:
    """One event of a stream."""
    return _encoder.encode({"v": VERSION, "id": request_id, "event": event})
