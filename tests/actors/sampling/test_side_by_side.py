"""A sampler whose engine holds adapters, in virtual time: what shares a turn, who gets a slot, and how much is held."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.models.adapter import AdapterSpec
from actors.rollout.engine import GenerationRequest, PromptScores, StepOutput
from actors.rollout.engines.simulated_engine import SimulatedEngine
from actors.rollout.errors import WeightsMismatch
from actors.sampling.errors import BadSampleRequest, SnapshotUnusable
from actors.sampling.sampler import SnapshotSampler
from configs.limits import Limits
from tests.actors.sampling.sampling_world import ask, sampling
from tests.made_snapshots import write_adapter
from tests.simulated import run_simulated
from tests.tiny_checkpoint import make_tiny_checkpoint


@pytest.fixture(scope="module")
def snapshots(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Six adapters of one size, and at the end a whole model."""
    root = tmp_path_factory.mktemp("snapshots")
    base = make_tiny_checkpoint(root / "base")
    made = [write_adapter(root / str(n), base, rank=2, seed=n) for n in range(6)]
    return [*made, make_tiny_checkpoint(root / "whole", seed=4)]


class HoldingEngine(SimulatedEngine):
    """Holds adapters, refuses the number ``refuses``, and notes what it holds and computes."""

    holds_adapters = True

    def __init__(self, refuses: int = 0) -> None:
        super().__init__()
        self.refuses = refuses
        self.held: dict[int, int] = {}
        self.most_bytes = 0
        self.of: dict[int, int] = {}
        self.batches: list[list[int]] = []
        self.loads: list[int] = []
        self.scored: list[int] = []

    async def add_adapter(self, number: int, tensors: Any, dtypes: Mapping[str, str], spec: AdapterSpec) -> None:
        assert number not in self.held
        if number == self.refuses:
            raise WeightsMismatch("it does not fit")
        self.held[number] = sum(array.nbytes for array in tensors.values())
        self.most_bytes = max(self.most_bytes, sum(self.held.values()))

    async def drop_adapter(self, number: int) -> None:
        assert number not in {self.of[one] for one in self._running}, "sequences of it run"
        del self.held[number]

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        assert all(one.adapter in {0, *self.held} for one in requests)
        self.of |= {one.request: one.adapter for one in requests}
        super().add(requests)

    async def step(self) -> StepOutput:
        output = await super().step()
        self.batches.append(sorted(self.of[one] for one in output.requests.tolist()))
        return output

    async def score(self, prompt: np.ndarray, top_k: int, adapter: int = 0) -> PromptScores:
        assert adapter in {0, *self.held}
        self.scored.append(adapter)
        return await super().score(prompt, top_k)

    async def load_adapter(self, tensors: Any, dtypes: Any, policy_version: int, spec: Any) -> None:
        assert spec is None, "adapters are held"
        await self.load_model(Path(), policy_version)

    async def load_model(self, directory: Path, policy_version: int) -> None:
        assert not self.has_work
        self.loads.append(policy_version)
        await super().load_model(directory, policy_version)


@asynccontextmanager
async def holding(
    snapshots: list[Path], refuses: int = 0, **options: Any
) -> AsyncIterator[tuple[SnapshotSampler, HoldingEngine]]:
    """A sampler that knows ``snapshots`` by the numbers 1, 2, …, whichever is asked for first, and its engine."""
    engine = HoldingEngine(refuses)
    async with sampling(make=lambda: engine, **options) as sampler:
        for one in snapshots:
            await sampler._snapshots.opened(str(one))
        yield sampler, engine


def test_adapters_and_the_base_share_a_turn_and_a_whole_model_has_its_own(snapshots: list[Path]) -> None:
    async def main() -> None:
        async with holding(snapshots, slots=12) as (sampler, engine):
            both = [sampler.sample(ask(one, max_tokens=20, prompt_logprobs=True)) for one in (None, *snapshots)]
            await asyncio.gather(*both)
            assert [0, 1, 2, 3, 4, 5, 6] in engine.batches and sorted(engine.scored) == [0, 0, 1, 2, 3, 4, 5, 6]
            assert engine.loads == [7], "the whole model's turn came once, and adapters are not loaded"
            await sampler.sample(ask(snapshots[0]))
            assert engine.loads[1:] == [0, 0], "the base comes back, and what was beside it is there still"
            assert len(engine.held) == 6

    run_simulated(main())


