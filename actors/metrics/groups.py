"""The groups in which TensorBoard shows the columns of metrics.jsonl: a heading for each section of its reference."""

from __future__ import annotations

from typing import Final

_GROUPS: Final[tuple[tuple[str, tuple[str, ...]], ...]] = (
    ("learning", (
        "loss", "reward_", "source_", "degenerate_", "grad_norm", "learning_rate", "update_skipped", "clip_", "kl",
        "entropy", "engine_mismatch", "micro_batches", "trainer_reward", "value_", "explained_", "shaped_", "critic_",
        "correction_",
    )),
    ("time", ("seconds", "rollout_idle", "trainer_idle", "trainer_seconds", "seed_s", "seeding_")),
    ("prefill", ("prefilled_", "prefix_", "distinct_prefix_")),
    ("shared_training", ("service_wait", "switch_", "compute_", "slowdown")),
    ("weights", ("publish_", "weights_", "pull_", "load_")),
    ("length_ranking", ("length_",)),
    ("cost", ("cost",)),
    ("faults", (
        "restarts", "samples_migrated", "rows_ignored", "grants_ignored", "prompts_lost", "samples_trained_twice",
        "detect_", "reassign_", "trainer_to_progress", "head_to_progress",
    )),
)  # fmt: skip
"""A group and the beginnings of its columns; what is none of these is progress."""


def tag(column: str) -> str:
    """The name under which TensorBoard shows ``column``, such as ``learning/loss``."""
    group = next((name for name, beginnings in _GROUPS if column.startswith(beginnings)), "progress")
    return f"{group}/{column}"
