"""The job of the real runs that are harmed here: small, and long enough to be hit in its middle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SMALL_JOB: dict[str, Any] = {
    "name": "small",
    "seed": 7,
    "steps": 8,
    "model": {"source": "tiny", "hidden": 48, "layers": 2, "warm_start_steps": 20},
    "data": {"source": "reasoning_gym", "task": "spell_backward"},
    "reward": {"kind": "reasoning_gym"},
    "algorithm": {"group_size": 4, "prompts_per_step": 6},
    "rollout": {"workers": 2, "max_tokens": 12, "threads": 1, "max_running": 16},
    "trainer": {"lr": 1e-3, "threads": 1},
    "checkpoint": {"every": 3},
    "metrics": {"tensorboard": False},
}


TORCH_TRAINER: dict[str, Any] = {section: SMALL_JOB[section] for section in ("data", "reward", "trainer")}
TORCH: dict[str, Any] = TORCH_TRAINER | {"rollout": SMALL_JOB["rollout"]}
"""What tests of a real trainer, and of a real engine too, put on top of a simulated job."""


def simulated_rollout(model: Path, *, step_s: float = 0.03, **changes: Any) -> dict[str, Any]:
    """SMALL_JOB's ``rollout`` on engines that take ``step_s`` a step on any machine, with tokens that ``model`` knows.

    For tests that need a run to be at a certain point at a certain time: real engines are as fast as the machine.
    """
    vocab = int(json.loads((model / "config.json").read_text())["vocab_size"])
    options = {"base_s": step_s, "mean_tokens": 12, "vocab": vocab}
    rollout = {name: value for name, value in SMALL_JOB["rollout"].items() if name != "threads"}
    return rollout | {"engine": "simulated", "engine_options": options} | changes


def simulated_job(model: Path, **sections: Any) -> dict[str, Any]:
    """SMALL_JOB without torch and reasoning_gym, a step in a fifth of a second; real processes, soon started."""
    prompts = model.with_name("prompts.jsonl")
    prompts.write_text("".join(json.dumps({"prompt": f"spell {n}", "answer": str(n)}) + "\n" for n in range(100)))
    parts = {
        "model": {"source": "hf", "path": str(model)},
        "data": {"source": "jsonl", "path": str(prompts)},
        "reward": {"kind": "exact_match"},
        "rollout": simulated_rollout(model, step_s=0.01),
        "trainer": {"backend": "simulated"},
    }
    return SMALL_JOB | parts | sections
