"""What the schema cannot see of ``rollout.tensor_parallel``: engines of one rank, and models that do not divide."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from configs.model_files import ModelFileBroken, text_config
from configs.schema import JobConfig

Found = tuple[str, str, str]
"""(field, what is wrong, what to do)."""

_FIELD: Final = "rollout.tensor_parallel"
_HEADS: Final = ("num_attention_heads", "n_head")
_KEY_HEADS: Final = ("num_key_value_heads",)
_MLP: Final = ("intermediate_size", "n_inner", "ffn_dim")
_VOCABULARY_MULTIPLE: Final = 64
"""vLLM pads vocabularies to a multiple of this, and divides what comes out."""


def check_tensor_parallel(job: JobConfig) -> list[Found]:
    """Problems of a job whose workers have several ranks."""
    ranks, engine = job.rollout.tensor_parallel, job.rollout.engine
    if ranks == 1:
        return []
    if engine == "simulated":
        return []
    if engine != "vllm":
        wrong = f"{ranks}, but rollout.engine is {engine}, which computes in one rank"
        return [(_FIELD, wrong, "Set rollout.engine to vllm, or tensor_parallel to 1")]
    path = Path(job.model.path or "").expanduser()
    if job.model.source != "hf" or not job.model.path or not path.is_dir():
        return []
    try:
        wrong = why_indivisible(path, ranks)
    except ModelFileBroken:  # said by whoever looks at the model's files
        return []
    return [(_FIELD, wrong, "Set it to a number that divides all of them, or to 1")] if wrong else []


def why_indivisible(directory: Path, ranks: int) -> str:
    """Which number in config.json keeps vLLM from dividing the model among ``ranks``; empty: none."""
    config = text_config(directory)

    def first(keys: tuple[str, ...]) -> tuple[str, int] | None:
        return next(((key, config[key]) for key in keys if isinstance(config.get(key), int)), None)

    for keys in (_HEADS, _MLP):
        if (found := first(keys)) is not None and found[1] % ranks:
            return _said(ranks, *found, directory)
    if (found := first(_KEY_HEADS)) is not None and found[1] % ranks and ranks % found[1]:
        return f"{_said(ranks, *found, directory)}, nor they it"
    if (found := first(("vocab_size",))) is not None:
        padded = -(-found[1] // _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE
        if padded % ranks:
            return f"{_said(ranks, *found, directory)}, padded to {padded}"
    return ""


def _said(ranks: int, key: str, count: int, directory: Path) -> str:
    return f"{ranks} ranks do not divide {key} = {count} of {directory / 'config.json'}"
