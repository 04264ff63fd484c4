"""The command line starts fast: what only some commands need is imported by them."""

from __future__ import annotations

import subprocess
import sys

import typer.main

from configs.reward_training import RewardTraining
from supervisors.cli.app import app

HEAVY = {"pydantic", "yaml", "numpy", "torch", "transformers", "zmq", "psutil", "structlog"}


def test_help_loads_no_library_that_only_a_run_needs() -> None:
    seen = f"import sys, supervisors.cli.app; print(*sorted({HEAVY!r} & set(sys.modules)))"
    loaded = subprocess.run([sys.executable, "-c", seen], capture_output=True, text=True, check=True, timeout=60)
    assert loaded.stdout.split() == []


def test_the_defaults_that_the_help_of_train_reward_shows_are_those_of_the_job_file() -> None:
    command = typer.main.get_group(app).commands["train-reward"]
    defaults = {str(option.name): getattr(option, "show_default", None) for option in command.params}
    shown = {name: default for name, default in defaults.items() if isinstance(default, str)}
    assert shown == {name: str(RewardTraining.model_fields[name].default) for name in shown}
    assert {"epochs", "lr", "held_out", "batch_pairs", "batch_tokens"} <= shown.keys()
