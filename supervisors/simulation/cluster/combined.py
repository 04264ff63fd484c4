"""Generation and training whose steps overlap, on machines that train, machines that do not, and such as come and go.

    open steps (version v: v … v + k) ─▶ one queue: older steps, then the order of the policy ─▶ engines with room
    finished groups ─▶ trainer, step by step ─▶ version + 1 ─▶ others pull it, one load each ─▶ further steps open
    engines on the trainer's machines: generate until policies.hand_over says train, and go back if it says so

What ``hybrid.py`` (RLBoost) and ``pipeline.py`` (StreamRL) do apart is done together here, with the same engines and
cost models as they have: samples are streamed, ranked, moved with their tokens, and handed out one by one; a step that
is open fills the places that the tail of the one before leaves. With k = 0 nothing overlaps: strictly on-policy.

Invariants
- A sample of step s runs on engines that serve version s - k or a newer one, and never goes back to an older one.
- Training machines generate or train or change over, one at a time. A group is trained once, when all of it is there.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from actors.scheduler.policies import balance, hand_over, migrate, worth_having
from actors.scheduler.policies.generation_time import Instance
from supervisors.providers.traces import TraceEvent
from supervisors.simulation.cluster.moving_engine import MovingEngine, Sample

_EVENTS_MAX = 5_000_000
_SAMPLES_MAX = 1 << 20
"""Of a step: numbers of samples count on from one step to the next."""
_NEVER_S = math.inf
Order = Literal["longest", "both_ends", "arrival"]


@dataclass(frozen=True, slots=True)
class Machines:
    """What there is, and what it takes."""

    instance: Instance
    """Of each engine."""
    fixed: int
    """Engines on machines that never train and never leave."""
    local: int
    """Engines on the machines that train; 0: those only train."""
    train_s: Callable[[Sequence[Sample]], float]
    step_s: float
    """Of the optimizer."""
    pull_s: Callable[[int], float]
    """Number of engines that pull at once → from a version's end of training until they have it."""
    load_s: float
    """Of it, for which an engine stands still."""
    switch_s: float = 0.0
    """One change between generating and training."""
    boot_s: float = 0.0
    reserved_price: float = 0.0
    """All that stay, an hour."""
    spot_price: float = 0.0
    """One that comes and goes, an hour."""
    least_samples: int = 1
    """In a micro-batch, if more are to come."""
    least_s: float = 0.0
    """Work in it; a smaller one takes as long."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What the policy is allowed and how it is set."""

    staleness: int
    order: Order = "longest"
    by_price: bool = True
    """Of machines that come and go, as many as ``policies.worth_having`` says; else all that there are."""
    slack_s: float = 60.0
    """See ``policies.hand_over``."""
    look_every_s: float = 10.0
    """Between two looks at who is to change over and whose work is to move."""


@dataclass(slots=True, eq=False)
class _Engine:
    engine: MovingEngine
    local: bool
    version: int
    coming: int = -1
    """Version that it pulls; -1: none."""
    ready_s: float = 0.0
    """When it serves that."""
    next_s: float = _NEVER_S
    booked: dict[int, float] = field(default_factory=dict[int, float])
    """Samples that it holds → cache that is counted for each: what it has, and half of what it still needs."""

    def has_room(self, sample: Sample, tokens: float) -> bool:
        """Whether it would begin at once, and is not likely to be put off again because the cache is full."""
        if not self.engine.has_room(sample):
            return False
        return not self.booked or sum(self.booked.values()) + tokens <= self.engine.instance.kv_tokens


@dataclass(slots=True, eq=False)
class _Step:
    """An open step."""

    samples: list[Sample]
    expected: np.ndarray
    missing: dict[int, int]
    """Group → samples of it that are not finished."""
    group_s: dict[int, float]
    """Its training as expected, of the groups that are not complete."""
    queue: deque[Sample]
    unfinished: int
    untrained: int
    arrived: list[Sample] = field(default_factory=list[Sample])
    """Of complete groups."""
    waiting: dict[int, list[Sample]] = field(default_factory=dict[int, list[Sample]])
    version: dict[int, int] = field(default_factory=dict[int, int])
    """Of the newest tokens of samples that have moved."""


