"""A model that predicts how long the response to a prompt will be, by regression on a reader's states.

    prompts ─▶ reader (``readers.py``) ─▶ states ─▶ mean over tokens ─▶ linear head ─▶ log of the length

The model is fitted to the log of the length: the order is what counts, and the log keeps a few very long responses from
dominating the loss. Lengths are standardised over the pairs that the model is fitted on, so that a drift of all lengths
moves two numbers and not the network.

Its state is kept in ``home`` after each refresh, one file, whole or not there, from which the next life of the process
goes on. AdamW's moments are not kept: they are made anew in a few steps.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import structlog
import torch

from actors.host.whole_file import replacing
from actors.ranker.model import LengthPair
from actors.ranker.readers import Reader

log = structlog.get_logger("headrace.ranker")

_HEAD_LEARNING_RATE: Final = 1e-3
_BATCH: Final = 32
_STEPS: Final = 10
"""Number of gradient steps in one slice."""
_SCORE_BATCH: Final = 128

RunBlocking = Callable[..., Awaitable[Any]]


class EncoderLengthModel:
    """Implements ``LengthModel``. ``run_blocking`` runs a function on a thread, one at a time.

    ``device``: as torch names it, or ``auto``: CUDA where there is a device.
    """

    def __init__(
        self,
        make_reader: Callable[[], Reader],
        home: Path,
        run_blocking: RunBlocking,
        *,
        seed: int = 0,
        device: str = "cpu",
        threads: int = 1,
    ) -> None:
        self._make_reader = make_reader
        self._file = home / "ranker.safetensors"
        self._run = run_blocking
        self._seed = seed
        self._device_name = device
        self._threads = threads
        self._draw = random.Random(seed)
        self._mean, self._deviation = 0.0, 1.0

    async def start(self) -> int:
        return await self._run(self._make)

    async def score(self, prompts: Sequence[np.ndarray]) -> np.ndarray:
        return await self._run(self._score, prompts)

    async def fit(self, pairs: Sequence[LengthPair]) -> float:
        return await self._run(self._fit, pairs)

    async def keep(self, refreshes: int) -> None:
        await self._run(self._save, refreshes)

    async def close(self) -> None:
        """Nothing to give back."""

    # ------------------------------------------------------------ on the thread

    def _make(self) -> int:
        torch.set_num_threads(self._threads)
        found = "cuda" if torch.cuda.is_available() else "cpu"
        self._device = torch.device(found if self._device_name == "auto" else self._device_name)
        self._reader = reader = self._make_reader()
        torch.manual_seed(self._seed)
        self._head = torch.nn.Linear(reader.hidden, 1)
        self._both = torch.nn.ModuleDict({"reader": reader.module, "head": self._head}).to(self._device).eval()
        self._optimizer = torch.optim.AdamW(
            [
                {"params": reader.module.parameters(), "lr": reader.learning_rate},
                {"params": self._head.parameters(), "lr": _HEAD_LEARNING_RATE},
            ]
        )
        return self._take_up() if self._file.is_file() else 0

    def _take_up(self) -> int:
        """Load what an earlier life kept, unless the job names another model now; returns its number of refreshes."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self._file, framework="pt") as file:
                state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
                said = file.metadata() or {}
            mean, deviation, refreshes = float(said["mean"]), float(said["deviation"]), int(said["refreshes"])
            self._both.load_state_dict(state)
        except (OSError, SafetensorError, RuntimeError, KeyError, ValueError) as error:
            log.warning("what the ranker has kept does not fit; it learns anew", file=self._file.name, error=str(error))
            return 0
        self._mean, self._deviation = mean, deviation
        return refreshes

    def _save(self, refreshes: int) -> None:
        from safetensors.torch import save_file

        self._file.parent.mkdir(parents=True, exist_ok=True)
        state = {name: value.detach().cpu().clone() for name, value in self._both.state_dict().items()}
        said = {"mean": repr(self._mean), "deviation": repr(self._deviation), "refreshes": str(refreshes)}
        with replacing(self._file) as partial:
            save_file(state, partial, metadata=said)

    def _forward(self, prompts: Sequence[np.ndarray]) -> torch.Tensor:
        """float32[p] standardised log lengths."""
        tokens = self._reader.tokens(prompts)
        width = max(1, *(len(ids) for ids in tokens))
        ids = torch.zeros((len(tokens), width), dtype=torch.long)
        mask = torch.zeros((len(tokens), width), dtype=torch.long)
        for row, of_prompt in enumerate(tokens):
            ids[row, : len(of_prompt)] = torch.tensor(of_prompt, dtype=torch.long)
            mask[row, : len(of_prompt)] = 1
        mask = mask.to(self._device)
        states = self._reader.states(ids.to(self._device), mask)
        weight = mask.unsqueeze(-1).to(states.dtype)
        mean = (states * weight).sum(dim=1) / weight.sum(dim=1).clamp(min=1.0)
        return self._head(mean).squeeze(-1)

    def _score(self, prompts: Sequence[np.ndarray]) -> np.ndarray:
        parts: list[np.ndarray] = []
        with torch.inference_mode():
            for first in range(0, len(prompts), _SCORE_BATCH):
                logs = self._forward(prompts[first : first + _SCORE_BATCH]).double().cpu().numpy()
                parts.append(np.exp(logs * self._deviation + self._mean))
        return np.concatenate(parts) if parts else np.empty(0)

    def _fit(self, pairs: Sequence[LengthPair]) -> float:
        logs = np.log(np.maximum([pair.response_tokens for pair in pairs], 1.0))
        self._mean, self._deviation = float(logs.mean()), max(float(logs.std()), 1e-3)
        targets = torch.tensor((logs - self._mean) / self._deviation, dtype=torch.float32, device=self._device)
        total = 0.0
        for _ in range(_STEPS):
            chosen = [self._draw.randrange(len(pairs)) for _ in range(min(_BATCH, len(pairs)))]
            predicted = self._forward([pairs[i].prompt_ids for i in chosen])
            loss = torch.nn.functional.smooth_l1_loss(predicted, targets[chosen])
            self._optimizer.zero_grad()
            loss.backward()
            self._optimizer.step()
            total += float(loss.detach())
        return total / _STEPS
