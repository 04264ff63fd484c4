"""Bugs that people write in such systems, each planted by replacing one function. Simulations must catch them all.

A planted bug is a function that gets ``replace(owner, name, new)`` and uses it; what it does wrong is its name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import msgspec
import numpy as np

from actors.core.errors import AskError
from actors.core.terms import TermGuard
from actors.environments.scoring import reward_worker as rewards_worker
from actors.fleet import dispatch
from actors.fleet.reattachment import Reattachment
from actors.fleet.returns import Returns
from actors.jobs.issuing import Issuing
from actors.ledger import events as ev
from actors.ledger.ledger import Ledger, Outcome
from actors.ledger.ledger_writer import LedgerWriter
from actors.ledger.report_check import ReportCheck
from actors.ledger.slots import Slots
from actors.policies.assigning import assign
from actors.protocol.job_news import NeedBatch
from actors.protocol.tokens import TokenReport
from actors.rollout.generation import Generation
from actors.rollout.reports import Reports
from actors.rollout.token_log import TokenLog
from actors.rollout.worker import RolloutWorker
from actors.scheduler.grants import Grants
from actors.scheduler.scoring import Scoring
from actors.trainer.backends.simulated_backend import SimulatedBackend
from actors.trainer.batching import Inbox
from actors.trainer.publisher import Publisher
from actors.trainer.trainer import Trainer
from actors.weights import chunk_server, holding, memory
from supervisors.machine.node_agent import NodeAgent
from supervisors.tree import restart_budget, strategies
from supervisors.tree.supervisor import Supervisor


class Replace(Protocol):
    def __call__(self, owner: Any, name: str, new: object) -> None: ...


PLANTED: dict[str, Callable[[Replace], None]] = {}
FOCUS: dict[str, dict[str, Any]] = {
    "a_worker_that_is_cut_off_does_not_fence_itself": {"kinds": ["partition"], "roles": ["rollout"], "faults": (6, 10)},
    "the_loss_of_a_node_is_nobody_s_business": {"kinds": ["kill"], "roles": ["node"], "faults": (4, 8)},
    "a_continuation_is_entered_wherever_the_sample_ends": {"kinds": ["kill"], "roles": ["head"], "faults": (4, 6)},
    "a_continuation_is_entered_for_the_next_sample": {"kinds": ["kill"], "roles": ["head"], "faults": (4, 6)},
}
"""Faults to draw, where those of the chaos scenario would take many seeds."""
SEEDS: dict[str, int] = {}
"""The first seeds that catch them."""
LIMITS: dict[str, dict[str, float]] = {
    "a_worker_that_is_cut_off_does_not_fence_itself": {"lease_s": 3.0, "lease_margin_s": 0.5},
}
"""Limits of the system, where a fault would have to last long under those of the chaos scenario."""


def caught_by(seed: int) -> Callable[[Callable[[Replace], None]], Callable[[Replace], None]]:
    """A bug that the seeds before ``seed`` let pass."""

    def plant_it(plant: Callable[[Replace], None]) -> Callable[[Replace], None]:
        PLANTED[plant.__name__], SEEDS[plant.__name__] = plant, seed
        return plant

    return plant_it


planted = caught_by(0)


# ------------------------------------------------------------ scheduler and ledger


@planted
def samples_of_a_lost_worker_are_forgotten(replace: Replace) -> None:
    replace(Returns, "lose", lambda self, worker, *_, **__: self._scope.workers.by_name.pop(worker.name, None))


@caught_by(1)
def a_worker_that_is_cut_off_does_not_fence_itself(replace: Replace) -> None:
    replace(RolloutWorker, "_fence", lambda self: None)


@planted
def a_return_is_not_journaled(replace: Replace) -> None:
    def apply(self: LedgerWriter, event: ev.Event) -> Outcome:
        outcome = self.ledger.apply(event)
        if not isinstance(event, ev.Returned):
            self.journal.append(event)
        self.events += 1
        return outcome

    replace(LedgerWriter, "apply", apply)


@caught_by(1)
def credit_leaks_when_two_samples_end_at_once(replace: Replace) -> None:
    right = Returns.after

    def after(self: Returns, outcome: Outcome) -> None:
        right(self, outcome)
        for name, hand_outs in outcome.ended.items():
            if (worker := self._scope.workers.by_name.get(name)) is not None:
                worker.in_flight += hand_outs > 1

    replace(Returns, "after", after)


@planted
def a_moved_sample_begins_again_at_its_prompt(replace: Replace) -> None:
    right = dispatch.work_of

    def work(*args: Any) -> Any:
        nothing = np.empty(0, np.int32)
        return [
            msgspec.structs.replace(
                prompt, samples=[msgspec.structs.replace(sample, generated=nothing) for sample in prompt.samples]
            )
            for prompt in right(*args)
        ]

    replace(dispatch, "work_of", work)


@planted
def a_moved_sample_is_assigned_without_its_last_token(replace: Replace) -> None:
    right = dispatch.work_of

    def work(*args: Any) -> Any:
        return [
            msgspec.structs.replace(
                prompt,
                samples=[msgspec.structs.replace(s, generated=s.generated[:-1]) for s in prompt.samples],
            )
            for prompt in right(*args)
        ]

    replace(dispatch, "work_of", work)


@caught_by(2)
def a_late_token_of_a_hand_out_that_is_over_is_taken(replace: Replace) -> None:
    """A skipped fence."""
    right_end, right_find = Slots.end, Slots.find

    def end(self: Slots, assignments: np.ndarray) -> None:
        over = self.__dict__.setdefault("over", {})
        over.update({int(a): int(self._rows[a - self._base]) for a in assignments})
        right_end(self, assignments)

    def find(self: Slots, assignments: np.ndarray, worker: int) -> Any:
        steps, rows = right_find(self, assignments, worker)
        over = self.__dict__.get("over", {})
        late = [over.get(int(a), -1) if row < 0 else row for a, row in zip(assignments, rows, strict=True)]
        return steps, np.array(late, rows.dtype)

    replace(Slots, "end", end)
    replace(Slots, "find", find)


@planted
def work_goes_to_workers_of_any_version(replace: Replace) -> None:
    right = assign.decide

    def decide(view: Any, now: float) -> Any:
        newest = max((w.policy_version for w in view.workers), default=0)
        workers = [w._replace(policy_version=newest) for w in view.workers]
        return right(dataclasses.replace(view, workers=workers), now)

    replace(assign, "decide", decide)
    right_add = Generation.add

    def add(self: Generation, requests: Any, _: int) -> None:
        right_add(self, requests, -1)

    replace(Generation, "add", add)
    replace(ReportCheck, "check", lambda *_: None)  # which would keep it out of the ledger


@planted
def tokens_that_come_twice_are_taken_twice(replace: Replace) -> None:
    right = Grants.open

    def open_(self: Grants, step: int, trainer: Any) -> None:
        right(self, step, trainer)
        batch = self._ledger_writer.ledger.batches.get(step)
        if batch is not None and not batch.committed and batch.length.any():
            row = int(np.argmax(batch.length))
            batch.length[row] += batch.length[row] < batch.sampling.max_tokens

    replace(Grants, "open", open_)


@caught_by(2)
def a_step_that_is_opened_again_is_granted_from_where_it_was(replace: Replace) -> None:
    def open_(self: Grants, step: int, trainer: Any) -> None:
        again = step == self.step
        self.step, self.trainer, self.all_sent = step, trainer, False
        if not again:
            self._sent = np.zeros(0, np.bool_)

    replace(Grants, "open", open_)


@caught_by(2)
def a_rewound_step_stays_granted(replace: Replace) -> None:
    def rewound(self: Ledger, event: ev.Rewound) -> Outcome:
        self.trainer_step = event.step
        return Outcome()

    replace(Ledger, "_rewound", rewound)


@caught_by(1)
def a_failed_question_to_the_verifier_is_not_asked_again(replace: Replace) -> None:
    right = Scoring._ask

    async def ask(self: Scoring, step: int, rows: Any, rewards: Any) -> None:
        kept = self.add
        self.add = lambda finished: None  # type: ignore[method-assign]
        try:
            await right(self, step, rows, rewards)
        finally:
            self.add = kept  # type: ignore[method-assign]

    replace(Scoring, "_ask", ask)


@caught_by(15)
def no_verdict_is_a_reward_of_zero(replace: Replace) -> None:
    right = rewards_worker._verdict

    def verdict(prompt: int, sibling: int, given: Any, limit: float) -> Any:
        return right(prompt, sibling, given._replace(reward=given.reward or 0.0), limit)

    replace(rewards_worker, "_verdict", verdict)


# ------------------------------------------------------------ workers and weights


@planted
def a_worker_claims_the_version_after_the_one_that_it_loaded(replace: Replace) -> None:
    right = Reports.version_loaded

    def version_loaded(self: Reports, pulled: Any, load_s: float) -> None:
        right(self, dataclasses.replace(pulled, policy_version=pulled.policy_version + 1), load_s)

    replace(Reports, "version_loaded", version_loaded)


@caught_by(13)
def chunks_are_not_verified(replace: Replace) -> None:
    for verifier in (holding, memory):
        replace(verifier, "chunk_is_intact", lambda manifest, index, data: True)


@caught_by(18)
def a_weight_server_does_not_adopt_what_its_predecessor_held(replace: Replace) -> None:
    replace(chunk_server, "read_manifests", lambda run_dir, holder: [])
    replace(Trainer, "service_changed", _ignores)


async def _ignores_all(self: object) -> None:
    """Looks for nobody."""


async def _ignores(self: object, message: object) -> None:
    """A handler that does nothing."""


@planted
def terms_are_never_taken_note_of(replace: Replace) -> None:
    replace(TermGuard, "admit", lambda self, term: False)


# ------------------------------------------------------------ a head that comes back


@planted
def a_continuation_is_entered_wherever_the_sample_ends(replace: Replace) -> None:
    """Its first token is left out, and the rest is moved up so that it fits: misaligned, and accepted."""
    right = TokenLog.continuation

    def continuation(self: TokenLog, kept: Any, term: int) -> Any:
        reports = right(self, kept, term)
        for i, report in enumerate(reports):
            counts = report.counts.tolist()
            ends = np.cumsum(report.counts)
            first = [int(end) - n for end, n in zip(ends, counts, strict=True) if n > 1]
            moved = np.array([n - (n > 1) for n in counts], np.int32)
            wrong = TokenReport.of(
                report.assignments, report.offsets, moved, report.finished, np.delete(report.tokens, first),
                np.delete(report.logprobs, first), job="", worker="", term=0, sequence=0, policy_version=0, stats=None,
            )  # fmt: skip
            reports[i] = msgspec.structs.replace(report, row_bytes=wrong.row_bytes, token_bytes=wrong.token_bytes)
        return reports

    replace(TokenLog, "continuation", continuation)


@caught_by(1)
def a_continuation_is_entered_for_the_next_sample(replace: Replace) -> None:
    right = Reattachment.take_up

    def take_up(self: Reattachment, offer: Any) -> Any:
        taken = right(self, offer)
        taken.numbers = taken.numbers[1:] + taken.numbers[:1]
        taken.lengths = taken.lengths[1:] + taken.lengths[:1]
        return taken

    replace(Reattachment, "take_up", take_up)


# ------------------------------------------------------------ trainer


@caught_by(1)
def a_group_is_trained_with_one_sibling_missing(replace: Replace) -> None:
    right = Trainer._commit

    async def commit(self: Trainer, inbox: Inbox, *args: Any) -> Any:
        for prompt, group in list(inbox.groups.items()):
            if len(group.siblings) > 2:
                inbox.groups[prompt] = msgspec.structs.replace(group, siblings=group.siblings[:-1])
        return await right(self, inbox, *args)

    replace(Trainer, "_commit", commit)


@caught_by(6)
def a_restarted_trainer_forgets_the_momentum_of_its_optimizer(replace: Replace) -> None:
    right = SimulatedBackend.load

    async def load(self: SimulatedBackend, directory: Any, *, optimizer: bool = True) -> None:
        await right(self, directory, optimizer=optimizer)
        self._policy.momentum = np.zeros_like(self._policy.momentum)

    replace(SimulatedBackend, "load", load)


@caught_by(5)
def a_trainer_never_looks_for_another_weight_server(replace: Replace) -> None:
    replace(Publisher, "server_changed", lambda self, address: None)
    replace(Publisher, "_look_again", _ignores_all)


# ------------------------------------------------------------ job and supervision


@planted
def a_batch_that_could_not_be_issued_is_given_up(replace: Replace) -> None:
    async def issue(self: Issuing, order: NeedBatch, key: tuple[int, int]) -> None:
        try:
            await self._try(order)
        except AskError as error:
            self._ctx.log.warning("a batch is not issued", error=str(error))

    replace(Issuing, "_issue", issue)


@caught_by(1)
def a_killed_process_is_not_started_again(replace: Replace) -> None:
    right = restart_budget.is_restarted

    def is_restarted(policy: Any, cause: restart_budget.ExitCause) -> bool:
        return cause is not restart_budget.ExitCause.KILLED and right(policy, cause)

    replace(strategies, "is_restarted", is_restarted)


@caught_by(1)
def an_agent_does_not_tell_of_a_kill(replace: Replace) -> None:
    right = NodeAgent._ended

    def ended(self: NodeAgent, managed: Any, end: Any) -> None:
        if end.code != -9:
            right(self, managed, end)
            return
        managed.end = end
        self._managed.pop(managed.order.name, None)

    replace(NodeAgent, "_ended", ended)


@planted
def the_loss_of_a_node_is_nobody_s_business(replace: Replace) -> None:
    replace(Supervisor, "_lost_agent", _ignores)
