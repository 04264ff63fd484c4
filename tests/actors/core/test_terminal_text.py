"""Text of others on a terminal: it says what it says, and commands nothing."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from actors.core.terminal_text import harmless, shares, shortened
from supervisors.cli.looking.tables import line, print_result
from supervisors.cli.running.live_view import ProgressView

ATTACKS = ["\x1b]0;title\x07", "\x1b[2J", "\x9b31m", "\r", "\x08", "\u202etxt", "\x00", "\x7f"]


@pytest.mark.parametrize("attack", ATTACKS)
def test_no_command_reaches_a_terminal(attack: str) -> None:
    shown = harmless(f"before {attack} after")
    assert not set(attack[:1]) & set(shown)
    assert shown.startswith("before \\") and shown.endswith(" after")


def test_what_is_no_command_stays_as_it_is() -> None:
    for text in ("tab\tand\nline", "日本語 émoji 🙂", "[b]brackets[/]", "\\x1b as text"):
        assert harmless(text) == text


@pytest.mark.parametrize(
    ("op", "result"),
    [
        ("logs", ["one \x1b[2Jline [b]x[/]"]),
        ("jobs", [{"job": "a[/b]\x1b[2J", "state": "running"}]),
        ("tree", [{"name": "[red]x\x1b]0;t\x07", "node": "a[/b]"}]),
        ("cancel", {"job": "\x1b[2Ja[/b]"}),
        ("scale", "\x1b[2J[b]"),
        ("other", [{"key \x1b[2J [/b]": 1}]),
    ],
)
def test_replies_are_shown_as_they_are_but_for_their_escapes(op: str, result: Any) -> None:
    out = io.StringIO()
    print_result(Console(file=out, width=300, color_system=None), op, result)
    assert "\x1b" not in out.getvalue() and "\\x1b" in out.getvalue()
    assert "[" in out.getvalue(), "what is in brackets is text"


def test_events_and_the_live_view_are_shown_likewise() -> None:
    assert line({"message": "\x1b[2Jx"}) == "message \\x1b[2Jx"
    out = io.StringIO()
    with ProgressView(Console(file=out, width=100, color_system=None)) as view:
        view.update({"message": "a[/b] \x1b[2J", "waiting_for": "\x1b]0;t\x07 [/b]"})
        Console(file=out, width=100, color_system=None).print(view.render())
    assert "\x1b" not in out.getvalue() and "a[/b]" in out.getvalue()


def test_a_long_text_keeps_its_beginning_and_its_end_and_says_what_is_missing() -> None:
    assert shortened("a" * 90 + "b" * 1910, 100) == f"{'a' * 75} … 1,900 characters left out … {'b' * 25}"
    assert shortened("c" * 130, 100) == "c" * 130, "saying so would take as many characters"
    assert shortened("d" * 40, 0) == " … 40 characters left out … "


def test_texts_share_their_room_and_short_ones_stay_whole() -> None:
    assert shares([5, 100, 1, 100], 46) == [5, 20, 1, 20]
    assert shares([5, 3], 10) == [5, 3]
    assert shares([9, 9], 5) == [2, 3]
    assert shares([], 5) == []
