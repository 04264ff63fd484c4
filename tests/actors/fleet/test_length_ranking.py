"""Length ranking in the scheduler: what is begun first, what it changes (the order alone), and what it reports."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest

from actors.core.actor import Actor, handles
from actors.fleet.length_ranking import LengthRanking
from actors.fleet.modes.long_lanes import LongLanes, choose
from actors.policies.assigning.assign import decide
from actors.policies.assigning.dispatch_long import Past
from actors.policies.assigning.latency_table import LatencyMeter, LatencyTable, StepShape
from actors.policies.assigning.view import AssignView, GroupView, WorkerView
from actors.protocol.failures import Acknowledged
from actors.protocol.lengths import LengthScores, ObserveLengths, ScorePrompts
from actors.protocol.services import RegisterService
from actors.protocol.work import SamplingParams
from tests.actors.scheduler_world import BUDGET, World, length
from transport.address import ActorAddress

_SKEWED = np.repeat(np.where(np.arange(22) < 2, 20_000.0, 4000.0), 4)
RIGHT = [Past(_SKEWED, _SKEWED)]
"""Of two long prompts and twenty others, all came out as expected."""


def group(prompt: int, expected: float = float("nan"), size: int = 4, **fields: Any) -> GroupView:
    rows = np.arange(prompt * size, (prompt + 1) * size, dtype=np.int32)
    return GroupView(0, prompt, rows, expected_tokens=expected, **fields)


def placed(workers: list[WorkerView], groups: list[GroupView]) -> dict[str, list[int]]:
    """Worker → prompts in the order in which it begins them."""
    decisions = decide(AssignView(workers, groups, 0, 2.0, 1000), 0.0)
    return {d.worker: list(dict.fromkeys((d.rows // 4).tolist())) for d in decisions}


def table(one_s: float = 0.01, per_sample_s: float = 0.0) -> LatencyTable:
    meter = LatencyMeter()
    for batch in (1, 4, 16, 64):
        meter.add(one_s + per_sample_s * batch, StepShape(batch, batch, 9 * batch, prefilled=False), 10)
    return meter.table


def test_the_longest_are_handed_out_first_and_the_unknown_as_if_they_were_median() -> None:
    groups = [group(0, 10), group(1, 90), group(2), group(3, 50), group(4, 30)]
    assert placed([WorkerView("a", 0, 64, 0)], groups) == {"a": [1, 3, 2, 4, 0]}
    assert placed([WorkerView("a", 0, 8, 0)], groups) == {"a": [1, 3]}, "and when there is little room, only they"


def test_without_predictions_prompts_keep_their_order_and_moved_ones_go_first_in_any_case() -> None:
    assert placed([WorkerView("a", 0, 64, 0)], [group(0), group(1), group(2)]) == {"a": [0, 1, 2]}
    assert placed([WorkerView("a", 0, 64, 0)], [group(0, 90), group(1, 5, moved=True)]) == {"a": [1, 0]}


def test_groups_that_are_kept_for_workers_go_to_them_and_the_others_do_not() -> None:
    mine = frozenset({"b"})
    groups = [group(p, 10, not_for=mine) for p in range(4)] + [group(9, 500, kept_for=mine)]
    workers = [WorkerView("a", 0, 64, 0), WorkerView("b", 0, 64, 0)]
    assert placed(workers, groups) == {"b": [9], "a": [0, 1, 2, 3]}
    assert placed(workers[:1], groups) == {"a": [9, 0, 1, 2, 3]}, "when all that are dedicated are gone, anybody may"


def test_a_dedicated_worker_helps_out_before_it_idles_and_others_help_it_when_they_have_nothing_left() -> None:
    mine = frozenset({"b"})
    others = [group(p, 10, not_for=mine) for p in range(4)]
    idle = placed([WorkerView("a", 0, 8, 0), WorkerView("b", 0, 8, 0)], others)
    assert idle == {"a": [0, 1], "b": [2, 3]}, "a step is issued whole: what is long has been handed out before"
    long = [group(8, 500, kept_for=mine), group(9, 400, kept_for=mine), group(10, 300, kept_for=mine)]
    assert placed([WorkerView("a", 0, 64, 0), WorkerView("b", 0, 4, 0)], [*others[:1], *long]) == {
        "b": [8],
        "a": [0, 9, 10],
    }


def test_workers_are_dedicated_where_their_own_tables_say_that_it_pays_and_not_where_it_does_not() -> None:
    groups = [group(p, 20_000.0 if p < 2 else 4000.0) for p in range(22)]
    heavy = [WorkerView(name, 0, 64, 0, latency=table(0.008, 0.004)) for name in "abcdefghi"]
    chosen = choose(groups, heavy, 10, RIGHT)
    assert len(chosen.dedicated) >= 1
    assert {0, 1} <= chosen.long_prompts, "the longest are with them"
    alike = [group(p, 20.0) for p in range(22)]
    assert choose(alike, heavy, 10, []).dedicated == frozenset()


def test_workers_that_still_have_a_long_tail_are_not_those_that_are_dedicated_to_more() -> None:
    """Two hundred samples' work is left on each of them: the long ones would wait behind it."""
    groups = [group(p, 20_000.0 if p < 2 else 4000.0) for p in range(22)]
    heavy = [WorkerView(name, 0, 64, 0, latency=table(0.008, 0.004)) for name in "abcdefghi"]
    idle = choose(groups, heavy, 10, RIGHT)
    held = dict.fromkeys(idle.dedicated, (60_000,) * 4)
    assert choose(groups, heavy, 10, RIGHT, lambda: held) != idle


