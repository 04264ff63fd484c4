"""What users write: losses and advantages of their own, good and bad."""

from __future__ import annotations

import sys

import numpy as np
import torch

from actors.trainer.backend import LossSpec
from actors.trainer.learning.losses import TokenColumns

not_a_function = 3


def reinforce(columns: TokenColumns, spec: LossSpec) -> torch.Tensor:
    return -columns.advantages * columns.new


def mean(columns: TokenColumns, spec: LossSpec) -> torch.Tensor:
    return columns.new.mean()


def without_gradient(columns: TokenColumns, spec: LossSpec) -> torch.Tensor:
    return columns.new.detach()


def raising(*_: object) -> None:
    raise RuntimeError("no such\n thing")


def leaving(*_: object) -> None:
    sys.exit(0)


def ranks(rewards: np.ndarray, lengths: np.ndarray) -> list[float]:
    """Plain floats are fine: the shortest of equal responses is the best."""
    return (rewards - lengths / 100 - (rewards - lengths / 100).mean()).tolist()


def too_few(rewards: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    return rewards[:-1]


def infinite(rewards: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    return np.full(len(rewards), np.inf)


def words(rewards: np.ndarray, lengths: np.ndarray) -> str:
    return "good"
