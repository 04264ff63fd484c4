"""The adapter of a backend: the model it belongs to, the switch that turns it off, and its files.

The torch backend, with replicas of the model, and the sharded one, with a part on each rank, use the same code.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor, nn

from actors.models.adapted_layers import peft_targets
from actors.models.adapter import (
    CONFIG_FILE,
    NAME_PREFIX,
    TENSOR_FILE,
    AdapterSpec,
    base_identity,
    peft_config,
)
from actors.trainer.backend import BackendSpec
from actors.trainer.backends.torch.adapter import Switch, load_adapted
from actors.trainer.backends.torch.exported_files import copy_tokenizer
from actors.trainer.backends.torch.replicas import Replicas
from actors.trainer.errors import CheckpointCorrupt


class TrainedAdapter:
    """Knows an adapter and its model. ``base``: identity of the model. ``switch``: the one of all its replicas."""

    def __init__(self, path: Path, spec: AdapterSpec) -> None:
        self._path = path
        self.spec = spec
        self.switch = Switch()
        self.base = base_identity(path)

    @property
    def kind(self) -> str:
        """Base model and scale of the adapter, which the names and shapes of its tensors do not say."""
        return f"adapter of {self.base}, scale {self.spec.scale:g}"

    def replicas(self, spec: BackendSpec) -> Replicas:
        """Replicas of the model with the adapter."""
        load = partial(load_adapted, spec, self.spec, self.switch, self.base)
        return Replicas(spec, load, prefix=NAME_PREFIX, kind=self.kind)

    def described(self) -> dict[str, str]:
        """What a checkpoint says of the adapter, for ``check_described``."""
        return {"adapter": self.spec.in_words, "base": self.base, "base_path": str(self._path.resolve())}

    def export(self, directory: Path, model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
        """Write ``tensors``, the weights of ``model`` by their published names, as PEFT does; the tokenizer too."""
        modules, parameters = peft_targets(model, self.spec)
        own = {name: tensor.cpu().clone() for name, tensor in tensors.items()}
        save_file(own, directory / TENSOR_FILE, metadata={"base": self.base})  # the order of two keys would vary
        (directory / CONFIG_FILE).write_text(
            peft_config(self.spec, base=self._path, modules=modules, parameters=parameters)
        )
        copy_tokenizer(self._path, directory)


def check_described(state: dict[str, object], adapter: TrainedAdapter | None, directory: Path) -> None:
    """Check that ``state``, from the checkpoint in ``directory``, is of this adapter, or of a whole model without one.

    Raises:
        CheckpointCorrupt: it is of another adapter, of another base model, or of a whole model instead of an adapter.
    """
    own = {} if adapter is None else adapter.described()
    theirs, ours = state.get("adapter"), own.get("adapter")
    if theirs != ours:
        raise CheckpointCorrupt(
            f"{directory}: holds {_in_words(theirs)}, and the job trains {_in_words(ours)} (model.adapter); resume "
            "with the job as it was, or begin a new run"
        )
    if adapter is not None and state.get("base") != adapter.base:
        raise CheckpointCorrupt(
            f"{directory}: holds an adapter of the model {state.get('base_path')} (xxh3 {state.get('base')}), and "
            f"model.path is {own['base_path']} (xxh3 {adapter.base}), whose files are others; put the former ones back"
        )


def _in_words(adapter: object) -> str:
    return "a whole model" if adapter is None else f"an adapter of {adapter}"
