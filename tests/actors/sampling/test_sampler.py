"""Turns, cancelling, failures and the end of a sampler, in virtual time on the simulated engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.protocol.sampling import SampleResult
from actors.rollout.engine import GenerationRequest, StepOutput
from actors.rollout.engines.server.engine import ServerEngine
from actors.rollout.engines.simulated_engine import SimulatedEngine
from actors.rollout.errors import EngineUnavailable
from actors.sampling.errors import BadSampleRequest, EngineLost, SamplerClosed, SnapshotUnusable
from actors.sampling.sampler import SnapshotSampler
from configs.limits import Limits
from tests.actors.sampling.sampling_world import ask, letters, said, sampling
from tests.made_snapshots import write_adapter
from tests.simulated import run_simulated
from tests.tiny_checkpoint import make_tiny_checkpoint


@pytest.fixture(scope="module")
def snapshots(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("snapshots")
    base = make_tiny_checkpoint(root / "base")
    return [write_adapter(root / str(rank), base, rank=rank, seed=rank) for rank in (1, 4, 16)]


class WatchedEngine(SimulatedEngine):
    """Notes what it is told, fails when it is told to, and is counted."""

    made = 0

    def __init__(self, failing: Sequence[str] = ()) -> None:
        super().__init__()
        WatchedEngine.made += 1
        self.failing = [*failing]
        self.loads: list[int] = []
        self.versions: dict[int, set[int]] = {}
        self.aborted: list[int] = []
        self.most = 0

    def _may_fail(self, at: str) -> None:
        if at in self.failing:
            raise OSError(f"the device is gone ({at})")

    async def start(self, spec: Any) -> None:
        self._may_fail("start")
        await super().start(spec)

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        super().add(requests)
        self.versions.setdefault(self.policy_version, set()).update(one.request for one in requests)

    def abort(self, requests: Sequence[int]) -> None:
        self.aborted += requests
        super().abort(requests)

    async def step(self) -> StepOutput:
        self._may_fail("step")
        output = await super().step()
        self.most = max(self.most, self.stats().running)
        return output

    async def load_adapter(self, tensors: Any, dtypes: Any, policy_version: int, spec: Any) -> None:
        assert not self.has_work, "weights change under running sequences"
        self._may_fail("load")
        await super().load_adapter(tensors, dtypes, policy_version, spec)
        self.loads.append(policy_version)


@asynccontextmanager
async def watched(
    failing: Sequence[Sequence[str]] = (), **options: Any
) -> AsyncIterator[tuple[SnapshotSampler, list[WatchedEngine]]]:
    """A sampler and the engines that it makes. ``failing``: what fails in each life of the engine."""
    engines: list[WatchedEngine] = []
    plans = iter(failing)

    def make() -> WatchedEngine:
        engines.append(WatchedEngine(next(plans, ())))
        return engines[-1]

    async with sampling(make=make, **options) as sampler:
        yield sampler, engines


def test_requests_of_the_loaded_snapshot_join_those_that_run_and_slots_are_filled(snapshots: list[Path]) -> None:
    async def main() -> None:
        async with watched(slots=4) as (sampler, [engine]):
            first = asyncio.ensure_future(sampler.sample(ask(snapshots[0], samples=2, max_tokens=30)))
            await asyncio.sleep(0.2)
            await sampler.sample(ask(snapshots[0], max_tokens=3))
            assert not first.done(), "the later one has overtaken it"
            await sampler.sample(ask(snapshots[0], samples=9))
            await first
            assert engine.loads == [1] and engine.most == 4

    run_simulated(main())


def test_nothing_starves_however_much_is_asked_of_another_snapshot(snapshots: list[Path]) -> None:
    """Two clients keep their snapshots busy without a pause; a third snapshot and the base ask now and then."""
    limits, sequence_s = Limits(sampling_patience_s=2.0), 4 * 0.1
    turn_s = limits.sampling_patience_s + sequence_s + 0.1

    async def main() -> None:
        loop, rare_ones_are_served = asyncio.get_running_loop(), asyncio.Event()

        async def busy(sampler: SnapshotSampler, snapshot: Path) -> None:
            while not rare_ones_are_served.is_set():
                await sampler.sample(ask(snapshot, seed=None, max_tokens=4))

        async def seldom(sampler: SnapshotSampler, snapshot: Path | None) -> float:
            longest_s = 0.0
            for _ in range(4):
                began_s = loop.time()
                await sampler.sample(ask(snapshot, max_tokens=4))
                longest_s = max(longest_s, loop.time() - began_s)
                await asyncio.sleep(1.7)
            return longest_s

        made = watched(limits=limits, slots=4, base_s=0.1, decode_s=0.0, prefill_s=0.0)
        async with made as (sampler, [engine]):
            crowd = [asyncio.ensure_future(busy(sampler, snapshots[n % 2])) for n in range(12)]
            async with asyncio.timeout(200.0):
                waits = await asyncio.gather(seldom(sampler, snapshots[2]), seldom(sampler, None))
            rare_ones_are_served.set()
            assert max(waits) <= 3 * turn_s + sequence_s
            assert len(engine.loads) < loop.time() / 0.4, "nor are weights loaded all the time"
            await asyncio.gather(*crowd)

    run_simulated(main())


def test_the_next_turn_is_that_of_the_snapshot_that_has_waited_longest(snapshots: list[Path]) -> None:
    async def main() -> None:
        async with watched() as (sampler, [engine]):
            one, two, three = snapshots
            calls = [asyncio.ensure_future(sampler.sample(ask(one, max_tokens=60)))]
            for later in (three, two, three, None, one):
                await asyncio.sleep(0.05)
                calls.append(asyncio.ensure_future(sampler.sample(ask(later))))
            await asyncio.gather(*calls)
            assert engine.loads == [1, 2, 3, 0], "the last request of the first snapshot has joined its first"

    run_simulated(main())


def test_answers_are_those_of_each_request_alone_whatever_runs_beside(snapshots: list[Path]) -> None:
    async def main() -> None:
        async with watched(slots=3, mean_tokens=20) as (sampler, _):
            asked = [
                ask(snapshot, ids=(5, 6, number), seed=number, samples=1 + number % 4, stop=None, max_tokens=50)
                for number in range(6) for snapshot in (None, *snapshots)
            ]  # fmt: skip
            together = await asyncio.gather(*(sampler.sample(one) for one in asked))
            alone = [await sampler.sample(one) for one in asked]
            assert [said(one) for one in together] == [said(one) for one in alone]
            assert [len(one.sequences) for one in alone] == [one.samples for one in asked]

    run_simulated(main())


def test_a_text_that_is_complete_ends_the_sequence_though_the_engine_has_gone_on(snapshots: list[Path]) -> None:
    async def main() -> None:
        async with watched() as (sampler, [engine]):
            [free] = (await sampler.sample(ask(max_tokens=60))).sequences
            text = letters(free.tokens.tolist())
            result = await sampler.sample(ask(max_tokens=60, stop=("no such text", text[20:24])))
            [one] = result.sequences
            assert one.stop_reason == "stop"
            assert letters(one.tokens.tolist()) == text[: text.index(text[20:24]) + 4]
            assert len(engine.aborted) == 1
            await sampler.sample(ask())

    run_simulated(main())


def test_whoever_gives_up_ends_its_sequences_and_nobody_elses(snapshots: list[Path]) -> None:
    async def main() -> None:
        async with watched(slots=2) as (sampler, [engine]):
            alone = said(await sampler.sample(ask(max_tokens=40, seed=1)))
            running = asyncio.ensure_future(sampler.sample(ask(max_tokens=90, samples=5)))
            waiting = asyncio.ensure_future(sampler.sample(ask(snapshots[0])))
            beside = asyncio.ensure_future(sampler.sample(ask(max_tokens=40, seed=1)))
            await asyncio.sleep(0.1)
            running.cancel()
            waiting.cancel()
            assert said(await beside) == alone
            assert len(engine.aborted) == 2 and engine.loads == []
            assert sampler._calls() == [] and not sampler._running

    run_simulated(main())


def test_a_failing_engine_fails_what_ran_and_is_started_anew_for_what_waited(snapshots: list[Path]) -> None:
    async def main() -> None:
        async with watched([["step"], ["start"], []]) as (sampler, engines):
            ran = asyncio.ensure_future(sampler.sample(ask(samples=2)))
            waited = asyncio.ensure_future(sampler.sample(ask(snapshots[0])))
            with pytest.raises(EngineLost, match=r"the device is gone \(step\)"):
                await ran
            assert not EngineLost.permanent
            result = await waited
            assert len(result.sequences[0].tokens) == 8 and len(engines) == 3
            assert said(await sampler.sample(ask(snapshots[0]))) == said(result)

    run_simulated(main())


def test_a_load_that_ends_the_engine_fails_the_snapshot_and_the_others_go_on(snapshots: list[Path]) -> None:
    async def main() -> None:
        async with watched([["load"]]) as (sampler, engines):
            with pytest.raises(EngineLost, match="load"):
                await sampler.sample(ask(snapshots[0]))
            await sampler.sample(ask(snapshots[0]))
            assert len(engines) == 2

    run_simulated(main())


def test_an_engine_that_fails_again_and_again_ends_the_sampler_with_a_reason() -> None:
    async def main() -> None:
        async with watched([["step"]] * 9, limits=Limits(sampling_restarts=2)) as (sampler, engines):
            for _ in range(3):
                with pytest.raises(EngineLost):
                    await sampler.sample(ask())
            await asyncio.sleep(10.0)
            with pytest.raises(SamplerClosed, match="failed too often"):
                await sampler.sample(ask())
            assert len(engines) == 3
            assert sampler._task is not None and isinstance(sampler._task.exception(), EngineLost)

    run_simulated(main())


def test_closing_ends_all_that_runs_and_waits_with_an_error(snapshots: list[Path]) -> None:
    async def main() -> None:
        async with watched() as (sampler, _):
            calls = [
                asyncio.ensure_future(sampler.sample(ask(snapshot, max_tokens=90))) for snapshot in (None, *snapshots)
            ]
            await asyncio.sleep(0.1)
            await sampler.close()
            for one in calls:
                with pytest.raises(SamplerClosed, match="it was closed"):
                    await one
            with pytest.raises(SamplerClosed):
                await sampler.sample(ask())

    run_simulated(main())


def test_prompts_are_scored_between_steps_and_a_crowd_of_them_does_not_stop_those_that_run() -> None:
    async def main() -> SampleResult:
        limits = Limits(sampling_score_tokens=10)
        async with watched(limits=limits, slots=8, prefill_s=0.01) as (sampler, _):
            running = asyncio.ensure_future(sampler.sample(ask(max_tokens=40)))
            await asyncio.sleep(0.001)
            scored = [
                asyncio.ensure_future(sampler.sample(ask(max_tokens=1, top_prompt_logprobs=3, prompt_logprobs=True)))
                for _ in range(200)
            ]
            await running
            assert sum(one.done() for one in scored) <= 40 * 4
            return (await asyncio.gather(*scored))[-1]

    result = run_simulated(main())
    assert result.prompt_logprobs is not None and result.top_prompt_ids is not None
    assert np.isnan(result.prompt_logprobs[0]) and result.prompt_logprobs.dtype == np.float32
    assert result.top_prompt_ids.shape == (3, 3)


def test_a_wrong_request_and_an_unknown_snapshot_do_not_reach_the_engine(tmp_path: Path) -> None:
    async def main() -> None:
        async with watched() as (sampler, [engine]):
            with pytest.raises(BadSampleRequest, match="temperature is nan"):
                await sampler.sample(ask(temperature=float("nan")))
            for snapshot in (tmp_path, tmp_path / "none", Path("\0")):
                with pytest.raises(SnapshotUnusable, match="expected a directory with"):
                    await sampler.sample(ask(snapshot))
            assert engine.versions == {} and engine.loads == []

    run_simulated(main())


def test_an_engine_that_cannot_serve_snapshots_is_refused_in_a_sentence() -> None:
    async def main() -> None:
        with pytest.raises(EngineUnavailable, match="the server engine serves versions of one shape"):
            async with sampling(make=ServerEngine):
                pass

    run_simulated(main())
