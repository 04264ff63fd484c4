"""What is wrong with an environment is told before anything starts, with its field and what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from configs.checks.environment_checks import check_environment
from tests.smallest_job import smallest_job

GAME = "actors.environments.examples.guess_number:GuessNumber"


@pytest.mark.parametrize(
    ("environment", "field", "said"),
    [
        ({"kind": "verifiers"}, "environment.path", "is missing, and environment.kind is verifiers"),
        (
            {"kind": "verifiers", "path": "x", "interpreter": "no-such-python"},
            "environment.interpreter",
            "'no-such-python' is no program that can be run",
        ),
        ({"kind": "agent", "path": "json:loads", "interpreter": "sh"}, "environment.interpreter", "is set, but"),
        ({"kind": "python"}, "environment.path", "is missing, and environment.kind is python"),
        ({"kind": "agent"}, "environment.path", "is missing, and environment.kind is agent"),
        ({"kind": "python", "path": "no_such_module:Game"}, "environment.path", "there is no module 'no_such_module'"),
        ({"kind": "python", "path": "guess_number.GuessNumber"}, "environment.path", "is not of the form"),
        ({"kind": "python", "path": GAME.replace("Guess", "Gues")}, "environment.path", "has no 'GuesNumber'"),
        (
            {"kind": "python", "path": GAME, "url": "http://a:1"},
            "environment.url",
            "is set, but environment.kind is python",
        ),
        ({"kind": "openenv"}, "environment.url", "is None, and environment.kind is openenv"),
        (
            {"kind": "external", "tools": ["json:loads"]},
            "environment.tools",
            "is set, but environment.kind is external",
        ),
        ({"kind": "python", "path": GAME, "tools": ["json:lods"]}, "environment.tools.0", "has no 'lods'"),
        ({"kind": "python", "path": GAME, "tools": ["mcp: no-such-server"]}, "environment.tools.0", "names no program"),
        ({"kind": "python", "tools": ["json:loads"]}, "environment.options", "says no reward"),
    ],
)
def test_what_is_wrong_is_named_with_its_field(environment: dict[str, Any], field: str, said: str) -> None:
    (where, wrong, fix), *_ = check_environment(smallest_job(reward={}, environment=environment))
    assert where == field
    assert said in wrong
    assert fix


@pytest.mark.parametrize(
    "environment",
    [
        {"kind": "none"},
        {"kind": "external"},
        {"kind": "python", "path": GAME, "options": {"numbers": 8}, "tools": ["json:loads", "mcp: sh -c true"]},
        {"kind": "python", "tools": ["json:loads"], "options": {"reward": "json:dumps"}},
    ],
)
def test_what_is_right_is_let_through(environment: dict[str, Any]) -> None:
    assert Path("/bin/sh").exists()
    assert check_environment(smallest_job(environment=environment)) == []
