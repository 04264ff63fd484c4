"""Records, from outside, what training services are asked for and what they compute.

calls as the network has delivered them ─▶ ServiceWatch ─▶ ServiceRecord ─▶ checkers/service_calls.py
calls as backends compute them ──────────▶      ▲
tiers that are full ◀── a fault ────────────────┘
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import numpy as np
import xxhash

from actors.protocol.training import (
    AccumulateCall,
    DropSums,
    ExportCheckpoint,
    ExportSegment,
    LearnCall,
    LoadCall,
    SaveCall,
    ScoreCall,
    StepCall,
    TrainBody,
    TrainCall,
    ValuesCall,
)
from actors.roles import ServiceArgs
from actors.train_service.parked_files import Tier as StoredTier
from supervisors.checkers.service_calls import Computed, ServiceRecord
from transport.codec import decode_body
from transport.envelope import decode_envelope
from transport.sim.process import SimProcess
from transport.transport import Frame

_TAG: Final = b"training.call"
_STATE_BYTES: Final = 2312
"""Bytes of a simulated job's state."""
_MOVES: Final = 4
"""Most moves, per job, of states before a call begins: those of others out, twice, and its own in."""


class ServiceWatch:
    """Records what training services are asked for and what they compute, independently of their own accounts."""

    def __init__(self, moved_byte_s: float, jobs: int) -> None:
        self.record = ServiceRecord(moving_s=_MOVES * jobs * _STATE_BYTES * moved_byte_s)
        self.full_tiers: list[StoredTier] = []
        """Tiers on the head's machine that are full."""
        self._processes: dict[SimProcess, str] = {}
        self._names = 0

    def begins(self, process: SimProcess, args: ServiceArgs) -> None:
        """Note that a service's process has begun."""
        name = f"{process.name}, life {len(self._processes) + 1}"
        self._processes[process] = name
        self.record.queues[name] = args.config.queue

    def hindered(self, process: SimProcess) -> None:
        """Note that a process was halted or slowed down."""
        if process in self._processes:
            self.record.disturbed.add(self._processes[process])

    def fresh_name(self) -> str:
        """A part of a file's name that no other file has."""
        self._names += 1
        return f"{self._names:016x}"

    def heard(self, frames: list[Frame]) -> None:
        """Note a message that was delivered."""
        head = bytes(frames[0])
        if _TAG not in head or decode_envelope(head).tag.encode() != _TAG:
            return
        call = decode_body(TrainCall, frames[1:])
        whats = self.record.asked.setdefault(call.life, {}).setdefault(call.number, [])
        if (what := what_of(call.body)) not in whats:
            whats.append(what)

    @contextmanager
    def computing(self, process: SimProcess, job: str, life: str, what: str, asked_s: float) -> Generator[None]:
        """Note that a backend computes a call in this block."""
        loop = asyncio.get_running_loop()
        call = Computed(
            process=self._processes[process], job=job, life=life, what=what, asked_s=asked_s, began_s=loop.time()
        )
        self.record.computed.append(call)
        try:
            yield
        finally:
            if process.alive:  # else the process was killed, and the call never ended
                call.ended_s = loop.time()


def what_of(body: TrainBody) -> str:
    """A string that tells a call apart from others."""
    kind = str(type(body).__struct_config__.tag)
    match body:
        case AccumulateCall() | LearnCall() | ScoreCall() | ValuesCall():
            digest = xxhash.xxh3_64()
            for array in (body.batch.input_ids, body.batch.loss_weight, body.batch.advantages):
                digest.update(np.ascontiguousarray(array).tobytes())
            return f"{kind} {digest.hexdigest()}"
        case DropSums():
            return kind
        case StepCall():
            return f"{kind} {body.weight!r}" + ("" if body.adam is None else f" {body.adam}")
        case ExportSegment():
            return f"{kind} {body.policy_version}"
        case SaveCall() | LoadCall() | ExportCheckpoint():
            return f"{kind} {Path(body.directory).name}"
