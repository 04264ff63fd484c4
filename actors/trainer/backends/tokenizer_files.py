"""Carries the files that belong to a model but are not its weights from one directory to another."""

from __future__ import annotations

import shutil
from pathlib import Path

PATTERNS = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.model",
    "chat_template*",
    "generation_config.json",
)


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy tokenizer, chat template and generation defaults; what the target already has is left alone."""
    for pattern in PATTERNS:
        for file in sorted(source.glob(pattern)):
            if file.is_file() and not (target / file.name).exists():
                shutil.copyfile(file, target / file.name)
