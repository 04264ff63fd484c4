"""Dedicated workers are chosen among those that may get work, and those that rest or leave are gone for the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, cast

import numpy as np
import pytest

from actors.core.message import Message
from actors.rollout.messages import Assign, SamplingParams
from actors.scheduler import events as ev
from actors.scheduler.books import Books
from actors.scheduler.dispatch import Dispatcher
from actors.scheduler.ledger import Ledger
from actors.scheduler.length_ranking import LengthRanking
from actors.scheduler.long_lanes import LongLanes, choose
from actors.scheduler.memory_journal import MemoryJournal
from actors.scheduler.messages import RegisterWorker
from actors.scheduler.policies.latency_table import StepShape
from actors.scheduler.policies.length_predictor import PromptsView, prompt_keys
from actors.scheduler.view import WorkerView
from actors.scheduler.workers import Worker, WorkerTable
from configs.limits import DEFAULT_LIMITS
from tests.actors.scheduler.test_length_ranking import RIGHT, group, table
from transport.address import ActorAddress, PeerId
from transport.transport import SendOutcome

SKEWED = [20_000.0 if prompt < 2 else 4000.0 for prompt in range(22)]
Choice = Literal["simulated", "closed_form"]


@pytest.mark.parametrize("choice", ["simulated", "closed_form"])
def test_a_worker_without_a_place_is_not_chosen_and_the_others_are_as_if_it_were_not_there(choice: Choice) -> None:
    groups = [group(prompt, tokens) for prompt, tokens in enumerate(SKEWED)]
    heavy = [WorkerView(name, 0, 64, 0, latency=table(0.008, 0.004)) for name in "abcdefghi"]
    without = WorkerView("0", 0, 0, 0, latency=table(0.001, 0.0005))
    chosen = choose(groups, [without, *heavy], 10, choice, RIGHT)
    assert chosen == choose(groups, heavy, 10, choice, RIGHT)
    assert chosen.dedicated
    assert not choose(groups, [without, heavy[0]], 10, choice, RIGHT).dedicated, "one worker has no other to share with"


class Knows:
    """A predictor that is right."""

    probes = 0

    def __init__(self) -> None:
        keys = prompt_keys([np.array([prompt], np.int32) for prompt in range(len(SKEWED))])
        self._tokens = dict(zip(keys.tolist(), SKEWED, strict=True))

    def expected(self, view: PromptsView) -> np.ndarray:
        return np.array([self._tokens[key] for key in view.keys.tolist()])

    def observe(self, view: PromptsView) -> None:
        pass


class Step:
    """Nine workers with measured latencies, all alike, and one step of which nothing is begun."""

    def __init__(self, choice: Choice) -> None:
        self.books, self.workers, self.told = Books(Ledger(), MemoryJournal("j")), WorkerTable(), dict[str, set[int]]()
        self.books.apply(ev.Opened(1))
        for name in "abcdefghi":
            address = ActorAddress(name, PeerId(f"n.{name}", 1), f"memory://{name}")
            offer = RegisterWorker(job="j", worker=address, node="n", engine="simulated", slots=64, policy_version=0)
            worker = self.workers.add(offer, 0.0)
            for batch in (1, 4, 16, 64):
                worker.latency.add(0.008 + 0.004 * batch, StepShape(batch, batch, 9 * batch, prefilled=False), 10)
        n = len(SKEWED)
        self.books.apply(
            ev.BatchIssued(
                step=0, group_size=4, sampling=SamplingParams(max_tokens=8), prompts=np.arange(n),
                prompt_lengths=np.full(n, 1, np.int32), prompt_ids=np.arange(n, dtype=np.int32), contexts=[b""] * n,
            )
        )  # fmt: skip
        ranking = LengthRanking("j", cast("Any", Knows()))
        ranking.past.extend(RIGHT)
        self._lanes = LongLanes(choice)
        self._dispatcher = Dispatcher(
            "j", self.books, self.workers, 0, DEFAULT_LIMITS, self._tell, ranking, lanes=self._lanes
        )

    @property
    def dedicated(self) -> frozenset[str]:
        return self._lanes._lanes[0].dedicated

    def hand_out(self, now: float) -> int:
        return self._dispatcher.assign(now)

    def _tell(self, worker: ActorAddress, message: Message) -> SendOutcome:
        assert isinstance(message, Assign)
        self.told.setdefault(worker.name, set()).update(work.prompt for work in message.work)
        return SendOutcome.QUEUED


def rests(worker: Worker) -> None:
    worker.resting_until_s = 9.0


def leaves(worker: Worker) -> None:
    worker.leaves_s = 9.0


@pytest.mark.parametrize("choice", ["simulated", "closed_form"])
@pytest.mark.parametrize("out", [rests, leaves])
def test_a_worker_that_rests_or_leaves_when_a_step_is_first_handed_out_is_not_one_of_the_dedicated(
    out: Callable[[Worker], None], choice: Choice
) -> None:
    step = Step(choice)
    assert step.hand_out(0.0) == 88
    assert "a" in step.dedicated, "as long as it works: of equal ones the first"
    step = Step(choice)
    out(step.workers.by_name["a"])
    assert step.hand_out(0.0) == 88
    assert step.dedicated
    assert "a" not in step.dedicated | step.told.keys()


@pytest.mark.parametrize("out", [rests, leaves])
def test_when_all_dedicated_workers_rest_or_leave_anybody_takes_the_long_samples_first(
    out: Callable[[Worker], None],
) -> None:
    step = Step("closed_form")
    workers = step.workers.by_name
    for worker in workers.values():
        worker.slots = 1
    assert step.hand_out(0.0) == len(workers)
    for name in step.dedicated:
        out(workers[name])
    other = next(name for name in workers if name not in step.dedicated)
    workers[other].slots = 16
    assert step.hand_out(1.0) == 15
    assert {0, 1} <= step.told[other]
