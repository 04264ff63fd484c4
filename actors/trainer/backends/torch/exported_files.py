"""The files of an exported model directory besides its weights: copies of the original model's.

Training does not change generation defaults, and transformers refuses to save many that it loads without complaint,
such as a temperature without do_sample. So their file is copied, with the tokenizer.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn

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


@contextlib.contextmanager
def as_it_was(model: nn.Module) -> Iterator[None]:
    """Keep ``save_pretrained`` from checking and writing generation defaults within the block."""
    from transformers import GenerationConfig

    class Unwritten(GenerationConfig):
        """Accepts what the model's config sets on it, and is not saved."""

        def save_pretrained(self, *args: Any, **options: Any) -> None:
            """Write nothing, so that nothing is refused."""

    holder: Any = model
    own = getattr(holder, "generation_config", None)
    holder.generation_config = Unwritten()
    try:
        yield
    finally:
        holder.generation_config = own
