"""Hands queued samples to workers: asks the policy, sends Assign, writes Assigned.

ledger's queued rows ─┬▶ GroupView ─┐
length ranking ───────┘             │
worker table ──────────▶ WorkerView ─┴▶ mode.mark ─▶ policies.assign.decide ──▶ an Assign per worker
                                                                          └──▶ an Assigned per step ─▶ ledger, journal

Evaluations come last: their samples get slots only while no sample of a step waits for one. The exception is an
episode of an evaluation that has begun: its later turns come first, since its time is running.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np

from actors.fleet.length_ranking import LengthRanking
from actors.fleet.modes.mode import Mode
from actors.fleet.scope import JobScope
from actors.ledger import events as ev
from actors.ledger.batch import SampleState, StepBatch
from actors.policies.assigning import assign
from actors.policies.assigning.assign import AssignSamples
from actors.policies.assigning.view import AssignView, GroupView, WorkerView
from actors.protocol.evaluations import is_evaluation, version_of
from actors.protocol.marks import contexts
from actors.protocol.work import Assign, PromptWork, SampleWork
from transport.transport import SendOutcome

_NOTHING = np.empty(0, np.int32)


class Dispatcher:
    """The dispatcher hands out as many samples as workers have room for, each time it is asked to."""

    def __init__(
        self, scope: JobScope, mode: Mode, ranking: LengthRanking, kept_back: Callable[[int], np.ndarray]
    ) -> None:
        """``kept_back``: gives the queued rows of a step that are not to be handed out yet."""
        self._scope, self._mode, self._ranking, self._kept_back = scope, mode, ranking, kept_back
        self._workers, self._limits, self._max_staleness = scope.workers, scope.limits, scope.job.staleness
        self._one_step = scope.job.sync.mode == "one_step_barrier"
        """Whether samples of a step are handed out only when all earlier steps are generated."""

    def assign(self, now: float) -> int:
        """Hand out samples; returns how many."""
        under_way = self._evaluate(now, later_turns=True)
        return under_way + self._assign_new(now)

    def _assign_new(self, now: float) -> int:
        suspects = self._scope.ledger.workers_with_suspects()
        workers = [
            w.view(has_suspect=w.name in suspects, pending_max=self._mode.pending_max)
            for w in self._workers.by_name.values()
            if w.may_get_work(now)
        ]
        if not any(w.slots > w.in_flight for w in workers):
            return 0
        newest = max(max(w.policy_version, w.pulling_version) for w in workers)
        groups = [g for step in self._open_steps(newest) for g in self._mode.mark(step, self._queued(step), workers)]
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
            keeps_parts=self._mode.keeps_parts,
        )  # fmt: skip
        return self._hand_out_all(assign.decide(view, now), now)

    def _evaluate(self, now: float, *, later_turns: bool = False) -> int:
        """Hand out samples of evaluations to slots that no training sample needs; returns how many.

        ``later_turns``: hand out only later turns of episodes that have begun.
        """
        handed_out = 0
        for step in self._scope.ledger.evaluations:
            batch = self._scope.ledger.batches[step]
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
        """Worker → assignments that wait for a version which it has been loading for too long; others may have it."""
        late: dict[str, np.ndarray] = {}
        for worker in self._workers.by_name.values():
            if worker.pulling_version >= 0 and now - worker.pulling_since_s >= self._limits.pull_patience_s:
                numbers = self._scope.ledger.in_flight_from(
                    worker.name, worker.policy_version + self._max_staleness + 1
                )
                if len(numbers):
                    late[worker.name] = numbers
        return late

    def _open_steps(self, newest_version: int) -> list[int]:
        """Uncommitted steps for which some worker's version is new enough, or soon will be."""
        ledger = self._scope.ledger
        last = min(ledger.issued_steps - 1, newest_version + self._max_staleness)
        steps = [step for step in range(ledger.committed_steps, last + 1) if step in ledger.batches]
        if self._one_step:
            return [step for step in steps if ledger.batches[step].generating][:1]
        return steps

    def _with_probes(self, groups: list[GroupView], room: int) -> list[GroupView]:
        """Split each group that has not begun in two: a few samples that go first, to probe its length, and the rest.

        Only as many groups are split as there is room for probes: the others are not handed out now anyway.
        """
        n, parts = self._ranking.probes, list[GroupView]()
        for group in groups:
            whole = self._scope.ledger.batches[group.step].group_size
            if room <= 0 or len(group.rows) < whole or whole <= n or group.moved:
                parts.append(group)
            else:
                parts += [group.part(group.rows[:n], math.inf), group.part(group.rows[n:])]
                room -= n
        return parts

    def _queued(self, step: int) -> list[GroupView]:
        batch = self._scope.ledger.batches[step]
        rows = np.nonzero(batch.state == SampleState.QUEUED)[0].astype(np.int32)
        if len(kept := self._kept_back(step)):
            rows = np.setdiff1d(rows, kept)
        if not len(rows):
            return []
        index = rows // batch.group_size
        together = index if batch.episodes is None else np.where(batch.turns[rows] > 1, -1 - rows, index)
        bounds = [0, *(np.nonzero(np.diff(together))[0] + 1).tolist(), len(rows)]
        parts = [rows[start:end] for start, end in itertools.pairwise(bounds)]  # np.split takes ten times as long
        moved = batch.attempts[rows] > 0
        if batch.episodes is not None:  # a later turn has tokens of some version, and goes first
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
        """The worker that generated the turn before this one, whose prefix cache holds most of the context."""
        if batch.episodes is None or batch.turns[rows[0]] <= 1:
            return ""
        return self._scope.ledger.last_worker(batch.step, int(rows[0]))

    def _hand_out(self, step: int, decisions: list[AssignSamples], now: float) -> int:
        """Send first, then write one event for all that was sent: what could not be sent was never assigned."""
        ledger, batch = self._scope.ledger, self._scope.ledger.batches[step]
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
        self._scope.ledger_writer.apply(ev.Assigned(step, first, [decision.worker for decision in sent], counts, rows))
        return handed_out

    def _oldest_version(self, step: int) -> int:
        """The oldest version that may generate samples of ``step``."""
        return version_of(step) if is_evaluation(step) else max(step - self._max_staleness, 0)

    def _send(self, decision: AssignSamples, batch: StepBatch, first: int, now: float) -> bool:
        """Send the rows of ``decision`` to its worker, as assignments from ``first`` on; False if it was not queued."""
        worker = self._workers.by_name[decision.worker]
        message = Assign(
            job=self._scope.name,
            term=self._scope.ledger.term,
            min_policy_version=self._oldest_version(batch.step),
            sampling=batch.sampling,
            work=work_of(batch, decision.rows, first),
        )
        if self._scope.tell(worker.address, message) is not SendOutcome.QUEUED:
            worker.rest(now, self._limits.backoff_first_s, self._limits.backoff_max_s)
            return False
        if not worker.in_flight:
            worker.heard_s = now
        worker.in_flight += len(decision.rows)
        return True


def _step(decision: AssignSamples) -> int:
    return decision.step


def work_of(batch: StepBatch, rows: np.ndarray, first: int) -> list[PromptWork]:
    """The rows as work for a worker, siblings under their prompt; ``rows[i]`` has assignment ``first + i``."""
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
    """The next turn of an episode, as work in its present context."""
    index, sibling = divmod(row, batch.group_size)
    tokens, now = batch.held(row), contexts(batch.marks(row))[-1]
    sample = SampleWork(assignment, sibling, tokens[now.first :], first=now.first, limit=int(batch.limit[row]))
    return PromptWork(batch.step, int(batch.prompts[index]), tokens[now.start : now.first], [sample])
