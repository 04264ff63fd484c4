"""Token streams beside vLLM's own server: events are read right, CPU is added up right, and once for real, small."""

from __future__ import annotations

import importlib.util
import json
import os
import sys

import pytest

from benchmarks.peers import vllm_stream
from benchmarks.peers._vllm_server import body, read_completion, read_generated
from benchmarks.vllm._vllm import Work

WORK = Work(streams=8, tokens=125)
"""A thousand tokens: a millisecond of CPU is a microsecond a token."""


def test_both_kinds_of_event_give_tokens_with_their_log_probabilities() -> None:
    openai = {"id": "x", "choices": [{"text": "ab", "token_ids": [5, 6], "logprobs": {"token_logprobs": [-0.5, -1.5]}}]}
    content = [{"token_id": 5, "logprob": -0.5, "rank": 1}, {"token_id": 6, "logprob": -1.5, "rank": 2}]
    own = {"choices": [{"index": 0, "token_ids": [5, 6], "logprobs": {"content": content}}]}
    expected = ([5, 6], [-0.5, -1.5])
    assert read_completion(json.dumps(openai).encode()) == expected
    assert read_generated(json.dumps(own).encode()) == expected


@pytest.mark.parametrize("endpoint", ["completions", "generate"])
def test_each_sample_is_asked_for_with_log_probabilities_and_all_of_its_tokens(endpoint: str) -> None:
    asked = body(endpoint, WORK, 3, [7, 8])
    sampling = asked.get("sampling_params", asked)
    assert asked["stream"] is True and [7, 8] in asked.values()
    assert (sampling["max_tokens"], sampling["logprobs"], sampling["ignore_eos"]) == (125, 0, True)
    assert "seed" not in sampling
    warm = body(endpoint, Work(temperature=1.0), 3, [7])
    assert warm.get("sampling_params", warm)["seed"] == 3


def test_the_engines_own_time_is_left_out_on_both_sides_and_the_cheaper_way_counts() -> None:
    mine = [{"seconds": 1.0, "collector_cpu_s": 0.002, "worker_cpu_s": 0.003, "vllm_cpu_s": 9.0}]
    cheap = [{"seconds": 1.0, "server_cpu_s": 0.04, "client_cpu_s": 0.02, "engine_cpu_s": 9.0}]
    dear = [{"seconds": 1.0, "server_cpu_s": 0.09, "client_cpu_s": 0.02, "engine_cpu_s": 1.0}]
    found = vllm_stream.figures(WORK, mine, {"completions": dear, "generate": cheap})
    assert found["cpu_us_per_token"] == pytest.approx(5.0)
    assert found["peer_cpu_us_per_token"] == pytest.approx(60.0)
    assert (found["endpoint"], found["times_cpu"]) == ("generate", 12.0)


def test_an_environment_without_vllm_is_refused_with_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert vllm_stream.main(["--python", "/bin/false"]) == 2
    assert "make vllm" in capsys.readouterr().err


@pytest.mark.vllm
@pytest.mark.long
@pytest.mark.timeout(400)
def test_the_server_and_a_worker_say_the_same_tokens_and_both_costs_are_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    if importlib.util.find_spec("vllm") is None and os.environ.get("HEADRACE_REQUIRE_VLLM") != "1":
        pytest.skip("vLLM is not installed; `make vllm` adds it, HEADRACE_REQUIRE_VLLM=1 makes this a failure")
    arguments = ["--streams", "16", "--tokens", "16", "--rounds", "1", "--hidden", "64", "--layers", "2"]
    assert vllm_stream.main(["--json", "--python", sys.executable, *arguments]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["equal_samples"] == {"completions": 1.0, "generate": 1.0}
    assert found["times_cpu"] == pytest.approx(found["peer_cpu_us_per_token"] / found["cpu_us_per_token"], rel=0.02)
    assert found["cpu_us_per_token"] > 0 and found["peer_cpu_us_per_token"] > 0