def test_what_is_left_of_a_sample_is_its_prediction_or_as_much_again_and_never_beyond_the_most() -> None:
    class Says:
        probes = 0

        def expected(self, view: object) -> np.ndarray:
            return np.array([10.0, 10.0, np.nan, 10.0])

    class Begun:
        step, group_size = 0, 1
        length = np.array([4, 13, 3, 18])
        sampling = SamplingParams(max_tokens=20)

    ranking = LengthRanking("j", cast("Any", Says()))
    ranking._view = lambda *_: cast("Any", None)
    assert ranking.left(cast("Any", Begun()), np.arange(4)).tolist() == [6, 7, 3, 2]


def test_nobody_is_dedicated_without_estimates_or_without_measured_latencies() -> None:
    groups = [group(p, 20_000.0 if p < 2 else 4000.0) for p in range(22)]
    workers = [WorkerView(name, 0, 64, 0, latency=table(0.008, 0.004)) for name in "abcdefghi"]
    assert choose([group(p) for p in range(32)], workers, 10, RIGHT).dedicated == frozenset()
    assert choose(groups, [*workers, WorkerView("new", 0, 64, 0)], 10, RIGHT).dedicated == frozenset()


def test_nobody_is_dedicated_until_a_step_has_shown_that_it_would_have_paid() -> None:
    groups = [group(p, 20_000.0 if p < 2 else 4000.0) for p in range(22)]
    heavy = [WorkerView(name, 0, 64, 0, latency=table(0.008, 0.004)) for name in "abcdefghi"]
    alike = [Past(np.full(88, 20.0), np.full(88, 20.0))]
    dedicated = {
        name: len(choose(groups, heavy, 10, past).dedicated)
        for name, past in {"none": [], "right": RIGHT, "alike": alike}.items()
    }
    assert dedicated["right"] >= 1
    assert dedicated["none"] == dedicated["alike"] == 0


def test_the_choice_of_a_step_holds_until_the_step_is_handed_out() -> None:
    lanes = LongLanes()
    groups = [group(p, 20_000.0 if p < 2 else 4000.0) for p in range(22)]
    workers = [WorkerView(name, 0, 64, 0, latency=table(0.008, 0.004)) for name in "abcdefghi"]
    first = lanes.mark(0, groups, workers, 10, RIGHT, dict, begun=False)
    assert any(g.kept_for for g in first)
    later = lanes.mark(0, groups[:1], workers, 10, RIGHT, dict, begun=True)
    assert later[0].kept_for == next(g.kept_for for g in first if g.kept_for)
    new_head = LongLanes().mark(0, groups, workers, 10, RIGHT, dict, begun=True)
    assert not any(g.kept_for for g in new_head), "a new head"


