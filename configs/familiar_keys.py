"""What other trainers call the keys of a job file: whoever writes such a name is told ours.

The names are those of TRL, verl, OpenRLHF and transformers' ``TrainingArguments``. One that means something a little
different here has a remark that says so.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

_OURS: Final[dict[str, tuple[str, str]]] = {
    "learning_rate": ("trainer.lr", ""),
    "actor_lr": ("trainer.lr", ""),
    "lr_scheduler_type": ("trainer.lr_schedule", ""),
    "lr_scheduler": ("trainer.lr_schedule", ""),
    "scheduler": ("trainer.lr_schedule", ""),
    "warmup_ratio": ("trainer.warmup_steps", "a number of steps"),
    "lr_warmup_steps": ("trainer.warmup_steps", ""),
    "grad_clip": ("trainer.max_grad_norm", ""),
    "max_norm": ("trainer.max_grad_norm", ""),
    "clip_grad": ("trainer.max_grad_norm", ""),
    "adam_betas": ("trainer.betas", ""),
    "adam_beta1": ("trainer.betas", "both as a list"),
    "adam_beta2": ("trainer.betas", "both as a list"),
    "batch_size": (
        "algorithm.prompts_per_step",
        "prompts of an optimizer step, each with algorithm.group_size samples",
    ),
    "train_batch_size": (
        "algorithm.prompts_per_step",
        "prompts of an optimizer step, each with algorithm.group_size samples",
    ),
    "rollout_batch_size": ("algorithm.prompts_per_step", ""),
    "per_device_train_batch_size": ("trainer.micro_batch_tokens", "tokens of a forward and backward pass"),
    "micro_batch_size": ("trainer.micro_batch_tokens", "tokens of a forward and backward pass"),
    "gradient_accumulation_steps": (
        "trainer.micro_batch_tokens",
        "a step is cut into passes of that many tokens; how many, follows",
    ),
    "num_generations": ("algorithm.group_size", ""),
    "n_samples": ("algorithm.group_size", ""),
    "samples_per_prompt": ("algorithm.group_size", ""),
    "n_samples_per_prompt": ("algorithm.group_size", ""),
    "num_samples": ("algorithm.group_size", ""),
    "rollout_n": ("algorithm.group_size", ""),
    "beta": ("algorithm.kl_coefficient", ""),
    "kl_coef": ("algorithm.kl_coefficient", ""),
    "kl_beta": ("algorithm.kl_coefficient", ""),
    "kl_loss_coef": ("algorithm.kl_coefficient", ""),
    "init_kl_coef": ("algorithm.kl_coefficient", ""),
    "epsilon": ("algorithm.clip_low", "and algorithm.clip_high"),
    "epsilon_low": ("algorithm.clip_low", ""),
    "epsilon_high": ("algorithm.clip_high", ""),
    "clip_ratio": ("algorithm.clip_low", "and algorithm.clip_high"),
    "clip_range": ("algorithm.clip_low", "and algorithm.clip_high"),
    "cliprange": ("algorithm.clip_low", "and algorithm.clip_high"),
    "adv_estimator": ("algorithm.name", ""),
    "advantage_estimator": ("algorithm.name", ""),
    "loss_type": ("algorithm.name", ""),
    "max_new_tokens": ("rollout.max_tokens", ""),
    "max_completion_length": ("rollout.max_tokens", ""),
    "max_response_length": ("rollout.max_tokens", ""),
    "generate_max_len": ("rollout.max_tokens", ""),
    "response_length": ("rollout.max_tokens", ""),
    "max_prompt_length": ("data.max_prompt_tokens", ""),
    "prompt_max_len": ("data.max_prompt_tokens", ""),
    "num_workers": ("rollout.workers", ""),
    "num_gpus": ("rollout.workers", "worker processes, each on a device of its own where there are several"),
    "stop_strings": ("rollout.stop", ""),
    "stop_sequences": ("rollout.stop", ""),
    "max_num_seqs": ("rollout.max_running", ""),
    "num_train_epochs": ("data.epochs", "and steps, which ends the run"),
    "epochs": ("data.epochs", "and steps, which ends the run"),
    "num_epochs": ("data.epochs", "and steps, which ends the run"),
    "total_epochs": ("data.epochs", "and steps, which ends the run"),
    "max_steps": ("steps", ""),
    "total_steps": ("steps", ""),
    "num_steps": ("steps", ""),
    "total_training_steps": ("steps", ""),
    "model_name": ("model.path", ""),
    "model_name_or_path": ("model.path", ""),
    "pretrain": ("model.path", ""),
    "torch_dtype": ("model.dtype", ""),
    "bf16": ("model.dtype", "bfloat16 or float32"),
    "dataset": ("data.path", "with data.source"),
    "dataset_name": ("data.path", "with data.source: hf_dataset"),
    "dataset_path": ("data.path", "with data.source"),
    "train_files": ("data.path", "with data.source"),
    "train_file": ("data.path", "with data.source"),
    "prompt_column": ("data.prompt_key", ""),
    "input_key": ("data.prompt_key", ""),
    "label_key": ("data.answer_key", ""),
    "answer_column": ("data.answer_key", ""),
    "apply_chat_template": ("data.chat", ""),
    "reward_fn": ("reward.function", "with reward.kind: function"),
    "reward_func": ("reward.function", "with reward.kind: function"),
    "reward_funcs": ("reward.function", "with reward.kind: function"),
    "reward_function": ("reward.function", "with reward.kind: function"),
    "save_steps": ("checkpoint.every", ""),
    "save_freq": ("checkpoint.every", ""),
    "save_interval": ("checkpoint.every", ""),
    "save_total_limit": ("checkpoint.keep", ""),
    "max_ckpt_num": ("checkpoint.keep", ""),
    "run_name": ("name", ""),
    "experiment_name": ("name", ""),
    "project_name": ("metrics.wandb_project", ""),
    "use_wandb": ("metrics.wandb_project", "the name of a project"),
    "report_to": ("metrics.wandb_project", "and metrics.tensorboard"),
    "max_off_policy_steps": ("sync.max_staleness", "with sync.mode: async"),
    "off_policy_steps": ("sync.max_staleness", "with sync.mode: async"),
    "async_training": ("sync.mode", "async"),
}
"""A foreign name → our key, and what to say besides."""


def key_by_meaning(name: str, known: Collection[str]) -> str | None:
    """What to write instead of the last part of a path; None if it is nobody's name, or ours is none of ``known``."""
    ours, remark = _OURS.get(name.lower(), ("", ""))
    if ours not in known:
        return None
    return f"Here it is {ours!r}" + (f": {remark}" if remark else "")
