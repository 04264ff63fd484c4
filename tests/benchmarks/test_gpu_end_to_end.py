"""``headrace bench gpu``, small and on the CPU: every part has its figures; one that fails takes no other's."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from benchmarks._jobs import BenchmarkFailed
from benchmarks.gpu import gpu


@pytest.mark.long
@pytest.mark.timeout(600)
def test_bench_gpu_measures_each_part_beside_its_peer_or_limit(capfd: pytest.CaptureFixture[str]) -> None:
    assert (
        gpu.main(
            ["--small", "--device", "cpu", "--json", "--parts", "decode,train,weights,sleep,residency,memory,killed"]
        )
        == 0
    )
    told = json.loads(capfd.readouterr().out)
    assert told["decode"]["2_rows"]["ratio"] > 0
    assert told["train"]["siblings"]["loop_tokens_per_second"] > 0
    assert told["weights"]["bytes"] > 0 and told["weights"]["publish_stall_s"] > 0
    assert told["sleep"]["level_1"]["wake_s"] >= 0
    assert told["residency"]["bits_equal"] and told["residency"]["addresses_equal"]
    assert told["residency"]["resume_s"] > 0
    assert told["memory"]["documented"] == 20
    assert (told["killed"]["prompts_lost"], told["killed"]["samples_trained_twice"]) == (0, 0)


def test_a_part_that_fails_appears_with_its_error_beside_the_figures_of_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(command: Sequence[str], *, timeout_s: float) -> str:
        if "train" in command:
            raise BenchmarkFailed("broken")
        return json.dumps({"module": command[2]})

    monkeypatch.setattr(gpu, "last_line", answer)
    monkeypatch.setattr(gpu, "hardware", lambda: {"load_before": 0.0})
    assert gpu.main(["--device", "cpu", "--json", "--parts", "train,sleep,sync"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["train"] == {"error": "broken"}
    assert told["sleep"] == {"module": "benchmarks.gpu._gpu_parts"}
    assert told["sync"] == {"module": "benchmarks.gpu._gpu_jobs"}


def test_an_unknown_part_is_told_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu.main(["--parts", "decode,warp"])
    assert "there is no 'warp'; expected some of decode, train" in capsys.readouterr().err
