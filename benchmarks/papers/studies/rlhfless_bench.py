"""What all of RLHFless's studies run: steps of a task on a site, by a policy, and what they take and cost.

    static      equal parts in any order on so many workers, prefilled for every sample, all held to the end (VERL)
    + prefill   each prompt is prefilled once
    + parts     sorted by expected length, even; cut one by one; each worker released when it has nothing left
    + scaling   as many workers as the plan says: all of RLHFless
    balanced, pareto    this project's parts, and its choice of how many

Plans and cuts are the live policies, ``actors/policies/planning/step_plan.py`` and ``cut.py``. The planner is told what
a profile run would have measured: decode steps by batch and context. Cost is devices times seconds in which something
is decoded or prefilled, or a worker held; of generation alone, which is what the policies change.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from actors.policies.assigning.generation_time import Instance, StepTime
from actors.policies.assigning.latency_table import BATCHES, CONTEXTS, Cell, LatencyTable
from actors.policies.planning import cut, step_plan
from actors.policies.planning.bill import BilledLife, BillingRule, compute_only
from actors.policies.planning.cut import Cut, CutView, CutWorker
from actors.policies.planning.step_plan import PlanRule, PlanView, PlanWorker, StepPlan
from benchmarks.papers.cluster.answers import Known, steps
from benchmarks.papers.cluster.costs import rollout_instance
from benchmarks.papers.cluster.planned_step import CutRule, Generated, Seat, StepWork, cut_nobody, generate
from benchmarks.papers.setups.rlhfless import Setup, Site, Task

COMPUTE_ONLY = BillingRule(asleep_price=0.0)


class Policy(NamedTuple):
    """Says how a step is generated."""

    plan: PlanRule | None
    """Rule of the plan; None: equal parts in any order on the baseline's workers, held to the end."""
    shares_prefill: bool = True
    cut: CutRule = cut_nobody
    """What is cut."""
    scales: bool = True
    """Whether the plan may use other than the baseline's number of workers."""


@dataclass(frozen=True)
class Totals:
    """Sums up steps."""

    generated: Sequence[Generated]
    workers: Sequence[int]
    devices: int
    """Devices of a worker."""

    @cached_property
    def seconds(self) -> float:
        return sum(one.seconds for one in self.generated)

    @cached_property
    def cost(self) -> float:
        """Device-seconds, compute only."""
        return self.devices * sum(compute_only(one.spans) for one in self.generated)

    def over(self, baseline: Totals) -> dict[str, float]:
        """What is published of a policy."""
        return {
            "speedup": baseline.seconds / self.seconds,
            "cost_cut_percent": 100 * (1 - self.cost / baseline.cost),
            "workers": float(np.mean(self.workers)),
        }


