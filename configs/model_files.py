"""What the small files of a Hugging Face directory say: read as JSON, without torch or transformers.

    config.json ──▶ how many positions the model has ─▶ how long a prompt may be beside ``rollout.max_tokens``
    chat_template.jinja, tokenizer_config.json ──▶ whether there is a chat template

A directory that is not there says nothing: whoever loads the model will say so.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from configs.schema import JobConfig

_POSITION_KEYS: Final = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length")
_TINY_POSITIONS: Final = 1024
"""Positions of a tiny model at least, so that jobs of short responses share one."""


class ModelFileBroken(ValueError):
    """A file of the model's directory is no JSON object; the message names it and says what to do."""


@dataclass(frozen=True, slots=True)
class Positions:
    """Says how many tokens a model can tell apart by their place, and which key of config.json says so."""

    count: int
    key: str


def read_model_file(directory: Path, name: str) -> dict[str, Any]:
    """The JSON object in ``directory / name``; empty where there is no such file.

    Raises:
        ModelFileBroken: it is no JSON object.
    """
    path = directory / name
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ModelFileBroken(f"{path} cannot be read as JSON ({error}); fetch or write it again") from error
    if not isinstance(content, dict):
        raise ModelFileBroken(f"{path} holds a {type(content).__name__}, expected a JSON object; fetch it again")
    return cast("dict[str, Any]", content)


def text_config(directory: Path) -> dict[str, Any]:
    """``config.json``; what it says of its text model in particular goes before what it says of all."""
    config = read_model_file(directory, "config.json")
    inner = config.get("text_config")
    return config | cast("dict[str, Any]", inner) if isinstance(inner, dict) else config


def positions(directory: Path) -> Positions | None:
    """The model's positions; None where config.json names none, or distances alone count (ALiBi).

    Rotary positions that are scaled reach as far as their scaling says.
    """
    config = text_config(directory)
    if config.get("alibi") is True:
        return None
    for key in _POSITION_KEYS:
        count = config.get(key)
        if isinstance(count, int) and count > 0:
            return Positions(max(count, *(_scaled(scaling, count) for scaling in _scalings(config)), 0), key)
    return None


def _scalings(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The rotary scalings that a config names: one for all layers, or one for each kind of layer."""
    for key in ("rope_parameters", "rope_scaling"):
        found = config.get(key)
        if isinstance(found, dict):
            found = cast("dict[str, Any]", found)
            yield found
            yield from (cast("dict[str, Any]", inner) for inner in found.values() if isinstance(inner, dict))


def _scaled(scaling: Mapping[str, Any], count: int) -> int:
    factor = scaling.get("factor")
    if not isinstance(factor, int | float) or factor <= 0:
        return 0
    original = scaling.get("original_max_position_embeddings", count)
    return int(factor * original) if isinstance(original, int) else 0


def prompt_tokens_max(job: JobConfig, directory: Path) -> int:
    """The longest prompt that is read: ``data.max_prompt_tokens``, or what ``rollout.max_tokens`` leaves of the model.

    Below 1 where it leaves nothing: such a job is refused (``why_too_long``).
    """
    limit = positions(directory)
    if limit is None:
        return job.data.max_prompt_tokens
    return min(job.data.max_prompt_tokens, limit.count - job.rollout.max_tokens)


def context_tokens_max(job: JobConfig, directory: Path) -> int:
    """Tokens that an engine reads and writes in one sequence, at most: as many as the model has positions."""
    if not job.has_episodes:
        return prompt_tokens_max(job, directory) + job.rollout.max_tokens
    limit = positions(directory)
    return job.sequence_tokens if limit is None else min(job.sequence_tokens, limit.count)


def why_too_long(job: JobConfig, directory: Path) -> tuple[str, str, str] | None:
    """Why responses of ``rollout.max_tokens``, or ``eval.max_tokens``, do not fit the model, as (field, what is wrong,
    what to do).
    """
    limit = positions(directory)
    wanted = {"rollout.max_tokens": job.rollout.max_tokens, "eval.max_tokens": job.evaluation.rollout.max_tokens}
    for key, tokens in wanted.items():
        if limit is not None and tokens >= limit.count:
            wrong = f"{tokens} is longer than the model: it has {limit.count} positions"
            fix = f"Set it below {limit.count}, so that a prompt fits before it, or use a model with more positions"
            return key, f"{wrong} ({limit.key} in {directory / 'config.json'})", fix
    return None


def tiny_positions(job: JobConfig) -> int:
    """Positions of the tiny model that is made for ``job``: they cost nothing, so all that it generates has room."""
    return max(_TINY_POSITIONS, job.sequence_tokens, job.evaluation.sequence_tokens)


def matrices(directory: Path) -> list[str]:
    """Names of what multiplies in the safetensors files, without ``.weight``; empty where there is none to read."""
    names: list[str] = []
    for file in sorted(directory.glob("*.safetensors")):
        try:
            with file.open("rb") as opened:
                header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
            names += [
                name.removesuffix(".weight") for name, entry in header.items() if len(entry.get("shape", ())) == 2
            ]
        except (OSError, ValueError, AttributeError, TypeError, MemoryError, OverflowError):
            return []  # whoever looks at the files says what is wrong with them
    return names


def has_chat_template(directory: Path) -> bool:
    """Whether the tokenizer brings a template for chats."""
    if any(directory.glob("chat_template*")) or (directory / "additional_chat_templates").is_dir():
        return True
    return bool(read_model_file(directory, "tokenizer_config.json").get("chat_template"))
