"""Queued samples to workers: asks the policy, sends Assign, writes Assigned.

ledger's queued rows ─┬▶ GroupView ─┐
length ranking ───────┘             │
worker table ──────────▶ WorkerView ─┴▶ policies.assign.decide ──▶ an Assign a worker
                                                             └──▶ an Assigned a step ─▶ ledger, journal

Evaluations come last: their samples get slots only while no sample of a step waits for one. An episode of theirs that
has begun is no such sample: its later turns come first, since its time runs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np

from actors.core.message import Message
from actors.fleet.length_ranking import LengthRanking
from actors.fleet.long_lanes import LongLanes
from actors.fleet.workers import WorkerTable
from actors.ledger import events as ev
from actors.ledger.batch import SampleState, StepBatch
from actors.ledger.journaled_ledger import JournaledLedger
from actors.policies import assign
from actors.policies.assign import AssignSamples
from actors.policies.view import AssignView, GroupView, WorkerView
from actors.protocol.evaluations import is_evaluation, version_of
from actors.protocol.marks import contexts
from actors.protocol.work import Assign, PromptWork, SampleWork
from configs.limits import Limits
from transport.address import ActorAddress
from transport.transport import SendOutcome

Tell = Callable[[ActorAddress, Message], SendOutcome]

_NOTHING = np.empty(0, np.int32)


class Dispatcher:
    """It hands out as much as credit allows each time it is asked to."""

    def __init__(
        self,
        job: str,
        journaled: JournaledLedger,
        workers: WorkerTable,
        max_staleness: int,
        limits: Limits,
        tell: Tell,
        ranking: LengthRanking | None = None,
        *,
        one_step: bool = False,
        lanes: LongLanes | None = None,
        pending_max: int | None = None,
    ) -> None:
        """``one_step``: no sample of a step is handed out before all of the steps before it are generated.

        ``pending_max``: as in ``Worker.view``.
        """
        self._job = job
        self._journaled = journaled
        self._workers = workers
        self._max_staleness = max_staleness
        self._limits = limits
        self._tell = tell
        self._ranking = ranking or LengthRanking(job, None)
        self._one_step = one_step
        self._lanes = lanes or LongLanes(dedicates=False)
        self._pending_max = pending_max
        self.kept_back: Callable[[int], np.ndarray] = lambda _: _NOTHING
        """Rows of a step that are queued and not to be handed out yet."""
        self.in_parts: Callable[[int, list[GroupView]], list[GroupView]] | None = None
        """Groups of a step with whom they are kept for, where steps are planned; groups that it leaves out wait."""

    def assign(self, now: float) -> int:
        """Returns how many samples were handed out."""
        under_way = self._evaluate(now, later_turns=True)
        return under_way + self._assign_new(now)

    def _assign_new(self, now: float) -> int:
        suspects = self._journaled.ledger.workers_with_suspects()
        workers = [
            w.view(has_suspect=w.name in suspects, pending_max=self._pending_max)
            for w in self._workers.by_name.values()
            if w.may_get_work(now)
        ]
        if not any(w.slots > w.in_flight for w in workers):
            return 0
        newest = max(max(w.policy_version, w.pulling_version) for w in workers)
        groups = [view for step in self._open_steps(newest) for view in self._in_lanes(step, workers)]
        handed_out = self._assign_groups(groups, workers, now) if groups else 0
        if handed_out < sum(len(group.rows) for group in groups):
            return handed_out
        return handed_out + self._evaluate(now)

    def _assign_groups(self, groups: list[GroupView], workers: list[WorkerView], now: float) -> int:
        room = sum(max(0, w.slots - w.in_flight) for w in workers)
        if self._ranking.probes and sum(len(g.rows) for g in groups) > room:
            groups = self._with_probes(groups, room)
        limits = self._limits
        view = AssignView(
            workers, groups, self._max_staleness, limits.pull_patience_s, limits.assign_max_samples,
            keeps_parts=self.in_parts is not None,
        )  # fmt: skip
        return self._hand_out_all(assign.decide(view, now), now)

    def _evaluate(self, now: float, *, later_turns: bool = False) -> int:
        """Hand out samples of evaluations to the slots that training has left; returns how many.

        ``later_turns``: only those of episodes that have begun.
        """
        handed_out = 0
        for step in self._journaled.ledger.evaluations:
            batch = self._journaled.ledger.batches[step]
            if later_turns and batch.episodes is None:
                continue
            groups = self._queued(step)
            if later_turns:
                groups = [g.part(rows) for g in groups if len(rows := g.rows[batch.turns[g.rows] > 1])]
            if groups:
                version, able = version_of(step), self._workers.by_name.values()
                workers = [w.view() for w in able if w.policy_version >= version and w.may_get_work(now)]
                limits = self._limits
                view = AssignView(workers, groups, 0, limits.pull_patience_s, limits.assign_max_samples)
                handed_out += self._hand_out_all(assign.decide(view, now), now)
        return handed_out

    def _hand_out_all(self, decisions: list[AssignSamples], now: float) -> int:
        return sum(self._hand_out(step, list(of_step), now) for step, of_step in itertools.groupby(decisions, _step))

    def overdue(self, now: float) -> dict[str, np.ndarray]:
        """Worker → assignments that it got ahead of a version which it still has not loaded: others may be able to."""
        late: dict[str, np.ndarray] = {}
        for worker in self._workers.by_name.values():
            if worker.pulling_version >= 0 and now - worker.pulling_since_s >= self._limits.pull_patience_s:
                numbers = self._journaled.ledger.in_flight_from(
                    worker.name, worker.policy_version + self._max_staleness + 1
                )
                if len(numbers):
                    late[worker.name] = numbers
        return late

    def _open_steps(self, newest_version: int) -> list[int]:
        """Steps that are not committed and that somebody's version is, or will be, new enough for."""
        ledger = self._journaled.ledger
        last = min(ledger.issued_steps - 1, newest_version + self._max_staleness)
        steps = [step for step in range(ledger.committed_steps, last + 1) if step in ledger.batches]
        if self._one_step:
            return [step for step in steps if ledger.batches[step].generating][:1]
        return steps

    def _in_lanes(self, step: int, workers: list[WorkerView]) -> list[GroupView]:
        """What is queued of ``step``, with whom it is kept for."""
        groups = self._queued(step)
        if self.in_parts is not None:
            return self.in_parts(step, groups)
        if not groups or not self._ranking.active:
            return groups
        batch = self._journaled.ledger.batches[step]
        past, begun = tuple(self._ranking.past), bool(batch.attempts.any())
        return self._lanes.mark(step, groups, workers, batch.prompt_tokens, past, self._held, begun=begun)

    def _held(self) -> dict[str, tuple[int, ...]]:
        """Worker → what is left, as predicted, of each sample that it holds."""
        ledger, held = self._journaled.ledger, dict[str, tuple[int, ...]]()
        for name in self._workers.by_name:
            rows = ledger.located(name, ledger.in_flight(name))
            parts = [self._ranking.left(ledger.batches[step], of_step) for step, of_step in rows.items()]
            held[name] = tuple(np.concatenate(parts).tolist()) if parts else ()
        return held

    def _with_probes(self, groups: list[GroupView], room: int) -> list[GroupView]:
        """Groups that nobody has begun, in two: those that go before everybody else, and the rest.

        No more of them than there is room for their first ones: what stands behind those is not handed out now.
        """
        n, parts = self._ranking.probes, list[GroupView]()
        for group in groups:
            whole = self._journaled.ledger.batches[group.step].group_size
            if room <= 0 or len(group.rows) < whole or whole <= n or group.moved:
                parts.append(group)
            else:
                parts += [group.part(group.rows[:n], math.inf), group.part(group.rows[n:])]
                room -= n
        return parts

    def _queued(self, step: int) -> list[GroupView]:
        batch = self._journaled.ledger.batches[step]
        rows = np.nonzero(batch.state == SampleState.QUEUED)[0].astype(np.int32)
        if len(kept := self.kept_back(step)):
            rows = np.setdiff1d(rows, kept)
        if not len(rows):
            return []
        index = rows // batch.group_size
        together = index if batch.episodes is None else np.where(batch.turns[rows] > 1, -1 - rows, index)
        bounds = [0, *(np.nonzero(np.diff(together))[0] + 1).tolist(), len(rows)]
        parts = [rows[start:end] for start, end in itertools.pairwise(bounds)]  # np.split takes ten times as long
        moved = batch.attempts[rows] > 0
        if batch.episodes is not None:  # a later turn has tokens of some version, and what is begun goes first
            moved |= batch.turns[rows] > 1
        with_moved = set(index[moved].tolist()) if moved.any() else set[int]()
        crashed = batch.crashes[rows] > 0
        suspects = set(index[crashed].tolist()) if crashed.any() else set[int]()
        expected = self._ranking.expected(batch, index[bounds[:-1]])
        return [
            GroupView(
                step,
                int(batch.prompts[i]),
                part,
                moved=i in with_moved,
                suspect=i in suspects,
                version=batch.newest_version(part) if i in with_moved else -1,
                last_worker=self._last_worker(batch, part),
                expected_tokens=tokens,
            )
            for i, part, tokens in zip(index[bounds[:-1]].tolist(), parts, expected.tolist(), strict=True)
        ]

    def _last_worker(self, batch: StepBatch, rows: np.ndarray) -> str:
        """The worker that has just said the turn before this one: most of the context is in its prefix cache."""
        if batch.episodes is None or batch.turns[rows[0]] <= 1:
            return ""
        return self._journaled.ledger.last_worker(batch.step, int(rows[0]))

    def _hand_out(self, step: int, decisions: list[AssignSamples], now: float) -> int:
        """Send, then write: what could not be sent was never assigned. One event for all: the ledger looks once."""
        ledger, batch = self._journaled.ledger, self._journaled.ledger.batches[step]
        first = ledger.next_assignment
        sent: list[AssignSamples] = []
        handed_out = 0
        for decision in decisions:
            if self._send(decision, batch, first + handed_out, now):
                sent.append(decision)
                handed_out += len(decision.rows)
        if not sent:
            return 0
        rows = np.concatenate([decision.rows for decision in sent])
        counts = np.array([len(decision.rows) for decision in sent], np.int32)
        self._ranking.note(batch, rows)
        self._journaled.apply(ev.Assigned(step, first, [decision.worker for decision in sent], counts, rows))
        return handed_out

    def _oldest_version(self, step: int) -> int:
        """The oldest version that may generate samples of ``step``."""
        return version_of(step) if is_evaluation(step) else max(step - self._max_staleness, 0)

    def _send(self, decision: AssignSamples, batch: StepBatch, first: int, now: float) -> bool:
        """Its rows to its worker, numbered from ``first`` on."""
        worker = self._workers.by_name[decision.worker]
        message = Assign(
            job=self._job,
            term=self._journaled.ledger.term,
            min_policy_version=self._oldest_version(batch.step),
            sampling=batch.sampling,
            work=work_of(batch, decision.rows, first),
        )
        if self._tell(worker.address, message) is not SendOutcome.QUEUED:
            worker.rest(now, self._limits.backoff_first_s, self._limits.backoff_max_s)
            return False
        if not worker.in_flight:
            worker.heard_s = now
        worker.in_flight += len(decision.rows)
        return True


