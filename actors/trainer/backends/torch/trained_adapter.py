"""The adapter of a backend: which model it belongs to, the model switched back to that, and the files of an adapter.

The torch backend has replicas of the model, the sharded one a part of it on each rank; the adapter is the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from actors.host.adapter import CONFIG_FILE, NAME_PREFIX, TENSOR_FILE, AdapterSpec, base_identity, layer_of, peft_config
from actors.trainer.backend import BackendSpec
from actors.trainer.backends.tokenizer_files import copy_tokenizer
from actors.trainer.backends.torch.adapter import Switch, load_adapted
from actors.trainer.backends.torch.replicas import Replicas
from actors.trainer.errors import CheckpointCorrupt


class TrainedAdapter:
    """Knows an adapter and its model. ``base``: identity of the model. ``switch``: that of all who compute with it."""

    def __init__(self, path: Path, spec: AdapterSpec) -> None:
        self._path = path
        self.spec = spec
        self.switch = Switch()
        self.base = base_identity(path)

    @property
    def kind(self) -> str:
        """What the names and shapes of its tensors do not say."""
        return f"adapter of {self.base}, scale {self.spec.scale:g}"

    def replicas(self, spec: BackendSpec) -> Replicas:
        """Replicas of the model with the adapter."""
        load = partial(load_adapted, spec, self.spec, self.switch, self.base)
        return Replicas(spec, load, prefix=NAME_PREFIX, kind=self.kind)

    def described(self) -> dict[str, str]:
        """What a checkpoint says of it, for ``check``."""
        return {"adapter": self.spec.in_words, "base": self.base, "base_path": str(self._path.resolve())}

    def export(self, directory: Path, tensors: Mapping[str, Tensor]) -> None:
        """Write ``tensors``, its weights by the names that they are published by, as PEFT does; the tokenizer too."""
        layers = sorted({layer_of(name) for name in tensors})
        own = {name: tensor.cpu().clone() for name, tensor in tensors.items()}
        save_file(own, directory / TENSOR_FILE, metadata={"base": self.base})  # of two keys the order would be any
        (directory / CONFIG_FILE).write_text(peft_config(self.spec, base=self._path, layers=layers))
        copy_tokenizer(self._path, directory)


def check_described(state: dict[str, object], adapter: TrainedAdapter | None, directory: Path) -> None:
    """Refuse the checkpoint in ``directory``, which says ``state``, unless it is of this adapter or of whole models.

    Raises:
        CheckpointCorrupt: it is of another adapter, of another model's, or of a whole model where this is an adapter.
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
