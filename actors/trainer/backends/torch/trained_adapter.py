"""The adapter of a backend: which model it belongs to, the model switched back to that, and the files of an adapter."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

from safetensors.torch import save_file

from actors.host.adapter import CONFIG_FILE, NAME_PREFIX, TENSOR_FILE, AdapterSpec, base_identity, layer_of, peft_config
from actors.trainer.backend import BackendSpec
from actors.trainer.backends.tokenizer_files import copy_tokenizer
from actors.trainer.backends.torch.adapter import Switch, load_adapted
from actors.trainer.backends.torch.replicas import Replicas
from actors.trainer.errors import CheckpointCorrupt


class TrainedAdapter:
    """Holds the replicas of a model with an adapter. ``base``: identity of the model."""

    def __init__(self, spec: BackendSpec, adapter: AdapterSpec) -> None:
        self._path = spec.model_path
        self._spec = adapter
        self._switch = Switch()
        self.base = base_identity(spec.model_path)
        load = partial(load_adapted, spec, adapter, self._switch, self.base)
        kind = f"adapter of {self.base}, scale {adapter.scale:g}"
        self.replicas = Replicas(spec, load, prefix=NAME_PREFIX, kind=kind)

    def switched_off(self) -> AbstractContextManager[None]:
        """Within the block the replicas compute what the model says without the adapter."""
        return self._switch.off()

    def described(self) -> dict[str, str]:
        """What a checkpoint says of it, for ``check``."""
        return {"adapter": self._spec.in_words, "base": self.base, "base_path": str(self._path.resolve())}

    def export(self, directory: Path) -> None:
        """Write it as PEFT does, with the tokenizer of its model."""
        tensors = self.replicas.parameters.by_name()
        layers = sorted({layer_of(name) for name in tensors})
        own = {name: tensor.cpu().clone() for name, tensor in tensors.items()}
        save_file(own, directory / TENSOR_FILE, metadata={"base": self.base})  # of two keys the order would be any
        (directory / CONFIG_FILE).write_text(peft_config(self._spec, base=self._path, layers=layers))
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
