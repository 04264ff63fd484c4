"""RLBoost's cluster: its machines and the samples of its steps, and the rules with which the combined model is RLBoost.

    HybridModel, HybridSetup ─▶ Hybrid ─ machines() ─┬─▶ CombinedCluster with rlboost() rules, strictly on-policy
                                                     └─▶ CombinedCluster with rules beyond it (combined_rlboost.py)

Decisions are those of the live policies: ``offload`` (window, target), ``balance`` (who gets what, who gives up what),
``migrate`` (what becomes of the samples of a worker that goes). What is simulated is time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from benchmarks.papers.cluster.combined import CombinedCluster, Machines, Rules
from benchmarks.papers.cluster.costs import MACHINE_DEVICES, rollout_instance, train_token_s
from benchmarks.papers.cluster.lengths import ranked
from benchmarks.papers.cluster.moving_engine import MovingEngine, Sample
from benchmarks.papers.cluster.overlapping.settings import WindowRules
from benchmarks.papers.setups.rlboost import H100, HybridModel, HybridSetup
from benchmarks.papers.setups.streamrl import Ranker
from supervisors.providers.traces import TraceEvent


class Hybrid:
    """Holds a model on reserved machines that generate and train, and beside them workers that come and go."""

    def __init__(self, model: HybridModel, setup: HybridSetup, seed: int = 0) -> None:
        self.model, self.setup = model, setup
        self._rng = np.random.default_rng(seed)
        transformer = model.transformer
        self._devices = model.machines * MACHINE_DEVICES
        self.instance = rollout_instance(transformer, H100, setup.decode, places=setup.places, reserve_tokens=0)
        self.local = self._devices // transformer.tensor_parallel
        """Engines on the reserved machines."""
        self._train_cost = setup.train.model_copy(update={"flops_use": model.train_flops_use})

    def draw(self, _step: int = 0) -> list[Sample]:
        """The next step's samples, group by group."""
        setup, lengths = self.setup, self.model.lengths
        groups = self._rng.standard_normal(setup.prompts)
        own = self._rng.standard_normal(setup.prompts * setup.group_size)
        shared = np.repeat(groups, setup.group_size)
        normal = math.sqrt(lengths.of_prompt) * shared + math.sqrt(1 - lengths.of_prompt) * own
        tokens = np.clip(lengths.median_tokens * np.exp(lengths.sigma * normal), 16, lengths.max_tokens).astype(int)
        return [Sample(i, i // setup.group_size, setup.prompt_tokens, int(length)) for i, length in enumerate(tokens)]

    def train_each_s(self, tokens: np.ndarray) -> np.ndarray:
        """Training of whole samples on all reserved devices, float64[n]."""
        return train_token_s(self.model.transformer, H100, self._train_cost, self._devices, tokens)

    def train_s(self, samples: Sequence[Sample]) -> float:
        """Training of a micro-batch."""
        return float(self.train_each_s(np.array([s.prompt_tokens + s.length for s in samples])).sum())

    def pull_s(self, pulling: int) -> float:
        """How long a version takes to each of so many workers at once, until they serve it."""
        senders = self.model.machines * self.setup.reserved_network_bytes_s
        rate = min(self.setup.remote_network_bytes_s, senders / max(1, pulling))
        return self.model.transformer.weight_bytes / rate + self.setup.load_s

    def machines(self, early: float = 0.0) -> Machines:
        """``early``: the part of a sample's training that need not wait for its group."""
        setup = self.setup
        return Machines(
            instance=self.instance,
            fixed=0,
            local=self.local,
            train_s=self.train_s,
            step_s=setup.train.step_s,
            early=early,
            pull_s=self.pull_s,
            load_s=setup.load_s,
            switch_s=setup.switch_s,
            start_s=setup.switch_s,
            boot_s=setup.boot_s,
            longest_tokens=self.model.lengths.max_tokens,
            reserved_price=self.model.machines * setup.reserved_price,
            spot_price=setup.spot_price,
            least_samples=setup.micro_batch_responses,
        )

    def rlboost(
        self,
        events: Iterable[TraceEvent] = (),
        *,
        workers: int = 0,
        target: int | None = None,
        remember: bool = True,
        fixed_s: float | None = None,
        keep_tokens: bool = True,
    ) -> CombinedCluster:
        """A job under RLBoost's policy, with so many workers from the beginning; the rest: see ``WindowRules``."""
        setup = self.setup
        rules = Rules(
            staleness=0,
            order="arrival",
            by_price=False,
            look_every_s=setup.balance_every_s,
            window=WindowRules(setup.first_seed_s, setup.damping, remember, fixed_s, target),
            pending_cap=setup.pending_cap,
            keep_tokens=keep_tokens,
            relieves=False,
        )
        cluster = CombinedCluster(self.machines(), rules, self.draw, ranked(Ranker(knows="nothing"), 0), events)
        cluster.pool.place(workers)
        return cluster

    def colocated_step_s(self, samples: Sequence[Sample]) -> float:
        """A step of the reserved machines alone, as colocated trainers do it: shares fixed beforehand, stages apart."""
        ends: list[float] = []
        for i in range(self.local):
            engine = MovingEngine(f"{i}", self.instance)
            engine.pending.extend(samples[i * len(samples) // self.local : (i + 1) * len(samples) // self.local])
            engine.admit()
            while engine.running:
                engine.advance(engine.next_s())
                engine.take_finished()
            ends.append(engine.now_s)
        return max(ends) + 2 * self.setup.switch_s + self.train_s(samples) + self.setup.train.step_s
