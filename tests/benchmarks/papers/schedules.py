"""Exhaustive search over all schedules of a small case, which no bound may lie above."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from actors.policies.assigning.generation_time import Instance
from benchmarks.papers.cluster.clairvoyant.ends import earliest_ends_s
from benchmarks.papers.cluster.clairvoyant.least_work import Kind, demand, token_costs
from benchmarks.papers.cluster.clairvoyant.supply import Supply

PROMPT = 2


@dataclass(frozen=True)
class Case:
    """Samples of one token count each, in steps of ``per_step``.

    Each sample is trained alone; with an ``early`` part, a step is a group, and the rest waits for all of it. The bound
    is one for engines of this kind or of any of the ``other_kinds``.
    """

    lengths: tuple[int, ...]
    per_step: int
    train_s: tuple[float, ...]
    instance: Instance
    local: int
    others: int
    staleness: int
    step_s: float
    early: float = 0.0
    other_kinds: tuple[Kind, ...] = ()
    switch_s: float = 0.0
    """Of the machine that trains, each way; it begins as one that trains."""
    pull_s: float = 0.0
    """Until the others have a version."""
    prompt: int = PROMPT

    @property
    def group(self) -> int:
        return self.per_step if self.early else 1

    @property
    def parts(self) -> list[float]:
        """In which a sample is trained."""
        return [self.early, 1 - self.early] if self.early else [1.0]

    def bound_s(self) -> float:
        kinds = [Kind(self.instance), *self.other_kinds]
        costs = token_costs(kinds, self.prompt, np.array(self.lengths))
        demands = [
            demand(
                costs,
                np.array(self.lengths[k : k + self.per_step]),
                np.array(self.train_s[k : k + self.per_step]),
                self.group,
                self.early,
            )
            for k in range(0, len(self.lengths), self.per_step)
        ]
        supply = Supply(
            local=self.local,
            others_s=lambda a, b: self.others * (b - a),
            step_s=self.step_s,
            step_engines=self.local,
            staleness=self.staleness,
            switch_s=self.switch_s,
            pull_s=self.pull_s,
        )
        return earliest_ends_s(demands, supply)[-1]


class Sides(NamedTuple):
    """Who may do what, with k = 0: with versions that overlap a schedule is free to change and to pull for nothing."""

    generates: bool = False
    """The machine that trains."""
    change_left_s: float = 0.0
    pull_left_s: float = 0.0
    """Of the others."""

    def after(self, waited_s: float) -> Sides:
        change_s, pull_s = (round(max(0.0, left - waited_s), 9) for left in self[1:])
        return self._replace(change_left_s=change_s, pull_left_s=pull_s)


State = tuple[tuple[int, ...], tuple[tuple[float, tuple[int, ...]], ...], tuple[float, int], frozenset[int], Sides]
"""Tokens of each sample; for each engine its step's rest and samples; the trainer's rest and part; what is trained.

Parts of samples are numbered sample by sample.
"""


def optimum_s(case: Case) -> float:
    """The best end over all schedules: any samples on any engine at each step, moved for nothing, any idling."""
    best: dict[State, float] = {}
    engines, parts = case.local + case.others, len(case.parts)
    per_step = case.per_step * parts
    least = [math.inf]
    switch_s, pull_s = (case.switch_s * bool(case.local), case.pull_s) if not case.staleness else (0.0, 0.0)

    def step_s(samples: tuple[int, ...], tokens: tuple[int, ...]) -> float:
        contexts = [case.prompt + tokens[i] + 0.5 for i in samples]
        prefill_s = sum(case.prompt * case.instance.prefill_token_s for i in samples if not tokens[i])
        return case.instance.pace.step_s(len(samples), sum(contexts) / len(samples)) + prefill_s

    def may(sample: int, trained: frozenset[int]) -> bool:
        """Its step is open."""
        return len(trained) >= per_step * (sample // case.per_step - case.staleness)

    def trainable(part: int, tokens: tuple[int, ...]) -> bool:
        """Its sample is finished, and for the last part its group."""
        i, first = part // parts, part // parts // case.group * case.group
        needed = range(first, first + case.group) if part % parts == parts - 1 else [i]
        return all(tokens[n] == case.lengths[n] for n in needed)

    def choices(state: State) -> list[State]:
        """What idle engines and an idle trainer may begin now, one thing after the other."""
        tokens, busy, (train_left, in_training), trained, sides = state
        out: list[State] = []
        changes = sides.change_left_s > 0
        taken = {i for _, samples in busy for i in samples}
        free = [i for i, n in enumerate(case.lengths) if tokens[i] < n and i not in taken and may(i, trained)]
        for e in range(engines):
            if busy[e][1] or (e < case.local and in_training >= 0):
                continue
            if (changes or (switch_s and not sides.generates)) if e < case.local else sides.pull_left_s > 0:
                continue
            for count in range(1, min(len(free), case.instance.places) + 1):
                for samples in itertools.combinations(free, count):
                    if sum(case.prompt + tokens[i] + 1 for i in samples) <= case.instance.kv_tokens:
                        begun = (*busy[:e], (step_s(samples, tokens), samples), *busy[e + 1 :])
                        out.append((tokens, begun, (train_left, in_training), trained, sides))
        if in_training >= 0 or changes or any(samples for _, samples in busy[: case.local]):
            return out
        if switch_s:
            other = sides._replace(generates=not sides.generates, change_left_s=switch_s)
            out.append((tokens, busy, (train_left, in_training), trained, other))
        if not sides.generates:
            now = len(trained) // per_step
            for part in range(now * per_step, min((now + 1) * per_step, len(tokens) * parts)):
                if part not in trained and trainable(part, tokens):
                    lasts_s = case.train_s[part // parts] * case.parts[part % parts]
                    ends_step = (len(trained) + 1) % per_step == 0
                    out.append((tokens, busy, (lasts_s + ends_step * case.step_s, part), trained, sides))
        return out

    def search(state: State, now_s: float) -> None:
        if now_s >= min(least[0], best.get(state, math.inf)) - 1e-12:
            return
        best[state] = now_s
        tokens, busy, (train_left, in_training), trained, sides = state
        if len(trained) == len(tokens) * parts:
            least[0] = now_s
            return
        for following in choices(state):
            search(following, now_s)
        ends = [left for left, samples in busy if samples] + ([train_left] if in_training >= 0 else [])
        ends += [left for left in sides[1:] if left > 0]
        if not ends:
            return
        wait_s = min(ends)
        grown = list(tokens)
        after: list[tuple[float, tuple[int, ...]]] = []
        for left, samples in busy:
            if samples and left <= wait_s + 1e-12:
                for i in samples:
                    grown[i] += 1
                after.append((0.0, ()))
            else:
                after.append((round(left - wait_s, 9) if samples else 0.0, samples))
        training, sides = (round(train_left - wait_s, 9), in_training), sides.after(wait_s)
        if in_training < 0:
            training = (0.0, -1)
        elif train_left <= wait_s + 1e-12:
            trained, training = trained | {in_training}, (0.0, -1)
            if len(trained) % per_step == 0:
                sides = sides._replace(pull_left_s=pull_s)
        search((tuple(grown), tuple(after), training, trained, sides), now_s + wait_s)

    begin = Sides(pull_left_s=pull_s)
    search((tuple(0 for _ in case.lengths), ((0.0, ()),) * engines, (0.0, -1), frozenset(), begin), 0.0)
    return least[0]
