"""Weights & Biases itself, offline: the newest release that is installed, and the oldest that Headrace takes.

``make test`` puts the oldest into ``.venv/wandb-oldest``; ``HEADRACE_WANDB`` names further directories, as PATH does.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[4]
PLAYED = Path(__file__).with_name("played_wandb.py")
FOLDERS = [ROOT / ".venv" / "wandb-oldest", *map(Path, filter(None, os.environ.get("HEADRACE_WANDB", "").split(":")))]
RELEASES = [
    *(["installed"] if importlib.util.find_spec("wandb") else []),
    *(str(folder) for folder in FOLDERS if (folder / "wandb").is_dir()),
]


@pytest.fixture(scope="module", params=RELEASES or [pytest.param("", marks=pytest.mark.skip("no wandb"))])
def played(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found = {} if request.param == "installed" else {"PYTHONPATH": request.param}
    directory = tmp_path_factory.mktemp("wandb")
    done = subprocess.run(
        [sys.executable, str(PLAYED), str(directory)], env={**os.environ, **found}, capture_output=True, text=True,
        timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


def rewards(rows: list[Any]) -> list[tuple[int, float]]:
    return [(step, row["reward_mean"]) for step, row in rows if "reward_mean" in row]


def test_a_resumed_run_goes_on_in_its_own(played: dict[str, Any]) -> None:
    assert rewards(played["runs"]["first"]) == [(step, 0.25) for step in range(6)]


def test_a_run_that_went_back_goes_on_in_a_new_one_that_has_every_row(played: dict[str, Any]) -> None:
    rows = played["runs"]["second"]
    assert rewards(rows) == [(0, 0.25), (1, 0.25), (2, 0.75), (3, 0.75)]
    evaluated = [(row["eval/version"], row["eval/pass_at_1"]) for _, row in rows if "eval/version" in row]
    assert evaluated == [(2, 0.25), (4, 0.75)]
    assert [step for step, _ in rows] == [0, 1, 2, 3], "evaluations and samples take no steps of their own"
    assert all("kl" not in row for _, row in rows), "a mean of nothing is no point"
    (fact,) = played["facts"]["second"]
    assert fact["notes"] == "goes on from step 2; the rows before it are repeated from metrics.jsonl"


def test_a_run_has_its_owner_name_tags_and_settings(played: dict[str, Any]) -> None:
    for fact in played["facts"]["first"]:
        assert (fact["project"], fact["entity"], fact["name"], fact["tags"]) == ("p", "team", "j", ["a", "b"])
        assert (fact["steps"], fact["notes"]) == ("7", "")


def test_jobs_of_one_process_have_runs_of_their_own(played: dict[str, Any]) -> None:
    assert [rewards(played["runs"][name]) for name in ("a", "b")] == [[(0, 0.0)], [(0, 1.0)]]


def test_samples_are_a_table_of_the_first_step_and_not_of_each(played: dict[str, Any]) -> None:
    tables = [(step, row) for step, row in played["runs"]["first"] if "samples/_type" in row]
    assert [(step, row["samples/_type"], row["samples/nrows"]) for step, row in tables] == [
        (0, "table-file", 1), (4, "table-file", 1),
    ]  # fmt: skip
