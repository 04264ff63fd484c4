"""What the vLLM engine makes of vLLM's outputs, and of its process groups; needs no vLLM."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from actors.protocol.tokens import FinishReason
from actors.protocol.work import SamplingParams
from actors.rollout.engine import EngineSpec, GenerationRequest, StepOutput
from actors.rollout.engines.vllm.core import CoreRows, VllmCore, rows_of
from actors.rollout.engines.vllm.engine import VllmEngine
from actors.rollout.engines.vllm.setup import groups_over_streams
from actors.rollout.errors import EngineError


def output(
    core_id: str, tokens: list[int], logprobs: list[float], reason: str | None = None,
    begun: tuple[int, int] | None = None,
) -> Any:  # fmt: skip
    """As vLLM's EngineCoreOutput; beside the drawn token's log-probability stands that of another one."""
    scores = None if not tokens else SimpleNamespace(logprobs=np.array([[p, -9.0] for p in logprobs], np.float32))
    stats = None if begun is None else SimpleNamespace(num_computed_tokens=begun[0], num_cached_tokens=begun[1])
    return SimpleNamespace(
        request_id=core_id, new_token_ids=tokens, new_logprobs=scores, finish_reason=reason, prefill_stats=stats
    )


def test_a_step_is_columns_whatever_number_of_tokens_each_request_has_gained() -> None:
    rows = rows_of([output("a", [1, 2], [-0.5, -1]), output("b", [], [], "length"), output("c", [3], [-2], "stop")])
    assert rows.core_ids == ["a", "b", "c"]
    assert rows.tokens == [[1, 2], [], [3]]
    assert rows.logprobs.tolist() == [-0.5, -1.0, -2.0] and rows.logprobs.dtype == np.float32
    assert rows.ended == {"b": "length", "c": "stop"}


def test_a_step_says_what_was_computed_of_those_that_have_begun_and_what_the_prefix_cache_had() -> None:
    rows = rows_of(
        [output("a", [1], [-1], begun=(40, 0)), output("b", [2], [-1], begun=(8, 32)), output("c", [3], [-1])]
    )
    assert (rows.prefilled_tokens, rows.prefix_hit_tokens) == (48, 32)


def test_a_step_without_outputs_has_no_rows() -> None:
    rows = rows_of([])
    assert (rows.core_ids, rows.tokens, rows.ended, len(rows.logprobs)) == ([], [], {}, 0)


def test_an_end_that_nobody_asked_for_is_an_error_that_names_the_request() -> None:
    with pytest.raises(EngineError, match="request b with 'error'"):
        rows_of([output("a", [1], [-1]), output("b", [2], [-1], "error")])


class Scripted:
    """In the place of vLLM: a core whose steps are given."""

    vocabulary, context_tokens = 100, 64

    def __init__(self, *steps: CoreRows) -> None:
        self._steps = list(steps)
        self._begun = 0
        self.during: dict[int, Callable[[], None]] = {}
        """What happens in which step, counted from one."""

    def submit(self, core_id: str, *_: Any, **__: Any) -> None: ...

    def step(self) -> CoreRows:
        self._begun += 1
        self.during.get(self._begun, lambda: None)()
        return self._steps.pop(0)

    def gauges(self) -> tuple[int, int, float]:
        return 0, 0, 0.0

    def close(self) -> None: ...


def request(number: int, prompt: list[int], generated: list[int]) -> GenerationRequest:
    return GenerationRequest(
        request=number, prompt=0, sibling=0, prompt_ids=np.array(prompt, np.int32),
        generated=np.array(generated, np.int32), sampling=SamplingParams(max_tokens=16),
    )  # fmt: skip


async def scripted(monkeypatch: pytest.MonkeyPatch, core: Scripted, *, step_ms: object) -> VllmEngine:
    """One that has started, over ``core``."""
    monkeypatch.setattr(VllmEngine, "_build", lambda self, _: setattr(self, "_core", core))
    engine = VllmEngine()
    await engine.start(EngineSpec(model_path=Path("unused"), options={"step_ms": step_ms}))
    return engine


async def test_rows_of_a_step_go_on_where_their_sequences_end_and_what_has_ended_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    core = Scripted(
        CoreRows(["7.1", "9.2"], [[1, 2], [3]], np.array([-1, -2, -3], np.float32), {}),
        CoreRows(["9.2", "7.1"], [[4], [5]], np.array([-4, -5], np.float32), {"9.2": "stop", "7.1": "length"}),
    )
    engine = await scripted(monkeypatch, core, step_ms=0)
    engine.add([request(7, [5, 6], [8]), request(9, [5], [])])
    first, second = await engine.step(), await engine.step()
    assert first.requests.tolist() == [7, 9]
    assert (first.offsets.tolist(), first.counts.tolist()) == ([1, 0], [2, 1])
    assert first.finished.tolist() == [FinishReason.RUNNING] * 2
    assert (first.tokens.tolist(), first.logprobs.tolist()) == ([1, 2, 3], [-1, -2, -3])
    assert (second.requests.tolist(), second.offsets.tolist()) == ([9, 7], [1, 3])
    assert second.finished.tolist() == [FinishReason.STOP, FinishReason.LENGTH]
    assert not engine.has_work
    await engine.close()


async def test_a_step_that_may_go_on_does_so_until_something_ends_and_has_one_row_a_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    core = Scripted(
        CoreRows(["9.2"], [[3]], np.array([-3], np.float32), {}),
        CoreRows(["9.2", "7.1"], [[4], [1]], np.array([-4, -1], np.float32), {}),
        CoreRows(["9.2", "7.1"], [[], [2, 6]], np.array([-2, -6], np.float32), {"9.2": "length"}),
        CoreRows(["7.1"], [[8]], np.array([-8], np.float32), {"7.1": "stop"}),
    )
    engine = await scripted(monkeypatch, core, step_ms=1e6)
    engine.add([request(7, [5, 6], [8]), request(9, [5], [])])
    first, second = await engine.step(), await engine.step()
    assert rows_by_request(first) == {
        7: (1, [1, 2, 6], [-1, -2, -6], FinishReason.RUNNING),
        9: (0, [3, 4], [-3, -4], FinishReason.LENGTH),
    }
    assert rows_by_request(second) == {7: (4, [8], [-8], FinishReason.STOP)}
    assert not engine.has_work
    await engine.close()


async def test_a_step_that_may_go_on_ends_behind_the_core_step_in_which_somebody_came(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def rows(token: int) -> CoreRows:
        return CoreRows(["7.1"], [[token]], np.array([-1], np.float32), {"7.1": "stop"} if token == 5 else {})

    core = Scripted(*map(rows, range(1, 6)))
    engine = await scripted(monkeypatch, core, step_ms=1e6)
    engine.add([request(7, [5, 6], [])])
    core.during[2] = engine.hurry
    engine.hurry()  # before a step: nobody has to wait for one
    first, second = await engine.step(), await engine.step()
    assert (first.tokens.tolist(), second.tokens.tolist()) == ([1, 2], [3, 4, 5])
    await engine.close()


def rows_by_request(output: StepOutput) -> dict[int, tuple[int, list[int], list[float], int]]:
    """Offset, tokens, log-probabilities and finish reason of each; one row a request."""
    starts = np.cumsum(output.counts) - output.counts
    assert len(set(output.requests.tolist())) == len(output.requests)
    columns = (output.requests, output.offsets, starts, output.counts, output.finished)
    found: dict[int, tuple[int, list[int], list[float], int]] = {}
    for number, offset, start, count, finished in zip(*(column.tolist() for column in columns), strict=True):
        of = slice(start, start + count)
        found[number] = (offset, output.tokens[of].tolist(), output.logprobs[of].tolist(), finished)
    return found


@pytest.mark.parametrize("step_ms", ["16", -1, float("nan"), True])
async def test_a_step_that_is_no_length_of_time_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, step_ms: object
) -> None:
    with pytest.raises(EngineError, match=r"rollout\.engine_options\.step_ms is .*: expected milliseconds"):
        await scripted(monkeypatch, Scripted(), step_ms=step_ms)


@pytest.mark.skipif(sys.platform != "linux", reason="listeners are looked up in /proc")
def test_groups_that_vllm_asks_of_gloo_listen_nowhere_have_no_threads_and_only_while_they_are_asked_for(
    tmp_path: Path,
) -> None:
    distributed = pytest.importorskip("torch.distributed")
    usual, before = (distributed.init_process_group, distributed.new_group), threads()
    with groups_over_streams(tmp_path):
        distributed.init_process_group(
            backend="gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
        )
        try:
            group = distributed.new_group([0], backend="gloo")
            assert distributed.get_world_size(group) == 1
            assert threads() == before
        finally:
            distributed.destroy_process_group()
    assert (distributed.init_process_group, distributed.new_group) == usual


def threads() -> int:
    """Of this process, all of them: a thread of gloo has its name only a moment after it is there."""
    return len(list(Path("/proc/self/task").iterdir()))


def test_each_time_that_the_scheduler_sets_a_request_aside_is_counted_once() -> None:
    requests = {"a": SimpleNamespace(num_preemptions=1), "b": SimpleNamespace(num_preemptions=0)}
    core: Any = SimpleNamespace(_core=SimpleNamespace(scheduler=SimpleNamespace(requests=requests)), _set_aside={})
    assert [VllmCore._preemptions(core) for _ in range(2)] == [1, 0]
    requests["a"].num_preemptions, requests["b"].num_preemptions = 2, 2
    assert VllmCore._preemptions(core) == 3
    del requests["a"]
    assert VllmCore._preemptions(core) == 0, "one that has ended takes nothing back"
