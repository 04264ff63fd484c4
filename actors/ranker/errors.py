"""What can go wrong with the ranker's model.

HeadraceError
└── RankerModelUnreadable   the job's fault: ``rollout.ranker_model`` cannot be loaded; do not retry
"""

from __future__ import annotations

from pathlib import Path

from transport.errors import HeadraceError


class RankerModelUnreadable(HeadraceError):
    """The directory that the job names holds no model with a tokenizer."""

    permanent = True

    def __init__(self, path: Path, why: Exception) -> None:
        super().__init__(
            f"rollout.ranker_model: {str(path)!r} cannot be loaded: {why}. Expected a Hugging Face encoder or language "
            "model with its tokenizer. Name another directory, or leave the field out: a small model is made then"
        )
