"""The leader and a follower of a tensor parallel vLLM engine, both in this process, over scripted cores; needs no vLLM.

What torch.distributed does between ranks, two threads do here.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.protocol.weights import Manifest
from actors.ranks.errors import RankLost
from actors.rollout.engine import EngineSpec, GenerationRequest
from actors.rollout.engines.vllm import ranks
from actors.rollout.engines.vllm.core import CoreRows
from actors.rollout.engines.vllm.engine import VllmEngine
from actors.rollout.engines.vllm.follower import VllmFollower
from actors.rollout.engines.vllm.leader import LeadingEngine
from actors.rollout.engines.vllm.orders import EngineLoad, as_file, read
from actors.rollout.errors import EngineUnavailable, ModelUnreadable, WeightsMismatch
from actors.weights.manifest import SegmentViews, layout
from configs.limits import DEFAULT_LIMITS
from tests.actors.rollout.engines.test_vllm_rows import request

SPEC = EngineSpec(model_path=Path("unused"), tensor_parallel=2, options={"step_ms": 1e6})
WEIGHTS = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.arange(4, dtype=np.uint16)}
DTYPES = {"a": "float32", "b": "bfloat16"}
EVERY_S = 10.0
"""Nothing here takes as long."""


class Core:
    """In the place of vLLM: draws a token after the other for each sequence, and writes down what it was told."""

    vocabulary, context_tokens, adapters, on_cpu = 100, 64, None, True

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.running: list[str] = []
        self.drawn = 0
        self.other_by = 0
        self.during: dict[int, Callable[[], None]] = {}
        """What happens in which step, counted from one."""
        self.fails = False

    def submit(self, core_id: str, token_ids: list[int], *_: Any, **how: Any) -> None:
        self.told.append(("submit", core_id, token_ids, how["salt"]))
        self.running.append(core_id)

    def drop(self, core_ids: Sequence[str]) -> None:
        self.told.append(("drop", list(core_ids)))
        self.running = [core_id for core_id in self.running if core_id not in core_ids]

    def step(self) -> CoreRows:
        self.drawn += 1
        self.told.append("step")
        self.during.get(self.drawn, lambda: None)()
        tokens = [[(self.drawn + self.other_by) % 100] for _ in self.running]
        return CoreRows(list(self.running), tokens, np.full(len(tokens), -1, np.float32), {})

    def load(self, tensors: Any, *, name: str, can_undo: bool, all_agree: Callable[[bool], bool]) -> None:
        self.told.append(("load", name, can_undo, {key: array.tolist() for key, array in tensors.items()}))
        if not all_agree(not self.fails):
            raise RuntimeError("not in every rank")

    def not_begun(self, core_id: str) -> bool:
        return False

    def release_kv_cache(self) -> None:
        self.told.append("release")

    def restore_kv_cache(self) -> None:
        self.told.append("restore")

    def gauges(self) -> tuple[int, int, float]:
        return 0, 0, 0.0

    def close(self) -> None: ...


class Expected:
    def check(self, tensors: Any, dtypes: Any) -> None:
        if dtypes != DTYPES:
            raise WeightsMismatch("others")


class Pair:
    """Implements ``Followers`` with one, and stands for torch.distributed between it and the leader."""

    count = 1

    def __init__(self, follower: VllmFollower) -> None:
        self.follower = follower
        self.answers: Callable[[bytes], bytes] = lambda answer: answer
        self.lost_in: set[int] = set()
        self.calls = 0
        self.ended = False
        """Whether the last answer would not have waited for those of further ranks."""
        self._said: queue.Queue[bool] = queue.Queue()
        self._votes: list[bool] = []
        self._all_have_voted = threading.Barrier(2)

    async def call(
        self, orders: Sequence[bytes], *, timeout_s: float, ends: Callable[[bytes], bool] | None = None
    ) -> list[bytes]:
        self.calls += 1
        assert timeout_s > 0
        if self.calls in self.lost_in:
            raise RankLost("rank 1 is gone")
        answers = [self.answers(await self.follower.serve(order)) for order in orders]
        self.ended = ends is not None and ends(answers[0])
        return answers

    async def close(self) -> None:
        await self.follower.close()

    def goes_on(self, decision: bool | None) -> bool:
        if decision is None:
            return self._said.get(timeout=EVERY_S)
        self._said.put(decision)
        return decision

    def all_agree(self, well: bool) -> bool:
        self._votes.append(well)
        self._all_have_voted.wait(EVERY_S)
        return all(self._votes[-2:])


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> dict[bool, Core]:
    """Cores of the leader (True) and of the follower."""
    made = {True: Core(), False: Core()}

    def build(self: VllmEngine, _: EngineSpec) -> None:
        self._expected = Expected()  # type: ignore[assignment]
        self._core = made[isinstance(self, LeadingEngine)]  # type: ignore[assignment]

    monkeypatch.setattr(VllmEngine, "_build", build)
    return made


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch, cores: dict[bool, Core]) -> Pair:
    pair = Pair(VllmFollower(1, 2))
    monkeypatch.setattr(ranks, "goes_on", pair.goes_on)
    monkeypatch.setattr(ranks, "all_agree", pair.all_agree)
    return pair


async def started(pair: Pair) -> LeadingEngine:
    engine = LeadingEngine(pair, DEFAULT_LIMITS)
    await engine.start(SPEC)
    return engine


def asked(number: int) -> GenerationRequest:
    return request(number, [5, 6], [7])


async def test_a_follower_makes_the_leaders_calls_in_its_order_and_the_leader_alone_says_when_a_step_ends(
    pair: Pair, cores: dict[bool, Core]
) -> None:
    engine = await started(pair)
    cores[True].during = {3: engine.hurry, 5: engine.hurry, 6: engine.hurry}  # the follower's would go on for long
    engine.add([asked(1), asked(2)])
    first = await engine.step()
    assert first.counts.tolist() == [3, 3]
    engine.abort([1])
    engine.add([asked(3)])
    second = await engine.step()
    assert dict(zip(second.requests.tolist(), second.counts.tolist(), strict=True)) == {1: 0, 2: 2, 3: 2}
    await engine.load_weights(WEIGHTS, DTYPES, 4, in_flight="recompute")
    await engine.sleep(1)
    await engine.wake()
    await engine.step()
    told = cores[True].told
    assert cores[False].told == told and told.count("step") == 6
    assert ("load", "4.1", True, {key: array.tolist() for key, array in WEIGHTS.items()}) in told
    assert told.index("release") < told.index("restore")
    assert engine.policy_version == 4
    await engine.close()


async def test_a_rank_that_draws_other_tokens_ends_the_engine(pair: Pair, cores: dict[bool, Core]) -> None:
    engine = await started(pair)
    cores[True].during = {1: engine.hurry, 2: engine.hurry}
    engine.add([asked(1)])
    await engine.step()
    cores[False].other_by = 1
    with pytest.raises(RankLost, match="rank 1 has drawn other tokens"):
        await engine.step()
    steps = cores[True].drawn
    with pytest.raises(RankLost):
        await engine.step()
    await engine.close()
    assert cores[True].drawn == steps, "it is over for this rank too"


async def test_a_load_that_fails_in_one_rank_is_refused_by_all_and_the_engine_goes_on(
    pair: Pair, cores: dict[bool, Core]
) -> None:
    engine = await started(pair)
    for unable in (True, False):
        cores[unable].fails = True
        with pytest.raises(WeightsMismatch, match="version 1"):
            await engine.load_weights(WEIGHTS, DTYPES, 1, in_flight="recompute")
        cores[unable].fails = False
    with pytest.raises(WeightsMismatch, match="others"):  # before anything is told
        await engine.load_weights(WEIGHTS, {}, 1, in_flight="recompute")
    assert engine.policy_version == 0
    await engine.load_weights(WEIGHTS, DTYPES, 1, in_flight="recompute")
    cores[True].during = {1: engine.hurry}
    engine.add([asked(1)])
    assert (await engine.step()).policy_version == 1
    await engine.close()


async def test_a_follower_that_is_gone_ends_the_engine_also_while_the_leaders_own_part_waits_for_it(
    pair: Pair, cores: dict[bool, Core]
) -> None:
    engine = await started(pair)
    goes = threading.Event()
    cores[True].during = {1: lambda: (goes.wait(EVERY_S), None)[1]}
    pair.lost_in = {2}
    engine.add([asked(1)])
    async with asyncio.timeout(EVERY_S / 2):
        with pytest.raises(RankLost, match="rank 1 is gone"):
            await engine.step()
        await engine.close()
    goes.set()


async def test_what_keeps_a_follower_from_starting_is_said_as_what_it_is(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unable(self: VllmEngine, _: EngineSpec) -> None:
        if not isinstance(self, LeadingEngine):
            raise ModelUnreadable("no such file")

    monkeypatch.setattr(VllmEngine, "_build", unable)
    with pytest.raises(ModelUnreadable, match="rank 1: no such file"):
        await started(pair)
    assert pair.ended


async def test_as_many_ranks_as_the_job_says_must_be_there(pair: Pair) -> None:
    engine = LeadingEngine(pair, DEFAULT_LIMITS)
    with pytest.raises(EngineUnavailable, match=r"rollout\.tensor_parallel is 1, and 2 ranks are there"):
        await engine.start(EngineSpec(model_path=Path("unused")))
    with pytest.raises(EngineUnavailable, match=r"rollout\.tensor_parallel is 2: no other ranks are here"):
        await VllmEngine().start(SPEC)


def load_of(file: str, entries: Any) -> EngineLoad:
    return EngineLoad(file=file, entries=entries, policy_version=1, in_flight="keep")


def test_weights_are_read_where_they_lie_and_those_that_lie_in_no_file_are_put_into_one_that_goes(
    tmp_path: Path,
) -> None:
    entries, size = layout([(name, DTYPES[name], array.shape) for name, array in WEIGHTS.items()])
    data = bytearray(size)
    for entry in entries:
        data[entry.offset_bytes : entry.offset_bytes + entry.length_bytes] = WEIGHTS[entry.name].tobytes()
    segment = tmp_path / "segment"
    segment.write_bytes(data)
    manifest = Manifest(
        job="j", policy_version=1, parent=0, total_bytes=size, chunk_bytes=size, chunk_hashes=(b"",), tensors=entries
    )
    mapped = SegmentViews(manifest, memoryview(segment.read_bytes()), segment)
    for retired in (False, True):
        if retired:
            segment.unlink()
        for tensors in (mapped, WEIGHTS):
            with as_file(tensors, DTYPES) as (file, where):
                assert (os.path.realpath(file) == str(segment)) == (tensors is mapped and not retired)
                with read(load_of(file, where)) as found:
                    assert {name: array.tolist() for name, array in found.items()} == {
                        name: array.tolist() for name, array in WEIGHTS.items()
                    }
            assert not Path(file).exists()
