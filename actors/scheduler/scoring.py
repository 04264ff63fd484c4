"""Sends finished samples to the reward worker, and enters its verdicts into the ledger.

Invariants
- A sample without a verdict never gets a reward: it is sent again, or dropped with the reason.
- At most ``score_requests`` questions are open; when the reward worker is slow, they become larger, not more.
- The death of a reward worker costs only time: its samples wait for its next life.

    finished ──add──▶ pending ──pump──▶ Score ask ──▶ verdicts ──┬─ reward ─────────────▶ Scored
                         ▲                  │                    ├─ no result, again ───▶ pending
                         └── a pause ◀──────┘ no answer          └─ else ───────────────▶ Dropped(reason)
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from actors.core.errors import AskError, RemoteError
from actors.fleet.scope import JobScope
from actors.ledger import events as ev
from actors.ledger.batch import SampleState, StepBatch
from actors.ledger.errors import IllegalTransition
from actors.ledger.ledger_writer import LedgerWriter
from actors.protocol.evaluations import is_evaluation, name_of_batch
from actors.protocol.failures import FailureKind
from actors.protocol.rewards import PromptResponses, Response, Score, Scored, Verdict
from transport.address import ActorAddress


class Scoring:
    """Has samples scored. ``settled(step)`` is called after samples of that step were scored or dropped."""

    def __init__(self, scope: JobScope, settled: Callable[[int], None]) -> None:
        self._ctx = scope.ctx
        self._job = scope.job
        self._limits = scope.limits
        self._ledger_writer = scope.ledger_writer
        self._settled = settled
        self._pending: dict[int, np.ndarray] = {}
        self._tries: dict[tuple[int, int], int] = {}
        self.rewards: ActorAddress | None = None
        self.requests = 0
        self._asked = 0
        """Number of samples whose verdicts are awaited."""
        longest = max(scope.job.rollout.max_tokens, scope.job.evaluation.rollout.max_tokens)
        fit = scope.limits.message_max_bytes // (8 * longest)  # 4 bytes a token, and as much for the rest
        self._samples_max = max(1, min(scope.limits.score_batch_samples, fit))
        self._lingering = False
        self._scope = scope
        self._parts = len(scope.job.reward.parts)
        self._failing_since_s: float | None = None
        """Time of the first unanswered question since the last answer; None: the last question was answered."""
        self._told_of_drop = False

    @property
    def waiting(self) -> int:
        """Number of finished samples that have not been sent to the reward worker."""
        return sum(len(rows) for rows in self._pending.values())

    def add(self, finished: dict[int, np.ndarray]) -> None:
        """Queue rows to be scored, by step."""
        for step, rows in finished.items():
            before = self._pending.get(step)
            self._pending[step] = rows if before is None else np.concatenate([before, rows])

    def finished(self, rows: dict[int, np.ndarray]) -> None:
        """Queue rows that have just ended, by step, and ask soon."""
        self.add(rows)
        self.pump_soon()

    def pump_soon(self) -> None:
        """Ask at once if no more samples are to come, else after ``score_linger_s``, for all that have come by then."""
        if not self._more_to_come():
            self.pump()
        elif not self._lingering:
            self._lingering = True
            self._ctx.start_task(self._linger(), "score soon")

    def _more_to_come(self) -> bool:
        """Whether samples of the oldest step that waits for verdicts are still being generated."""
        return bool(self._pending) and self._ledger_writer.ledger.batches[self._first()].generating

    def _first(self) -> int:
        """The oldest step that waits for verdicts; an evaluation only if no step does."""
        return min(self._pending, key=lambda step: (is_evaluation(step), step))

    async def _linger(self) -> None:
        await self._ctx.sleep(self._limits.score_linger_s)
        self._lingering = False
        self.pump()

    def serve(self, address: ActorAddress | None) -> None:
        """Have the reward worker at ``address`` score from now on; None: there is none."""
        self.rewards = address
        self.pump()

    def pump(self) -> None:
        """Send as many questions as may be open, oldest step first, evaluations last."""
        limits = self._limits
        while self.rewards is not None and self._pending and self.requests < limits.score_requests:
            step = self._first()
            rows = self._pending.pop(step)
            if len(rows) > self._samples_max:
                self._pending[step] = rows[self._samples_max :]
                rows = rows[: self._samples_max]
            self.requests += 1
            self._ctx.start_task(self._ask(step, rows, self.rewards), f"score {name_of_batch(step)}")

    async def _ask(self, step: int, rows: np.ndarray, rewards: ActorAddress) -> None:
        batch = self._ledger_writer.ledger.batches[step]
        self._asked += len(rows)  # all earlier ones are scored first, and each sample may be tried twice
        timeout_s = 2 * self._job.reward.timeout_s * self._asked + self._limits.ask_timeout_s
        try:
            question = Score(job=self._job.name, step=step, items=_items(batch, rows))
            reply = await self._ctx.ref(rewards).ask(question, Scored, timeout_s)
        except RemoteError as error:
            await self._again(step, rows, f"{error.error_type}: {error.detail}")
        except AskError as error:
            self._ctx.log.warning("scoring will be tried again", step=step, samples=len(rows), why=str(error))
            self._note_silence(len(rows), str(error))
            await self._ctx.sleep(self._limits.backoff_first_s)
            self.add({step: rows})
        else:
            self._failing_since_s = None
            if later := self._take(batch, rows, reply.verdicts):
                await self._ctx.sleep(self._limits.backoff_first_s)
                self.add({step: np.array(later, np.int32)})
        finally:
            self.requests -= 1
            self._asked -= len(rows)
        self.pump_soon()

    def _note_silence(self, samples: int, why: str) -> None:
        """Tell users if the silence lasts: a reward worker that is being restarted is soon back."""
        now = self._ctx.now()
        if self._failing_since_s is None:
            self._failing_since_s = now
        if now - self._failing_since_s > self._limits.stall_report_s:
            text = f"the reward worker gives no answer, so {samples} finished samples are tried again and again: {why}"
            self._scope.trouble("reward_worker_silent", text)

    async def _again(self, step: int, rows: np.ndarray, why: str) -> None:
        """Count a try, since the reward worker raised: the cause may be its bug or these samples."""
        self._ctx.log.warning("the reward worker failed", step=step, samples=len(rows), why=why)
        self._scope.trouble("reward_worker_failed", f"the reward worker could not score {len(rows)} samples: {why}")
        await self._ctx.sleep(self._limits.backoff_first_s)
        self._retry_or_drop(self._ledger_writer.ledger.batches[step], dict.fromkeys(rows.tolist(), why))
        self._settled(step)

    def _take(self, batch: StepBatch, rows: np.ndarray, verdicts: list[Verdict]) -> list[int]:
        """Enter the verdicts; returns the rows with an infrastructure failure, to be sent again after a pause."""
        if self._take_all(batch, rows, verdicts):
            return []
        later: list[int] = []
        scored: dict[int, Verdict] = {}
        retry: dict[int, str] = {}
        missing = set(rows.tolist())
        first = {int(p): i * batch.group_size for i, p in enumerate(batch.prompts.tolist())}
        for verdict in verdicts:
            row = first.get(verdict.prompt, -1) + verdict.sibling
            if row not in missing:
                continue
            missing.discard(row)
            if verdict.reward is not None and self._is_whole(verdict):
                scored[row] = verdict
            elif verdict.failure_kind in (FailureKind.DATA, FailureKind.BUG):
                self._drop(batch, [row], f"{verdict.failure_kind}: {verdict.failure_message}")
            elif verdict.failure_kind == FailureKind.INFRASTRUCTURE:
                later.append(row)
            else:
                retry[row] = verdict.failure_message or "the verifier gave no finite number"
        retry.update(dict.fromkeys(missing, "the reward worker returned no verdict"))
        if scored:
            self._enter(self._scored(batch.step, np.fromiter(scored, np.int32), list(scored.values())))
        self._retry_or_drop(batch, retry)
        self._settled(batch.step)
        return later

    def _take_all(self, batch: StepBatch, rows: np.ndarray, verdicts: list[Verdict]) -> bool:
        """Enter the common case in columns: a reward for each of ``rows``. False: nothing entered, check one by one."""
        if len(verdicts) != len(rows) or not all(map(self._is_whole, verdicts)):
            return False
        prompts = np.fromiter((verdict.prompt for verdict in verdicts), np.int64, len(rows))
        siblings = np.fromiter((verdict.sibling for verdict in verdicts), np.int32, len(rows))
        try:
            named = batch.rows_of(prompts, siblings)
        except IllegalTransition:
            return False
        if not np.array_equal(np.sort(named), np.sort(rows)):
            return False
        self._enter(self._scored(batch.step, named, verdicts))
        self._settled(batch.step)
        return True

    def _is_whole(self, verdict: Verdict) -> bool:
        """Whether the verdict has a finite reward and all of its parts: a sum that lacks one is no reward."""
        if verdict.reward is None or len(verdict.parts) != self._parts:
            return False
        return math.isfinite(verdict.reward) and all(map(math.isfinite, verdict.parts))

    def _scored(self, step: int, rows: np.ndarray, verdicts: list[Verdict]) -> ev.Scored:
        rewards = np.array([verdict.reward for verdict in verdicts], np.float64)
        parts = np.array([verdict.parts for verdict in verdicts], np.float64) if self._parts else None
        return ev.Scored(step, rows, rewards, parts)

    def _retry_or_drop(self, batch: StepBatch, reasons: dict[int, str]) -> None:
        hopeless: dict[str, list[int]] = {}
        for row, why in reasons.items():
            tries = self._tries.get((batch.step, row), 0) + 1
            if tries > self._limits.score_retries:
                hopeless.setdefault(why, []).append(row)
            else:
                self._tries[batch.step, row] = tries
                self.add({batch.step: np.array([row], np.int32)})
        for why, rows in hopeless.items():
            self._drop(batch, rows, f"{FailureKind.NO_RESULT}: {why}")

    def _drop(self, batch: StepBatch, rows: list[int], reason: str) -> None:
        self._scope.event("samples_dropped", step=batch.step, samples=len(rows), why=reason)
        if not self._told_of_drop:  # the first one at once; their number is reported with each step
            self._told_of_drop = True
            kind, _, why = reason.partition(": ")
            tries = self._limits.score_retries + 1 if kind == FailureKind.NO_RESULT else 1
            said = f"a sample got no verdict in {tries} {'try' if tries == 1 else 'tries'}: {why}"
            self._scope.trouble("first_without_verdict", said)
        self._enter(ev.Dropped(batch.step, np.array(rows, np.int32), reason))

    def _enter(self, event: ev.Scored | ev.Dropped) -> None:
        """Apply the event, and forget the samples' tries, since they are not sent again."""
        self._ledger_writer.apply(event)
        if self._tries:
            for row in event.rows.tolist():
                self._tries.pop((event.step, row), None)


def restored(ledger_writer: LedgerWriter) -> dict[int, np.ndarray]:
    """Step → rows that were finished and not yet scored when the journal was read."""
    found: dict[int, np.ndarray] = {}
    for step, batch in ledger_writer.ledger.batches.items():
        rows = np.nonzero(batch.state == SampleState.FINISHED)[0].astype(np.int32)
        if len(rows):
            found[step] = rows
    return found


def _items(batch: StepBatch, rows: np.ndarray) -> list[PromptResponses]:
    items: dict[int, PromptResponses] = {}
    for row in rows.tolist():
        index, sibling = divmod(row, batch.group_size)
        if index not in items:
            items[index] = PromptResponses(int(batch.prompts[index]), batch.contexts[index], [])
        items[index].responses.append(Response(sibling, batch.held(row), int(batch.finish[row])))
    return list(items.values())
