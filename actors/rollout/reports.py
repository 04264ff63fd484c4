"""The assignments that a rollout worker holds, and all messages about them to its scheduler.

    assign ─▶ held ─▶ the engine's steps ─▶ deliver ─▶ TokenReport ─▶ outbox ─▶ scheduler
                │                              └─ remembered (``token_log``, bounded)
                └─ void: nobody waits for it ─▶ nothing is reported

Invariants
- Each assignment ends in exactly one finished row or in one AssignmentsFailed, unless it is void: then the scheduler
  has given its sample to another worker, and nothing more is reported of it.
- The engine knows an assignment by the number under which it came, its *name* here. A worker that outlives a scheduler
  gets other numbers from the next one, and reports those.
- Without a scheduler nothing is sent. The engine's output is remembered, and the next scheduler's answer says which
  samples the worker continues, from where, and under which numbers; all others are void.
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
from actors.rollout.token_log import KeptAssignment, TokenLog
from actors.weights.client import PulledWeights
from configs.limits import Limits


@dataclass(frozen=True, slots=True)
class WentOn:
    """Says what has become of the assignments that a worker brought to its next scheduler."""

    void: set[int]
    """Names of the assignments that the engine is to end."""
    samples: int
    tokens: int
    """Number of tokens that the scheduler lacked and is sent."""
    generated_alone: int
    """Number of tokens that were generated without a scheduler."""


class Reports:
    """Sends one worker's messages. ``terms``: has the term of each report. ``scheduler``: its first life."""

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
        """Names of the assignments that have not ended."""
        self._void: set[int] = set()
        """Names of assignments that nobody waits for any more, until the engine has ended them."""
        self._numbers: dict[int, int] = {}
        """Name → present number, for assignments that have outlived their scheduler."""

    # ------------------------------------------------------------ what is held

    @property
    def held(self) -> set[int]:
        return self._held

    @property
    def resumable(self) -> np.ndarray:
        """Present numbers, int64[n], of the assignments that a next scheduler could continue."""
        numbers = self._log.assignments().union(self._numbers.get(name, name) for name in self._held)
        return np.array(sorted(numbers), np.int64)

    @property
    def untold(self) -> int:
        """Number of held samples and unsent reports and tokens, for checks that the worker is fenced off."""
        unheard = self._log.unheard_tokens if self._log.orphaned else 0
        return len(self._held) + self._outbox.waiting(TokenReport) + unheard

    def hold(self, names: Iterable[int]) -> None:
        """Note assignments that have come."""
        self._held.update(names)

    def forget(self) -> set[int]:
        """Void all assignments; returns their names, which the engine is to end."""
        self._outbox.retain(WorkerVersion)
        self._log.clear()
        gone = set(self._held)
        self._void_some(gone)
        self._numbers.clear()
        return gone

    def _void_some(self, names: set[int]) -> None:
        """Void ``names``, whose samples have been given to other workers, or will be."""
        self._void |= names
        self._held -= names

    def names(self, numbers: Iterable[int]) -> list[int]:
        """Names of the assignments with these present numbers."""
        names = {number: name for name, number in self._numbers.items()}
        return [names.get(number, number) for number in numbers]

    def _numbered(self, names: np.ndarray) -> np.ndarray:
        """Present numbers of the assignments with these names."""
        if not self._numbers:
            return names
        return np.array([self._numbers.get(name, name) for name in names.tolist()], np.int64)

    # ------------------------------------------------------------ what is told

    @property
    def full(self) -> bool:
        """Whether no further token may be generated, since there is no room to keep it."""
        return self._outbox.full or self._log.full

    @property
    def waiting(self) -> int:
        """Number of messages that have not left yet."""
        return len(self._outbox)

    def flush(self) -> None:
        self._outbox.flush()

    def taken(self, term: int, sequence: int) -> None:
        """Note that the scheduler of ``term`` has all reports up to number ``sequence``."""
        if term == self._terms.ruling:
            self._outbox.taken(sequence)

    def deliver(self, output: StepOutput, stats: EngineStats) -> None:
        """Report the output of one engine step."""
        if self._void:
            ended = output.requests[output.finished != FinishReason.RUNNING].tolist()
            output = without_requests(output, self._void)
            self._void.difference_update(ended)
        if not len(output.requests):
            return
        self._tell_or_remember(self._report(output, stats))
        over = output.requests[output.finished != FinishReason.RUNNING].tolist()
        self._held.difference_update(over)
        for name in over if self._numbers else ():
            self._numbers.pop(name, None)

    def fail(self, names: list[int], kind: FailureKind, why: str) -> None:
        """Report that these assignments will not be generated here."""
        numbers = self._numbered(np.array(names, np.int64))
        failure = Failure(kind=kind, message=why, where=self._worker)
        self._held.difference_update(names)
        self._outbox.send(AssignmentsFailed(job=self._job, worker=self._worker, assignments=numbers, failure=failure))

    def version_loaded(self, pulled: PulledWeights, load_s: float) -> None:
        """Report that the version is loaded, so that samples are generated with it from now on."""
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
        """Report that the engine is asleep or awake, as the scheduler has asked."""
        self._outbox.send(WorkerAsleep(job=self._job, worker=self._worker, asleep=asleep))

    def trouble(self, kind: str, text: str) -> None:
        """Have users told of something that went wrong here."""
        self._outbox.send(Trouble(job=self._job, kind=kind, text=f"{self._worker}: {text}"))

    def drain(self, reason: str, left_s: float) -> None:
        """Report that no new work is begun, and that the worker ends in ``left_s``."""
        self._outbox.send(Draining(job=self._job, worker=self._worker, left_s=left_s, reason=reason))

    def leave(self, reason: str) -> None:
        """Report that the worker leaves; this is its last message."""
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
            routes=output.routes,
            stats=stats,
        )

    def _tell_or_remember(self, report: TokenReport) -> None:
        """Send ``report`` now, or remember it for the next scheduler."""
        self._log.add(report)
        if not self._log.orphaned:
            self._sequence += 1
            self._outbox.send(report)

    # ------------------------------------------------------------ from one scheduler to the next

    def hold_back(self) -> None:
        """Let all messages wait, since no scheduler has registered us yet."""
        self._outbox.held_back = True

    def lose(self) -> None:
        """Note that the scheduler is gone: from now on, reports are remembered for the next one."""
        self._outbox.retain(WorkerVersion)
        self._log.lose()

    def meet(self, scheduler: ActorRef) -> None:
        """Send the messages that wait, and further ones, to ``scheduler``, which has registered us."""
        self._outbox.meet(scheduler)

    def go_on(self, answer: Registered, policy_version: int, stats: EngineStats) -> WentOn:
        """Continue the assignments that the scheduler has kept, send what it lacks of them, and void the rest."""
        columns = (answer.kept.tolist(), answer.numbers.tolist(), answer.lengths.tolist())
        kept = {former: KeptAssignment(number, length) for former, number, length in zip(*columns, strict=True)}
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
            self._tell_or_remember(msgspec.structs.replace(report, sequence=self._sequence))
        return WentOn(void, len(kept), sum(len(report.tokens) for report in reports), unheard)

    def _lost(self, kept: dict[int, KeptAssignment], reports: list[TokenReport]) -> dict[int, int]:
        """Kept number → length, for assignments that ended here without a record of how: they are handed back."""
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