@dataclass(slots=True)
class Figures:
    """What a run came to; one entry for each step that was trained."""

    ends_s: list[float] = field(default_factory=list[float])
    costs: list[float] = field(default_factory=list[float])
    """Paid by then."""
    tokens: list[int] = field(default_factory=list[int])
    lengths: list[np.ndarray] = field(default_factory=list[np.ndarray])
    rented_s: float = 0.0
    """Machine seconds of those that come and go."""
    changes: int = 0
    """Between generating and training."""


class CombinedCluster:
    """One job. ``draw(step)`` gives its samples, group by group; ``expect(step, samples)`` a ranker's lengths."""

    def __init__(
        self,
        machines: Machines,
        rules: Rules,
        draw: Callable[[int], list[Sample]],
        expect: Callable[[int, Sequence[Sample]], np.ndarray],
        events: Iterable[TraceEvent] = (),
    ) -> None:
        self._m, self._rules, self._draw, self._expect = machines, rules, draw, expect
        self._events = deque(events)
        self._fixed = [_Engine(MovingEngine(f"fixed-{i}", machines.instance), False, 0) for i in range(machines.fixed)]
        self._local = [_Engine(MovingEngine(f"local-{i}", machines.instance), True, 0) for i in range(machines.local)]
        self._spot: dict[str, _Engine] = {}
        self._offered: dict[str, None] = {}
        self._steps: dict[int, _Step] = {}
        self.now_s, self.version = 0.0, 0
        self._generating = bool(machines.local)
        self._change_s = machines.switch_s if machines.local else 0.0
        self._batch: list[Sample] = []
        self._batch_end_s = self._publish_s = _NEVER_S
        self._look_s, self._paid, self._stirred = 0.0, 0.0, True
        self._gone_busy_s = self._busy_before_s = 0.0
        self._work_s: list[tuple[float, float]] = []
        """Of each step that was trained: engine seconds in which samples ran, and seconds of training."""
        self.figures = Figures()

    def run(self, *, steps: int | None = None, until_s: float = _NEVER_S) -> Figures:
        """Until so many steps are trained, or until the end of the step that is trained at ``until_s``."""
        self._open_steps()
        for _ in range(_EVENTS_MAX):
            self._act()
            ends = self.figures.ends_s
            if ends and (len(ends) == steps or ends[-1] >= until_s):
                return self.figures
            self._advance(self._next_s())
        raise RuntimeError("the simulated cluster does not come to an end: a bug of the model")

    # ------------------------------------------------------------ time

    def _others(self) -> list[_Engine]:
        """On machines that do not train."""
        return [*self._fixed, *self._spot.values()]

    def _awake(self) -> list[_Engine]:
        return [*self._local, *self._others()] if self._generating and self._change_s <= self.now_s else self._others()

    def _next_s(self) -> float:
        later = [self._look_s, self._batch_end_s, self._publish_s]
        if self._change_s > self.now_s:
            later.append(self._change_s)
        later += [e.ready_s for e in self._others() if e.coming >= 0]
        later += [e.next_s for e in self._awake()]
        if self._events:
            later.append(self._events[0].at_s)
        return max(self.now_s, min(later))

    def _advance(self, to_s: float) -> None:
        lasts_s = to_s - self.now_s
        self._paid += (self._m.reserved_price + len(self._spot) * self._m.spot_price) * lasts_s / 3600
        self.figures.rented_s += len(self._spot) * lasts_s
        self._stirred |= self.now_s < self._change_s <= to_s
        self.now_s = to_s

    def _act(self) -> None:
        """All that is due now."""
        for one in self._awake():
            if one.next_s <= self.now_s + 1e-9:
                self._touch(one)
        self._follow_trace()
        self._load_versions()
        self._train()
        looks = self.now_s >= self._look_s
        if looks:
            self._look_s = self.now_s + self._rules.look_every_s
        if self._local and (looks or not self._steps[self.version].unfinished) and self._change_s <= self.now_s:
            self._change_over()
        if self._stirred:
            self._dispatch()
            self._stirred = False
        if looks:
            self._even_out()

    def _touch(self, one: _Engine) -> None:
        """Bring an engine to now, with what it has finished."""
        one.engine.advance(self.now_s)
        for sample in one.engine.take_finished():
            del one.booked[sample.number]
            self._finished(sample)
            self._stirred = True
        one.next_s = one.engine.next_s()

    # ------------------------------------------------------------ steps and samples

    def _open_steps(self) -> None:
        for number in range(self.version, self.version + self._rules.staleness + 1):
            if number in self._steps:
                continue
            samples = [replace(s, number=number * _SAMPLES_MAX + i) for i, s in enumerate(self._draw(number))]
            expected = self._expect(number, samples)
            missing: dict[int, int] = {}
            group_s: dict[int, float] = {}
            for sample, tokens in zip(samples, expected.tolist(), strict=True):
                guess = replace(sample, length=max(1, int(tokens)))
                missing[sample.group] = missing.get(sample.group, 0) + 1
                group_s[sample.group] = group_s.get(sample.group, 0.0) + self._m.train_s([guess])
            queue = deque(samples[i] for i in _in_order(self._rules.order, expected, samples))
            self._steps[number] = _Step(samples, expected, missing, group_s, queue, len(samples), len(samples))
            self._stirred = True

    def _finished(self, sample: Sample) -> None:
        step = self._steps[sample.number // _SAMPLES_MAX]
        step.unfinished -= 1
        step.missing[sample.group] -= 1
        step.waiting.setdefault(sample.group, []).append(sample)
        if not step.missing[sample.group]:
            step.arrived += step.waiting.pop(sample.group)
            del step.group_s[sample.group]

    def _left(self, sample: Sample, has: float, group: int) -> hand_over.Left:
        """As far as anybody knows: who is beyond what was expected needs a tenth more."""
        number, i = divmod(sample.number, _SAMPLES_MAX)
        expected = float(self._steps[number].expected[i])
        tokens = max(expected - has, 0.1 * max(expected, has), 1.0)
        return hand_over.Left(tokens, group, sample.prompt_tokens + has + tokens / 2)

    def _take_back(self, one: _Engine) -> None:
        """All that an engine holds, into the queues, before what waits there."""
        engine = one.engine
        engine.advance(self.now_s)
        held = {s.number: s for s in engine.held()}
        views = [
            migrate.HeldSample(
                n, engine.tokens(s) if n in engine.running else int(s.kept), n in engine.running, s.length
            )
            for n, s in held.items()
        ]
        for move in reversed(migrate.decide(views, 0.0)):
            sample = engine.take(held[move.sample])
            sample.kept = move.keep
            step = self._steps[sample.number // _SAMPLES_MAX]
            step.version[sample.number] = one.version
            step.queue.appendleft(sample)
        one.booked.clear()
        one.next_s, self._stirred = _NEVER_S, True

    # ------------------------------------------------------------ machines and versions

    def _follow_trace(self) -> None:
        while self._events and self._events[0].at_s <= self.now_s + 1e-9:
            event = self._events.popleft()
            if event.what == "up":
                self._offered[event.node] = None
            elif event.what == "kill":
                self._offered.pop(event.node, None)
                if event.node in self._spot:
                    gone = self._spot.pop(event.node)
                    self._take_back(gone)
                    self._gone_busy_s += gone.engine.busy_s
        for node in list(self._offered)[: max(0, self._wanted() - len(self._spot))]:
            del self._offered[node]
            self._spot[node] = one = _Engine(MovingEngine(node, self._m.instance, now_s=self.now_s), False, -1)
            one.coming = self.version
            one.ready_s = self.now_s + self._m.boot_s + self._m.pull_s(1)

    def _wanted(self) -> int:
        """Machines that come and go, of those that are there."""
        there = len(self._spot) + len(self._offered)
        if not self._rules.by_price or not self._work_s or not there:
            return there
        generate_s, train_s = self._work_s[-1]
        step = worth_having.StepCost(generate_s, train_s, len(self._local), self._m.reserved_price, self._m.spot_price)
        return worth_having.decide(step, there)

    def _load_versions(self) -> None:
        for one in self._others():
            if one.coming >= 0 and one.ready_s <= self.now_s + 1e-9:
                self._touch(one)
                one.version, one.coming = one.coming, -1
                if one.engine.running:
                    one.engine.stall_s += self._m.load_s
                    one.next_s = one.engine.next_s()
                self._stirred = True

    def _publish(self) -> None:
        step = self._steps.pop(self.version)
        self.version, self._publish_s = self.version + 1, _NEVER_S
        lengths = np.array([s.length for s in step.samples])
        self.figures.ends_s.append(self.now_s)
        self.figures.costs.append(self._paid)
        self.figures.lengths.append(lengths)
        self.figures.tokens.append(int(lengths.sum()) + sum(s.prompt_tokens for s in step.samples))
        busy_s = self._gone_busy_s + sum(e.engine.busy_s for e in (*self._local, *self._others()))
        self._work_s.append((busy_s - self._busy_before_s, self._m.train_s(step.samples) + self._m.step_s))
        self._busy_before_s = busy_s
        for one in self._local:
            one.version = self.version
        others = self._others()
        pull_s = self._m.pull_s(len(others)) if others else 0.0
        for one in others:
            booting_s = max(0.0, one.ready_s - self.now_s) if one.version < 0 else 0.0
            one.coming, one.ready_s = self.version, self.now_s + max(pull_s, booting_s)
        self._open_steps()

    # ------------------------------------------------------------ training

    def _train(self) -> None:
        if self._batch_end_s <= self.now_s:
            step = self._steps[self.version]
            step.untrained -= len(self._batch)
            self._batch, self._batch_end_s = [], _NEVER_S
            if not step.untrained:
                self._publish_s = self.now_s + self._m.step_s
        if self._publish_s <= self.now_s:
            self._publish()
        idle = math.isinf(self._batch_end_s) and math.isinf(self._publish_s)
        if not idle or self._generating or self._change_s > self.now_s:
            return
        step = self._steps[self.version]
        if not step.arrived:
            return
        work_s = self._m.train_s(step.arrived)
        if step.unfinished and (len(step.arrived) < self._m.least_samples or work_s < self._m.least_s):
            return
        self._batch, step.arrived = step.arrived, []
        self._batch_end_s = self.now_s + max(work_s, self._m.least_s)

    def _change_over(self) -> None:
        """The machines that train: from one of their two occupations to the other."""
        if self._generating:
            step = self._steps[self.version]
            if step.unfinished and not step.arrived:
                return
            if step.unfinished and not hand_over.should_train(self._view(), slack_s=self._rules.slack_s):
                return
            self._generating = False
            for one in self._local:
                self._take_back(one)
            self._feed(step)
        else:
            if self._batch or self._publish_s < _NEVER_S or not self._steps[self.version].unfinished:
                return
            if not hand_over.should_return(self._view(), switch_s=self._m.switch_s):
                return
            self._generating = self._stirred = True
        self._change_s = self.now_s + self._m.switch_s
        self.figures.changes += 1

    def _view(self) -> hand_over.HandOverView:
        """Of the step that is trained next."""
        step, first = self._steps[self.version], self.version * _SAMPLES_MAX
        running, queued = list[hand_over.Left](), list[hand_over.Left]()
        others = self._others()
        for one in (*self._local, *others):
            one.engine.advance(self.now_s)
            for sample in one.engine.held():
                mine = first <= sample.number < first + _SAMPLES_MAX
                has = one.engine.tokens(sample) if sample.number in one.engine.running else sample.kept
                left = self._left(sample, has, sample.group if mine else -1)
                if not one.local and sample.number in one.engine.running:
                    running.append(left)
                elif mine:
                    queued.append(left)
        queued += [self._left(sample, sample.kept, sample.group) for sample in step.queue]
        place = self._feeding_places(step, [*running, *queued])
        queued.sort(key=lambda left: place[left.group])
        return hand_over.HandOverView(
            ready_s=self._m.train_s(step.arrived) if step.arrived else 0.0,
            running=running,
            queued=queued,
            train_s=step.group_s,
            workers=len(others),
            places=self._m.instance.places,
            cache_tokens=self._m.instance.kv_tokens,
            pace=self._m.instance.pace,
            begin_s=min((max(0.0, e.ready_s - self.now_s) if e.version < 0 else 0.0 for e in others), default=0.0),
        )

    def _feed(self, step: _Step) -> None:
        """From now on the trainer waits for what is queued: in the order that feeds it best."""
        lefts = [self._left(s, s.kept, s.group) for s in step.queue]
        first = self.version * _SAMPLES_MAX
        for one in self._others():
            mine = (s for s in one.engine.running.values() if first <= s.number < first + _SAMPLES_MAX)
            lefts += [self._left(s, one.engine.tokens(s), s.group) for s in mine]
        place = self._feeding_places(step, lefts)
        step.queue = deque(sorted(step.queue, key=lambda s: place[s.group]))

    @staticmethod
    def _feeding_places(step: _Step, lefts: Sequence[hand_over.Left]) -> dict[int, int]:
        left_tokens: dict[int, float] = {}
        for left in lefts:
            left_tokens[left.group] = left_tokens.get(left.group, 0.0) + left.tokens
        return {group: i for i, group in enumerate(hand_over.feeding_order(left_tokens, step.group_s))}

    # ------------------------------------------------------------ who generates what

    def _dispatch(self) -> None:
        """From the queues, older steps first, to the engine that runs least of those with room."""
        awake = self._awake()
        for number in sorted(self._steps):
            step, need = self._steps[number], number - self._rules.staleness
            able = [e for e in awake if e.version >= need]
            for one in able:
                one.engine.advance(self.now_s)
            while step.queue and able:
                sample = step.queue[0]
                least = step.version.get(sample.number, 0)
                tokens = self._to_book(sample)
                open_ = [e for e in able if e.version >= least and e.has_room(sample, tokens)]
                if not open_:
                    break
                one = min(open_, key=lambda e: (len(e.engine.running), e.engine.context))
                self._give(one, step.queue.popleft())
            if step.queue:
                return

    def _to_book(self, sample: Sample) -> float:
        return self._left(sample, sample.kept, 0).cache_tokens

    def _give(self, one: _Engine, sample: Sample) -> None:
        one.engine.advance(self.now_s)
        one.booked[sample.number] = self._to_book(sample)
        one.engine.pending.append(sample)
        one.engine.admit()
        one.next_s = one.engine.next_s()

    def _even_out(self) -> None:
        """What waits or runs too many to a worker, to such as have nothing to do."""
        engines = {e.engine.name: e for e in self._awake() if e.version >= self.version}
        if len(engines) < 2 or all(e.engine.running and not e.engine.pending for e in engines.values()):
            return
        for one in engines.values():
            self._touch(one)
        views = [
            balance.QueueView(
                name, len(e.engine.pending), len(e.engine.running), self._m.instance.places, self._plateau()
            )
            for name, e in engines.items()
        ]
        for move in balance.decide(views):
            source, target = engines[move.source], engines[move.target]
            if move.running:
                chosen = sorted(source.engine.running.values(), key=source.engine.tokens)[: move.count]
            else:
                chosen = list(source.engine.pending)[-move.count :]
            for sample in chosen:
                del source.booked[sample.number]
                self._give(target, source.engine.take(sample))
            source.engine.admit()
            source.next_s = source.engine.next_s()

    def _plateau(self) -> int | None:
        step, instance = self._steps[self.version], self._m.instance
        context = step.samples[0].prompt_tokens + float(step.expected.mean()) / 2
        fits = max(1, int(instance.kv_tokens / context))
        batches = [b for b in (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256) if b <= fits]
        return balance.plateau({b: b / instance.pace.step_s(b, context) for b in batches}, gain=0.1)


def _in_order(order: Order, expected: np.ndarray, samples: Sequence[Sample]) -> list[int]:
    """Positions; siblings stay together, a group counts as long as its longest."""
    if order == "arrival":
        return list(range(len(samples)))
    longest: dict[int, float] = {}
    for sample, tokens in zip(samples, expected.tolist(), strict=True):
        longest[sample.group] = max(longest.get(sample.group, 0.0), tokens)
    groups = sorted(longest, key=lambda g: (-longest[g], g))
    if order == "both_ends":
        groups = [groups[i // 2] if i % 2 else groups[-1 - i // 2] for i in range(len(groups))]
    place = {group: i for i, group in enumerate(groups)}
    return sorted(range(len(samples)), key=lambda i: (place[samples[i].group], -float(expected[i]), i))
