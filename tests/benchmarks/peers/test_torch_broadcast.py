"""Weights beside what others do: medians and ratios are the right way round, and once for real, small, without Ray."""

from __future__ import annotations

import json

import pytest

from benchmarks.peers import torch_broadcast
from benchmarks.peers.torch_broadcast import figures, places


def rounds(*all_s: float, stall_s: float = 0.5) -> list[dict[str, float]]:
    return [{"all_s": seconds, "stall_s": stall_s} for seconds in all_s]


def test_the_first_round_does_not_count_and_others_stand_beside_pullers_of_the_same_place() -> None:
    found = {
        "same_machine": rounds(9.0, 1.0, 1.0),
        "one_other_machine": rounds(9.0, 2.0, 2.0),
        "each_its_machine": rounds(9.0, 4.0, 4.0),
        "gloo": rounds(90.0, 8.0, 8.0, stall_s=8.0),
        "ray": rounds(90.0, 3.0, 3.0),
    }
    ways = figures(found, 2_000_000_000, 4)["ways"]
    assert ways["each_its_machine"]["gb_per_second"] == 2.0
    assert (ways["gloo"]["times"], ways["gloo"]["times_stall"]) == (2.0, 16.0)
    assert ways["ray"]["times"] == 3.0
    assert "times" not in ways["same_machine"] and "checkpoint_http" not in ways


def test_only_pullers_of_the_trainers_machine_may_map() -> None:
    assert places(2) == {
        "same_machine": ["", ""],
        "one_other_machine": ["other", "other"],
        "each_its_machine": ["machine-0", "machine-1"],
    }


@pytest.mark.long
@pytest.mark.timeout(300)
def test_every_way_brings_the_bytes_to_all_and_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert torch_broadcast.main(["--json", "--bytes", "2000000", "--pullers", "2", "--rounds", "1"]) == 0
    found = json.loads(capsys.readouterr().out)
    ways = found["ways"]
    assert set(ways) == {*places(2), "gloo", "checkpoint_http"}
    assert all(row["ms"] >= row["trainer_stall_ms"] > 0 for row in ways.values())
    assert ways["gloo"]["times"] == pytest.approx(ways["gloo"]["ms"] / ways["each_its_machine"]["ms"], abs=0.02)
    assert found["versions"]["torch"]