def _step(decision: AssignSamples) -> int:
    return decision.step


def work_of(batch: StepBatch, rows: np.ndarray, first: int) -> list[PromptWork]:
    """Rows as work, siblings under their prompt; ``rows[i]`` has assignment ``first + i``."""
    if batch.episodes is not None:
        return [_turn(batch, row, number) for number, row in enumerate(rows.tolist(), first)]
    work: dict[int, PromptWork] = {}
    indices, siblings = (part.tolist() for part in np.divmod(rows, batch.group_size))
    begun = batch.length[rows].astype(bool).tolist()
    columns = zip(rows.tolist(), indices, siblings, begun, strict=True)
    for number, (row, index, sibling, has_begun) in enumerate(columns, first):
        if index not in work:
            work[index] = PromptWork(batch.step, int(batch.prompts[index]), batch.prompt_ids[index], [])
        held = batch.held(row) if has_begun else _NOTHING
        work[index].samples.append(SampleWork(number, sibling, held))
    return list(work.values())


def _turn(batch: StepBatch, row: int, assignment: int) -> PromptWork:
    """A turn of an episode, in its present context."""
    index, sibling = divmod(row, batch.group_size)
    tokens, now = batch.held(row), contexts(batch.marks(row))[-1]
    sample = SampleWork(assignment, sibling, tokens[now.first :], first=now.first, limit=int(batch.limit[row]))
    return PromptWork(batch.step, int(batch.prompts[index]), tokens[now.start : now.first], [sample])
