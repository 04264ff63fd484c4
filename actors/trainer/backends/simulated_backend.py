"""A backend that computes next to nothing, in the time that a cost model sets. It skips no step of the protocol.

The weights are a few numbers, and every promise of ``TrainBackend`` holds for them: gradients are sums that do not
depend on the cut, only ``step`` changes the weights, saved state comes back bit for bit, exports are real segments.
With several ranks the first holds the weights, and each call takes its time on all ranks (``ranks/simulated.py``).
A critic is as many numbers again, of which each token of the vocabulary has one as its value.
Time passes on the loop's clock, so under a virtual-time loop a year of training takes seconds.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

import msgspec
import numpy as np
import xxhash

from actors.core.context import Context
from actors.core.watch import Down
from actors.protocol.weights import Manifest
from actors.ranks.simulated import SimulatedRanks
from actors.trainer.backend import (
    AdamStep,
    BackendSpec,
    Learned,
    LedRanks,
    LocalBackend,
    LossSpec,
    MemoryUse,
    MicroBatch,
    MicroBatchStats,
    StepResult,
    StoredBytes,
)
from actors.trainer.backends.segment_file import described, write_segment
from actors.trainer.errors import (
    BackendClosed,
    BadMicroBatch,
    CheckpointCorrupt,
    OutOfMemory,
    ParkedStateDamaged,
    StateParked,
)
from actors.trainer.parking import SUMS, TRAINED, Place, StatePart, StoredPart, place_blocks
from actors.weights.manifest import cut_for_sources, layout
from actors.weights.memory import copy_and_hash
from actors.weights.shares import seal, share_path, write_pieces

TENSORS = (("embed.weight", "float32", (32, 4)), ("norm.weight", "float32", (4,)))
STATE_FILE = "backend.json"
VOCABULARY = 32
TOKEN_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainCost:
    """Says what training costs, in seconds on the loop's clock. By default it takes no time."""

    accumulate_base_s: float = 0.0
    accumulate_token_s: float = 0.0
    """Seconds for each token, padding included."""
    score_token_s: float = 0.0
    step_s: float = 0.0
    export_s: float = 0.0
    save_s: float = 0.0
    moved_byte_s: float = 0.0
    """Seconds for each byte of state that is copied out of the backend or back."""
    memory_tokens: float = math.inf
    """Padded tokens for which each rank has memory; a token takes ``TOKEN_BYTES``."""


class _Numbers:
    """Holds the state of one simulated model."""

    def __init__(self, count: int = 0) -> None:
        self.reset(count)

    def reset(self, count: int) -> None:
        """Become ``count`` zeros."""
        self.weights = np.zeros(count, dtype=np.float32)
        self.momentum = np.zeros(count, dtype=np.float32)
        self.sums = np.zeros(count, dtype=np.float64)

    def add(self, tokens: np.ndarray, gradients: np.ndarray) -> None:
        """Add the gradient of each token to the sums of its word in the vocabulary."""
        contribution = np.zeros((VOCABULARY, 4))
        np.add.at(contribution, tokens % VOCABULARY, gradients.astype(np.float64)[:, None])
        self.sums[: contribution.size] += contribution.reshape(-1)

    def norm(self, weight: float) -> float:
        with np.errstate(over="ignore"):  # then it is infinite, and the step is not taken
            return float(np.linalg.norm((self.sums / weight).astype(np.float32)))

    def take(self, adam: AdamStep, norm: float, weight: float) -> None:
        gradient = (self.sums / weight).astype(np.float32)
        self.momentum = adam.beta1 * self.momentum + gradient * np.float32(adam.scale(norm))
        self.weights = (self.weights - np.float32(adam.learning_rate) * self.momentum).astype(np.float32)


