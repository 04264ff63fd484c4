"""Generation and training whose steps overlap, on machines that train, machines that do not, and such as come and go.

    open steps (version v: v … v + k) ─▶ one queue: older steps, then the order of the policy ─▶ engines with room
    finished groups ─▶ trainer, step by step ─▶ version + 1 ─▶ others pull it, one load each ─▶ further steps open
    engines on the trainer's machines: generate until policies.hand_over says train, and go back if it says so

What RLBoost and StreamRL (``pipeline.py``) do apart is done together here, on the same engines and cost models: samples
are streamed, ranked, moved with their tokens, and handed out one by one; a step that is open fills the places that the
tail of the one before leaves. With k = 0 nothing overlaps: strictly on-policy. ``hybrid.py`` has the rules with which
this is RLBoost's own policy.

``overlapping/`` has the parts: settings, open steps, the pool of machines, the trainer, who generates what, who hands
over. Here is the loop over them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from actors.policies.seeding import worth_having
from benchmarks.papers.cluster.moving_engine import Sample
from benchmarks.papers.cluster.overlapping import hand_out
from benchmarks.papers.cluster.overlapping.pool import Engine, Pool
from benchmarks.papers.cluster.overlapping.settings import NEVER_S, Figures, Machines, Rules
from benchmarks.papers.cluster.overlapping.sides import Sides
from benchmarks.papers.cluster.overlapping.steps import Step, Steps
from benchmarks.papers.cluster.overlapping.trainer import Trainer
from benchmarks.papers.cluster.overlapping.window import Window
from supervisors.providers.traces import TraceEvent

__all__ = ["CombinedCluster", "Figures", "Machines", "Rules"]

_EVENTS_MAX = 5_000_000


class CombinedCluster:
    """Runs one job. ``draw(step)`` gives samples, group by group; ``expect(step, samples)`` a ranker's lengths."""

    def __init__(
        self,
        machines: Machines,
        rules: Rules,
        draw: Callable[[int], list[Sample]],
        expect: Callable[[int, Sequence[Sample]], np.ndarray],
        events: Iterable[TraceEvent] = (),
    ) -> None:
        self._m, self.rules = machines, rules
        self._steps = Steps(draw, expect, machines, rules)
        self.pool = Pool(machines, events)
        self._trainer = Trainer(machines)
        self.now_s, self.version = 0.0, 0
        self._look_s, self._paid, self._stirred = 0.0, 0.0, True
        self._busy_before_s = 0.0
        self.figures = Figures()
        self._sides = (
            Window(machines, rules.window, self._steps, self.pool, self.figures)
            if rules.window
            else Sides(machines, rules, self._steps, self.pool, self._trainer)
        )

    def run(self, *, steps: int | None = None, until_s: float = NEVER_S) -> Figures:
        """A job of so many steps, which opens no others; or of no given number, until a step ends after ``until_s``.

        A job that has come to its end goes on if it is run again with more steps.
        """
        self._steps.job_steps = steps
        self._stirred |= self._steps.open_for(self.version, self.rules.staleness)
        self._look_s = self.now_s
        for _ in range(_EVENTS_MAX):
            self._act()
            ends = self.figures.ends_s
            if ends and (len(ends) == steps or ends[-1] >= until_s):
                return self.figures
            self._advance(max(self.now_s, min(self._look_s, self._trainer.next_s(), self.pool.next_s(self.now_s))))
        raise RuntimeError("the simulated cluster does not come to an end: a bug of the model")

    def _advance(self, to_s: float) -> None:
        lasts_s, pool = to_s - self.now_s, self.pool
        self._paid += (self._m.reserved_price + len(pool.spot) * self._m.spot_price) * lasts_s / 3600
        self.figures.rented_s += len(pool.spot) * lasts_s
        self._stirred |= self.now_s < pool.since_s <= to_s
        self.now_s = to_s

    def _act(self) -> None:
        """All that is due now."""
        for one in self.pool.awake(self.now_s):
            if one.next_s <= self.now_s + 1e-9:
                self._stirred |= hand_out.touch(one, self._steps, self.now_s)
        self.pool.follow_trace(self.now_s, self.version, self._take_back)
        self._load_versions()
        published = self._train()
        if self.version not in self._steps.open:
            return  # the job's last step is trained
        looks = self.now_s >= self._look_s
        if looks:
            self._look_s = self.now_s + self.rules.look_every_s
        if looks or published or not self._steps.open[self.version].unfinished:
            self._change_over()
        if self._stirred:
            hand_out.dispatch(self._steps, self.pool.awake(self.now_s), self.rules, self.now_s)
            self._stirred = False
        if looks:
            awake = self.pool.awake(self.now_s)
            pending = self.rules.pending_cap > 0
            self._stirred |= hand_out.even_out(self._steps, awake, self.version, self.now_s, pending=pending)
            if self.rules.relieves:
                self._stirred |= hand_out.even_out_last(self._steps, awake, self.version, self.now_s)

    def _change_over(self) -> None:
        if self._sides.change(self.version, self._trainer.idle, self.now_s, self._take_back):
            self.figures.changes += 1
            self._stirred = True

    def _take_back(self, one: Engine) -> None:
        hand_out.take_back(self._steps, one, self.now_s, keep_tokens=one.local or self.rules.keep_tokens)
        self._stirred = True

    # ------------------------------------------------------------ versions

    def _train(self) -> bool:
        """Whether a step is trained now."""
        published = self._trainer.end(self.now_s, self._steps.open[self.version])
        if published:
            self._publish()
        step = self._steps.open.get(self.version)
        if step is not None and (not self.pool.local or self.pool.can_train(self.now_s)):
            self._trainer.begin(self.now_s, step)
        return published

    def _publish(self) -> None:
        step = self._steps.open.pop(self.version)
        self.version += 1
        lengths = np.array([s.length for s in step.samples])
        self.figures.ends_s.append(self.now_s)
        self.figures.costs.append(self._paid)
        self.figures.lengths.append(lengths)
        self.figures.tokens.append(int(lengths.sum()) + sum(s.prompt_tokens for s in step.samples))
        if self.rules.by_price:
            self._weigh(step)
        self._sides.learn(step)
        self.pool.publish(self.version, self.now_s)
        self._stirred |= self._steps.open_for(self.version, self.rules.staleness)

    def _load_versions(self) -> None:
        for one in self.pool.loaded(self.now_s):
            hand_out.touch(one, self._steps, self.now_s)
            one.version, one.coming = one.coming, -1
            if one.engine.running:
                one.engine.stall_s += self._m.load_s
                one.next_s = one.engine.next_s()
            self._stirred = True

    def _weigh(self, step: Step) -> None:
        """What this step has cost, in engine seconds in which samples ran and in training."""
        busy_s, m = self.pool.busy_s(), self._m
        generate_s, self._busy_before_s = busy_s - self._busy_before_s, busy_s
        train_s = m.train_s(step.samples) + m.step_s
        cost = worth_having.StepCost(generate_s, train_s, m.local, m.reserved_price, m.spot_price)
        self.pool.weigh(cost, self._take_back)
