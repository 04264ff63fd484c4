"""What a rollout worker holds for its scheduler, and everything that it says to it.

    assign ─▶ held ─▶ the engine's steps ─▶ deliver ─▶ TokenReport ─▶ outbox ─▶ scheduler
                │                              └─ remembered (``token_log``, bounded)
                └─ void: nobody waits for it ─▶ silence

Invariants
- Each assignment ends in exactly one finished row or in one AssignmentsFailed, unless it is void: a scheduler that
  has lost us has given its samples to others, so nothing more is said about it.
- The engine calls an assignment by the number under which it came; whoever outlives a scheduler has another number for
  the next one, and only that one is said.
- Without a scheduler nothing is sent. What comes of what is held is remembered, and the next scheduler's answer says
  with which samples it goes on, from where, and under which numbers; all others are void.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec
import numpy as np

from actors.core.ref import ActorRef
from actors.core.terms import TermGuard
from actors.protocol.failures import Failure, FailureKind
from actors.protocol.job_news import Trouble
from actors.protocol.tokens import FinishReason, TokenReport
from actors.protocol.work import EngineStats
from actors.protocol.workers import AssignmentsFailed, Draining, Leaving, Registered, WorkerAsleep, WorkerVersion
from actors.rollout.engine import StepOutput
from actors.rollout.engines.step_columns import without_requests
from actors.rollout.outbox import Outbox
from actors.rollout.token_log import Kept, TokenLog
from actors.weights.client import PulledWeights
from configs.limits import Limits


@dataclass(frozen=True, slots=True)
class WentOn:
    """Tells what has become of the assignments that a worker brought to its next scheduler."""

    void: set[int]
    """The engine's names of those that it is to end."""
    samples: int
    tokens: int
    """Told to the scheduler, which lacked them."""
    generated_alone: int


