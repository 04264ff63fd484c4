"""Loads a Hugging Face model, and refuses one whose files are not exactly its tensors.

    DIRECTORY ──from_pretrained──▶ model, and what was missing, left over, or of another shape ──▶ WeightsNotWhole

transformers draws what is missing at random and says so in a log that nobody reads: training would begin with noise.

HeadraceError
└── WeightsNotWhole   the model's fault: its files lack tensors, or hold others; do not retry
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from configs.checks.model_files import wrapper_of
from transport.errors import HeadraceError

_LOADS: Final = threading.Lock()
"""Held while transformers loads: it changes what all threads share, and of two at once one misses its tied head."""
_NAMED: Final = 3
"""Number of tensors that a message names; it counts the others."""


class WeightsNotWhole(HeadraceError):
    """The files of a model lack some of its tensors, or hold others. The message continues after the model's name."""

    permanent = True


def load_whole(auto: Any, path: Path, *, new_head: bool = False, **how: Any) -> Any:
    """The model in ``path`` as the class ``auto`` of transformers loads it, with ``how``; no code of the directory is
    run.

    Args:
        new_head: whether the model gets another head than it was saved with: then only its body has to be there whole,
            without a pooler, and the old head may be left over.

    Raises:
        WeightsNotWhole: names the first tensors that are missing, left over, or of another shape.
        Exception: whatever transformers raises for a directory that it cannot load.
    """
    with _LOADS:
        model, told = auto.from_pretrained(
            path,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # so that they are told, by name, with all others
            **how,
        )
    missing, left = sorted(told["missing_keys"]), sorted(told["unexpected_keys"])
    shapes = {str(name): (list(there), list(wanted)) for name, there, wanted in told["mismatched_keys"]}
    wrapper = wrapper_of(left)
    if new_head:
        prefix = f"{model.base_model_prefix}."
        body = "" if model.base_model is model else prefix
        missing = [name for name in missing if name.startswith(body) and "pooler" not in name]
        left = [name for name in left if name.startswith(prefix)]
        shapes = {name: two for name, two in shapes.items() if name.startswith(body)}
    if wrapper and (missing or left):
        raise WeightsNotWhole(f"its weights {'. '.join(wrapper)}")
    refuse_parts(missing, shapes)
    if left:
        raise WeightsNotWhole(
            f"its weights hold {_first(left)}, which a model of its config.json has not and which would be ignored; "
            "save the model anew, with its own config.json"
        )
    return model


def refuse_parts(missing: Sequence[str], shapes: Mapping[str, tuple[list[int], list[int]]]) -> None:
    """Refuse a model whose files lack tensors, or have some of another shape: (that in the files, that in the model).

    Raises:
        WeightsNotWhole: names the first of them.
    """
    if missing:
        raise WeightsNotWhole(
            f"its weights lack {_first(missing)}, which would be drawn at random; fetch or save it anew"
        )
    if shapes:
        said = [f"{name} ({there} in the files, {wanted} in the model)" for name, (there, wanted) in shapes.items()]
        raise WeightsNotWhole(
            f"its weights have other shapes than config.json says: {_first(sorted(said))}; save both anew"
        )


def _first(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{', '.join(names[:_NAMED])}{more}"