class SimulatedBackend(LocalBackend):
    """Implements ``TrainBackend`` with numpy."""

    kind = "simulated"

    def __init__(
        self, cost: TrainCost | None = None, ranks: SimulatedRanks | None = None, sources: Sequence[str] = ()
    ) -> None:
        """``ranks``: those of which this is the first; None: it computes alone.

        ``sources``: one for each machine of the ranks, as ``Manifest.sources``; empty: they are on one.
        """
        self._cost = cost or TrainCost()
        self._ranks = ranks or SimulatedRanks()
        self._sources = sources
        self._spec: BackendSpec | None = None
        self._policy = _Numbers()
        self._critic: _Numbers | None = None
        self._steps = 0
        self._entries, self._total_bytes = layout(TENSORS)
        self._versions = {TRAINED: 1, SUMS: 1}
        self._sums_are_zero = True
        self._released = False

    def connect(self, ctx: Context) -> None:
        self._ranks.followers.connect(ctx)

    def heard(self, message: Down) -> None:
        self._ranks.followers.heard(message)

    async def start(self, spec: BackendSpec, *, checkpoint_step: int = 0) -> None:
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
        self._find_memory(batch)
        return self._logprobs(batch, reference=reference)

    def _logprobs(self, batch: MicroBatch, *, reference: bool) -> np.ndarray:
        drift = 0.0 if reference else float(self._policy.weights[0]) + 1.0
        logprob = -math.log(VOCABULARY) - 0.01 * drift
        return np.where(_responses(batch), logprob, 0.0).astype(np.float32)

    async def values(self, batch: MicroBatch) -> np.ndarray:
        self._started()
        if self._critic is None:
            raise BackendClosed("no critic was loaded; start the backend with critic")
        await self._ranks.spend("values", self._cost.score_token_s * batch.input_ids.size, batch.input_ids)
        self._find_memory(batch)
        return np.where(_responses(batch), _values(self._critic, batch.input_ids), np.float32(0.0))

    async def accumulate(self, batch: MicroBatch, loss: LossSpec) -> MicroBatchStats:
        self._started()
        self._changed(SUMS)
        seconds = self._cost.accumulate_base_s + self._cost.accumulate_token_s * batch.input_ids.size
        await self._ranks.spend("accumulate", seconds, batch.input_ids, batch.advantages)
        self._find_memory(batch)
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
            older_tokens=int((where & batch.older_rows[:, None]).sum()),
            value_loss_sum=0.0 if self._critic is None else self._accumulate_values(self._critic, batch, where),
        )

    async def learn(self, batch: MicroBatch, loss: LossSpec, *, backward: bool = True) -> Learned:
        """Every loss is minus the advantage times the log-probability, which has its own simple gradient."""
        self._started().check_learn()
        if backward:
            self._changed(SUMS)
        seconds = self._cost.accumulate_base_s + self._cost.accumulate_token_s * batch.input_ids.size
        targets = batch.input_ids if batch.targets is None else batch.targets
        await self._ranks.spend("learn", seconds, targets, batch.advantages)
        self._find_memory(batch)
        where, weighted = _responses(batch), batch.loss_weight.astype(np.float64) * batch.advantages
        if backward:
            self._policy.add(targets[where], -weighted[where])
        logprobs = self._logprobs(batch, reference=False)
        return Learned(logprobs=logprobs, loss_sum=-float((weighted * logprobs)[where].sum()))

    @property
    def memory_tokens(self) -> float:
        """Padded tokens for which each rank has memory now."""
        return self._cost.memory_tokens

    def _find_memory(self, batch: MicroBatch) -> None:
        """Raise OutOfMemory if there is none for ``batch``."""
        if batch.input_ids.size > self.memory_tokens * self._ranks.count:
            self._run_short(batch)

    def _run_short(self, batch: MicroBatch) -> NoReturn:
        """Fail in the middle of a pass: the gradient sums are void."""
        self._changed(SUMS)
        for model in self._models.values():
            model.sums += 1.0
        raise OutOfMemory(f"there is no memory for {batch.input_ids.size} tokens")

    async def drop_sums(self) -> None:
        self._started()
        await self._ranks.tell("drop_sums")
        self._no_sums()

    async def measure(self, batch: MicroBatch, loss: LossSpec) -> MemoryUse | None:
        if math.isinf(self._cost.memory_tokens):
            return None
        free = int(self._cost.memory_tokens) * TOKEN_BYTES
        return MemoryUse(batch.input_ids.size // self._ranks.count * TOKEN_BYTES, free)

    def _accumulate_values(self, critic: _Numbers, batch: MicroBatch, where: np.ndarray) -> float:
        """Add the critic's gradients; returns its summed loss, half the squared distance to the returns, unclipped."""
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

    async def step(self, *, weight: float, adam: AdamStep | None = None) -> StepResult:
        spec = self._started()
        if adam is not None:
            spec.check_adam(adam)
        asked = repr(weight if adam is None else (weight, adam))
        await self._ranks.spend("step", self._cost.step_s, asked.encode())
        norm = self._policy.norm(weight)
        critic_norm = None if self._critic is None else self._critic.norm(weight)
        used = adam or spec.adam_at(0.0 if self._critic_alone else spec.learning_rate_of(self._steps))
        skipped = not (math.isfinite(norm) and math.isfinite(critic_norm or 0.0))
        if not skipped:
            if not self._critic_alone:
                self._policy.take(used, norm, weight)
            if self._critic is not None and critic_norm is not None and spec.critic is not None:
                critic_rate = spec.learning_rate_of(self._steps, spec.critic.learning_rate)
                self._critic.take(spec.adam_at(critic_rate), critic_norm, weight)
        self._steps += 1
        self._changed(TRAINED)
        self._no_sums()
        rate = used.learning_rate
        return StepResult(grad_norm=norm, learning_rate=rate, skipped=skipped, critic_grad_norm=critic_norm)

    async def export_segment(self, path: Path, *, job: str, policy_version: int, chunk_bytes: int) -> Manifest:
        self._started()
        await self._ranks.spend("export", self._cost.export_s, path.name.encode())
        data = _bytes(self._policy.weights)
        if len(self._sources) > 1:
            return await self._write_shares(path, data, job, policy_version, chunk_bytes)
        return write_segment(
            path, data, job=job, policy_version=policy_version, chunk_bytes=chunk_bytes, tensors=self._entries
        )

    async def _write_shares(
        self, path: Path, data: memoryview, job: str, policy_version: int, chunk_bytes: int
    ) -> Manifest:
        ranges = share_ranges(len(data), len(self._sources))
        ends, numbers = cut_for_sources(((end, number) for _, end, number in ranges), chunk_bytes)
        write_share(path, "", data, 0, len(self._sources))
        await self._ranks.keep_shares(str(path), bytes(data))
        manifest = described(
            tuple(xxhash.xxh3_128_digest(data[start:end]) for start, end in pairwise((0, *ends))),
            job=job,
            policy_version=policy_version,
            total_bytes=len(data),
            chunk_bytes=chunk_bytes,
            tensors=self._entries,
        )
        return msgspec.structs.replace(manifest, sources=tuple(self._sources), chunk_ends=ends, chunk_sources=numbers)

    def stored_bytes(self) -> StoredBytes:
        return StoredBytes(
            segment=self._total_bytes, checkpoint=4 * self._total_bytes * len(self._models)
        )  # weights and momentum, in hexadecimal

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

    async def load(self, directory: Path, *, optimizer: bool = True) -> None:
        self._started()
        try:
            state = json.loads((directory / STATE_FILE).read_text())
            for name, model in self._models.items():
                model.weights = np.frombuffer(bytes.fromhex(state[f"{name}weights"]), dtype=np.float32).copy()
                model.momentum = np.frombuffer(bytes.fromhex(state[f"{name}momentum"]), dtype=np.float32).copy()
            self._steps = int(state["steps"]) if optimizer else 0
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointCorrupt(f"{directory / STATE_FILE}: {error}; resume from another checkpoint") from error
        if not optimizer:
            for model in self._models.values():
                model.momentum[:] = 0.0
        await self._ranks.tell("load", directory.name.encode())
        self._changed(TRAINED)
        self._no_sums()

    async def export_checkpoint(self, directory: Path) -> None:
        """Write in place of a model a config that says that no model can be loaded from the directory."""
        self._started()
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(json.dumps({"model_type": "headrace_simulated"}) + "\n")

    def state(self) -> tuple[int, bytes]:
        """Steps taken, weights and momentum: equal for two lives with the same history."""
        models = self._models.values()
        return self._steps, b"".join(model.weights.tobytes() + model.momentum.tobytes() for model in models)

    @property
    def _models(self) -> dict[str, _Numbers]:
        """Trained models, by the prefix of their blocks' names."""
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

    async def copy_out(self, places: Mapping[str, Place], chunk_bytes: int) -> dict[str, tuple[bytes, ...]]:
        self._started()
        digests: dict[str, tuple[bytes, ...]] = {}
        for part in self.parts():
            if part.name not in places:
                continue
            await asyncio.sleep(self._cost.moved_byte_s * part.size_bytes)
            digests[part.name] = ()
            for block in part.blocks:
                place = places[part.name].memory[block.offset_bytes :][: block.length_bytes]
                digests[part.name] += copy_and_hash(_bytes(self._arrays()[block.name]), place, chunk_bytes)
        return digests

    async def release(self) -> None:
        for model in self._models.values():
            model.reset(0)
        self._released = True

    async def restore(self, stored: Mapping[str, StoredPart]) -> None:
        for model in self._models.values():
            model.reset(self._total_bytes // 4)
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
        """Do nothing: no memory is pinned."""

    async def close(self, *, keep: bool = True) -> None:
        self._spec = None
        await self._ranks.close()

    def _started(self) -> BackendSpec:
        if self._spec is None:
            raise BackendClosed("the simulated backend was called before start or after close")
        if self._released:
            raise StateParked("the simulated backend was called while its state is parked; restore it first")
        return self._spec


def share_ranges(total_bytes: int, machines: int) -> list[tuple[int, int, int]]:
    """(first byte, last-plus-one, machine): each machine has a part of every half of the weights."""
    steps = 2 * machines
    cuts = [total_bytes * step // steps // 4 * 4 for step in range(steps)] + [total_bytes]
    return [(start, end, step % machines) for step, (start, end) in enumerate(pairwise(cuts))]


def write_share(segment: Path, source: str, data: memoryview | bytes, machine: int, machines: int) -> None:
    """Write and seal the share of one of ``machines``, whose name as a source is ``source``."""
    path, view = share_path(segment, source), memoryview(data)
    own = [(start, end) for start, end, number in share_ranges(len(view), machines) if number == machine]
    write_pieces(path, len(view), ((start, view[start:end]) for start, end in own))
    seal(path, own)


def build(ranks: LedRanks) -> SimulatedBackend:
    """The leader of those ranks."""
    return SimulatedBackend(ranks=SimulatedRanks(ranks.followers, ranks.limits.train_step_timeout_s))


def _responses(batch: MicroBatch) -> np.ndarray:
    t = np.arange(batch.input_ids.shape[1])
    return (t >= batch.prompt_lengths[:, None]) & (t < batch.lengths[:, None])


def _values(critic: _Numbers, tokens: np.ndarray) -> np.ndarray:
    """float32 of the shape of ``tokens``."""
    return critic.weights[: 4 * VOCABULARY : 4][tokens % VOCABULARY]


def _bytes(array: np.ndarray) -> memoryview:
    return array.view(np.uint8).data
