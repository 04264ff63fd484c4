"""Reads the small files of a Hugging Face directory as JSON, without torch or transformers.

    config.json ──▶ how many positions the model has ─▶ how long a prompt may be beside ``rollout.max_tokens``
    chat_template.jinja, tokenizer_config.json ──▶ whether there is a chat template

A missing directory is no error here: the code that loads the model reports it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from configs.schema import JobConfig

_POSITION_KEYS: Final = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length")
_EXPERT_KEYS: Final = ("num_experts", "num_local_experts", "n_routed_experts")
_IN_A_BYTE: Final = 255
"""Most experts of a layer whose numbers take a byte each, as ``actors/models/routers.py`` packs them."""
TINY_LAYERS: Final = (
    *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
)
"""Linear layers of each block of a tiny model, which is a Qwen3."""
HEAD: Final = "lm_head"
"""Output embedding, as most families name it. A tied one is in no file, since its weight is the input embedding's."""
EXPERT_WEIGHTS: Final = ("gate_up_proj", "down_proj", "up_proj")
"""Weights of experts, each of which transformers keeps as one tensor a layer."""
_TINY_POSITIONS: Final = 1024
"""Fewest positions of a tiny model, so that jobs of short responses share one."""


class ModelFileBroken(ValueError):
    """A file of the model's directory is no JSON object; the message names it and says what to do."""


@dataclass(frozen=True, slots=True)
class Positions:
    """Says how many token positions a model has, and which key of config.json says so."""

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
    """``config.json``, in which the keys of its section ``text_config`` replace those of the same name at the top."""
    config = read_model_file(directory, "config.json")
    inner = config.get("text_config")
    return config | cast("dict[str, Any]", inner) if isinstance(inner, dict) else config


def vocabulary(job: JobConfig, directory: Path) -> int:
    """Number of token ids that the model has; 0: not known, or simulated engines and trainers draw others."""
    if "simulated" in (job.rollout.engine, job.trainer.backend):
        return 0
    rows = text_config(directory).get("vocab_size")
    return rows if isinstance(rows, int) and rows > 0 else 0


def route_bytes(job: JobConfig, directory: Path) -> int | None:
    """Bytes of the experts that an engine chose for a token (``actors/models/routers.py``); None: not known."""
    if not job.trainer.router_replay:
        return 0
    config = text_config(directory)
    layers, top_k = config.get("num_hidden_layers"), config.get("num_experts_per_tok")
    experts = next((config[key] for key in _EXPERT_KEYS if key in config), None)
    if not (isinstance(layers, int) and isinstance(top_k, int) and isinstance(experts, int)):
        return None
    every, dense = config.get("decoder_sparse_step") or 1, set(config.get("mlp_only_layers") or ())
    first = config.get("first_k_dense_replace") or 0
    routed = [layer for layer in range(first, layers) if layer not in dense and (layer + 1) % every == 0]
    return len(routed) * top_k * (1 if experts <= _IN_A_BYTE else 2)


def has_experts(directory: Path) -> bool:
    """Whether the model is a mixture of experts, as far as config.json says."""
    return any(text_config(directory).get(key) for key in _EXPERT_KEYS)


def names_experts(target: str) -> bool:
    """Whether the end of a name, as in ``model.adapter.targets``, is that of a weight of a mixture's experts.

    ``up_proj`` alone is not: in most mixtures it is a linear layer beside them.
    """
    *owner, key = target.split(".")[-2:]
    return key in EXPERT_WEIGHTS and (owner == ["experts"] or (not owner and key != "up_proj"))


def positions(directory: Path) -> Positions | None:
    """The model's positions; None where config.json names none, or distances alone count (ALiBi).

    Scaled rotary positions count as far as the scaling extends them.
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
    """The longest prompt that is read: ``data.max_prompt_tokens``, or the positions that ``rollout.max_tokens`` leaves.

    Below 1 where none are left: such a job is refused (``why_too_long``).
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
    """Names of the matrices in the safetensors files, without ``.weight``; empty where none can be read."""
    names: list[str] = []
    for file in sorted(directory.glob("*.safetensors")):
        try:
            with file.open("rb") as opened:
                header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
            names += [
                name.removesuffix(".weight") for name, entry in header.items() if len(entry.get("shape", ())) == 2
            ]
        except (OSError, ValueError, AttributeError, TypeError, MemoryError, OverflowError):
            return []  # the check of the model's files reports it
    return names


def has_chat_template(directory: Path) -> bool:
    """Whether the tokenizer has a chat template."""
    if any(directory.glob("chat_template*")) or (directory / "additional_chat_templates").is_dir():
        return True
    return bool(read_model_file(directory, "tokenizer_config.json").get("chat_template"))
