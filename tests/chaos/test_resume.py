"""Ctrl-C takes a checkpoint; a resumed run is the run that would have been."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq
from small_job import TORCH

from actors.ledger.journal import committed_samples
from supervisors.testing.run_under_test import HeadraceRun

STEPS = 12


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_an_interrupted_run_goes_on_as_if_nothing_had_happened(start_run: Callable[..., HeadraceRun]) -> None:
    """The same seed with and without Ctrl-C and --resume: every sample of every step has the same tokens.

    The uninterrupted run is bombarded with random frames on its control socket meanwhile, which changes nothing.
    """
    whole = start_run("whole", **TORCH, steps=STEPS)
    whole.wait_until("control socket", lambda: (whole.run_dir / "control.endpoint").exists())
    _bombard((whole.run_dir / "control.endpoint").read_text().strip())
    assert whole.finish()["steps"] == STEPS

    broken = start_run("broken", **TORCH, steps=STEPS)
    broken.wait_for_step(3)
    broken.interrupt()
    assert broken.finish(state="interrupted")["steps"] < STEPS
    broken.resume()
    summary = broken.finish()
    assert summary["steps"] == STEPS
    assert summary["prompts_lost"] == 0
    assert summary["samples_trained_twice"] == 0

    assert _ledger(broken.run_dir) == _ledger(whole.run_dir)
    _exports_load(Path(summary["checkpoint"]))


def _ledger(run_dir: Path) -> list[tuple[int, int, int, str, float | None]]:
    return [(r.step, r.prompt, r.sibling, r.tokens_hash, r.reward) for r in committed_samples(run_dir / "journal.db")]


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
