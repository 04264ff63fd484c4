"""A backend that computes next to nothing, in the time that a cost model says. It skips no step of the protocol.

The weights are a few numbers, and every promise of ``TrainBackend`` holds for them: gradients are sums that do not
depend on the cut, only ``step`` changes the weights, saved state comes back bit for bit, exports are real segments.
Time passes on the loop's clock, so under a virtual-time loop a year of training takes seconds.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from actors.protocol.weights import Manifest
from actors.trainer.backend import BackendSpec, LossSpec, MicroBatch, MicroBatchStats, StepResult, StoredBytes
from actors.trainer.backends.segment_file import write_segment
from actors.trainer.errors import BackendClosed, CheckpointCorrupt, ParkedStateDamaged, StateParked
from actors.trainer.parking import SUMS, TRAINED, StatePart, StoredPart, place_blocks
from actors.weights.manifest import layout
from actors.weights.memory import copy_and_hash

TENSORS = (("embed.weight", "float32", (32, 4)), ("norm.weight", "float32", (4,)))
STATE_FILE = "backend.json"
VOCABULARY = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainCost:
    """Says what training costs, in seconds on the loop's clock. The default is free of charge."""

    accumulate_base_s: float = 0.0
    accumulate_token_s: float = 0.0
    """Per padded token."""
    score_token_s: float = 0.0
    step_s: float = 0.0
    export_s: float = 0.0
    save_s: float = 0.0
    moved_byte_s: float = 0.0
    """Per byte of state that is copied out of the backend or back."""


