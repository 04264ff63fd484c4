"""``headrace bench vllm_stream``, small: both sides say the same tokens, and the figures fit each other."""

from __future__ import annotations

import importlib.util
import json
import os
from typing import Any

import pytest

from benchmarks._jobs import BenchmarkFailed
from benchmarks.vllm import vllm_stream
from benchmarks.vllm._vllm import GROUP, Work
from benchmarks.vllm.vllm_stream import equal_fraction

WORK = Work(streams=8, tokens=3)


def samples(**changes: Any) -> list[list[list[int]]]:
    one_round = [[1, 2, 3] for _ in range(8)]
    for row, tokens in changes.items():
        one_round[int(row[1:])] = tokens
    return [one_round]


def test_samples_are_compared_token_by_token() -> None:
    assert equal_fraction(WORK, samples(), samples()) == 1.0
    assert equal_fraction(WORK, samples(), samples(r3=[1, 2, 4], r5=[0, 0, 0])) == 0.75


def test_a_sample_that_came_short_or_not_at_all_is_no_measurement() -> None:
    with pytest.raises(BenchmarkFailed, match="not all of 3 tokens"):
        equal_fraction(WORK, samples(), samples(r7=[1, 2]))
    with pytest.raises(BenchmarkFailed, match="7 samples came"):
        equal_fraction(WORK, samples(), [samples()[0][:7]])


def test_every_round_has_prompts_of_its_own_and_as_many_as_there_are_groups() -> None:
    first, second = Work(streams=24).prompts(0), Work(streams=24).prompts(1)
    assert len(first) == 24 // GROUP
    assert (first[0] != second[0]).any() and (first[0] == Work(streams=24).prompts(0)[0]).all()


@pytest.mark.parametrize("wrong", [["--streams", "12"], ["--streams", "0"], ["--hidden", "96"]])
def test_a_number_that_does_not_divide_is_named_with_what_was_expected(wrong: list[str]) -> None:
    with pytest.raises(SystemExit, match=f"{wrong[0]} {wrong[1]}: expected a multiple of"):
        vllm_stream.main(wrong)


@pytest.mark.long
@pytest.mark.vllm
@pytest.mark.timeout(400)
def test_bench_vllm_stream_has_the_tokens_of_async_llm_in_the_journal_and_prints_both_speeds(
    capsys: pytest.CaptureFixture[str],
) -> None:
    if importlib.util.find_spec("vllm") is None and os.environ.get("HEADRACE_REQUIRE_VLLM") != "1":
        pytest.skip("vLLM is not installed; `make vllm` adds it, HEADRACE_REQUIRE_VLLM=1 makes this a failure")
    arguments = ["--streams", "16", "--tokens", "16", "--rounds", "2", "--hidden", "64", "--layers", "2"]
    assert vllm_stream.main(["--json", *arguments]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["equal_samples"] == 1.0
    assert len(found["ratios"]) == 2 and min(found["ratios"]) <= found["ratio"] <= max(found["ratios"])
    assert found["tokens_per_second"] > 0 and found["async_llm_tokens_per_second"] > 0
    assert found["worker_cpu_us_per_token"] > 0 and found["vllm_cpu_us_per_token"] > found["worker_cpu_us_per_token"]
