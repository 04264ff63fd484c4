"""How far a phase is, how long the rest takes, and where the reward goes, in words."""

from __future__ import annotations

import pytest

from supervisors.cli.running.outlook import PhaseProgress, duration, seconds_left, trend


def phase(done: int, total: int = 900, unit: str = "steps") -> dict[str, object]:
    return {"phase": "making the model", "phase_done": done, "phase_total": total, "phase_unit": unit}


def test_a_phase_tells_every_tenth_once_and_how_long_the_rest_takes() -> None:
    progress = PhaseProgress()
    lines: list[str | None] = []
    for done in range(0, 901, 10):
        progress.update(phase(done), now_s=100.0 + done / 50)
        lines.append(progress.line())
        if done == 450:
            assert progress.left() == "9 s left"
    said = [line for line in lines if line is not None]
    assert len(said) == 11
    assert said[1] == "making the model: 90 of 900 steps"
    progress.update({"phase": ""}, now_s=120.0)
    assert (progress.name, progress.line()) == ("", None)


def test_bytes_are_told_in_the_size_that_fits_the_whole() -> None:
    progress = PhaseProgress()
    progress.update(phase(1_000_000, 30_000_000, "bytes"), 0.0)
    assert progress.line() == "making the model: 1.0 of 30.0 MB"
    progress.update(phase(1_500_000_000, 3_000_000_000, "bytes"), 1.0)
    assert progress.line() == "making the model: 1.50 of 3.00 GB"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (119, "119 s"), (120, "2 min"), (7200, "2.0 h"), (200_000, "2.3 d")]
)
def test_a_duration_has_one_unit(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_the_rest_of_a_run_is_as_long_as_its_last_steps_say_and_unknown_before_the_first() -> None:
    assert seconds_left([], 0, 150) is None
    assert seconds_left([1.0, 2.0, 30.0], 140, 150) == 20.0
    assert seconds_left([1.0], 150, 150) == 0.0


def test_the_trend_compares_the_last_steps_with_the_first_ones() -> None:
    assert trend([0.5] * 19) == ""
    assert trend([0.3] * 10 + [0.5] * 10) == "↗ +0.200 in 20 steps"
    assert trend([0.5] * 10 + [0.3] * 15) == "↘ -0.200 in 25 steps"
    assert trend([0.5] * 30) == "→ +0.000 in 30 steps"
