"""What a person sees of steps: dropped samples, a dash where nothing was trained, no text that steers a terminal."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from actors.core.terminal_text import harmless
from supervisors.api.step_line import step_line
from supervisors.cli.running.live_view import JobsView, ProgressView

ROW: dict[str, Any] = {
    "step": 1, "reward_mean": 0.5, "samples": 12, "samples_dropped": 4, "seconds": 2.0, "tokens_generated": 9000,
    "response_tokens_mean": 7.25,
}  # fmt: skip
EMPTY: dict[str, Any] = ROW | {
    "step": 2, "reward_mean": None, "samples": 0, "samples_dropped": 16, "response_tokens_mean": None,
}  # fmt: skip


def shown(*progress: dict[str, Any], terminal: bool) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=120, highlight=False)
    with ProgressView(console) as view:
        for news in progress:
            view.update(news)
    return out.getvalue()


def test_a_plain_line_tells_what_was_dropped_and_has_a_dash_where_nothing_was_trained() -> None:
    assert "reward 0.500  dropped 4 of 16  4,500 tokens/s" in step_line(ROW, 8)
    assert "step 1 (2 of 8)  reward –  dropped 16 of 16" in step_line(EMPTY, 8)
    assert "dropped" not in step_line(ROW | {"samples_dropped": 0}, 8)


def test_the_panel_has_a_column_of_drops_and_draws_no_reward_of_an_empty_step() -> None:
    panel = shown(ROW, EMPTY, terminal=True)
    assert "dropped" in panel and "–" in panel and "0.000" not in panel
    assert shown(EMPTY, terminal=True).count("–") >= 3, "also when the very first step was empty"


@pytest.mark.parametrize("terminal", [False, True])
def test_why_a_run_has_failed_is_left_to_the_report_at_its_end(terminal: bool) -> None:
    assert "the disk is full" not in shown({"state": "failed", "message": "the disk is full"}, terminal=terminal)


def test_a_message_cannot_steer_the_terminal() -> None:
    evil = "\x1b]0;owned\x07 \x9b2J \u202egnp\rforged"
    assert harmless(evil) == r"\x1b]0;owned\x07 \x9b2J \u202egnp\rforged"
    assert r"\x1b]0;owned" in shown({"message": evil}, terminal=False)
    assert harmless("Grüße, 你好 🎉\tline\n") == "Grüße, 你好 🎉\tline\n"


@pytest.mark.parametrize("terminal", [False, True])
def test_what_is_waited_for_cannot_either(terminal: bool) -> None:
    assert "\x1b]0" not in shown({"waiting_for": "\x1b]0;owned\x07"}, terminal=terminal)


@pytest.mark.parametrize(
    ("width", "left_out"), [(80, ()), (60, ("dropped", "ness")), (40, ("dropped", "ness", "seconds", "trainer"))]
)
def test_a_narrow_terminal_has_fewer_columns_and_whole_numbers(width: int, left_out: tuple[str, ...]) -> None:
    out = io.StringIO()
    view = ProgressView(Console(file=io.StringIO(), width=width))
    row = {"step": 12345, "reward_mean": 0.5, "samples_dropped": 120, "tokens_generated": 1e8, "seconds": 1234.5,
           "response_tokens_mean": 1234.5, "staleness_max": 1, "rollout_idle_fraction": 0.25}  # fmt: skip
    view.update(row)
    Console(file=out, width=width).print(view.render())
    table = out.getvalue()
    assert "…" not in table and "12344" in table and "81,004" in table and "25%" in table
    assert all((name in table) == (name not in left_out) for name in ("dropped", "ness", "seconds", "trainer"))


def test_the_table_of_several_jobs_keeps_their_names_whole() -> None:
    out = io.StringIO()
    names = {"a-job-with-a-name-that-says-it-all": 10, "second": 20}
    view = JobsView(Console(file=io.StringIO(), width=60), names)
    view.update({"of_job": "second", "state": "running", "step": 3, "reward_mean": 0.5, "tokens_generated": 1e5,
                 "seconds": 2.0, "waiting_for": "12 of 64 samples, which rollout-0 has"})  # fmt: skip
    Console(file=out, width=60).print(view.render())
    table = out.getvalue()
    assert "a-job-with-a-name-that-says-it-all" in table and "3/20" in table and "0.500" in table
    assert "…" not in table