@dataclass(frozen=True)
class Bench:
    """Holds a site with its workers."""

    site: Site
    setup: Setup
    machines: int

    @property
    def devices(self) -> int:
        """Devices of a worker."""
        return self.site.transformer.tensor_parallel

    @cached_property
    def instance(self) -> Instance:
        site = self.site
        return rollout_instance(site.transformer, site.device, site.cost, places=self.setup.places, reserve_tokens=0)

    @cached_property
    def seats(self) -> list[Seat]:
        """Workers, the one beside the trainer first, then those on its machine, then the others."""
        near, weights = self.site.machine_workers, self.site.transformer.weight_bytes
        near_s, far_s = weights / self.setup.pcie_bytes_s, weights * near / self.site.device.network_bytes_s
        distances = [0.0, *[near_s] * (near - 1), *[max(near_s, far_s)] * (near * (self.machines - 1))]
        return [Seat(f"w{i:02}", self.instance, after_s, after_s) for i, after_s in enumerate(distances)]

    @cached_property
    def plan_workers(self) -> list[PlanWorker]:
        table = profiled(self.instance.pace)
        return [
            PlanWorker(
                seat.name,
                self.instance.places,
                table,
                self.instance.prefill_token_s,
                transfer_s=seat.distance_s,
                beside_trainer=i == 0,
                kv_tokens=self.instance.kv_tokens,
            )
            for i, seat in enumerate(self.seats)
        ]

    def draws(self, task: Task, siblings: int, policy: Policy, seed: int, *, known: Known = "history") -> Totals:
        """The steps of all draws; equal seeds give every policy the same steps."""
        seeds = range(seed, seed + self.setup.draws)
        all_of_them = [self.run(policy, steps(task, self.setup, siblings, one, known=known), one) for one in seeds]
        return Totals(
            [step for one in all_of_them for step in one.generated],
            [count for one in all_of_them for count in one.workers],
            self.devices,
        )

    def run(self, policy: Policy, works: Iterable[StepWork], seed: int) -> Totals:
        """All of these steps."""
        rng = np.random.default_rng([seed, 1])
        done = [self.step(policy, work, rng) for work in works]
        generated, workers = zip(*done, strict=True)
        return Totals(generated, workers, self.devices)

    def step(self, policy: Policy, work: StepWork, rng: np.random.Generator) -> tuple[Generated, int]:
        """One step, and how many workers it had."""
        static = min(self.setup.static_workers, len(self.seats))
        if policy.plan is None:
            parts = np.array_split(rng.permutation(len(work.lengths)), static)
            one = generate(
                self.seats[:static], [part.tolist() for part in parts], work,
                rule=policy.cut, shares_prefill=policy.shares_prefill, moves_cache=self.setup.moves_cache,
            )  # fmt: skip
            return (one if policy.cut is not cut_nobody else _held(one)), static
        plan = self.plan(policy, work, static)
        seats = {seat.name: seat for seat in self.seats}
        one = generate(
            [seats[name] for name in plan.parts], [part.tolist() for part in plan.parts.values()], work,
            rule=policy.cut, shares_prefill=policy.shares_prefill, longest=plan.longest,
            moves_cache=self.setup.moves_cache,
        )  # fmt: skip
        return one, len(plan.parts)

    def plan(self, policy: Policy, work: StepWork, static: int) -> StepPlan:
        prompts, siblings = work.lengths.shape
        least, most = (1, len(self.seats)) if policy.scales else (static, static)
        view = PlanView(
            self.plan_workers, work.expected, np.full(prompts, siblings, np.int32),
            np.full(prompts, work.prompt_tokens, np.int32), least, most, int(work.expected.max()) + 1,
            policy.plan or PlanRule(), COMPUTE_ONLY,
        )  # fmt: skip
        return step_plan.decide(view, now=0.0)


def cut_from(part: float) -> CutRule:
    """The live rule: whoever has finished this part of its own hands over the rest."""
    if part >= 1:
        return cut_nobody

    def rule(workers: Sequence[CutWorker]) -> Sequence[Cut]:
        return cut.decide(CutView(workers, part), now=0.0)

    return rule


def policies(setup: Setup) -> dict[str, Policy]:
    """The baseline, RLHFless's features one after the other, and ours."""
    lam = PlanRule("lambda", setup.time_weight, setup.within, "even")
    cuts = cut_from(setup.cut_at)
    return {
        "static": Policy(None, shares_prefill=False),
        "prefill": Policy(None),
        "parts": Policy(lam, cut=cuts, scales=False),
        "paper": Policy(lam, cut=cuts),
        "balanced": Policy(replace(lam, parts="balanced"), cut=cuts),
        "pareto": Policy(replace(lam, choose="pareto", parts="balanced"), cut=cuts),
    }


def profiled(pace: StepTime) -> LatencyTable:
    """What a profile run with dummy batches measures of an engine of this pace."""
    return LatencyTable(
        {
            (row, column): Cell(pace.step_s(2.0**row, 192.0 * 2**column), 1, 2.0**row)
            for row in range(BATCHES)
            for column in range(CONTEXTS)
        }
    )


def _held(one: Generated) -> Generated:
    """All workers work, or wait, until the last one ends."""
    return one._replace(spans=[BilledLife(0.0, one.seconds, works_s=one.seconds) for _ in one.spans])
