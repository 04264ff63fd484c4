"""Which tokens end a response: the model's own, and the job's further ones by text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from transport.errors import HeadraceError


class BadStopToken(HeadraceError):
    """Configuration: a text of ``rollout.stop`` is not one token of this model, or there is no end token at all."""

    permanent = True


def stop_token_ids(model_path: Path, stop: Sequence[str] = ()) -> tuple[int, ...]:
    """The ids, ascending. Reads JSON files of the HF directory and imports neither torch nor transformers.

    Raises:
        BadStopToken: naming the text and what to do.
    """
    found = {token for name in ("generation_config.json", "config.json") for token in _end_tokens(model_path / name)}
    found.update(_single_token(model_path, text) for text in stop)
    if not found:
        raise BadStopToken(
            f"model.path: {model_path.name} names no eos_token_id in generation_config.json or config.json;"
            " add one there, or name a token in rollout.stop"
        )
    return tuple(sorted(found))


def _end_tokens(path: Path) -> list[int]:
    if not path.exists():
        return []
    config = cast("dict[str, Any]", json.loads(path.read_text("utf-8")))
    value = config.get("eos_token_id")
    if value is None:
        value = (config.get("text_config") or {}).get("eos_token_id")
    return [] if value is None else [int(v) for v in (cast("list[int]", value) if isinstance(value, list) else [value])]


def _single_token(model_path: Path, text: str) -> int:
    from tokenizers import Tokenizer  # a compiled library, needed only where a job names further stop tokens

    path = model_path / "tokenizer.json"
    if not path.exists():
        raise BadStopToken(f"rollout.stop: {model_path.name} has no tokenizer.json, so {text!r} cannot be looked up")
    ids: list[int] = Tokenizer.from_file(str(path)).encode(text, add_special_tokens=False).ids
    if len(ids) != 1:
        raise BadStopToken(
            f"rollout.stop: {text!r} is {len(ids)} tokens of this model, it must be one; use another text"
        )
    return ids[0]
