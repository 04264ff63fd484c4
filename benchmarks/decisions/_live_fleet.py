"""A real ledger of a fleet, in memory: what a live scheduler pays for a round, views of its ledger included.

    BatchIssued ─▶ ledger ─▶ Dispatcher ─▶ Assigned ─▶ 20,000 samples with 1,000 workers ─▶ TokensAppended: some end
                                                                                         └─▶ Balanced.handed_out

Links and the journal's disk are left out: orders are taken at once, and events are kept in a list.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from actors.fleet.dispatch import Dispatcher
from actors.fleet.length_ranking import LengthRanking, make_predictor
from actors.fleet.modes.balanced import Balanced
from actors.fleet.modes.plain import Plain
from actors.fleet.modes.seeding_estimate import SeedingEstimate
from actors.fleet.scope import JobScope
from actors.fleet.workers import WorkerTable
from actors.ledger import events as ev
from actors.ledger.ledger import Ledger
from actors.ledger.ledger_writer import LedgerWriter
from actors.ledger.memory_journal import MemoryJournal
from actors.policies.assigning.latency_table import StepShape
from actors.policies.lengths.length_predictor import prompt_keys
from actors.protocol.lengths import LengthScores
from actors.protocol.tokens import FinishReason
from actors.protocol.work import EngineStats, Revoke, SamplingParams
from actors.protocol.workers import RegisterWorker
from configs.limits import DEFAULT_LIMITS
from transport.address import ActorAddress, PeerId
from transport.transport import SendOutcome

JOB = "fleet"
_CONTEXT_TOKENS = 400


class LiveFleet:
    """``steps`` batches of as many samples as all workers have places, the first of them handed out."""

    def __init__(self, workers: int, places: int, group: int, *, ranking: str = "none") -> None:
        self.ledger = Ledger()
        self.ledger_writer = LedgerWriter(self.ledger, MemoryJournal(JOB))
        self.workers = WorkerTable()
        self._group, self._samples = group, workers * places
        self.ledger_writer.apply(ev.Opened(1))
        for i in range(workers):
            self._register(f"rollout-{i}", places)
        self._issued = 0
        self.issue()
        limits = DEFAULT_LIMITS
        self.ranking = LengthRanking(JOB, make_predictor(cast("Any", ranking), limits))
        scope = self._scope(lambda *_: SendOutcome.QUEUED)
        plain = Plain(scope, cast("Any", None), self.ranking)
        self.dispatcher = Dispatcher(scope, plain, self.ranking, lambda _: np.empty(0, np.int32))
        self.now = 0.0
        self.moved: list[tuple[str, np.ndarray]] = []
        """Who was told to end which assignments, since others shall have them."""

    def _register(self, name: str, places: int) -> None:
        address = ActorAddress(name, PeerId(f"n.{name}", 1), f"memory://{name}")
        offer = RegisterWorker(
            job=JOB, worker=address, node="n", engine="simulated", slots=places, policy_version=0
        )  # fmt: skip
        worker = self.workers.add(offer, 0.0)
        for sequences in (1, 2, 4, 8, 16, places):
            shape = StepShape(sequences, sequences, sequences * _CONTEXT_TOKENS, prefilled=False)
            worker.latency.add(0.01 + 0.0001 * sequences, shape, _CONTEXT_TOKENS)

    def issue(self) -> None:
        """Another step is queued."""
        n = self._samples // self._group
        first = self._issued * n
        self.ledger_writer.apply(
            ev.BatchIssued(
                step=self._issued, group_size=self._group, sampling=SamplingParams(max_tokens=1024),
                prompts=np.arange(first, first + n), prompt_lengths=np.full(n, 4, np.int32),
                prompt_ids=np.arange(4 * n, dtype=np.int32), contexts=[b""] * n,
            )
        )  # fmt: skip
        self._issued += 1

    def assign(self) -> int:
        """A round: how many samples were handed out."""
        return self.dispatcher.assign(self.now)

    def say(self, ending: int) -> None:
        """An engine step of every worker that holds something; ``ending`` samples in all have their last token."""
        names = [name for name, worker in self.workers.by_name.items() if worker.in_flight]
        held = [self.ledger.in_flight(name) for name in names]
        every = np.concatenate(held)
        steps = np.concatenate([np.full(len(numbers), i) for i, numbers in enumerate(held)])
        offsets = np.zeros(len(every), np.int32)
        for step, batch in self.ledger.batches.items():
            at = np.searchsorted(every, batch.assignment)
            at = np.minimum(at, len(every) - 1)
            ours = every[at] == batch.assignment
            offsets[at[ours]] = batch.length[ours]
            assert step >= 0
        finished = np.zeros(len(every), np.uint8)
        finished[np.linspace(0, len(every) - 1, ending).astype(int)] = FinishReason.LENGTH
        row_counts = np.bincount(steps, minlength=len(names)).astype(np.int32)
        outcome = self.ledger_writer.apply(
            ev.TokensAppended(
                workers=names, versions=np.zeros(len(names), np.int32), row_counts=row_counts, assignments=every,
                offsets=offsets, counts=np.ones(len(every), np.int32), finished=finished,
                tokens=np.ones(len(every), np.int32), logprobs=np.zeros(len(every), np.float32),
            )
        )  # fmt: skip
        for name, ended in outcome.ended.items():
            self.workers.by_name[name].in_flight -= ended

    def balancing(self, *, relief: bool = False) -> Balanced:
        """Over this ledger, with nobody at the other end; ``relief`` as ``scheduling.relief``."""
        return Balanced(self._scope(self._ordered, relief=relief), cast("Any", None), LengthRanking(JOB, None))

    def _scope(self, told: Callable[[str, Any], SendOutcome], *, relief: bool = False) -> JobScope:
        """``told`` gets what each worker is told."""
        ctx = SimpleNamespace(ref=lambda address: SimpleNamespace(tell=partial(told, address.name)))
        job = SimpleNamespace(
            name=JOB, limits=DEFAULT_LIMITS, staleness=1, sync=SimpleNamespace(mode="dynamic"),
            rollout=SimpleNamespace(dedicated_workers="none"), scheduling=SimpleNamespace(relief=relief),
        )  # fmt: skip
        return JobScope(cast("Any", ctx), cast("Any", job), self.ledger_writer, self.workers, {}, None, lambda: None)

    def estimate(self, response_tokens: np.ndarray) -> SeedingEstimate:
        """With a trainer whose pace is known, and these lengths expected of each step's prompts, int[prompts]."""
        for batch in self.ledger.batches.values():
            scores = response_tokens.astype(np.float64)
            self.ranking.scored(LengthScores(JOB, batch.step, prompt_keys(batch.prompt_ids), scores))
        return SeedingEstimate(self.ledger, self.ranking, look_every_s=1.0, train_token_s=1e-4)

    def _ordered(self, worker: str, order: Revoke) -> SendOutcome:
        self.moved.append((worker, order.assignments))
        return SendOutcome.QUEUED

    def empty(self, workers: int) -> None:
        """Take everything from so many workers, as if they had just come."""
        for worker in list(self.workers.by_name.values())[:workers]:
            numbers = self.ledger.in_flight(worker.name)
            self.ledger_writer.apply(ev.Returned(worker.name, numbers, "to have idle ones"))
            worker.in_flight -= len(numbers)

    def runs(self, sequences: int) -> None:
        """All workers run so many of the samples that they hold; the rest waits there."""
        for worker in self.workers.by_name.values():
            if worker.in_flight:
                worker.full_at = sequences
            worker.stats = EngineStats(running=sequences)
