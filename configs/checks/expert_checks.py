"""Checks of keys for mixtures of experts, by what the model's config.json says."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from configs.errors import Found
from configs.model_files import ModelFileBroken, has_experts, route_bytes, text_config
from configs.schema import JobConfig

REPLAYED: Final[tuple[str, ...]] = (
    *("qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "gpt_oss", "granitemoe"),
    "deepseek_v3",
)
"""Families whose routers ``actors/models/routers.py`` can be given experts."""
BALANCED: Final[tuple[str, ...]] = REPLAYED[:-1]
"""Those of them whose routers make probabilities, which the load-balancing loss is about. The others are balanced by a
bias of each expert, which stays as it is."""

_TOKEN_BYTES: Final = 16
"""Bytes of a token besides its routes: id, log-probability, version, and room for the rest of the message."""


def check_experts(job: JobConfig) -> list[Found]:
    """Problems of ``trainer.router_replay``, ``algorithm.load_balancing`` and ``trainer.expert_parallel``."""
    found = _check_parallel(job)
    asked: dict[str, tuple[str, ...]] = {
        "trainer.router_replay": REPLAYED if job.trainer.router_replay else (),
        "algorithm.load_balancing": BALANCED if job.algorithm.load_balancing is not None else (),
    }
    if job.trainer.router_replay and job.rollout.engine != "torch":
        wrong = f"true, but rollout.engine is {job.rollout.engine}, which does not tell the experts it has chosen"
        found.append(("trainer.router_replay", wrong, "Remove it, or set rollout.engine to torch"))
    if job.trainer.router_replay and job.rollout.servers:
        wrong = "true, but the servers of rollout.servers do not tell the experts they have chosen"
        found.append(("trainer.router_replay", wrong, "Remove it, or rollout.servers"))
    found += _check_message(job)
    for key, families in asked.items():
        if not families:
            continue
        if job.trainer.backend == "simulated":
            found.append((key, "is set, but trainer.backend is simulated, which has no experts", "Remove it"))
        elif (family := _family(job)) is not None and family not in families:
            wrong = (
                f"is set, but the model is a {family or 'model without model_type'}, whose routers are not known to it"
            )
            found.append((key, wrong, f"Remove it; known are {', '.join(families)}"))
    return found


def _check_parallel(job: JobConfig) -> list[Found]:
    """With another backend than fsdp, ``check_sharding`` refuses it. Whether each rank has experts is seen later."""
    trainer, key = job.trainer, "trainer.expert_parallel"
    if not trainer.expert_parallel or trainer.backend != "fsdp":
        return []
    if _is_dense(job):
        return [(key, "true, but the model has no experts", "Remove it")]
    if trainer.ranks > trainer.replicas:
        return []
    wrong = f"true, but trainer.ranks is {trainer.ranks} and trainer.replicas {trainer.replicas}: one rank has all "
    return [(key, wrong + "experts of a copy", "Raise trainer.ranks, or remove it")]


def _is_dense(job: JobConfig) -> bool:
    """Whether the model is seen to have no experts; one that is not here yet is asked when it is loaded."""
    if job.model.source == "tiny" and not job.model.path:
        return job.model.experts == 0
    directory = Path(job.model.path or "").expanduser()
    try:
        return bool(text_config(directory)) and not has_experts(directory)
    except ModelFileBroken:
        return False


def _check_message(job: JobConfig) -> list[Found]:
    """A group goes to the trainer in one message, and its routes are the most of it."""
    try:
        width = route_bytes(job, Path(job.model.path or "").expanduser()) or 0
    except ModelFileBroken:
        return []
    size = job.algorithm.group_size * job.sequence_tokens * (_TOKEN_BYTES + width)
    if not width or size <= job.limits.message_max_bytes:
        return []
    wrong = f"true, but a group's tokens with {width} bytes of routes each take up to {size} bytes, and a message holds"
    wrong += f" {job.limits.message_max_bytes} (limits.message_max_bytes)"
    return [("trainer.router_replay", wrong, "Raise that limit, or lower algorithm.group_size or rollout.max_tokens")]


def _family(job: JobConfig) -> str | None:
    """``model_type`` of the model's config.json; None: it is not here yet, or cannot be read (told elsewhere)."""
    if job.model.source == "tiny" and not job.model.path:
        return "qwen3_moe" if job.model.experts else "qwen3"
    try:
        config = text_config(Path(job.model.path or "").expanduser())
    except ModelFileBroken:
        return None
    return str(config.get("model_type", "")) if config else None
