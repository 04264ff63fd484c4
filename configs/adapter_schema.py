"""The adapter of a job that trains one in place of the whole model: the section ``model.adapter``."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field

from configs.section import PositiveFloat, PositiveInt, Section

ALL_LINEAR: Final = "all-linear"
"""Target that stands for all linear layers but the output embedding."""


class AdapterConfig(Section):
    """A low-rank adapter (LoRA): two thin matrices beside each chosen layer. The model itself stays as it is."""

    rank: PositiveInt = 16
    """Width of the two matrices: how much the adapter can learn, and how large it is."""
    alpha: PositiveFloat = 32.0
    """What the two matrices add to a layer is multiplied by this, divided by ``rank``."""
    targets: Literal["all-linear"] | Annotated[list[str], Field(min_length=1)] = "all-linear"
    """What gets one. ``all-linear``: all linear layers but the output embedding; a list: those whose names end so, such
    as ``[q_proj, v_proj]`` or ``[all-linear, lm_head]``. Experts have one if a target names their weights:
    ``experts.down_proj``."""
    quantization: Literal["none", "nf4"] = "none"
    """``nf4`` (QLoRA): the trainer keeps the linear layers of the model in 4.5 bits a number. A copy of the model with
    the numbers that are left is made in the run's directory, and engines load that (extra ``nf4``)."""
