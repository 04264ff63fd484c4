"""What a person sees of steps: dropped samples, a dash where nothing was trained, no text that steers a terminal."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from actors.core.terminal_text import harmless
from supervisors.api.step_line import step_line
from supervisors.cli.live_view import ProgressView

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
    assert "step 2/8  reward –  dropped 16 of 16" in step_line(EMPTY, 8)
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
