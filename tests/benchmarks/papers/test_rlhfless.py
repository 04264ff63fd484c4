"""RLHFless's published results: which come out, that the page says so, and what the model of a step does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from actors.policies.assigning.generation_time import Instance
from actors.policies.planning.cut import Cut, CutWorker
from benchmarks.papers.claims import PaperResult, run_paper
from benchmarks.papers.cluster.answers import epochs, steps
from benchmarks.papers.cluster.planned_step import CutRule, Seat, StepWork, cut_all_at, cut_nobody, generate
from benchmarks.papers.scenario import load_paper_scenario
from benchmarks.papers.setups.rlhfless import SITES, TASKS, BillStudy, Setup
from benchmarks.papers.studies.rlhfless_bench import Bench, cut_from, policies
from benchmarks.papers.studies.rlhfless_bill import bills
from tests.benchmarks.papers.pages import assert_page_shows

ROOT = Path(__file__).parents[3]
DEAR = ("rlhfless_scaling", "rlhfless_sweeps", "rlhfless_sim")
SCENARIOS = [
    pytest.param(path, id=path.stem, marks=[pytest.mark.long, pytest.mark.timeout(400)] if path.stem in DEAR else [])
    for path in sorted((ROOT / "configs" / "papers").glob("rlhfless_*.yaml"))
]
NOT_WITHIN = {
    "rlhfless_scaling": {"best.1.paper.speedup", "mean.3.paper.speedup_over_prefill"},
    "rlhfless_assign": {"parts.cost_cut_percent"},
    "rlhfless_sweeps": {"weight.0.7.cost_rank"},
    "rlhfless_sim": {"mean.paper.speedup"},
    "rlhfless_bill": {
        "balanced.asleep.0.5.cost_cut_percent",
        "balanced.asleep.1.cost_cut_percent",
        "balanced.gone.60.cost_cut_percent",
        "paper.gone.7.cost_cut_percent",
    },
}
"""Measures of claims that our model does not reproduce. One that comes to hold is taken out here and on the page."""


@pytest.fixture(scope="module", params=SCENARIOS)
def result(request: pytest.FixtureRequest) -> PaperResult:
    return run_paper(load_paper_scenario(request.param))


@pytest.mark.long
def test_the_claims_that_hold_are_all_but_those_that_the_page_explains(result: PaperResult) -> None:
    outside = {row.claim.measure for row in result.rows if not row.within}
    assert outside == NOT_WITHIN[result.scenario]


def test_the_page_shows_every_row_as_it_comes_out(result: PaperResult) -> None:
    assert_page_shows(result, "rlhfless.md")


# ------------------------------------------------------------ what the model of a step does


class Linear:
    """A step takes 1 s, and a tenth for each sequence."""

    def step_s(self, batch: float, context_tokens: float) -> float:
        return 1 + batch / 10


def seats(count: int, **fields: float) -> list[Seat]:
    return [Seat(f"w{i}", Instance(Linear(), 8), **fields) for i in range(count)]


def work(*lengths: int, prompt_tokens: int = 10) -> StepWork:
    tall = np.array(lengths)
    return StepWork(tall[:, None], tall.astype(float), prompt_tokens, np.arange(len(tall)))


def test_a_worker_is_released_when_its_last_sample_ends() -> None:
    one = generate(seats(2), [[0], [1, 2]], work(30, 10, 20))
    assert one.seconds == pytest.approx(30 * 1.1)
    assert [span.ended_s for span in one.spans] == pytest.approx([33.0, 10 * 1.2 + 10 * 1.1])
    assert [span.works_s for span in one.spans] == pytest.approx([33.0, 23.0])


def test_what_is_cut_goes_on_behind_its_tokens_and_its_worker_is_released() -> None:
    """At 12 s, w1 has done one of two: the other one goes on at w0 with 10 of its 20 tokens."""
    one = generate(seats(2), [[0], [1, 2]], work(40, 10, 20), rule=cut_from(0.5), longest="w0")
    assert one.cut_samples == 1
    alone = 12 / 1.1  # tokens of w0's sample by then
    assert [span.ended_s for span in one.spans] == pytest.approx([12 + 10 * 1.2 + (40 - alone - 10) * 1.1, 12.0])


@pytest.mark.parametrize("rule", [cut_nobody, cut_from(0.3), cut_from(0.7), cut_all_at(0.5)])
@pytest.mark.parametrize("moves_cache", [True, False])
def test_every_token_is_decoded_once_whatever_moves(rule: CutRule, moves_cache: bool) -> None:
    """With steps of one length, whatever the batch, places that are busy say how many tokens were decoded."""

    class Flat:
        def step_s(self, batch: float, context_tokens: float) -> float:
            return 1.0

    lengths = np.random.default_rng(3).integers(5, 200, (12, 2))
    one_place = [Seat(f"w{i}", Instance(Flat(), 1)) for i in range(3)]
    some = StepWork(lengths, lengths.mean(axis=1), 0, np.arange(12))
    parts = [list(range(i, 12, 3)) for i in range(3)]
    one = generate(one_place, parts, some, rule=rule, moves_cache=moves_cache)
    assert sum(span.works_s for span in one.spans) == pytest.approx(lengths.sum(), rel=1e-3)


def test_rlhfuse_cuts_all_at_once_to_the_worker_with_the_most_left() -> None:
    def worker(name: str, assigned: int, done: int, free: int) -> CutWorker:
        return CutWorker(name, assigned, done, free, assigned - done, 1.0)

    rule, some = cut_all_at(0.8), (worker("a", 10, 9, 4), worker("b", 10, 7, 4), worker("c", 10, 10, 4))
    assert list(rule(some)) == [Cut("a", "b", 1)]
    assert not rule([one._replace(done=one.done - 2) for one in some]), "too early"
    assert not rule([one._replace(free=0) for one in some]), "no room"


def test_shared_prefills_are_paid_by_the_first_sibling() -> None:
    lengths = np.full((1, 4), 5)
    costly = [Seat("w", Instance(Linear(), 8, prefill_token_s=0.1))]
    some = StepWork(lengths, np.array([5.0]), 100, np.arange(1))
    own, shared = (generate(costly, [[0]], some, shares_prefill=shares) for shares in (False, True))
    assert own.prefill_s == pytest.approx(4 * shared.prefill_s)
    assert own.seconds - shared.seconds == pytest.approx(30.0)


def test_history_knows_the_last_epoch_and_equal_seeds_give_equal_lengths_whatever_is_known() -> None:
    setup = Setup(prompts=50, steps=2, epochs=3)
    first, again = (list(steps(TASKS["gsm8k"], setup, 3, 7, known=known)) for known in ("history", "perfectly"))
    assert all((a.lengths == b.lengths).all() for a, b in zip(first, again, strict=True))
    before, after = list(epochs(TASKS["gsm8k"], setup, 3, 7))[1:]
    seen = {
        n: mean for step in before for n, mean in zip(step.prompts.tolist(), step.lengths.mean(axis=1), strict=True)
    }
    for step in after:
        assert step.expected.tolist() == pytest.approx([seen[n] for n in step.prompts.tolist()])


def test_a_planned_run_generates_the_same_samples_as_the_baseline() -> None:
    setup = Setup(prompts=32, steps=1, epochs=2, draws=1)
    bench = Bench(SITES["3B"], setup, 2)
    counted: dict[str, Sequence[int]] = {}
    for name, policy in policies(setup).items():
        total = bench.draws(TASKS["gsm8k"], 3, policy, 0)
        assert len(total.generated) == 2
        counted[name] = total.workers
        assert total.cost > 0
    assert counted["static"] == counted["prefill"] == [3, 3]
    assert all(1 <= count <= 8 for count in counted["paper"])


def test_longer_starts_and_dearer_sleep_cost_more() -> None:
    study = BillStudy(kind="rlhfless_bill", setup=Setup(prompts=64, steps=1, epochs=2, draws=1))
    found = bills(study, 0)
    for policy in ("paper", "balanced"):
        gone = [found[f"{policy}.gone.{cold_s:g}.cost_cut_percent"] for cold_s in study.cold_starts_s]
        asleep = [found[f"{policy}.asleep.{price:g}.cost_cut_percent"] for price in study.asleep_prices]
        assert gone == sorted(gone, reverse=True)
        assert asleep == sorted(asleep, reverse=True)
        assert found[f"{policy}.break_even_cold_s"] > found[f"{policy}.break_even_cold_over_asleep_s"] >= 0
