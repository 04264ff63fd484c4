"""What people are told of a run that goes wrong: each kind of trouble once, and again whenever it has doubled.

    Trouble (scheduler, services) ─┐
    StepCommitted: row, drops ─────┴─▶ RunWatch ─┬─▶ Warned(kind, text, times) ─▶ JobEvent(trouble), events.jsonl
                                                 └─ empty steps ─▶ why the run must end

Invariants
- A kind is told at counts 1, 2, 4, …: a run of a thousand bad steps says ten lines of them.
- A step counts as empty if none of its samples was trained; a step that was is the end of such a row.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

from actors.jobs.summary import Row, number
from actors.protocol.failures import FailureKind
from actors.protocol.job_news import Trouble
from configs.limits import Limits

_RECENT_STEPS: Final = 8
"""Steps over which shares are told."""
_HAPPENED: Final[dict[str, str]] = {
    FailureKind.NO_RESULT: "had no verdict",
    FailureKind.DATA: "were set aside",
    FailureKind.INFRASTRUCTURE: "were given up",
    FailureKind.BUG: "failed",
}


class Warned(NamedTuple):
    """It is what people are told now."""

    kind: str
    text: str
    times: int
    """How often it was met, or in how many steps."""


@dataclass(frozen=True, slots=True)
class _Step:
    samples: int
    lost: int
    dropped: dict[str, int]


class RunWatch:
    """It looks at each committed step, and hears of every trouble. ``tell`` gets what people are to be told now."""

    def __init__(self, limits: Limits, tell: Callable[[Warned], None]) -> None:
        self._limits = limits
        self._tell = tell
        self._recent: deque[_Step] = deque(maxlen=max(_RECENT_STEPS, limits.empty_steps_max))
        self._counts: dict[str, tuple[int, int]] = {}
        """Kind → (how often so far or in a row, how often when it was last told); at most ``limits.troubles_kept``."""
        self._empty = 0
        """Steps in a row without a sample."""
        self._bearable = limits.empty_steps_max
        """Number of such steps at which the run must end."""
        self.hopeless_before = ""
        """Reason why a former life of the job's actor wanted the end, if it did."""

    def trouble(self, news: Trouble) -> None:
        """Count what somebody has met."""
        total, told = self._add(news.kind, news.count)
        if total:
            text = f"{news.text} ({total} times so far)" if told else news.text
            self._tell(Warned(news.kind, text, total))

    def take_over(self, rows: Iterable[Row], ahead: int) -> None:
        """Begin after ``rows`` of a former life of the job's actor, or of the run that is resumed.

        ``ahead``: steps whose samples may have been dropped in that life, whatever has been mended since.
        """
        for row in rows:
            self._count(row)
        self.hopeless_before = self.hopeless
        if self._empty:
            self._bearable = self._empty + ahead + self._limits.empty_steps_max

    def step(self, row: Row, dropped: dict[str, int]) -> None:
        """Take in a step, and tell what is to be told of it."""
        trained, lost = int(number(row, "samples")), int(number(row, "samples_dropped"))
        self._recent.append(_Step(trained + lost, lost, dropped))
        self._count(row)
        limits, cut = self._limits, number(row, "truncated_fraction")
        many = lost > 0 and lost >= limits.warn_fraction * (trained + lost)
        equal = self._in_a_row("equal_rewards", trained > 0 and number(row, "degenerate_fraction") >= 1.0)
        long = self._in_a_row("responses_cut", trained > 0 and cut > limits.warn_truncated_fraction)
        if many and (bad := self._add("samples_dropped", 1)[0]):
            self._tell(Warned("samples_dropped", self.cause(), bad))
        if number(row, "update_skipped") and (times := self._add("updates_skipped", 1)[0]):
            self._tell(Warned("updates_skipped", _skipped(times, int(number(row, "step"))), times))
        if equal:
            self._tell(Warned("equal_rewards", _equal(equal, row), equal))
        if long:
            self._tell(Warned("responses_cut", _cut(long, cut), long))

    def _count(self, row: Row) -> None:
        if number(row, "samples"):
            self._empty, self._bearable = 0, self._limits.empty_steps_max
        else:
            self._empty += 1

    @property
    def hopeless(self) -> str:
        """Why the run must end: too many steps in a row were empty. Empty text while it may go on."""
        if self._empty < self._bearable:
            return ""
        cause = f": {self.cause()}" if self._recent else ""
        return f"no sample of {self._empty} steps in a row could be trained{cause}"

    def cause(self) -> str:
        """What has become of the samples of the last steps, and the reason of most."""
        return f"{self._share()}: {self._first()}"

    def _add(self, kind: str, count: int) -> tuple[int, int]:
        """Count: how often so far if that is to be told now, else 0; and how often when it was last told."""
        before, told = self._counts.pop(kind, (0, 0))
        total = before + count
        due = total >= 2 * told
        self._counts[kind] = total, total if due else told
        while len(self._counts) > self._limits.troubles_kept:
            del self._counts[next(iter(self._counts))]
        return (total if due else 0), told

    def _in_a_row(self, kind: str, so: bool) -> int:
        """Steps in a row of which ``so`` holds, if that is to be told now, else 0."""
        count, told = self._counts.get(kind, (0, 0))
        count = count + 1 if so else 0
        due = count >= max(2 * told, self._limits.warn_after_steps)
        self._counts[kind] = count, count if due else told
        return count if due else 0

    def _share(self) -> str:
        """``312 of 512 samples of the last 8 steps had no verdict``."""
        samples, lost = sum(step.samples for step in self._recent), sum(step.lost for step in self._recent)
        kind, steps = self._reason()[0], len(self._recent)
        of = f"the last {steps} steps" if steps > 1 else "the last step"
        return f"{lost} of {samples} samples of {of} {_HAPPENED.get(kind, 'were dropped')}"

    def _first(self) -> str:
        """The most frequent reason, without its kind."""
        _, reason, others = self._reason()
        return f"{reason} (and other reasons)" if others else reason

    def _reason(self) -> tuple[str, str, bool]:
        """Kind and text of the most frequent reason, and whether there are others."""
        lost = Counter[str]()
        for step in self._recent:
            lost.update(step.dropped)
        if not lost:
            return "", "nobody has said why", False
        ((reason, _),) = lost.most_common(1)
        kind, _, rest = reason.partition(": ")
        return (kind, rest, len(lost) > 1) if kind in _HAPPENED else ("", reason, len(lost) > 1)


def _skipped(steps: int, step: int) -> str:
    return (
        f"the gradient of step {step} was not finite, so its update was skipped ({steps} so far): lower trainer.lr, "
        "or look at the rewards"
    )


def _equal(steps: int, row: Row) -> str:
    return (
        f"in {steps} steps in a row each group's samples had one reward (mean {number(row, 'reward_mean'):.3f}), so "
        "nothing was learnt: look at headrace samples RUN_DIR; make the reward finer, or the prompts easier or harder"
    )


def _cut(steps: int, fraction: float) -> str:
    return (
        f"in {steps} steps in a row most responses were cut at rollout.max_tokens ({fraction:.0%} in the last one), so "
        "their ends were never scored: raise it, or see in headrace samples RUN_DIR why they do not end"
    )