class SimulatedBackend:
    """Implements ``TrainBackend`` with numpy."""

    kind = "simulated"

    def __init__(self, cost: TrainCost | None = None) -> None:
        self._cost = cost or TrainCost()
        self._spec: BackendSpec | None = None
        self._weights = np.zeros(0, dtype=np.float32)
        self._momentum = np.zeros(0, dtype=np.float32)
        self._sums = np.zeros(0, dtype=np.float64)
        self._steps = 0
        self._entries, self._total_bytes = layout(TENSORS)
        self._versions = {TRAINED: 1, SUMS: 1}
        self._sums_are_zero = True
        self._released = False

    async def start(self, spec: BackendSpec) -> None:
        self._spec = spec
        count = self._total_bytes // 4
        self._weights = np.zeros(count, dtype=np.float32)
        for entry in self._entries:
            start, size = entry.offset_bytes // 4, entry.length_bytes // 4
            self._weights[start : start + size] = np.linspace(-1.0, 1.0, size, dtype=np.float32)
        self._momentum = np.zeros(count, dtype=np.float32)
        self._sums = np.zeros(count, dtype=np.float64)

    async def score(self, batch: MicroBatch, *, temperature: float, reference: bool) -> np.ndarray:
        spec = self._started()
        if reference and not spec.needs_reference:
            raise BackendClosed("no reference model was loaded; start the backend with needs_reference")
        await asyncio.sleep(self._cost.score_token_s * batch.input_ids.size)
        t = np.arange(batch.input_ids.shape[1])
        response = (t >= batch.prompt_lengths[:, None]) & (t < batch.lengths[:, None])
        drift = 0.0 if reference else float(self._weights[0]) + 1.0
        logprob = -math.log(VOCABULARY) - 0.01 * drift
        return np.where(response, logprob, 0.0).astype(np.float32)

    async def accumulate(self, batch: MicroBatch, loss: LossSpec) -> MicroBatchStats:
        self._started()
        self._changed(SUMS)
        await asyncio.sleep(self._cost.accumulate_base_s + self._cost.accumulate_token_s * batch.input_ids.size)
        where = batch.loss_weight != 0
        weighted = batch.loss_weight * batch.advantages
        contribution = np.zeros((VOCABULARY, 4))
        np.add.at(contribution, batch.input_ids[where] % VOCABULARY, -weighted[where].astype(np.float64)[:, None])
        self._sums[: contribution.size] += contribution.reshape(-1)
        return MicroBatchStats(
            tokens=int(where.sum()),
            weight=float(batch.loss_weight.sum()),
            loss_sum=-float(weighted.sum()),
            clipped_sum=0.0,
            kl_sum=0.0,
            entropy_sum=math.log(VOCABULARY) * int(where.sum()),
            mismatch_sum=0.0,
        )

    async def step(self, *, weight: float) -> StepResult:
        spec = self._started()
        await asyncio.sleep(self._cost.step_s)
        gradient = (self._sums / weight).astype(np.float32)
        norm = float(np.linalg.norm(gradient))
        rate = spec.learning_rate_of(self._steps)
        skipped = not math.isfinite(norm)
        if not skipped:
            self._momentum = spec.adam_betas[0] * self._momentum + gradient * np.float32(
                min(1.0, spec.max_grad_norm / (norm + 1e-6))
            )
            self._weights = (self._weights - np.float32(rate) * self._momentum).astype(np.float32)
        self._steps += 1
        self._changed(TRAINED)
        self._no_sums()
        return StepResult(grad_norm=norm, learning_rate=rate, skipped=skipped)

    async def export_segment(self, path: Path, *, job: str, policy_version: int, chunk_bytes: int) -> Manifest:
        self._started()
        await asyncio.sleep(self._cost.export_s)
        return self._write(path, _bytes(self._weights), job, policy_version, chunk_bytes)

    def _write(self, path: Path, data: memoryview, job: str, policy_version: int, chunk_bytes: int) -> Manifest:
        return write_segment(
            path, data, job=job, policy_version=policy_version, chunk_bytes=chunk_bytes, tensors=self._entries
        )

    def stored_bytes(self) -> StoredBytes:
        return StoredBytes(segment=self._total_bytes, checkpoint=4 * self._total_bytes)  # twice, in hexadecimal

    async def save(self, directory: Path) -> None:
        self._started()
        await asyncio.sleep(self._cost.save_s)
        directory.mkdir(parents=True, exist_ok=True)
        state = {"format": 1, "kind": self.kind, "steps": self._steps}
        state |= {"weights": self._weights.tobytes().hex(), "momentum": self._momentum.tobytes().hex()}
        (directory / STATE_FILE).write_text(json.dumps(state) + "\n")

    async def load(self, directory: Path) -> None:
        self._started()
        try:
            state = json.loads((directory / STATE_FILE).read_text())
            self._weights = np.frombuffer(bytes.fromhex(state["weights"]), dtype=np.float32).copy()
            self._momentum = np.frombuffer(bytes.fromhex(state["momentum"]), dtype=np.float32).copy()
            self._steps = int(state["steps"])
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointCorrupt(f"{directory / STATE_FILE}: {error}; resume from another checkpoint") from error
        self._changed(TRAINED)
        self._no_sums()

    async def export_checkpoint(self, directory: Path) -> None:
        """The HF directory's place, with a config that says that no model can be loaded from it."""
        self._started()
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(json.dumps({"model_type": "headrace_simulated"}) + "\n")

    def state(self) -> tuple[int, bytes]:
        """Steps taken, and weights and momentum: two lives that have come the same way are in the same state."""
        return self._steps, self._weights.tobytes() + self._momentum.tobytes()

    # ------------------------------------------------------------ parking: implements ``Parkable``

    keeps_addresses = False

    @property
    def steps(self) -> int:
        return self._steps

    def fingerprint(self) -> str:
        return f"{self.kind} {TENSORS}"

    def parts(self) -> tuple[StatePart, ...]:
        trained = place_blocks([("counts", 8), ("weights", self._total_bytes), ("momentum", self._total_bytes)])
        sums = place_blocks([] if self._sums_are_zero else [("sums", 2 * self._total_bytes)])
        return (
            StatePart(name=TRAINED, version=self._versions[TRAINED], blocks=trained),
            StatePart(name=SUMS, version=self._versions[SUMS], blocks=sums),
        )

    def resident_bytes(self) -> int:
        return 8 + 4 * self._total_bytes

    def released_bytes(self) -> int:
        return 8

    async def copy_out(self, places: Mapping[str, memoryview], chunk_bytes: int) -> dict[str, tuple[bytes, ...]]:
        self._started()
        digests: dict[str, tuple[bytes, ...]] = {}
        for part in self.parts():
            if part.name not in places:
                continue
            await asyncio.sleep(self._cost.moved_byte_s * part.size_bytes)
            digests[part.name] = ()
            for block in part.blocks:
                place = places[part.name][block.offset_bytes :][: block.length_bytes]
                digests[part.name] += copy_and_hash(_bytes(self._arrays()[block.name]), place, chunk_bytes)
        return digests

    async def release(self) -> None:
        self._weights = self._momentum = np.zeros(0, dtype=np.float32)
        self._sums = np.zeros(0, dtype=np.float64)
        self._released = True

    async def restore(self, stored: Mapping[str, StoredPart]) -> None:
        count = self._total_bytes // 4
        self._weights, self._momentum = np.zeros(count, dtype=np.float32), np.zeros(count, dtype=np.float32)
        self._sums = np.zeros(count, dtype=np.float64)
        arrays = self._arrays()
        for part in stored.values():
            await asyncio.sleep(self._cost.moved_byte_s * len(part.memory))
            found: tuple[bytes, ...] = ()
            for block in part.blocks:
                found += copy_and_hash(part.block(block.name), _bytes(arrays[block.name]), part.chunk_bytes)
            if found != part.hashes:
                await self.release()
                raise ParkedStateDamaged("parked state does not fit its hashes: it was altered, and is not used")
        self._steps = int(arrays["counts"][0])
        for part in (TRAINED, SUMS):
            self._changed(part)
        self._sums_are_zero = SUMS not in stored
        self._released = False

    def _arrays(self) -> dict[str, np.ndarray]:
        """The state by the names of its blocks; ``counts`` is a copy."""
        counts = np.array([self._steps], dtype=np.int64)
        return {"counts": counts, "weights": self._weights, "momentum": self._momentum, "sums": self._sums}

    def _changed(self, part: str) -> None:
        self._versions[part] += 1
        self._sums_are_zero = self._sums_are_zero and part != SUMS

    def _no_sums(self) -> None:
        self._sums[:] = 0.0
        self._versions[SUMS] += 1
        self._sums_are_zero = True

    async def forget_place(self, memory: memoryview) -> None:
        """Nothing is pinned."""

    async def export_parked(
        self, trained: StoredPart, path: Path, *, job: str, policy_version: int, chunk_bytes: int
    ) -> Manifest:
        await asyncio.sleep(self._cost.export_s)
        return self._write(path, trained.block("weights"), job, policy_version, chunk_bytes)

    async def close(self) -> None:
        self._spec = None

    def _started(self) -> BackendSpec:
        if self._spec is None:
            raise BackendClosed("the simulated backend was called before start or after close")
        if self._released:
            raise StateParked("the simulated backend was called while its state is parked; restore it first")
        return self._spec


def _bytes(array: np.ndarray) -> memoryview:
    return array.view(np.uint8).data
