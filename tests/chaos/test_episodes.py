"""Episodes on real processes: the preset runs as it is, and whoever is killed in mid-episode leaves no trace."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from actors.ledger.journal import committed_samples
from supervisors.testing.run_under_test import HeadraceRun

PRESET = Path(__file__).resolve().parents[2] / "configs" / "episodes.yaml"
SMALL = ["model.warm_start_steps=30", "algorithm.prompts_per_step=4", "algorithm.group_size=4", "checkpoint.every=0"]


@pytest.mark.timeout(400)
def test_the_preset_plays_its_games_in_turns_through_the_gateway(headrace_run: Callable[..., HeadraceRun]) -> None:
    run = headrace_run(PRESET, name="episodes", settings=[*SMALL, "steps=2"])
    summary = run.finish()
    assert (summary["samples"], summary["samples_dropped"], summary["tokens_discarded"]) == (32, 0, 0)
    for row in run.rows():
        assert row["episodes"] == 16
        assert 1 <= row["turns_mean"] <= 4
        assert row["turns_mean"] == row["env_guesses"]
        assert (row["engine_mismatch"] or 0.0) < 1e-5
    assert (run.run_dir / "gateway.key").stat().st_mode & 0o077 == 0
    assert list((run.run_dir / "episodes" / "environments-0").iterdir()) == []


@pytest.mark.long
@pytest.mark.timeout(900)
def test_whoever_is_killed_in_mid_episode_the_trained_weights_are_the_same_bit_for_bit(
    headrace_run: Callable[..., HeadraceRun],
) -> None:
    """A rollout worker, an environment worker, the gateway and the head; and no token of the model is discarded."""
    settings = [*SMALL, "steps=10", "rollout.workers=2", "environment.workers=2", "environment.slots=4"]
    settings += ["rollout.threads=1", "trainer.threads=1"]
    roles = ("rollout", "environments", "gateway", "head")
    kills = [
        {"kind": "kill", "target": {"role": role}, "after_step": 1 + 2 * i, "at_s": 0.3} for i, role in enumerate(roles)
    ]
    alone = headrace_run(PRESET, name="alone", settings=settings)
    hashes = files(alone.finish())
    harmed = headrace_run(PRESET, name="harmed", settings=settings, faults=kills)
    summary = harmed.finish()
    assert summary["faults"]["injected"] == len(kills)
    assert summary["tokens_discarded"] == 0
    assert sum(row["environment_restarts"] for row in harmed.rows()) > 0, "no kill has hit an episode"
    assert samples(harmed) == samples(alone)
    assert {"model.safetensors", "trainer/weights.safetensors"} <= set(hashes)
    assert files(summary) == hashes


def samples(run: HeadraceRun) -> list[tuple[int, int, int, str, float | None]]:
    rows = committed_samples(run.run_dir / "journal.db")
    return [(r.step, r.prompt, r.sibling, r.tokens_hash, r.reward) for r in rows]


def files(summary: dict[str, Any]) -> dict[str, str]:
    """The hash of each file of the last checkpoint."""
    state = json.loads((Path(summary["checkpoint"]) / "state.json").read_text())
    return {name: file["xxh3"] for name, file in state["files"].items()}
