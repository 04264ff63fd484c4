"""The weights that a loaded model serves: versions one after the other, and adapters side by side.

    load_version ─┐                        ┌─▶ the model's parameters, in place ─▶ the decoder, and what was cached
    load_adapter ─┼─ checked as a whole ───┤
    load_model  ──┘                        └─▶ nothing, if anything does not fit
    side.add, side.drop ───────────────────▶ beside the parameters; nothing else notices

Every call runs on the engine's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from actors.models.adapter import AdapterSpec
from actors.rollout.engine import EngineSpec, WeightTensors
from actors.rollout.engines.torch.decoder import Decoder
from actors.rollout.engines.torch.model_loading import copy_model, load_model, refuse_another_kind
from actors.rollout.engines.torch.prompt_scorer import PromptScorer
from actors.rollout.engines.torch.side_adapters import SideAdapters
from actors.rollout.engines.torch.weight_loading import AdaptedWeights, SleepingWeights, copy_weights, verify_weights


class ServedWeights:
    """Changes what ``model`` serves, which ``decoder`` computes with. ``changes``: called before they change.

    Raises:
        ModelUnreadable: the model lacks layers that the spec's adapter names.
    """

    def __init__(
        self, model: Any, decoder: Decoder, side: SideAdapters, spec: EngineSpec, changes: Callable[[], None]
    ) -> None:
        self._model, self._decoder, self._spec, self._changes = model, decoder, spec, changes
        self.side = side
        self.scorer = PromptScorer(model, in_parts=decoder.shares_prefixes, side=side)
        self._merged = AdaptedWeights(model)
        """Weights of the adapted layers without an adapter."""
        self._expects = None if spec.adapter is None else self._merged.expected(spec.adapter)
        """Tensors of each version; None if versions are models."""
        self._asleep: SleepingWeights | None = None

    @property
    def are_adapted(self) -> bool:
        """Whether an adapter is merged into the model."""
        return self._merged.are_adapted

    def load_version(self, tensors: WeightTensors, dtypes: Mapping[str, str]) -> None:
        """Serve a version, of the kind that the spec says. Raises WeightsMismatch."""
        if (expected := self._expects) is not None:
            expected.check(tensors, dtypes)
            self._change(lambda: self._merged.load(tensors, expected))
        else:
            verify_weights(self._model, tensors, dtypes)
            self._change(lambda: copy_weights(self._model, tensors), whole=True)

    def load_adapter(self, tensors: WeightTensors, dtypes: Mapping[str, str], spec: AdapterSpec | None) -> None:
        """Merge an adapter into the model; None: there is none. Raises WeightsMismatch, ModelUnreadable."""
        expected = None if spec is None else self._merged.expected(spec)
        if expected is not None:
            expected.check(tensors, dtypes)
        self._change(lambda: self._merged.load(tensors, expected))

    def load_model(self, directory: Path) -> None:
        """Serve another model of this kind. Raises WeightsMismatch, ModelUnreadable."""
        other = load_model(directory, self._spec.dtype, torch.device("cpu"))
        refuse_another_kind(self._model, other, directory)
        self._change(lambda: copy_model(self._model, other), whole=True)

    def _change(self, change: Callable[[], None], *, whole: bool = False) -> None:
        """Change the weights, and all that follows from them. ``whole``: they are a model's, without an adapter."""
        self._changes()
        change()
        if whole:
            self._merged.forget()
        with torch.no_grad():
            self._decoder.weights_changed()

    def fall_asleep(self, level: int) -> None:
        """Free what ``sleep`` says. If versions are adapters, the model stays, since no version would bring it back."""
        drops = level >= 2 and self._expects is None
        if drops or self._model.device.type != "cpu":
            self._asleep = SleepingWeights(self._model, keep=not drops)
        if self._model.device.type == "cuda":
            torch.cuda.empty_cache()

    def wake(self) -> None:
        if self._asleep is not None:
            self._asleep.restore()
        self._asleep = None
