"""``headrace bench train_memory``, small: both ways agree, and what it makes of their figures."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.gpu import train_memory
from benchmarks.gpu._head_memory import measure

SMALL: dict[str, Any] = {"device": "cpu", "tokens": 64, "vocabulary": 500, "hidden": 16}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_both_ways_come_to_the_same_sums(dtype: str) -> None:
    whole, blocks = (measure({**SMALL, "way": way, "dtype": dtype}) for way in ("whole", "blocks"))
    assert train_memory.compared(whole, blocks)["apart"] <= train_memory.APART_MAX[dtype]
    assert blocks["gradients"][1] > 0 and blocks["cpu_s"] >= 0


def test_goals_that_are_missed_are_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    bytes_of = {("whole", 64): 1000, ("blocks", 64): 500, ("blocks", 256): 600}
    asked: list[tuple[str, str, int]] = []

    def one(command: list[str]) -> str:
        job = json.loads(command[-1])
        asked.append((job["way"], job["dtype"], job["tokens"]))
        found = {"added_bytes": bytes_of[job["way"], job["tokens"]], "seconds": 1.0, "cpu_s": 2.0}
        return json.dumps({**found, "logprobs": -1.0, "gradients": [1.0, 2.0]})

    monkeypatch.setattr(train_memory, "last_line", one)
    assert train_memory.main(["--tokens=64", "--json", "--check"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert (result["float32"]["ratio"], result["bfloat16"]["time_ratio"], result["growth"]["share"]) == (0.5, 1.0, 0.2)
    assert result["missed"] == [
        "float32: 0.5 of the memory of whole logits, the goal is 0.35",
        "memory grows by 0.2 of itself, the goal is 0.05",
    ]
    assert len(asked) == 5 and asked[-1] == ("blocks", "bfloat16", 256)
