"""Every decoder of what comes from outside a process, by name, with what it may raise and where to begin.

    bytes ──▶ Target.decode ──▶ nothing, or one of Target.allowed; anything else is a bug

Used by pytest for some hundred inputs each (``test_decoders.py``) and by atheris for as long as one likes
(``python -m tests.fuzz``). Several frames travel as one input: two bytes of size, then the frame, again and again.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import importlib.util
import pkgutil
import struct
import tempfile
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import yaml

import actors
import supervisors
from actors.control import protocol, verbs
from actors.control.errors import ControlError
from actors.core import message as messages
from actors.environments.errors import SourceUnreadable
from actors.environments.prompts.seen_rows import SeenRows
from actors.environments.prompts.text_rows import TextRows
from actors.fleet.inflow import joined
from actors.gateway.errors import HttpProblem
from actors.gateway.requests import ChatRequest, GenerateRequest, parsed
from actors.gateway.tool_calls import split_calls
from actors.ledger import events as ev
from actors.ledger.errors import IllegalTransition
from actors.ledger.ledger import Ledger
from actors.protocol.episodes import EpisodeName
from actors.protocol.session_keys import BadKey, SessionKeys
from actors.protocol.tokens import ROW, TOKEN, TokenReport
from actors.protocol.training import ScoreCall, StepCall, TokensScored
from actors.protocol.weights import Manifest
from actors.protocol.work import EngineStats, SamplingParams
from actors.train_service.parked_manifest import ManifestPart, ParkedManifest, decode, decode_unhashed, encode
from actors.trainer.backends.fsdp.orders import decode_answer, decode_order, nothing
from actors.trainer.backends.fsdp.orders import encode as _encode_order
from actors.trainer.errors import ParkedStateDamaged
from actors.trainer.parking import place_blocks
from actors.weights.delta import apply_delta, encode_delta
from actors.weights.errors import MalformedDelta, MalformedManifest
from actors.weights.manifest import check_manifest, hash_chunks, layout, tensor_views
from actors.weights.segments import UNREADABLE
from configs.errors import ConfigError
from configs.fault_plan import load_fault_plan
from configs.limits import DEFAULT_LIMITS
from configs.loader import read_job
from configs.scenario import load_scenario
from configs.yaml_source import parse_value
from supervisors.providers.trace_files import read_trace
from tests.fuzz.examples import example
from transport.codec import decode_body, encode_body
from transport.endpoints import split_key
from transport.envelope import Envelope, Kind, decode_envelope, encode_envelope
from transport.errors import HandshakeRefused, MalformedInput
from transport.zmq import handshake
from transport.zmq.packing import pack, packed, unpack

ROOT: Final = Path(__file__).resolve().parents[2]
_SIZE: Final = struct.Struct(">H")


@dataclass(frozen=True)
class Target:
    """One decoder."""

    name: str
    decode: Callable[[bytes], object]
    allowed: tuple[type[Exception], ...]
    seeds: Sequence[bytes] = field(default=(b"",))


def check(target: Target, data: bytes) -> None:
    """Decode, and pass over what the decoder may raise; whatever else it raises is a bug and goes on to the caller."""
    with contextlib.suppress(*target.allowed):
        target.decode(data)


def frames_of(data: bytes) -> list[bytes]:
    """At least one."""
    frames: list[bytes] = []
    while len(data) >= _SIZE.size:
        size = _SIZE.unpack_from(data)[0]
        frames.append(data[_SIZE.size : _SIZE.size + size])
        data = data[_SIZE.size + size :]
    return frames or [data]


def as_input(frames: Sequence[Any]) -> bytes:
    """The inverse of ``frames_of``."""
    return b"".join(_SIZE.pack(memoryview(frame).nbytes) + bytes(frame) for frame in frames)


# ------------------------------------------------------------ the wire


def _wire() -> list[Target]:
    envelope = Envelope(
        kind=Kind.TELL, source="a", target="b", target_incarnation=1, term=1, job="j", trace_id=1, tag="core.look"
    )
    frame = packed([b"head", b"body"])
    assert frame is not None, "it is small"
    controls = [handshake.Hello, handshake.Welcome, handshake.Confirm, handshake.Refusal, handshake.Goodbye]
    return [
        Target("envelope", decode_envelope, (MalformedInput,), [encode_envelope(envelope)]),
        Target("pack", unpack, (MalformedInput,), [pack(1, [frame, frame])]),
        Target("head", lambda data: handshake.read_head(list(frames_of(data))), (MalformedInput,)),
        Target("endpoint", _endpoint, (HandshakeRefused, ValueError), [b"tcp://h:1?key=" + b"ab" * 40, b"ipc:///a"]),
        *(_control(kind) for kind in controls),
    ]


def _endpoint(data: bytes) -> object:
    return split_key(data.decode("utf-8", "replace"))


def _control(kind: type[Any]) -> Target:
    seed = as_input(handshake.control(handshake.Mark.HELLO, example(kind)))
    decode = functools.partial(_read_control, kind)
    return Target(f"control:{kind.__name__}", decode, (MalformedInput,), [seed])


def _read_control(kind: type[Any], data: bytes) -> object:
    return handshake.read_control(kind, list(frames_of(data)))


def _messages() -> list[Target]:
    """Each message that any actor of the system understands."""
    for package in (actors, supervisors):
        for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            if _defines_messages(module.name):
                importlib.import_module(module.name)
    own = {tag: kind for tag, kind in messages._by_tag.items() if kind.__module__.startswith(("actors", "supervisors"))}
    return [
        Target(f"message:{tag}", functools.partial(_read_body, kind), (MalformedInput,), [_body(kind)])
        for tag, kind in sorted(own.items())
    ]


def _defines_messages(module: str) -> bool:
    """By its source: to import all of them takes torch and vLLM."""
    spec = importlib.util.find_spec(module)
    return spec is not None and spec.origin is not None and "(Message" in Path(spec.origin).read_text("utf-8")


def _read_body(kind: type[Any], data: bytes) -> object:
    return decode_body(kind, frames_of(data))


def _body(kind: type[Any]) -> bytes:
    return as_input(encode_body(example(kind)))


# ------------------------------------------------------------ tokens and the ledger

_SAMPLES: Final = 4
FIRST: Final = 1 << 40
"""The first assignment number of term 1."""


def _delta(data: bytes) -> object:
    """Into a ledger in which a worker holds some samples; what is illegal must change nothing."""
    rows, tokens = (*frames_of(data), b"")[:2]
    report = TokenReport(
        job="j", worker="w", term=1, sequence=0, policy_version=0, row_bytes=rows, token_bytes=tokens,
        stats=EngineStats(),
    )  # fmt: skip
    ledger = _ledger()
    before = ledger.counters.tokens
    try:
        return ledger.apply(joined([report]))
    except IllegalTransition:
        assert ledger.counters.tokens == before, "an illegal event has changed something"
        raise


def _ledger() -> Ledger:
    ledger = Ledger()
    ledger.apply(ev.Opened(term=1))
    ledger.apply(
        ev.BatchIssued(
            0, 2, SamplingParams(max_tokens=8), np.arange(2), np.zeros(2, np.int32), np.zeros(0, np.int32), [b""] * 2
        )
    )
    ledger.apply(ev.Assigned.to_one("w", 0, FIRST, np.arange(_SAMPLES, dtype=np.int32)))
    return ledger


def _delta_seed() -> bytes:
    rows, tokens = np.zeros(_SAMPLES, ROW), np.zeros(_SAMPLES, TOKEN)
    rows["assignment"], rows["count"] = np.arange(_SAMPLES) + FIRST, 1
    return as_input([rows.tobytes(), tokens.tobytes()])


def _events() -> list[Target]:
    seeds = [ev.encode_event(example(kind)) for kind in typing.get_args(ev.Event)]
    return [
        Target("token_delta", _delta, (IllegalTransition,), [_delta_seed()]),
        Target("journal_event", ev.decode_event, (msgspec.DecodeError, ValueError), seeds),
    ]


# ------------------------------------------------------------ weights


def _parked() -> ParkedManifest:
    part = ManifestPart(name="trained", file="parked-ab-01", blocks=place_blocks([("w", 100)]), hashes=(bytes(16),) * 2)
    return ParkedManifest(job="j", fingerprint="f", steps=3, generation=2, chunk_bytes=64, parts=(part,))


def _manifest() -> Manifest:
    entries, total = layout([("a", "float32", (3, 5)), ("b", "bfloat16", (7,))])
    data = bytes(total)
    return Manifest(
        job="j", policy_version=1, parent=-1, tensors=entries, chunk_bytes=64, chunk_hashes=hash_chunks(data, 64),
        total_bytes=total,
    )  # fmt: skip


def _read_manifest(data: bytes) -> object:
    manifest = msgspec.msgpack.decode(data, type=Manifest)
    check_manifest(manifest)
    return tensor_views(manifest, bytes(manifest.total_bytes)) if manifest.total_bytes < 1 << 20 else None


_OLD: Final = bytes(range(256)) * 2


def _apply(data: bytes) -> object:
    apply_delta(data, _OLD, memoryview(bytearray(len(_OLD))))
    return None


def _weights() -> list[Target]:
    delta = encode_delta(bytes([1, 2, *_OLD[2:]]), _OLD, 2)
    assert delta is not None, "two bytes differ"
    return [
        Target("parked_manifest", decode_unhashed, (ParkedStateDamaged,), [encode(_parked())[:-16]]),
        Target("parked_manifest_file", decode, (ParkedStateDamaged,), [encode(_parked())]),
        Target(
            "manifest",
            _read_manifest,
            (MalformedManifest, *UNREADABLE),
            [msgspec.msgpack.encode(_manifest())],
        ),
        Target(
            "fsdp_order",
            decode_order,
            (MalformedInput,),
            [_encode_order(StepCall(1.0)), _encode_order(ScoreCall(nothing(), 1.0, reference=False))],
        ),
        Target("fsdp_answer", decode_answer, (MalformedInput,), [_encode_order(TokensScored(nothing().advantages))]),
        Target("delta", _apply, (MalformedDelta,), [delta]),
    ]


# ------------------------------------------------------------ what people and programs hand in


def _request(data: bytes) -> object:
    limit = DEFAULT_LIMITS.control_request_bytes
    protocol.request_id_of(data, max_bytes=limit)  # raises nothing, whatever it is
    return protocol.read_args(protocol.read_request(data, max_bytes=limit))


def _requests() -> list[bytes]:
    found = [msgspec.msgpack.encode({"v": protocol.VERSION, "id": 1, "op": op, "args": {}}) for op in verbs.VERBS]
    return [
        *found,
        msgspec.msgpack.encode({"v": 1, "id": "a", "op": "scale", "args": {"workers": 2}, "timeout_s": 1.0}),
    ]


def _from_file(read: Callable[[Path], object], suffix: str) -> Callable[[bytes], object]:
    """A decoder of files, as one of bytes."""

    def decode(data: bytes) -> object:
        with tempfile.NamedTemporaryFile(suffix=suffix) as file:
            file.write(data)
            file.flush()
            return read(Path(file.name))

    return decode


def _override(data: bytes) -> object:
    return parse_value(data.decode("utf-8", "replace"))


def _texts(*names: str) -> list[bytes]:
    return [(ROOT / "configs" / name).read_bytes()[:4096] for name in names]


def _rows(path: Path) -> object:
    rows = TextRows(path)
    return [(rows.columns(index), rows[index]) for index in range(len(rows))]


def _seen(path: Path) -> object:
    seen = SeenRows("d", "s", 9, path)
    assert 0 <= seen.kept <= seen.seen <= seen.rows, "a file tells more than there is"
    return [seen.place_of(kept) for kept in range(9)]


_CHAT: Final = (
    b'{"model": "m", "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}, {"role": "assistant", '
    b'"tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]}], "tools": [{"function": {"name": '
    b'"f"}}], "stop": ["x"], "max_tokens": 9, "temperature": 0.5, "stream_options": {"include_usage": true}}'
)
_GENERATE: Final = b'{"token_ids": [5, 6], "sampling_params": {"max_tokens": 9, "logprobs": 1, "stop": "x"}}'
_KEYS: Final = SessionKeys("hr-admin-x", "job")


def _chat(data: bytes) -> object:
    asked = parsed(data, ChatRequest)
    return asked.question(is_retry=False, with_tokens=False), asked.ignored({"temperature": 1.0}, ())


def _generate(data: bytes) -> object:
    return parsed(data, GenerateRequest).question(is_retry=False)


_CALLS: Final = [
    b'Hm. <tool_call>\n{"name": "f", "arguments": {"a": "</tool_call>"}}\n</tool_call><tool_call>[{"name": "f"}]',
    b"<tool_call><function=f><parameter=a>\nnull\n</parameter><parameter=b>1</parameter></function></tool_call>",
]


def _tool_calls(data: bytes) -> object:
    properties = {"a": {"anyOf": [{"type": "string"}, {"type": "null"}]}}
    tool = {"function": {"name": "f", "parameters": {"properties": properties}}}
    content, calls = split_calls(data.decode("utf-8", "replace"), [tool])
    return content.encode(), [(call.name.encode(), call.arguments.encode()) for call in calls]


def _session_key(data: bytes) -> object:
    return _KEYS.read(data.decode("latin-1"))


def _files() -> list[Target]:
    plan = b"seed: 1\nfaults:\n  - {kind: kill, target: {name: rollout-0}, at_s: 3}\n"
    sky = b'{"metadata": {"gap_seconds": 300}, "data": [1, 2, 0]}'
    wrong = (ConfigError,)
    rows = [b'{"prompt": "1+1=", "answer": [2, null]}\n\n{"prompt": "a"}\n', b'[{"prompt": "a", "x": 1.5e3}, {}]']
    seen = b'{"data": "d", "settings": "s", "rows": 9}\n{"checked": 9}\n'
    seen += b'{"from": 0, "to": 4, "passed": [1, 3], "why": {"long": 2}, "first": {"long": "row 1"}}\n'
    return [
        Target("job_yaml", _from_file(read_job, ".yaml"), wrong, _texts("quickstart.yaml", "async.yaml")),
        Target("fault_plan_yaml", _from_file(load_fault_plan, ".yaml"), wrong, [plan]),
        Target("scenario_yaml", _from_file(load_scenario, ".yaml"), wrong, _texts("chaos.yaml")),
        Target("trace_csv", _from_file(read_trace, ".csv"), wrong, _texts("traces/three_nodes.csv")),
        Target("trace_json", _from_file(read_trace, ".json"), wrong, [sky]),
        Target("text_rows", _from_file(_rows, ".jsonl"), (SourceUnreadable,), rows),
        Target("packed_rows", _from_file(_rows, ".jsonl.gz"), (SourceUnreadable,), [gzip.compress(rows[0])]),
        Target("seen_rows", _from_file(_seen, ".jsonl"), (), [seen]),
        Target("override", _override, (yaml.YAMLError,), [b"[1, {a: b}]"]),
        Target("control_request", _request, (ControlError,), _requests()),
        Target("chat_request", _chat, (HttpProblem,), [_CHAT]),
        Target("generate_request", _generate, (HttpProblem,), [_GENERATE]),
        Target("tool_calls", _tool_calls, (), _CALLS),
        Target("session_key", _session_key, (BadKey,), [_KEYS.sign(EpisodeName(3, 7, 1, 1)).encode()]),
    ]


@functools.cache
def targets() -> dict[str, Target]:
    """All of them, by name."""
    every = [*_wire(), *_messages(), *_events(), *_weights(), *_files()]
    return {target.name: target for target in every}
