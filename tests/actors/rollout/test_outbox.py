"""The outbox keeps order and bounds, whatever the link and the scheduler say."""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from actors.core.message import Message
from actors.core.ref import ActorRef
from actors.protocol.tokens import TokenReport
from actors.protocol.work import EngineStats
from actors.protocol.workers import Leaving
from actors.rollout.outbox import Outbox
from configs.limits import DEFAULT_LIMITS
from transport.transport import SendOutcome


class Link:
    """A ref that answers as told, and a clock."""

    def __init__(self) -> None:
        self.outcome = SendOutcome.QUEUED
        self.said: list[Message] = []
        self.now_s = 100.0

    def tell(self, message: Message) -> SendOutcome:
        if self.outcome is SendOutcome.QUEUED:
            self.said.append(message)
        return self.outcome

    @property
    def sent(self) -> list[str]:
        return [message.reason for message in self.said if isinstance(message, Leaving)]

    @property
    def steps(self) -> list[list[int]]:
        """The positions that each report's first row covers."""
        reports = [message for message in self.said if isinstance(message, TokenReport)]
        return [list(range(d.offsets[0], d.offsets[0] + d.counts[0])) for d in reports]


def outbox_to(link: Link, bound: int = 8, interval_s: float = 0.0) -> Outbox:
    changed = {"outbox_messages": bound, "reports_under_way": 4, "report_interval_s": interval_s}
    limits = DEFAULT_LIMITS.model_copy(update=changed)
    return Outbox(cast(ActorRef, link), limits, lambda: link.now_s)


def note(text: Any) -> Leaving:
    return Leaving(job="j", worker="w", reason=str(text))


def step(number: int, finished: int = 0) -> TokenReport:
    one = np.ones(2, np.int32)
    ends = np.array([0, finished])
    return TokenReport.of(
        np.array([5, 6]), one * number, one, ends, one, one, job="j", worker="w", term=1, sequence=number,
        policy_version=0, stats=EngineStats(step_s=0.5),
    )  # fmt: skip


def test_what_the_link_refuses_waits_and_leaves_first() -> None:
    link = Link()
    outbox = outbox_to(link)
    outbox.send(note(0))
    for refusal in (SendOutcome.FULL, SendOutcome.NO_LINK):
        link.outcome = refusal
        outbox.send(note(1 + len(outbox)))
    assert (link.sent, len(outbox)) == (["0"], 2)
    link.outcome = SendOutcome.QUEUED
    outbox.send(note(3))
    assert (link.sent, len(outbox)) == (["0", "1", "2", "3"], 0)


def test_held_back_nothing_leaves_and_the_bound_is_told() -> None:
    link = Link()
    outbox = outbox_to(link, bound=2)
    outbox.held_back = True
    outbox.send(note(0))
    assert not outbox.full
    outbox.send(note(1))
    assert outbox.full
    assert link.sent == []
    outbox.held_back = False
    outbox.flush()
    assert link.sent == ["0", "1"]
    assert not outbox.full


def test_beyond_its_credit_steps_wait_and_leave_as_one_when_some_are_taken() -> None:
    link = Link()
    outbox = outbox_to(link)
    for number in range(7):
        outbox.send(step(number))
    assert (link.steps, len(outbox)) == ([[0], [1], [2], [3]], 3)
    asked = [message.sequence for message in link.said if cast(TokenReport, message).confirm]
    assert asked == [2], "one word is enough for several reports"
    outbox.taken(2)
    assert (link.steps[4:], len(outbox)) == ([[4, 5, 6]], 0)
    assert cast(TokenReport, link.said[-1]).stats.step_s == 1.5


def test_what_is_not_a_report_needs_no_credit_but_overtakes_none() -> None:
    link = Link()
    outbox = outbox_to(link)
    for number in range(5):
        outbox.send(step(number))
    outbox.send(note("behind"))
    assert link.sent == []
    outbox.taken(0)
    assert (link.steps[-1], link.sent, len(outbox)) == ([4], ["behind"], 0)


def test_the_last_word_waits_for_no_credit() -> None:
    link = Link()
    outbox = outbox_to(link)
    for number in range(6):
        outbox.send(step(number))
    outbox.send(note("bye"), last=True)
    assert (link.steps[4:], link.sent, len(outbox)) == ([[4, 5]], ["bye"], 0)


def test_whoever_hears_nothing_for_long_says_on() -> None:
    link = Link()
    outbox = outbox_to(link)
    for number in range(5):
        outbox.send(step(number))
    link.now_s += DEFAULT_LIMITS.report_patience_s - 0.01
    outbox.flush()
    assert len(outbox) == 1
    link.now_s += 0.02
    outbox.flush()
    assert (link.steps[4:], len(outbox)) == ([[4]], 0)


def test_another_scheduler_has_taken_nothing_and_gives_all_the_credit() -> None:
    link, other = Link(), Link()
    outbox = outbox_to(link)
    for number in range(5):
        outbox.send(step(number))
    outbox.meet(cast(ActorRef, other))
    outbox.flush()
    assert (other.steps, len(outbox)) == ([[4]], 0)


def test_steps_that_only_go_on_leave_as_one_when_the_interval_is_over() -> None:
    link = Link()
    outbox = outbox_to(link, interval_s=0.02)
    for number in range(5):
        outbox.send(step(number))
        link.now_s += 0.006
    assert link.steps == [[0], [1, 2, 3, 4]]
    link.now_s += 0.05
    outbox.send(step(5))
    assert link.steps[2:] == [[5]], "an engine whose steps take longer says each of them at once"


def test_the_end_of_a_sample_waits_for_no_interval_and_takes_with_it_what_waits() -> None:
    link = Link()
    outbox = outbox_to(link, interval_s=0.02)
    for number in range(3):
        outbox.send(step(number))
    assert link.steps == [[0]]
    outbox.send(step(3, finished=1))
    assert link.steps == [[0], [1, 2, 3]]
    outbox.send(step(4))
    assert len(outbox) == 1, "and the next interval begins"


def test_another_message_waits_for_no_interval_and_overtakes_nothing() -> None:
    link = Link()
    outbox = outbox_to(link, interval_s=0.02)
    outbox.send(step(0))
    outbox.send(step(1))
    outbox.send(note("asleep"))
    assert link.steps == [[0], [1]]
    assert isinstance(link.said[-1], Leaving)


def test_a_full_outbox_waits_for_no_interval() -> None:
    link = Link()
    outbox = outbox_to(link, bound=3, interval_s=1000.0)
    for number in range(4):
        outbox.send(step(number))
    assert link.steps == [[0], [1, 2, 3]]
