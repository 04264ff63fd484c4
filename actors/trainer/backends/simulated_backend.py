"""A backend that computes next to nothing, in the time that a cost model says. It skips no step of the protocol.

The weights are a few numbers, and every promise of ``TrainBackend`` holds for them: gradients are sums that do not
depend on the cut, only ``step`` changes the weights, saved state comes back bit for bit, exports are real segments.
With several ranks the first has the numbers, and the time of each call passes for all of them (``ranks/simulated.py``).
A critic is as many numbers again, of which each token of the vocabulary has one as its value.
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
from actors.ranks.simulated import SimulatedRanks
from actors.trainer.backend import BackendSpec, LossSpec, MicroBatch, MicroBatchStats, StepResult, StoredBytes
from actors.trainer.backends.segment_file import write_segment
from actors.trainer.errors import BackendClosed, BadMicroBatch, CheckpointCorrupt, ParkedStateDamaged, StateParked
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


class _Numbers:
    """Holds the state of one simulated model."""

    def __init__(self, count: int = 0) -> None:
        self.have(count)

    def have(self, count: int) -> None:
        """Become so many zeros."""
        self.weights = np.zeros(count, dtype=np.float32)
        self.momentum = np.zeros(count, dtype=np.float32)
        self.sums = np.zeros(count, dtype=np.float64)

    def add(self, tokens: np.ndarray, gradients: np.ndarray) -> None:
        """Add the gradient of each token to what belongs to it."""
        contribution = np.zeros((VOCABULARY, 4))
        np.add.at(contribution, tokens % VOCABULARY, gradients.astype(np.float64)[:, None])
        self.sums[: contribution.size] += contribution.reshape(-1)

    def norm(self, weight: float) -> float:
        return float(np.linalg.norm((self.sums / weight).astype(np.float32)))

    def take(self, rate: float, norm: float, weight: float, spec: BackendSpec) -> None:
        gradient = (self.sums / weight).astype(np.float32)
        self.momentum = spec.adam_betas[0] * self.momentum + gradient * np.float32(
            min(1.0, spec.max_grad_norm / (norm + 1e-6))
        )
        self.weights = (self.weights - np.float32(rate) * self.momentum).astype(np.float32)


class SimulatedBackend:
    """Implements ``TrainBackend`` with numpy."""

    kind = "simulated"

    def __init__(self, cost: TrainCost | None = None, ranks: SimulatedRanks | None = None) -> None:
        """``ranks``: of which this is the first; None: it computes alone."""
        self._cost = cost or TrainCost()
        self._ranks = ranks or SimulatedRanks()
        self._spec: BackendSpec | None = None
        self._policy = _Numbers()
        self._critic: _Numbers | None = None
        self._steps = 0
        self._entries, self._total_bytes = layout(TENSORS)
        self._versions = {TRAINED: 1, SUMS: 1}
        self._sums_are_zero = True
        self._released = False

    async def start(self, spec: BackendSpec) -> None:
        self._spec = spec
        count = self._total_bytes // 4
        self._policy = _Numbers(count)
        self._critic = None if spec.critic is None else _Numbers(count)
        for entry in self._entries:
            start, size = entry.offset_bytes // 4, entry.length_bytes // 4
            self._policy.weights[start : start + size] = np.linspace(-1.0, 1.0, size, dtype=np.float32)
        await self._ranks.tell("start")

    async def score(self, batch: MicroBatch, *, temperature: float, reference: bool) -> np.ndarray:
        spec = self._started()
        if reference and not spec.needs_reference:
            raise BackendClosed("no reference model was loaded; start the backend with needs_reference")
        await self._ranks.spend("score", self._cost.score_token_s * batch.input_ids.size, batch.input_ids)
        drift = 0.0 if reference else float(self._policy.weights[0]) + 1.0
        logprob = -math.log(VOCABULARY) - 0.01 * drift
        return np.where(_responses(batch), logprob, 0.0).astype(np.float32)

    async def values(self, batch: MicroBatch) -> np.ndarray:
        self._started()
        if self._critic is None:
            raise BackendClosed("no critic was loaded; start the backend with critic")
        await self._ranks.spend("values", self._cost.score_token_s * batch.input_ids.size, batch.input_ids)
        return np.where(_responses(batch), _values(self._critic, batch.input_ids), np.float32(0.0))

    async def accumulate(self, batch: MicroBatch, loss: LossSpec) -> MicroBatchStats:
        self._started()
        self._changed(SUMS)
        seconds = self._cost.accumulate_base_s + self._cost.accumulate_token_s * batch.input_ids.size
        await self._ranks.spend("accumulate", seconds, batch.input_ids, batch.advantages)
        where = batch.loss_weight != 0
        weighted = batch.loss_weight * batch.advantages
        if not self._critic_alone:
            self._policy.add(batch.input_ids[where], -weighted[where])
        return MicroBatchStats(
            tokens=int(where.sum()),
            weight=float(batch.loss_weight.sum()),
            loss_sum=-float(weighted.sum()),
            clipped_sum=0.0,
            kl_sum=0.0,
            entropy_sum=math.log(VOCABULARY) * int(where.sum()),
            mismatch_sum=0.0,
            value_loss_sum=0.0 if self._critic is None else self._accumulate_values(self._critic, batch, where),
        )

    def _accumulate_values(self, critic: _Numbers, batch: MicroBatch, where: np.ndarray) -> float:
        """The value loss, summed; half the square of the distance to the returns, and no clip."""
        if batch.returns is None:
            raise BadMicroBatch("returns: missing, expected float32[B, T] of a job with a critic")
        tokens, weight = batch.input_ids[where], batch.loss_weight[where]
        apart = _values(critic, tokens) - batch.returns[where]
        critic.add(tokens, weight * apart)
        return float((0.5 * weight * apart**2).sum())

    @property
    def _critic_alone(self) -> bool:
        spec = self._started()
        return spec.critic is not None and self._steps < spec.critic.warmup_steps

    async def step(self, *, weight: float) -> StepResult:
        spec = self._started()
        await self._ranks.spend("step", self._cost.step_s, repr(weight).encode())
        norm = self._policy.norm(weight)
        critic_norm = None if self._critic is None else self._critic.norm(weight)
        rate = 0.0 if self._critic_alone else spec.learning_rate_of(self._steps)
        skipped = not (math.isfinite(norm) and math.isfinite(critic_norm or 0.0))
        if not skipped:
            if not self._critic_alone:
                self._policy.take(rate, norm, weight, spec)
            if self._critic is not None and critic_norm is not None and spec.critic is not None:
                critic_rate = spec.learning_rate_of(self._steps, spec.critic.learning_rate)
                self._critic.take(critic_rate, critic_norm, weight, spec)
        self._steps += 1
        self._changed(TRAINED)
        self._no_sums()
        return StepResult(grad_norm=norm, learning_rate=rate, skipped=skipped, critic_grad_norm=critic_norm)

    async def export_segment(self, path: Path, *, job: str, policy_version: int, chunk_bytes: int) -> Manifest:
        self._started()
        await self._ranks.spend("export", self._cost.export_s, path.name.encode())
        return self._write(path, _bytes(self._policy.weights), job, policy_version, chunk_bytes)

    def _write(self, path: Path, data: memoryview, job: str, policy_version: int, chunk_bytes: int) -> Manifest:
        return write_segment(
            path, data, job=job, policy_version=policy_version, chunk_bytes=chunk_bytes, tensors=self._entries
        )

    def stored_bytes(self) -> StoredBytes:
        return StoredBytes(
            segment=self._total_bytes, checkpoint=4 * self._total_bytes * len(self._models)
        )  # twice, in hexadecimal

    async def save(self, directory: Path) -> None:
        self._started()
        await self._ranks.spend("save", self._cost.save_s, directory.name.encode())
        directory.mkdir(parents=True, exist_ok=True)
        state = {"format": 1, "kind": self.kind, "steps": self._steps}
        for name, model in self._models.items():
            state |= {
                f"{name}weights": model.weights.tobytes().hex(),
                f"{name}momentum": model.momentum.tobytes().hex(),
            }
        (directory / STATE_FILE).write_text(json.dumps(state) + "\n")

    async def load(self, directory: Path) -> None:
        self._started()
        try:
            state = json.loads((directory / STATE_FILE).read_text())
            for name, model in self._models.items():
                model.weights = np.frombuffer(bytes.fromhex(state[f"{name}weights"]), dtype=np.float32).copy()
                model.momentum = np.frombuffer(bytes.fromhex(state[f"{name}momentum"]), dtype=np.float32).copy()
            self._steps = int(state["steps"])
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointCorrupt(f"{directory / STATE_FILE}: {error}; resume from another checkpoint") from error
        await self._ranks.tell("load", directory.name.encode())
        self._changed(TRAINED)
        self._no_sums()

    async def export_checkpoint(self, directory: Path) -> None:
        """The HF directory's place, with a config that says that no model can be loaded from it."""
        self._started()
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(json.dumps({"model_type": "headrace_simulated"}) + "\n")

    def state(self) -> tuple[int, bytes]:
        """Steps taken, and weights and momentum: two lives that have come the same way are in the same state."""
        models = self._models.values()
        return self._steps, b"".join(model.weights.tobytes() + model.momentum.tobytes() for model in models)

    @property
    def _models(self) -> dict[str, _Numbers]:
        """What is trained, by the beginnings of its blocks' names."""
        return {"": self._policy} | ({} if self._critic is None else {"critic.": self._critic})

    # ------------------------------------------------------------ parking: implements ``Parkable``

    keeps_addresses = False

    @property
    def steps(self) -> int:
        return self._steps

    def fingerprint(self) -> str:
        return " and ".join(f"{name}{self.kind} {TENSORS}" for name in self._models)

    def parts(self) -> tuple[StatePart, ...]:
        size, names = self._total_bytes, list(self._models)
        each = [(f"{name}{array}", size) for name in names for array in ("weights", "momentum")]
        trained = place_blocks([("counts", 8), *each])
        sums = place_blocks([] if self._sums_are_zero else [(f"{name}sums", 2 * size) for name in names])
        return (
            StatePart(name=TRAINED, version=self._versions[TRAINED], blocks=trained),
            StatePart(name=SUMS, version=self._versions[SUMS], blocks=sums),
        )

    def resident_bytes(self) -> int:
        return 8 + 4 * self._total_bytes * len(self._models)

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
        for model in self._models.values():
            model.have(0)
        self._released = True

    async def restore(self, stored: Mapping[str, StoredPart]) -> None:
        for model in self._models.values():
            model.have(self._total_bytes // 4)
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
        arrays: dict[str, np.ndarray] = {"counts": np.array([self._steps], dtype=np.int64)}
        for name, model in self._models.items():
            arrays |= {name + inner: array for inner, array in vars(model).items()}
        return arrays

    def _changed(self, part: str) -> None:
        self._versions[part] += 1
        self._sums_are_zero = self._sums_are_zero and part != SUMS

    def _no_sums(self) -> None:
        for model in self._models.values():
            model.sums[:] = 0.0
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
        await self._ranks.close()

    def _started(self) -> BackendSpec:
        if self._spec is None:
            raise BackendClosed("the simulated backend was called before start or after close")
        if self._released:
            raise StateParked("the simulated backend was called while its state is parked; restore it first")
        return self._spec


def _responses(batch: MicroBatch) -> np.ndarray:
    t = np.arange(batch.input_ids.shape[1])
    return (t >= batch.prompt_lengths[:, None]) & (t < batch.lengths[:, None])


def _values(critic: _Numbers, tokens: np.ndarray) -> np.ndarray:
    """float32 of the shape of ``tokens``."""
    return critic.weights[: 4 * VOCABULARY : 4][tokens % VOCABULARY]


def _bytes(array: np.ndarray) -> memoryview:
    return array.view(np.uint8).data