def test_a_free_slot_goes_to_the_snapshot_with_the_fewest_running_sequences(snapshots: list[Path]) -> None:
    """Two thousand samples of one client do not keep another's one waiting."""

    async def main() -> None:
        async with holding(snapshots, slots=4) as (sampler, engine):
            crowd = [asyncio.ensure_future(sampler.sample(ask(snapshots[0], max_tokens=3, seed=n))) for n in range(200)]
            await asyncio.sleep(0.1)
            began = len(engine.batches)
            await asyncio.gather(*(sampler.sample(ask(one, max_tokens=3)) for one in (snapshots[1], None)))
            assert len(engine.batches) - began <= 7, "it waits for a slot, and for nothing else"
            assert sum(one.done() for one in crowd) < 40
            for one in crowd:
                one.cancel()

    run_simulated(main())


def test_no_more_adapters_are_held_than_memory_is_for_and_busy_ones_stay(snapshots: list[Path]) -> None:
    async def main() -> None:
        async with holding(snapshots) as (sampler, engine):
            await sampler.sample(ask(snapshots[0]))
            [one_bytes] = engine.held.values()
        limits = Limits(sampling_memory_bytes=2 * one_bytes + one_bytes // 2)
        async with holding(snapshots, slots=8, limits=limits) as (sampler, engine):
            lasting = asyncio.ensure_future(sampler.sample(ask(snapshots[0], max_tokens=80)))
            await asyncio.sleep(0.05)
            rest = [sampler.sample(ask(one, max_tokens=3 + n)) for n in range(3) for one in snapshots[:6]]
            await asyncio.gather(*rest)
            assert not lasting.done() and 1 in engine.held
            await lasting
            assert engine.most_bytes == 2 * one_bytes
            assert max(len(set(batch)) for batch in engine.batches) == 2
        async with holding(snapshots, limits=Limits(sampling_memory_bytes=1)) as (sampler, engine):
            await asyncio.gather(*(sampler.sample(ask(one)) for one in snapshots[:3]))
            assert engine.most_bytes == one_bytes, "one is served, however large it is"

    run_simulated(main())


def test_an_adapter_that_the_engine_refuses_fails_its_own_requests_alone(snapshots: list[Path]) -> None:
    async def main() -> None:
        async with holding(snapshots, refuses=2) as (sampler, engine):
            for _ in range(2):
                calls = [asyncio.ensure_future(sampler.sample(ask(one, samples=2))) for one in snapshots[:3]]
                assert len((await calls[0]).sequences) == len((await calls[2]).sequences) == 2
                with pytest.raises(SnapshotUnusable, match="cannot be served: it does not fit"):
                    await calls[1]
            assert sorted(engine.held) == [1, 3]

    run_simulated(main())


def test_a_caller_that_leaves_ends_its_sequences_and_its_adapter_can_go(snapshots: list[Path]) -> None:
    async def main() -> None:
        async with holding(snapshots, limits=Limits(sampling_memory_bytes=1)) as (sampler, engine):
            gone = asyncio.ensure_future(sampler.sample(ask(snapshots[0], samples=3, max_tokens=90)))
            await asyncio.sleep(0.05)
            other = asyncio.ensure_future(sampler.sample(ask(snapshots[1])))
            await asyncio.sleep(0.1)
            assert sorted(engine.held) == [1], "there is no room for the other"
            gone.cancel()
            assert len((await other).sequences) == 1
            assert sorted(engine.held) == [2]

    run_simulated(main())


def test_the_likeliest_tokens_of_a_sequence_are_refused_where_the_engine_tells_none(snapshots: list[Path]) -> None:
    async def main() -> None:
        async with holding(snapshots) as (sampler, _):
            with pytest.raises(BadSampleRequest, match="top_logprobs is 2: expected 0, since this engine tells none"):
                await sampler.sample(ask(snapshots[0], top_logprobs=2))

    run_simulated(main())
