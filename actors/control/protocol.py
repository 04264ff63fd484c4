"""The messages of the control protocol, which are maps, and how a request is read. Its verbs are in ``verbs.py``.

Invariants
- Every readable request gets exactly one final reply, ``{v, id, ok: true, result}`` or ``{v, id, ok: false, error}``; a
  stream's events, ``{v, id, event}``, come before it.
- Decoding trusts nothing: size, depth, types and unknown keys are checked before a verb sees anything.
- Additions to a reply, a verb's optional argument or a new verb keep the version; anything else raises it.
"""

from __future__ import annotations

import difflib
from numbers import Integral, Real
from typing import Any, Final, cast

import msgspec

from actors.control.errors import (
    BadArgs,
    ControlError,
    MalformedRequest,
    TooLarge,
    UnknownOp,
    WrongVersion,
)
from actors.control.verbs import VERBS, Args, RequestId
from configs.names import NAME_CHARACTERS_MAX, name_problem

VERSION: Final = 1

ID_CHARACTERS_MAX: Final = 128


class Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One request has these fields on the wire."""

    v: int
    id: RequestId
    op: str
    args: dict[str, Any] = {}
    timeout_s: float | None = None
    """Deadline that the client wants; unset: ``limits.control_timeout_s``."""


_request_decoder = msgspec.msgpack.Decoder(Request)


def _plain(value: object) -> object:
    """A number of numpy is a number: rows of metrics hold what was computed."""
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    raise TypeError(f"a {type(value).__name__} is no plain value")


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)


def read_request(payload: bytes, *, max_bytes: int) -> Request:
    """Decode one request frame.

    Raises:
        TooLarge, MalformedRequest, WrongVersion: to be sent as the error of the reply.
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
            f"this is no request: {error}", "Send a map {v, id, op, args}; see docs/control_protocol.md"
        ) from error
    if request.v != VERSION:
        raise _wrong_version(request.v)
    if isinstance(request.id, str) and len(request.id) > ID_CHARACTERS_MAX:
        raise MalformedRequest(
            f"the id has {len(request.id)} characters, {ID_CHARACTERS_MAX} are allowed", "Shorten it"
        )
    return request


def _wrong_version(version: int) -> WrongVersion:
    older = "the client" if version < VERSION else "the server"
    return WrongVersion(
        f"protocol version {version} was asked for, {VERSION} is spoken here", f"Upgrade {older}, it is the older one"
    )


def request_id_of(payload: bytes, *, max_bytes: int) -> RequestId | None:
    """The id in a request that could not be read, so that the client can match the error; None if there is none."""
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
        BadArgs: the arguments do not fit the verb; the message names the wrong one.
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
        raise BadArgs(f"{request.op}: {error}", f"It takes: {known}" if known else "It takes no arguments") from error
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
"""Longest name. A worker's name contains that of its machine, so it may be longer than a job's."""


def _check_names(op: str, args: Args) -> None:
    for name in _NAMES:
        value = getattr(args, name, None)
        if isinstance(value, str) and (problem := name_problem(value, longest=_NAME_CHARACTERS_MAX)):
            raise BadArgs(f"{op}: {name} {problem}", "Give a name as jobs and tree list them")


def _check_seconds(request: Request, args: Args) -> None:
    for name, value in (("timeout_s", request.timeout_s), ("longer_than_s", getattr(args, "longer_than_s", None))):
        if isinstance(value, int | float) and not value >= 0:  # NaN is refused as well
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
