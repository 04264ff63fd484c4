"""Chooses the files of a model repository that are needed, and checks whether a directory holds them.

The needed files lie at the top. The same weights in another format or precision (``onnx/``, ``original/``, ``*.bin``
beside safetensors, ``consolidated.*``, ``model.fp16.*``) would only double the download. Nothing is read here but the
index of a directory's weights.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any, Final, cast

WHOLE: Final = "model.safetensors"
_INDEX: Final = "model.safetensors.index.json"
_BIN_INDEX: Final = "pytorch_model.bin.index.json"
_SHARD: Final = re.compile(r"model-\d+-of-\d+\.safetensors")
_BIN: Final = re.compile(r"pytorch_model(-\d+-of-\d+)?\.bin")
_SMALL: Final = (".json", ".txt", ".model", ".jinja", ".tiktoken")
"""Endings of configurations, tokenizers and chat templates."""


def needed_files(names: Collection[str]) -> list[str]:
    """The files that an engine, the trainer or the tokenizer reads; weights in one format only."""
    top = sorted(name for name in names if "/" not in name)
    weights = _weights(top)
    with_bin = any(_BIN.fullmatch(name) for name in weights)
    indexes = {_BIN_INDEX} if not with_bin else {_INDEX}  # the other format's index would name files that are not there
    small = [name for name in top if name.endswith(_SMALL) and name not in indexes]
    return sorted([*weights, *small])


def _weights(top: Collection[str]) -> list[str]:
    if WHOLE in top:
        return [WHOLE]
    shards = [name for name in top if _SHARD.fullmatch(name)] if _INDEX in top else []
    return shards or [name for name in top if _BIN.fullmatch(name)]


def lacking_kinds(names: Collection[str]) -> list[str]:
    """Which of the files that every model needs are missing: its configuration, a fast tokenizer, weights."""
    lacking = [name for name in ("config.json", "tokenizer.json") if name not in names]
    return lacking if _weights(names) else [*lacking, WHOLE]


def lacking_files(directory: Path) -> list[str]:
    """Names of the files that ``directory`` lacks to be a complete model. A dangling link does not count as a file."""
    present = {path.name for path in directory.iterdir() if path.is_file()} if directory.is_dir() else set[str]()
    if WHOLE in present:
        return lacking_kinds(present)
    index = next((name for name in (_INDEX, _BIN_INDEX) if name in present), None)
    shards = _shards_of(directory / index) if index else set[str]()
    return lacking_kinds(present | shards) + sorted(shards - present)


def _shards_of(index: Path) -> set[str]:
    try:
        content = cast("dict[str, Any]", json.loads(index.read_text("utf-8")))
        return {str(name) for name in content["weight_map"].values()}
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return {f"a readable {index.name}"}