class Reports:
    """Speaks for one worker. ``terms``: whose reign each report names. ``scheduler``: its first life."""

    def __init__(
        self, job: str, worker: str, terms: TermGuard, scheduler: ActorRef, limits: Limits, now: Callable[[], float]
    ) -> None:
        self._job = job
        self._worker = worker
        self._terms = terms
        self._log = TokenLog(limits.replay_tokens, limits.orphan_tokens)
        self._outbox = Outbox(scheduler, limits, now)
        self._sequence = 0
        self._held: set[int] = set()
        """Assignments that have not ended."""
        self._void: set[int] = set()
        """Assignments that nobody waits for any more; the engine has yet to end them."""
        self._numbers: dict[int, int] = {}
        """The engine's name of an assignment → its present number, of those that have outlived their scheduler."""

    # ------------------------------------------------------------ what is held

    @property
    def held(self) -> set[int]:
        return self._held

    @property
    def known(self) -> np.ndarray:
        """Every assignment with which a next scheduler could go on, by its present number."""
        known = self._log.assignments().union(self._numbers.get(name, name) for name in self._held)
        return np.array(sorted(known), np.int64)

    @property
    def untold(self) -> int:
        """Samples and tokens that have not been told, for those who look from outside whether it has fenced itself."""
        unheard = self._log.unheard_tokens if self._log.orphaned else 0
        return len(self._held) + self._outbox.waiting(TokenReport) + unheard

    def hold(self, names: Iterable[int]) -> None:
        """Note what has been assigned."""
        self._held.update(names)

    def forget(self) -> set[int]:
        """All that is held is void; the engine's names of it, which it is to end."""
        self._outbox.retain(WorkerVersion)
        self._log.clear()
        gone = set(self._held)
        self._void_some(gone)
        self._numbers.clear()
        return gone

    def _void_some(self, names: set[int]) -> None:
        """Nobody waits for these: they have been given to others, or will be."""
        self._void |= names
        self._held -= names

    def names(self, numbers: Iterable[int]) -> list[int]:
        """What the engine calls the assignments of these present numbers."""
        names = {number: name for name, number in self._numbers.items()}
        return [names.get(number, number) for number in numbers]

    def _numbered(self, names: np.ndarray) -> np.ndarray:
        """The present numbers of assignments that the engine calls ``names``."""
        if not self._numbers:
            return names
        return np.array([self._numbers.get(name, name) for name in names.tolist()], np.int64)

    # ------------------------------------------------------------ what is said

    @property
    def full(self) -> bool:
        """No further token may be made: nobody takes them."""
        return self._outbox.full or self._log.full

    @property
    def waiting(self) -> int:
        """Messages that the link has not taken yet."""
        return len(self._outbox)

    def flush(self) -> None:
        self._outbox.flush()

    def taken(self, term: int, sequence: int) -> None:
        """The scheduler of that reign has taken what was said up to there."""
        if term == self._terms.ruling:
            self._outbox.taken(sequence)

    def deliver(self, output: StepOutput, stats: EngineStats) -> None:
        """Send on what one engine step produced."""
        if self._void:
            ended = output.requests[output.finished != FinishReason.RUNNING].tolist()
            output = without_requests(output, self._void)
            self._void.difference_update(ended)
        if not len(output.requests):
            return
        self._say(self._report(output, stats))
        over = output.requests[output.finished != FinishReason.RUNNING].tolist()
        self._held.difference_update(over)
        for name in over if self._numbers else ():
            self._numbers.pop(name, None)

    def fail(self, names: list[int], kind: FailureKind, why: str) -> None:
        """Say that these will not be generated here."""
        numbers = self._numbered(np.array(names, np.int64))
        failure = Failure(kind=kind, message=why, where=self._worker)
        self._held.difference_update(names)
        self._outbox.send(AssignmentsFailed(job=self._job, worker=self._worker, assignments=numbers, failure=failure))

    def version_loaded(self, pulled: PulledWeights, load_s: float) -> None:
        """Samples may be generated with it from now on."""
        self._outbox.send(
            WorkerVersion(
                job=self._job,
                worker=self._worker,
                policy_version=pulled.policy_version,
                pull_s=pulled.seconds,
                pull_bytes=pulled.bytes,
                load_s=load_s,
                wire_bytes=pulled.wire_bytes,
            )
        )

    def asleep(self, asleep: bool) -> None:
        """The engine is as the scheduler has told it to be."""
        self._outbox.send(WorkerAsleep(job=self._job, worker=self._worker, asleep=asleep))

    def trouble(self, kind: str, text: str) -> None:
        """People are to be told of something that went wrong here."""
        self._outbox.send(Trouble(job=self._job, kind=kind, text=f"{self._worker}: {text}"))

    def drain(self, reason: str, left_s: float) -> None:
        """Nothing is begun any more, and in ``left_s`` all is over."""
        self._outbox.send(Draining(job=self._job, worker=self._worker, left_s=left_s, reason=reason))

    def leave(self, reason: str) -> None:
        """The last word."""
        self._outbox.send(Leaving(job=self._job, worker=self._worker, reason=reason), last=True)

    def _report(self, output: StepOutput, stats: EngineStats) -> TokenReport:
        return TokenReport.of(
            job=self._job,
            worker=self._worker,
            term=self._terms.ruling,
            sequence=self._sequence,
            policy_version=output.policy_version,
            assignments=self._numbered(output.requests),
            offsets=output.offsets,
            counts=output.counts,
            finished=output.finished,
            tokens=output.tokens,
            logprobs=output.logprobs,
            stats=stats,
        )

    def _say(self, report: TokenReport) -> None:
        """Now, or when there is a scheduler again."""
        self._log.add(report)
        if not self._log.orphaned:
            self._sequence += 1
            self._outbox.send(report)

    # ------------------------------------------------------------ from one scheduler to the next

    def hold_back(self) -> None:
        """No scheduler has confirmed that it knows us: everything waits."""
        self._outbox.held_back = True

    def lose(self) -> None:
        """The scheduler is gone; what it does not hear is remembered for the next one."""
        self._outbox.retain(WorkerVersion)
        self._log.lose()

    def meet(self, scheduler: ActorRef) -> None:
        """Tell this scheduler, which has registered us, what waits."""
        self._outbox.meet(scheduler)

    def go_on(self, answer: Registered, policy_version: int, stats: EngineStats) -> WentOn:
        """Go on with what the scheduler has taken up; say what it lacks of that, and forget the rest."""
        columns = (answer.kept.tolist(), answer.numbers.tolist(), answer.lengths.tolist())
        kept = {former: Kept(number, length) for former, number, length in zip(*columns, strict=True)}
        former = {name: self._numbers.get(name, name) for name in self._held}
        void = {name for name, number in former.items() if number not in kept}
        self._void_some(void)
        self._numbers = {name: kept[former[name]].number for name in self._held}
        reports = self._log.continuation(kept, answer.term)
        unheard = self._log.unheard_tokens
        self._log.clear()
        if lost := self._lost(kept, reports):
            reports.append(self._report(_handed_back(lost, policy_version), stats))
        for report in reports:
            self._say(msgspec.structs.replace(report, sequence=self._sequence))
        return WentOn(void, len(kept), sum(len(report.tokens) for report in reports), unheard)

    def _lost(self, kept: dict[int, Kept], reports: list[TokenReport]) -> dict[int, int]:
        """Numbers, each with its length, that have ended here, and nothing records how."""
        open_ = {has.number: has.length for has in kept.values()}
        for report in reports:
            columns = (report.assignments.tolist(), (report.offsets + report.counts).tolist(), report.finished.tolist())
            for number, end, finished in zip(*columns, strict=True):
                open_[number] = end
                if finished:
                    del open_[number]
        goes_on = set(self._numbers.values())
        return {number: at for number, at in open_.items() if number not in goes_on}


def _handed_back(lost: dict[int, int], policy_version: int) -> StepOutput:
    n = len(lost)
    return StepOutput(
        policy_version=policy_version,
        requests=np.array(list(lost), np.int64),
        offsets=np.array(list(lost.values()), np.int32),
        counts=np.zeros(n, np.int32),
        finished=np.full(n, FinishReason.ABORTED, np.uint8),
        tokens=np.empty(0, np.int32),
        logprobs=np.empty(0, np.float32),
        step_s=0.0,
    )