# ------------------------------------------------------------ a whole job, in virtual time


class FakeRanker(Actor):
    """Knows the truth, and says it."""

    def __init__(self, scheduler: ActorAddress) -> None:
        self.scheduler = scheduler
        self.lessons: list[ObserveLengths] = []
        self.asked: list[int] = []

    async def on_start(self) -> None:
        offer = RegisterService(job="j", role="ranker", address=self.ctx.self_address)
        await self.ctx.ref(self.scheduler).ask(offer, Acknowledged)

    @handles(ScorePrompts)
    async def score(self, question: ScorePrompts) -> None:
        self.asked.append(question.step)
        prompts = np.split(question.prompt_ids, np.cumsum(question.prompt_lengths)[:-1])
        scores = np.array([np.mean([length(int(ids[0]), s) for s in range(4)]) for ids in prompts])
        self.ctx.ref(self.scheduler).tell(LengthScores(job="j", refresh=1, keys=question.keys, scores=scores))

    @handles(ObserveLengths)
    async def observe(self, lesson: ObserveLengths) -> None:
        self.lessons.append(lesson)


def rows(world: World) -> list[dict[str, float]]:
    return [event.fields for event in world.events if event.kind == "step"]


@pytest.mark.parametrize("kind", ["history", "siblings", "learned"])
def test_a_ranking_changes_the_order_of_hand_outs_and_not_one_token(in_world: Callable[..., None], kind: str) -> None:
    """The world checks each token against what (prompt, sibling, position) say; here: the samples of all steps."""

    async def scenario(world: World) -> None:
        await world.start_head()
        world.rewards = await world.start_rewards()
        if kind == "learned":
            world.ranker = FakeRanker(world.scheduler_at)
            await (await world.system("ranker")).spawn("ranker", world.ranker)
        world.workers = [await world.start_worker(f"rollout-{i}", slots=3) for i in range(2)]
        await world.start_trainer()
        await world.until(lambda: world.job.state.over)
        assert world.trained.keys() == {0, 1, 2, 3}
        for step, samples in world.trained.items():
            assert [(p, s) for p, s, *_ in samples] == [(p, s) for p in range(4 * step, 4 * step + 4) for s in range(4)]
        assert world.scheduler.counters.prompts_lost == world.scheduler.counters.samples_trained_twice == 0
        ranking = world.scheduler._fleet.ranking
        assert (ranking._keys, ranking._noted) == ({}, {}), "nothing is kept of steps that are over"
        assert len(ranking.past) == (0 if kind == "history" else 3), "but lengths beside what was expected, of a few"
        assert all(len(past.estimates) == len(past.lengths) == 16 for past in ranking.past)
        newest = rows(world)[-1]
        assert {"length_recall_20", "length_recall_10", "length_recall_5", "length_known_fraction"} <= newest.keys()
        if kind == "learned":
            assert world.ranker.asked[:2] == [0, 1], "as soon as a batch is issued"
            assert len(world.ranker.lessons) == 4
            assert newest["length_known_fraction"] == 1.0
            assert 0.0 <= newest["length_recall_20"] <= 1.0
        if kind == "history":
            assert newest["length_known_fraction"] == 0.0, "each prompt comes once"

    in_world(scenario, rollout={"max_tokens": BUDGET, "max_running": 3, "length_ranking": kind})


def test_without_a_ranking_no_recall_is_reported(in_world: Callable[..., None]) -> None:
    async def scenario(world: World) -> None:
        await world.start()
        await world.until(lambda: world.job.state.over)
        assert not [name for name in rows(world)[-1] if name.startswith("length_")]

    in_world(scenario)


def test_workers_latencies_are_measured_while_they_work(in_world: Callable[..., None]) -> None:
    async def scenario(world: World) -> None:
        await world.start()
        await world.until(lambda: len(world.trained) >= 2)
        for worker in world.scheduler._workers.by_name.values():
            assert worker.view().latency.empty  # the fake worker's steps say nothing of their time
            worker.latency.add(0.01, StepShape(1, 1, 5, prefilled=False), 2.0)
            assert worker.view().latency.step_s(1, 10) == pytest.approx(0.01)

    in_world(scenario)
