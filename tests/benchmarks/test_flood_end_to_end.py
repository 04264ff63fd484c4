"""``headrace bench flood``, short: strangers come in numbers, the head does not grow, and its friend is answered."""

from __future__ import annotations

import json

import pytest

from benchmarks.data_plane import flood


@pytest.mark.long
@pytest.mark.timeout(300)
def test_bench_flood_holds_a_head_against_strangers_and_asks_it_meanwhile(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(flood, "_SETTLE_S", 0.5)
    assert flood.main(["--json", "--seconds", "3", "--only", "frames,connections,messages", "--check"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["floods"]) == {"frames", "connections", "messages"}
    for kind, each in found["floods"].items():
        assert each["came"] > 0 and each["failed"] == 0, kind
        assert each["while"]["answers"] > 0 and each["growth_mib"] < flood.GROWTH_GOAL_MIB, kind
    assert found["floods"]["connections"]["while"]["fds"] < 3000, "strangers that only wait are few"


def test_a_head_that_grows_or_leaves_its_friend_without_an_answer_is_told() -> None:
    result = {"failed": 2, "floods": {"frames": {"growth_mib": 1000.0}, "garbage": {"growth_mib": 1.0}}}
    told = flood.missed(result)
    assert told == ["frames: 1000.0 MiB more, the goal is 128", "2 questions of the friend were not answered"]


def test_a_flood_of_an_unknown_kind_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        flood.main(["--only", "rain"])
    assert "there is no 'rain'; expected some of garbage" in capsys.readouterr().err
