"""An engine whose samples come and go in mid-flight: seeding, hand-over, preemption and balancing need that.

    pending ──admit while a place and KV room are free──▶ running ── a token each a step ──▶ finished
       ▲                 cache full: the youngest waits again ──┘

Between two events the batch is the same and every context grows by one token a step, so a step's time is linear in the
steps done and all of them are added up at once. Tokens are real numbers meanwhile; who leaves keeps whole ones.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass, field

from actors.policies.assigning.generation_time import Instance

ADMIT = 0.95
"""Part of the KV cache beyond which nothing is admitted, so that those that run can grow."""


@dataclass(slots=True, eq=False)
class Sample:
    """A sample is one response that is being made."""

    number: int
    group: int
    prompt_tokens: int
    length: int
    """Tokens at which it will end."""
    kept: float = 0.0
    """Tokens generated before it came to where it runs now."""
    joined: float = 0.0
    finished_s: float = math.inf
    prefilled_tokens: int = 0
    """Tokens of its prompt that are in the cache of the engine where it begins: a sibling's prefill left them."""


@dataclass(slots=True, eq=False)
class MovingEngine:
    """An engine has to be brought to an instant (``advance``) before it is looked at or changed."""

    name: str
    instance: Instance
    now_s: float = 0.0
    pending: deque[Sample] = field(default_factory=deque[Sample])
    running: dict[int, Sample] = field(default_factory=dict[int, Sample])
    busy_s: float = 0.0
    """Seconds in which something ran."""
    position: float = 0.0
    """Decode steps done."""
    context: float = 0.0
    """Tokens in the KV cache."""
    stall_s: float = 0.0
    """Seconds of prefills that decoding waits for."""
    _ends: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])

    # ------------------------------------------------------------ time

    def advance(self, now_s: float) -> None:
        """Decode until ``now_s``, which lies no later than ``next_s``."""
        left_s, self.now_s = now_s - self.now_s, now_s
        if not self.running or left_s <= 0:
            return
        self.busy_s += left_s
        stalled_s = min(left_s, self.stall_s)
        self.stall_s -= stalled_s
        left_s -= stalled_s
        if left_s > 0:
            first_s, growth_s = self._pace()
            steps = 2 * left_s / (first_s + math.sqrt(first_s * first_s + 2 * growth_s * left_s))
            self.position += steps
            self.context += steps * len(self.running)

    def next_s(self) -> float:
        """When a sample is finished or the cache is full."""
        self._forget_those_who_left()
        if not self.running:
            return math.inf
        steps = min(self._ends[0][0] - self.position, (self.instance.kv_tokens - self.context) / len(self.running))
        steps = max(steps, 0.0)
        first_s, growth_s = self._pace()
        return self.now_s + self.stall_s + steps * (first_s + growth_s * steps / 2)

    def _pace(self) -> tuple[float, float]:
        batch = len(self.running)
        mean, pace = self.context / batch, self.instance.pace
        first_s = pace.step_s(batch, mean)
        return first_s, pace.step_s(batch, mean + 1) - first_s

    # ------------------------------------------------------------ samples

    def take_finished(self) -> list[Sample]:
        """Those that have ended by now. What the cache cannot hold waits again, and who waited may begin."""
        done: list[Sample] = []
        self._forget_those_who_left()
        while self._ends and self._ends[0][0] <= self.position + 1e-6:
            _, number = heapq.heappop(self._ends)
            sample = self._leave(self.running[number])
            sample.kept, sample.finished_s = sample.length, self.now_s
            done.append(sample)
            self._forget_those_who_left()
        while len(self.running) > 1 and self.context >= self.instance.kv_tokens - 1e-3:
            youngest = max(self.running.values(), key=lambda sample: (sample.joined, sample.number))
            youngest.prefilled_tokens = 0
            self.pending.appendleft(self._leave(youngest))
        self.admit()
        return done

    def admit(self) -> None:
        """Begin as many pending samples as there is room for."""
        while self.pending and len(self.running) < self.instance.places:
            sample = self.pending[0]
            need = sample.prompt_tokens + sample.kept
            if self.running and self.context + need > ADMIT * self.instance.kv_tokens:
                return
            self.pending.popleft()
            self.running[sample.number] = sample
            sample.joined = self.position
            self.context += need
            self.stall_s += self.instance.prefill_token_s * (need - sample.prefilled_tokens)
            heapq.heappush(self._ends, (self.position + max(1.0, sample.length - sample.kept), sample.number))

    def has_room(self, sample: Sample) -> bool:
        """Whether ``sample`` would begin at once."""
        if self.pending or len(self.running) >= self.instance.places:
            return False
        need = sample.prompt_tokens + sample.kept
        return not self.running or self.context + need <= ADMIT * self.instance.kv_tokens

    def tokens(self, sample: Sample) -> int:
        """Tokens of a sample that runs here."""
        return int(min(sample.length - 1, sample.kept + self.position - sample.joined))

    def take(self, sample: Sample) -> Sample:
        """A sample that runs or waits here, with its tokens."""
        if sample.number in self.running:
            return self._leave(sample)
        self.pending.remove(sample)
        return sample

    def held(self) -> list[Sample]:
        return [*self.running.values(), *self.pending]

    def _leave(self, sample: Sample) -> Sample:
        del self.running[sample.number]
        tokens = self.tokens(sample)
        self.context -= sample.prompt_tokens + sample.kept + self.position - sample.joined
        if not self.running:
            self.context = self.stall_s = 0.0
        sample.kept = tokens
        return sample

    def _forget_those_who_left(self) -> None:
        """The heap keeps ends of samples that have gone, perhaps to come back with another end."""
        while self._ends and not self._is_due(*self._ends[0]):
            heapq.heappop(self._ends)

    def _is_due(self, end: float, number: int) -> bool:
        sample = self.running.get(number)
        return sample is not None and math.isclose(
            end, sample.joined + max(1.0, sample.length - sample.kept), rel_tol=0, abs_tol=1e-6
        )
