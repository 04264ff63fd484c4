"""A model's generation defaults pass through an export as they were.

They are its owner's, training does not change them, and transformers refuses to save many that it loads without a
word: a temperature without do_sample, for one. The file itself is copied with the tokenizer (``tokenizer_files.py``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn


@contextlib.contextmanager
def as_it_was(model: nn.Module) -> Iterator[None]:
    """While ``save_pretrained`` runs, ``model`` has generation defaults that are not written, whatever they say."""
    from transformers import GenerationConfig

    class Unwritten(GenerationConfig):
        """Takes what the model's config sets on it, and is not saved."""

        def save_pretrained(self, *args: Any, **options: Any) -> None:
            """Nothing is written: there is nothing to refuse."""

    holder: Any = model
    own = getattr(holder, "generation_config", None)
    holder.generation_config = Unwritten()
    try:
        yield
    finally:
        holder.generation_config = own
