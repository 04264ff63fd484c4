"""What people are told of a run that goes wrong: each kind of trouble once, and again whenever it has doubled.

    Trouble (scheduler, services) ─┐
    StepCommitted: row, drops ─────┴─▶ RunWatch ─┬─▶ Warned(kind, text, times) ─▶ JobEvent(trouble), events.jsonl
                                                 └─ empty steps ─▶ why the run must end

Invariants
- A kind is told at counts 1, 2, 4, …, so a thousand bad steps make ten lines. A kind that is counted in steps in a row
  is told from ``limits.warn_after_steps`` on. A step is empty if none of its samples was trained.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

from actors.jobs.summary import Row, number
from actors.protocol.endings import BOUNDS, CUT, column
from actors.protocol.failures import FailureKind
from actors.protocol.job_news import Trouble
from configs.limits import Limits

_RECENT_STEPS: Final = 8
"""Number of newest steps over which the share of lost samples is told, at least."""
_HAPPENED: Final[dict[str, str]] = {
    FailureKind.NO_RESULT: "had no verdict",
    FailureKind.DATA: "were set aside",
    FailureKind.INFRASTRUCTURE: "were given up",
    FailureKind.BUG: "failed",
}

_RAISE: Final[dict[str, str]] = {
    "request": "have the agent ask for more tokens",
    "context": "lower environment.turns_max, or take a model with a longer context",
    "mid_turn": "have the agent wait longer",
}
"""Label of an ending → what to do about it; of those that are bounds of the job: raise the bound."""


class Warned(NamedTuple):
    """Holds a warning that people are to be given now."""

    kind: str
    text: str
    times: int
    """Number of times that the trouble was met, or of steps in which it was."""


@dataclass(frozen=True, slots=True)
class _StepCounts:
    samples: int
    lost: int
    dropped: dict[str, int]


class RunWatch:
    """Watches the committed steps, and hears of every trouble. ``tell`` gets what people are to be told now."""

    def __init__(self, limits: Limits, tell: Callable[[Warned], None]) -> None:
        self._limits = limits
        self._tell = tell
        self._recent: deque[_StepCounts] = deque(maxlen=max(_RECENT_STEPS, limits.empty_steps_max))
        self._counts: dict[str, tuple[int, int]] = {}
        """Kind → (count so far or in a row, count when it was last told); at most ``limits.troubles_kept`` kinds."""
        self._empty = 0
        """Number of steps in a row without a trained sample."""
        self._bearable = limits.empty_steps_max
        """Number of such steps at which the run must end."""
        self.hopeless_before = ""
        """Reason why a former life of the job's actor wanted to end the run; empty if it did not."""

    def trouble(self, news: Trouble) -> None:
        """Count a trouble that an actor has met, and tell of it if it is time."""
        total, told = self._add(news.kind, news.count)
        if total:
            text = f"{news.text} ({total} times so far)" if told else news.text
            self._tell(Warned(news.kind, text, total))

    def take_over(self, rows: Iterable[Row], ahead: int) -> None:
        """Begin after ``rows`` of a former life of the job's actor, or of the run that is resumed.

        ``ahead``: number of coming steps whose samples that life may have dropped, whatever has been mended since.
        """
        for row in rows:
            self._count(row)
        self.hopeless_before = self.hopeless
        if self._empty:
            self._bearable = self._empty + ahead + self._limits.empty_steps_max

    def step(self, row: Row, dropped: dict[str, int]) -> None:
        """Count a step, and tell of its troubles if it is time."""
        trained, lost = int(number(row, "samples")), int(number(row, "samples_dropped"))
        self._recent.append(_StepCounts(trained + lost, lost, dropped))
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
            self._tell(Warned("responses_cut", _cut(long, cut, row), long))

    def _count(self, row: Row) -> None:
        if number(row, "samples"):
            self._empty, self._bearable = 0, self._limits.empty_steps_max
        else:
            self._empty += 1

    @property
    def hopeless(self) -> str:
        """Why the run must end, as too many steps in a row were empty; an empty text while it may go on."""
        if self._empty < self._bearable:
            return ""
        cause = f": {self.cause()}" if self._recent else ""
        return f"no sample of {self._empty} steps in a row could be trained{cause}"

    def cause(self) -> str:
        """What has become of the samples of the last steps, and the most frequent reason."""
        return f"{self._share()}: {self._first()}"

    def _add(self, kind: str, count: int) -> tuple[int, int]:
        """Add to the count of ``kind``: the new count if that is to be told now, else 0, and the one told last."""
        before, told = self._counts.pop(kind, (0, 0))
        total = before + count
        due = total >= 2 * told
        self._counts[kind] = total, total if due else told
        while len(self._counts) > self._limits.troubles_kept:
            del self._counts[next(iter(self._counts))]
        return (total if due else 0), told

    def _in_a_row(self, kind: str, so: bool) -> int:
        """Number of steps in a row for which ``so`` was true, if it is to be told now, else 0."""
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


def _cut(steps: int, fraction: float, row: Row) -> str:
    shares = {ending.label: number(row, column(ending)) for ending in CUT}
    most = max(shares, key=lambda label: shares[label])  # of single responses there are no such columns: max_tokens
    others = fraction - shares[most] > 0.005 and any(shares.values())
    who = "episodes" if any(shares.values()) else "responses"
    how = f"{BOUNDS[most]}, or else" if others else BOUNDS[most]
    advice = f"{_RAISE.get(most, 'raise it')}, or see in headrace samples RUN_DIR why they do not end"
    return (
        f"in {steps} steps in a row most {who} were {how} ({fraction:.0%} in the last one), so their ends were never "
        f"scored: {advice}"
    )
