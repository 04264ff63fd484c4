"""Runs of a trainer of two ranks, and how a harmed one is held against one that is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import xxhash

from supervisors.testing.run_under_test import HeadraceRun
from tests.chaos.small_job import SMALL_JOB, simulated_rollout
from tests.chaos.test_same_weights import files, samples


def job_of(model: Path, *, simulated: bool = False, **trainer: Any) -> dict[str, Any]:
    """``simulated``: engines that say the same whatever the weights, where it is about what is trained with that."""
    return SMALL_JOB | {
        "model": {"source": "hf", "path": str(model)},
        "rollout": simulated_rollout(model, step_s=0.01) if simulated else SMALL_JOB["rollout"],
        "trainer": SMALL_JOB["trainer"] | {"backend": "fsdp", "ranks": 2} | trainer,
    }


def hit(kind: str, name: str, step: int, at_s: float = 0.02) -> dict[str, Any]:
    return {"kind": kind, "target": {"name": name}, "after_step": step, "at_s": at_s}


def parts(summary: dict[str, Any]) -> dict[str, Any]:
    """What the last checkpoint's files hold. Of safetensors the head has its words in any order: they are read."""
    held: dict[str, Any] = dict(files(summary))
    checkpoint = Path(summary["checkpoint"])
    return held | {f"trainer/{name}": found for name, found in held_in(checkpoint / "trainer").items()}


def held_in(directory: Path) -> dict[str, Any]:
    """What the files of all ranks hold."""
    held: dict[str, Any] = {}
    for path in directory.rglob("shard-*.safetensors"):
        data = path.read_bytes()
        end = 8 + int.from_bytes(data[:8], "little")
        held[str(path.relative_to(directory))] = json.loads(data[8:end]), xxhash.xxh3_128_hexdigest(data[end:])
    return held


def assert_alike(harmed: HeadraceRun, alone: HeadraceRun, faults: int, *, stored: str = "model.safetensors") -> None:
    """``stored``: one of the files that a checkpoint holds."""
    summary, held = harmed.finish(), parts(alone.finish())
    assert summary.get("faults", {"injected": 0})["injected"] == faults
    assert summary["prompts_lost"] == summary["samples_trained_twice"] == 0
    assert samples(harmed) == samples(alone)
    assert stored in held and parts(summary) == held
    losses = [row["loss"] for row in alone.rows()]
    assert any(losses) and [row["loss"] for row in harmed.rows()] == losses
