"""AdamW over the flat buffers: one group for matrices, which decay, one for vectors, which do not.

Its moments are made by the first step, by whoever saves or fills them, or, where they must lie in memory that can be
given back at unchanged addresses, at the start.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from actors.trainer.backend import BackendSpec
from actors.trainer.backends.torch.flat import FlatParameters

MOMENTS: Final = ("exp_avg", "exp_avg_sq")


class Adam:
    """Updates the master weights from the gradient sums."""

    def __init__(self, flat: FlatParameters, spec: BackendSpec) -> None:
        self._memory = flat.memory
        groups: list[dict[str, Any]] = []
        for start, end, decay in (
            (0, flat.first_vector, spec.weight_decay),
            (flat.first_vector, flat.master.numel(), 0.0),
        ):
            if end > start:
                part = torch.nn.Parameter(flat.master[start:end])
                part.grad = flat.grad[start:end]
                groups.append({"params": [part], "weight_decay": decay})
        self._adam = torch.optim.AdamW(groups, lr=spec.learning_rate, betas=spec.adam_betas, fused=True)
        self._parts: list[Tensor] = [group["params"][0] for group in groups]
        if self._memory.keeps_addresses_by_itself:
            self.states()

    @property
    def groups(self) -> int:
        """Count of groups, each with moments and a step count of its own."""
        return len(self._parts)

    @property
    def sizes(self) -> list[int]:
        """Numbers in each group."""
        return [part.numel() for part in self._parts]

    @property
    def has_moments(self) -> bool:
        """Whether moments are there yet."""
        return bool(self._adam.state)

    def step(self, rate: float) -> None:
        for group in self._adam.param_groups:
            group["lr"] = rate
        self._adam.step()

    def states(self) -> list[dict[str, Tensor]]:
        """Adam's moments and step counts, made now if no step was taken yet, so that they can be saved and filled."""
        states: list[dict[str, Tensor]] = []
        for part in self._parts:
            state = self._adam.state[part]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=part.device)
                for moment in MOMENTS:
                    state[moment] = self._memory.zeros(part.numel(), part.dtype)
            states.append({key: state[key] for key in ("step", *MOMENTS)})
        return states

    def counts(self) -> list[float]:
        """Step counts of the groups, 0 before the first step."""
        return [float(state["step"]) for state in self.states()] if self.has_moments else [0.0] * self.groups

    def set_counts(self, counts: list[float]) -> None:
        for state, count in zip(self.states(), counts, strict=True):
            state["step"].fill_(count)
