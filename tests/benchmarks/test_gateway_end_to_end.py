"""``headrace bench gateway``, small: both sides say the same tokens, and ours costs less a token."""

from __future__ import annotations

import importlib.util
import json
import os

import pytest

from benchmarks.vllm import gateway
from benchmarks.vllm.gateway import Load


def test_every_question_is_another_and_the_same_in_each_round() -> None:
    load = Load()
    first = [load.question(episode, turn)["content"] for episode in range(3) for turn in range(3)]
    assert len(set(first)) == 9
    assert first == [load.question(episode, turn)["content"] for episode in range(3) for turn in range(3)]


@pytest.mark.vllm
@pytest.mark.long
@pytest.mark.timeout(400)
def test_bench_gateway_prints_what_a_token_costs_on_both_sides(capsys: pytest.CaptureFixture[str]) -> None:
    if importlib.util.find_spec("vllm") is None and os.environ.get("HEADRACE_REQUIRE_VLLM") != "1":
        pytest.skip("vLLM is not installed; `make vllm` adds it, HEADRACE_REQUIRE_VLLM=1 makes this a failure")
    arguments = ["--episodes", "4", "--turns", "2", "--tokens", "32", "--rounds", "2"]
    assert gateway.main(["--json", *arguments]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["cpu_us_per_token"] > 0 and found["vllm_cpu_us_per_token"] > 0
    assert len(found["ratios"]) == 2
    assert found["ratio"] < 1
