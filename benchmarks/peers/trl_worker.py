"""TRL's side: runs in an environment of its own, reads one JSON file, prints one JSON line.

    {model, prompts: [text…], answers: [row index…], job} ─▶ GRPOTrainer ─▶ {rewards, seconds} of every step

Settings of ours that have a counterpart in TRL are given to it; what it does better than its defaults is turned on
(no gradient checkpointing, no saving, no reporting), and one optimizer step learns from one generated batch.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

from actors.environments.scoring.scorers import Example, make_scorer
from configs.schema import JobConfig


def main(args: list[str]) -> int:
    """``python -m benchmarks.peers.trl_worker ORDER.json``."""
    entered = perf_counter()
    order = json.loads(Path(args[0]).read_text(encoding="utf-8"))
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(order["threads"])
    job = JobConfig.model_validate_json(order["job"])
    tokenizer = AutoTokenizer.from_pretrained(order["model"], padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(order["model"], dtype=torch.float32)
    score = make_scorer(job)
    target: float | None = order["target"]

    def reward(
        prompts: list[str], completions: list[str], index: list[int], answer: list[str], **_: Any
    ) -> list[float]:
        rows = zip(prompts, completions, index, answer, strict=True)
        return [score(text, Example(prompt=prompt, answer=right, index=i, extra={})) for prompt, text, i, right in rows]

    class Clock(TrainerCallback):
        """When each step ended, and its mean reward."""

        def __init__(self) -> None:
            self.started = 0.0
            self.steps: list[dict[str, float]] = []

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.started = perf_counter()

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
            if not logs or "reward" not in logs:
                return
            self.steps.append({"seconds": perf_counter() - self.started, "reward_mean": float(logs["reward"])})
            last = [step["reward_mean"] for step in self.steps[-order["window"] :]]
            if target is not None and len(last) == order["window"] and sum(last) / len(last) >= target:
                control.should_training_stop = True

    clock = Clock()
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=GRPOConfig(**trl_settings(job, order["steps"], order["scratch"])),
        train_dataset=Dataset.from_list(order["rows"]),
        processing_class=tokenizer,
        callbacks=[clock],
    )
    trainer.train()
    print(json.dumps({"steps": clock.steps, "start_s": clock.started - entered}), flush=True)
    return 0


def trl_settings(job: JobConfig, steps: int, scratch: str) -> dict[str, Any]:
    """Arguments of GRPOConfig for ``job``: the same batch, group, lengths, loss and optimizer."""
    algorithm, trainer = job.algorithm, job.trainer
    batch = algorithm.prompts_per_step * algorithm.group_size
    return {
        "output_dir": scratch,
        "max_steps": steps,
        "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": 1,
        "num_generations": algorithm.group_size,
        "max_completion_length": job.rollout.max_tokens,
        "temperature": job.rollout.temperature,
        "top_p": 1.0,
        "top_k": 0,
        "beta": algorithm.kl_coefficient,
        "epsilon": algorithm.clip_low,
        "epsilon_high": algorithm.clip_high,
        "loss_type": "dapo",  # the mean over all tokens of the step, as ours
        "scale_rewards": "group",
        "num_iterations": 1,
        "learning_rate": trainer.lr,
        "lr_scheduler_type": "constant",
        "warmup_steps": trainer.warmup_steps,
        "weight_decay": trainer.weight_decay,
        "adam_beta1": trainer.betas[0],
        "adam_beta2": trainer.betas[1],
        "max_grad_norm": trainer.max_grad_norm,
        "seed": job.seed,
        "shuffle_dataset": False,  # the prompts come in the order in which Headrace takes them
        "bf16": False,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
