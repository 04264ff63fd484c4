"""Dedicated workers that are full, idle, at rest or leaving: nobody idles beside samples that he may generate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.core.message import Message
from actors.fleet.length_ranking import LengthRanking
from actors.fleet.modes.long_lanes import Lanes, choose
from actors.fleet.modes.plain import Plain
from actors.fleet.workers import Worker, WorkerTable
from actors.ledger import events as ev
from actors.ledger.ledger import Ledger
from actors.ledger.ledger_writer import LedgerWriter
from actors.ledger.memory_journal import MemoryJournal
from actors.policies.assigning.assign import decide
from actors.policies.assigning.latency_table import StepShape
from actors.policies.assigning.view import AssignView, GroupView, WorkerView
from actors.policies.lengths.length_predictor import PromptsView, prompt_keys
from actors.protocol.work import Assign, SamplingParams
from actors.protocol.workers import RegisterWorker
from tests.actors.fleet.bare_scope import bare_scope, dispatcher
from tests.actors.fleet.test_length_ranking import RIGHT, group, placed, table
from transport.address import ActorAddress, PeerId
from transport.transport import SendOutcome

DEDICATED = frozenset({"d"})
SKEWED = [20_000.0 if prompt < 2 else 4000.0 for prompt in range(22)]


def long(prompt: int, **fields: Any) -> GroupView:
    return group(prompt, 500, kept_for=DEDICATED, **fields)


def ordinary(prompt: int, **fields: Any) -> GroupView:
    return group(prompt, 10, not_for=DEDICATED, **fields)


def fleet(dedicated: tuple[int, int], *others: tuple[int, int]) -> list[WorkerView]:
    """The dedicated worker ``d`` and others ``a``, ``b`` …; of each how many it can hold, and holds."""
    return [WorkerView(name, 0, *places) for name, places in zip("dab", (dedicated, *others), strict=False)]


# ------------------------------------------------------------ who generates what


def test_long_groups_alone_go_to_others_when_the_dedicated_worker_is_full() -> None:
    assert placed(fleet((8, 8), (8, 0)), [long(0), long(1)]) == {"a": [0, 1]}
    assert placed(fleet((4, 0), (8, 8)), [long(0), long(1)]) == {"d": [0]}, "if they have room"
    assert placed(fleet((8, 4), (8, 0)), [long(0)]) == {"d": [0]}, "and to the dedicated one while it has"


def test_long_groups_wait_for_the_dedicated_worker_while_others_have_groups_of_their_own() -> None:
    assert placed(fleet((8, 8), (4, 0)), [long(0), ordinary(1), ordinary(2)]) == {"a": [1]}


def test_what_a_leaving_dedicated_worker_had_not_begun_goes_to_others() -> None:
    assert placed(fleet((3, 3), (8, 0)), [long(0, moved=True)]) == {"a": [0]}


@pytest.mark.parametrize("beside", [[], [ordinary(1), ordinary(2), ordinary(3)]])
def test_long_samples_that_hold_tokens_go_to_others_when_the_dedicated_worker_is_full(beside: list[GroupView]) -> None:
    hands = placed(fleet((3, 3), (8, 0)), [long(0, moved=True, version=0), *beside])
    assert hands["a"][0] == 0, "ahead of what nobody has begun"
    assert "d" not in hands


@pytest.mark.parametrize("beside", [[], [long(1)]])
def test_ordinary_samples_that_hold_tokens_go_to_the_dedicated_worker_when_others_are_full(
    beside: list[GroupView],
) -> None:
    hands = placed(fleet((12, 1), (8, 8)), [ordinary(0, moved=True, version=0), *beside])
    assert 0 in hands["d"]
    assert "a" not in hands


def test_what_holds_tokens_stays_in_its_lane_while_there_is_room_and_never_goes_on_with_an_older_version() -> None:
    begun = [ordinary(0, moved=True, version=1), long(1, moved=True, version=1)]
    old_and_new = [WorkerView("d", 1, 8, 0), WorkerView("a", 1, 8, 4), WorkerView("b", 0, 8, 0)]
    assert placed(old_and_new, begun) == {"d": [1], "a": [0]}
    assert placed([w._replace(policy_version=0) for w in old_and_new], begun) == {}


def test_a_suspect_goes_to_a_worker_of_the_other_lane_when_those_of_its_own_hold_one() -> None:
    workers = [WorkerView("d", 0, 8, 4, has_suspect=True), WorkerView("a", 0, 8, 0)]
    assert placed(workers, [long(0, moved=True, suspect=True)]) == {"a": [0]}


def test_a_dedicated_worker_that_holds_nothing_helps_out_unless_long_groups_of_another_step_are_queued_for_it() -> None:
    """The next step's long groups come before more of this step's others: they are what it is kept for."""
    queued = [ordinary(0), ordinary(1)]
    assert placed(fleet((8, 0), (4, 0)), queued) == {"a": [0], "d": [1]}
    assert placed(fleet((8, 1), (4, 0)), queued) == {"a": [0]}, "it still has long ones: they are fast only if few"
    later = long(8)._replace(step=1)
    decisions = decide(AssignView(fleet((8, 0), (4, 0)), [*queued, later], 1, 2.0, 1000), 0.0)
    assert [(d.worker, d.step, d.rows[0] // 4) for d in decisions] == [("a", 0, 0), ("d", 1, 8)]


@given(
    st.lists(st.tuples(st.integers(0, 1), st.integers(0, 12), st.integers(0, 12), st.booleans()), max_size=5),
    st.lists(st.tuples(st.booleans(), st.integers(1, 4), st.integers(-2, 1)), max_size=8),
)
def test_nobody_has_room_for_what_is_left_but_dedicated_workers_that_still_hold_something(
    workers: list[tuple[int, int, int, bool]], work: list[tuple[bool, int, int]]
) -> None:
    views = [WorkerView(f"w{i}", v, s, min(s, f)) for i, (v, s, f, _) in enumerate(workers)]
    mine = frozenset(f"w{i}" for i, (*_, dedicated) in enumerate(workers) if dedicated)
    groups = [
        GroupView(
            0, p, np.arange(p * 4, p * 4 + n, dtype=np.int32), moved=version > -2, version=max(-1, version),
            kept_for=mine if is_long else frozenset(), not_for=frozenset() if is_long else mine,
        )
        for p, (is_long, n, version) in enumerate(work)
    ]  # fmt: skip
    held = {w.name: w.in_flight for w in views}
    given_rows: list[int] = []
    for decision in decide(AssignView(views, groups, 0, 2.0, 1000), 0.0):
        held[decision.worker] += len(decision.rows)
        given_rows += decision.rows.tolist()
    assert len(given_rows) == len(set(given_rows))
    assert all(held[w.name] <= w.slots for w in views)
    left = [g for g in groups if not set(g.rows.tolist()) <= set(given_rows)]
    for worker in (w for w in views if held[w.name] < w.slots):
        busy = worker.name in mine and held[worker.name] > 0
        served = (g for g in left if worker.policy_version >= g.version)
        assert not [g for g in served if g.kept_for or g.version >= 0 or not busy]


# ------------------------------------------------------------ who is dedicated


def test_a_worker_without_a_place_is_not_chosen_and_the_others_are_as_if_it_were_not_there() -> None:
    groups = [group(prompt, tokens) for prompt, tokens in enumerate(SKEWED)]
    heavy = [WorkerView(name, 0, 64, 0, latency=table(0.008, 0.004)) for name in "abcdefghi"]
    without = WorkerView("0", 0, 0, 0, latency=table(0.001, 0.0005))
    chosen = choose(groups, [without, *heavy], 10, RIGHT)
    assert chosen == choose(groups, heavy, 10, RIGHT)
    assert chosen.dedicated
    assert not choose(groups, [without, heavy[0]], 10, RIGHT).dedicated, "one worker has no other to share with"


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

    def __init__(self) -> None:
        self.ledger_writer, self.workers, self.told = (
            LedgerWriter(Ledger(), MemoryJournal("j")),
            WorkerTable(),
            dict[str, set[int]](),
        )
        self.ledger_writer.apply(ev.Opened(1))
        for name in "abcdefghi":
            address = ActorAddress(name, PeerId(f"n.{name}", 1), f"memory://{name}")
            offer = RegisterWorker(job="j", worker=address, node="n", engine="simulated", slots=64, policy_version=0)
            worker = self.workers.add(offer, 0.0)
            for batch in (1, 4, 16, 64):
                worker.latency.add(0.008 + 0.004 * batch, StepShape(batch, batch, 9 * batch, prefilled=False), 10)
        n = len(SKEWED)
        self.ledger_writer.apply(
            ev.BatchIssued(
                step=0, group_size=4, sampling=SamplingParams(max_tokens=8), prompts=np.arange(n),
                prompt_lengths=np.full(n, 1, np.int32), prompt_ids=np.arange(n, dtype=np.int32), contexts=[b""] * n,
            )
        )  # fmt: skip
        ranking = LengthRanking("j", cast("Any", Knows()))
        ranking.past.extend(RIGHT)
        scope = bare_scope(self.ledger_writer, self.workers, self._tell, staleness=0, dedicates=True)
        plain = Plain(scope, cast("Any", None), ranking)
        self._lanes, self._dispatcher = plain._lanes, dispatcher(scope, ranking, plain)

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


@pytest.mark.parametrize("out", [rests, leaves])
def test_a_worker_that_rests_or_leaves_when_a_step_is_first_handed_out_is_not_one_of_the_dedicated(
    out: Callable[[Worker], None],
) -> None:
    step = Step()
    assert step.hand_out(0.0) == 88
    assert "a" in step.dedicated, "as long as it works: of equal ones the first"
    step = Step()
    out(step.workers.by_name["a"])
    assert step.hand_out(0.0) == 88
    assert step.dedicated
    assert "a" not in step.dedicated | step.told.keys()


@pytest.mark.parametrize("out", [rests, leaves])
def test_when_all_dedicated_workers_rest_or_leave_anybody_takes_the_long_samples_first(
    out: Callable[[Worker], None],
) -> None:
    step = Step()
    step._lanes._lanes[0] = Lanes(frozenset("a"), frozenset({0, 1}))
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
