"""What a synchronous job learns has no trace of killed workers, of evaluation beside it, or of Ctrl-C and a resume.

One run is left alone; each test has another one of the same job, harms it, and holds it against that.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from actors.jobs.evaluation_rows import read_rows
from actors.ledger.journal import committed_samples
from supervisors.testing.run_under_test import HeadraceRun
from tests.chaos.small_job import SMALL_JOB

ROOT = str(Path(__file__).resolve().parents[2])
STEPS = 9


def torch_job(model: Path, **sections: Any) -> dict[str, Any]:
    """Two workers with torch engines, whose answers take long enough for a step to be hit in its middle."""
    return SMALL_JOB | {
        "steps": STEPS,
        "model": {"source": "hf", "path": str(model)},
        "rollout": {"workers": 2, "max_tokens": 48, "threads": 1, "max_running": 16,
                    "engine_options": {"tokens_per_step": 1}},
        "checkpoint": {"every": 3},
    } | sections  # fmt: skip


@pytest.fixture(scope="module")
def alone(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HeadraceRun]:
    """The run that is left alone, once it is over."""
    run = HeadraceRun(tmp_path_factory.mktemp("undisturbed") / "alone", torch_job(small_model))
    try:
        assert run.finish()["steps"] == STEPS
        assert run.rows()[-1]["samples_migrated"] == 0
        yield run
    finally:
        run.close()


@pytest.mark.timeout(400)
def test_with_killed_workers_and_heads_and_with_evaluation_beside_it_the_trained_weights_are_the_same_bit_for_bit(
    headrace_run: Callable[..., HeadraceRun], small_model: Path, alone: HeadraceRun
) -> None:
    """One seed, the torch engine on CPU, sync mode: two workers, of which one is killed three times in mid-step.

    The samples that were moved, their tokens and rewards, the learned weights and the optimizer's state are compared by
    their hashes. What may differ are the last bits of the engines' log-probabilities: see ``losses.NUMERICS``.

    A worker and the head are killed while versions are evaluated, too; each evaluation has all its samples of one, and
    a checkpoint that is evaluated by itself says what its run said.
    """
    held_out = {"source": "reasoning_gym", "task": "spell_backward", "size": 100}
    evaluation = {"data": held_out, "every": 3, "samples": 4, "prompts": 20, "max_tokens": 48}
    kills: list[dict[str, Any]] = [
        {"kind": "kill", "target": {"role": role}, "after_step": step, "at_s": at_s}
        for role, step, at_s in (("rollout", 1, 0.02), ("rollout", 3, 0.02), ("rollout", 4, 0.05), ("head", 6, 0.05))
    ]
    harmed = headrace_run(torch_job(small_model, eval=evaluation), name="harmed", faults=kills)
    summary = harmed.finish()

    assert summary["faults"] == {"injected": len(kills), "failed": 0, "skipped": 0}
    assert harmed.rows()[-1]["samples_migrated"] > 0, "no kill has hit a worker that held samples"
    assert samples(harmed) == samples(alone)
    hashes = files(alone.finish())
    assert {"model.safetensors", "trainer/weights.safetensors"} <= set(hashes)
    assert files(summary) == hashes
    assert [row["loss"] for row in harmed.rows()] == [row["loss"] for row in alone.rows()]

    rows = read_rows(harmed.run_dir / "eval.jsonl")
    assert [row["version"] for row in rows] == [0, 3, 6, 9]
    for row in rows:
        assert row["samples"] == 80 and row["version_min"] == row["version_max"] == row["version"], row
    lines = (harmed.run_dir / "eval.jsonl").read_text().splitlines()
    assert len({json.loads(line)["version"] for line in lines}) == len(lines), "each is told once"
    assert summary["eval"]["last"]["avg_at_k"] == rows[-1]["avg_at_k"]
    command = [sys.executable, "-P", "-m", "main", "eval", summary["checkpoint"], str(harmed.run_dir / "job.yaml")]
    again = subprocess.run(
        [*command, "--dir", str(harmed.run_dir.with_name("again")), "--json"], env={**os.environ, "PYTHONPATH": ROOT},
        capture_output=True, text=True, timeout=200, check=True,
    )  # fmt: skip
    said = ("avg_at_k", "pass_at_k", "samples", "response_tokens_mean")
    assert json.loads(again.stdout.splitlines()[-1]) == {key: rows[-1][key] for key in said}


@pytest.mark.timeout(400)
def test_an_interrupted_run_goes_on_as_if_nothing_had_happened(
    headrace_run: Callable[..., HeadraceRun], small_model: Path, alone: HeadraceRun
) -> None:
    """The same seed with Ctrl-C and --resume: every sample of every step has the same tokens.

    Its control socket is bombarded with random frames meanwhile, which changes nothing.
    """
    broken = headrace_run(torch_job(small_model), name="broken")
    broken.wait_until("control socket", lambda: (broken.run_dir / "control.endpoint").exists())
    _bombard((broken.run_dir / "control.endpoint").read_text().strip())
    broken.wait_for_step(1)
    broken.interrupt()
    assert broken.finish(state="interrupted")["steps"] < STEPS
    broken.resume()
    summary = broken.finish()
    assert summary["steps"] == STEPS
    assert summary["prompts_lost"] == 0
    assert summary["samples_trained_twice"] == 0

    assert samples(broken) == samples(alone)
    _exports_load(Path(summary["checkpoint"]))


def _exports_load(checkpoint: Path) -> None:
    """The checkpoint is an HF directory."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    assert AutoTokenizer.from_pretrained(checkpoint).eos_token_id == model.config.eos_token_id


def _bombard(endpoint: str) -> None:
    """10,000 random messages, some of them MessagePack of the wrong shape."""
    draw = random.Random(5)
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 2000)
    socket.setsockopt(zmq.SNDTIMEO, 5000)
    socket.connect(endpoint)
    try:
        for _ in range(10_000):
            frames = [os.urandom(draw.randrange(60)) for _ in range(draw.randrange(1, 4))]
            socket.send_multipart([*frames, json.dumps({"op": "tree"}).encode()] if draw.random() < 0.1 else frames)
    finally:
        socket.close()
        context.term()


def samples(run: HeadraceRun) -> list[tuple[int, int, int, str, float | None]]:
    rows = committed_samples(run.run_dir / "journal.db")
    return [(r.step, r.prompt, r.sibling, r.tokens_hash, r.reward) for r in rows]


def files(summary: dict[str, Any]) -> dict[str, str]:
    """The hash of each file of the last checkpoint."""
    state = json.loads((Path(summary["checkpoint"]) / "state.json").read_text())
    return {name: file["xxh3"] for name, file in state["files"].items()}
