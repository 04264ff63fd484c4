"""What StreamRL's studies share: one model at one length, as batches that pools of any size generate and train.

Workload, model, variant ─▶ Bench ─ batches(devices …) ─▶ pipeline.iteration_s(mode)
                               └─── gen_s(x), train_s(y): the profiles of Algorithm 1
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from actors.fleet.length_ranking import REMEMBERED
from actors.policies.assigning.dispatch_long import Past
from actors.policies.assigning.generation_time import Instance
from benchmarks.papers.cluster import costs
from benchmarks.papers.cluster.generation import Dispatching, generate
from benchmarks.papers.cluster.lengths import draw_lengths, estimate_lengths, even_lengths
from benchmarks.papers.cluster.pipeline import Batch, Mode, Stages, iteration_s
from benchmarks.papers.cluster.splits import Split, one_centre
from benchmarks.papers.setups.hardware import Device
from benchmarks.papers.setups.streamrl import H800, SCALES, PaperModel, Variant, Workload

_STATE_BYTES = 16
"""Bytes of weights and optimizer a parameter, of the actor and of the critic."""


@dataclass(frozen=True, slots=True)
class Bench:
    """Measures one model, one scale of lengths, one seed. Equal calls draw equal samples, for any mode."""

    workload: Workload
    model: PaperModel
    scale: float
    seed: int
    rollout_device: Device = H800
    train_device: Device = H800

    @property
    def longest_tokens(self) -> int:
        """Tokens of the longest response."""
        return round(self.workload.max_tokens * self.scale)

    @property
    def moved_bytes(self) -> float:
        """Weights and optimizer states of actor and critic, out and in."""
        return 2 * 2 * self._state_bytes

    def pool(self, devices: int) -> list[Instance]:
        """Instances of ``devices`` rollout devices."""
        work, shape = self.workload, self.model.transformer
        reserve = self.longest_tokens if work.reserve == "longest" else 0
        one = costs.rollout_instance(
            shape, self.rollout_device, work.decode, places=work.places, reserve_tokens=reserve
        )
        return [one] * (devices // shape.tensor_parallel)

    def by_tensor_parallel(self) -> dict[int, Bench]:
        """Devices of an engine → the same with such engines: powers of two in a machine whose cache holds a sample."""
        sizes = [2**i for i in range(costs.MACHINE_DEVICES.bit_length())]
        shapes = {tp: self.model.transformer.model_copy(update={"tensor_parallel": tp}) for tp in sizes}
        longest = self.workload.prompt_tokens + self.longest_tokens
        return {
            tp: replace(self, model=self.model.model_copy(update={"transformer": shape}))
            for tp, shape in shapes.items()
            if costs.cache_tokens(shape, self.rollout_device, self.workload.decode) >= longest
        }

    def lengths(self, iteration: int) -> np.ndarray:
        """Lengths of the samples of one iteration."""
        histogram = self.workload.lengths.model_copy(update={"scale": self.scale})
        return draw_lengths(histogram, self.workload.samples, np.random.default_rng([self.seed, iteration]))

    def generate(
        self, devices: int, lengths: np.ndarray, dispatching: Dispatching, *, iteration: int = 0, oracle: bool = False
    ) -> np.ndarray:
        """When each of them is finished on ``devices``, float64[n]."""
        work, rng = self.workload, np.random.default_rng([self.seed, iteration, 1])
        estimates = lengths.astype(np.float64) if oracle else self.estimates(lengths, rng)
        return generate(
            self.pool(devices), lengths, work.prompt_tokens,
            dispatching=dispatching, estimates=estimates, rng=rng, past=self.past(iteration),
        )  # fmt: skip

    def estimates(self, lengths: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """What the ranker says of them, float64[n]."""
        return np.minimum(estimate_lengths(lengths, self.workload.ranker, rng), self.longest_tokens)

    def past(self, iteration: int) -> list[Past]:
        """The iterations before this one that a scheduler looks back on."""
        batches = [(k, self.lengths(k)) for k in range(max(0, iteration - REMEMBERED), iteration)]
        return [Past(self.estimates(own, np.random.default_rng([self.seed, k, 1])), own) for k, own in batches]

    def train_each_s(self, devices: int, lengths: np.ndarray) -> np.ndarray:
        """What each sample takes ``devices`` to train, float64[n]."""
        cost = self.workload.train.model_copy(update={"flops_use": self.model.train_flops_use})
        tokens = lengths + self.workload.prompt_tokens
        return costs.train_token_s(self.model.transformer, self.train_device, cost, devices, tokens)

    # ------------------------------------------------------------ profiles of Algorithm 1

    def gen_s(self, devices: int) -> float:
        """P_gen: mean time of a batch with typical lengths, ranked."""
        if devices < self.model.transformer.tensor_parallel:
            return float("inf")
        typical, rng = self._typical(), np.random.default_rng(self.seed)
        draws = range(self.workload.profile_draws)
        return float(
            np.mean([self.generate(devices, rng.permutation(typical), "simulated", iteration=k).max() for k in draws])
        )

    def train_s(self, devices: int) -> float:
        """P_train: time of a batch with typical lengths; only whole replicas of the model can be trained on."""
        if devices % self.replica_devices:
            return float("inf")
        return float(self.train_each_s(devices, self._typical()).sum()) + self.workload.train.step_s

    @property
    def replica_devices(self) -> int:
        """Whole machines whose memory holds weights and optimizer state of one of the models."""
        machine_bytes = costs.MACHINE_DEVICES * self.train_device.memory_bytes
        machines = math.ceil(self._state_bytes / machine_bytes)
        return machines * costs.MACHINE_DEVICES

    @property
    def fewest_train_devices(self) -> int:
        """The fewest devices whose memory holds that, where it is sharded over any number of them (FSDP)."""
        return math.ceil(self._state_bytes / self.train_device.memory_bytes)

    @property
    def _state_bytes(self) -> float:
        """Weights and optimizer state of one of the models."""
        return _STATE_BYTES * self.model.transformer.parameters

    def _typical(self) -> np.ndarray:
        histogram = self.workload.lengths.model_copy(update={"scale": self.scale})
        return even_lengths(histogram, self.workload.samples)

    def split(self) -> Split:
        """The split of the model's devices, as Algorithm 1 has it, at the lengths of ``workload.split_variant``."""
        return _split_of(replace(self, scale=SCALES[self.workload.split_variant]))

    # ------------------------------------------------------------ iterations

    def iterations_s(
        self, modes: Sequence[Mode], dispatching: Dispatching, *, rollout: int, train: int, line_bytes_s: float = 0.0
    ) -> dict[Mode, float]:
        """Mean time of an iteration in each mode; ``colocated`` has ``rollout`` = ``train`` = all devices."""
        batches: list[Batch] = []
        for k in range(self.workload.iterations):
            lengths = self.lengths(k)
            finished = self.generate(rollout, lengths, dispatching, iteration=k)
            batches.append(Batch(finished, self.train_each_s(train, lengths)))
        stages = self._stages(rollout, train, line_bytes_s)
        return {mode: iteration_s(mode, batches, stages) for mode in modes}

    def colocated_s(self, dispatching: Dispatching = "random") -> float:
        """Mean time of an iteration in which all devices first generate, then train."""
        n = self.model.devices
        return self.iterations_s(["colocated"], dispatching, rollout=n, train=n)["colocated"]

    def _stages(self, rollout: int, train: int, line_bytes_s: float) -> Stages:
        work, shape = self.workload, self.model.transformer
        return Stages(
            transfer_s=costs.transfer_s(shape, self.rollout_device, rollout, wide_area_bytes_s=line_bytes_s),
            switch_s=self.moved_bytes / train / work.switch_bytes_s,
            step_s=work.train.step_s,
            saturating_s=self.saturating_s(train),
        )

    def saturating_s(self, train: int) -> float:
        """What the smallest micro-batch takes that keeps ``train`` devices busy."""
        sample = np.array([self.longest_tokens / 2])
        token_s = float(self.train_each_s(train, sample)[0] / (sample[0] + self.workload.prompt_tokens))
        return self.workload.train.saturating_tokens * train * token_s


@lru_cache(maxsize=32)
def _split_of(at: Bench) -> Split:
    """Kept, since the studies of a model all begin with it."""
    return one_centre(at.model.devices, at.gen_s, at.train_s, unit=costs.MACHINE_DEVICES)


def bench(workload: Workload, model: PaperModel, variant: Variant, seed: int) -> Bench:
    """A bench at one of the paper's length variants, on H800."""
    return Bench(workload, model, SCALES[variant], seed)
