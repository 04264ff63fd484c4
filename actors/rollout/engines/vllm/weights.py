"""Loads new weights into a running vLLM model, all or nothing.

    tensors ─▶ Expected.check ─▶ Rollback ─▶ layerwise reload ─▶ repack tied heads ─▶ served
                  │ WeightsMismatch            │ any error
                  ▼                            ▼
             nothing was touched          Rollback.restore, then WeightsMismatch or the error itself

Invariants
- vLLM silently accepts half of the tensors, so names, shapes, dtypes and count are checked before it sees one.
- On a CPU vLLM empties linear weights after packing them; only the layerwise reload path can fill them again.
- A head tied to the embedding keeps its own packed copy, which no reload renews; it is packed anew here.
- A reload that fails half-way leaves layers on the meta device; it is finished and then undone before the next step.
"""

# pyright: reportMissingImports=false
# vLLM is an optional extra.

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from actors.host.import_guard import hide_broken_optionals
from actors.models.whole_model import WeightsNotWhole, refuse_parts
from actors.rollout.engine import WeightTensors
from actors.rollout.errors import ModelUnreadable, WeightsMismatch
from configs.checks.model_files import wrapper_of

_ARRAY_DTYPES = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16), "bfloat16": np.dtype(np.uint16)}


@dataclass(frozen=True, slots=True)
class Expected:
    """Names a checkpoint's parameters as Hugging Face does. ``aliases``: other name of a tied one → its first name."""

    shapes: Mapping[str, tuple[int, ...]]
    aliases: Mapping[str, str]
    dtype: str

    @classmethod
    def of_checkpoint(cls, model_path: Path, dtype: str) -> Expected:
        """Read the names and shapes from a model on the meta device, so no weight is loaded. Also checks the files.

        Raises:
            ModelUnreadable: transformers does not know the configuration, or ``check_files`` fails.
        """
        model = model_without_memory(model_path)
        first = {id(parameter): name for name, parameter in model.named_parameters()}
        expected = cls(
            shapes={name: tuple(parameter.shape) for name, parameter in model.named_parameters()},
            aliases={
                name: first[id(parameter)]
                for name, parameter in model.named_parameters(remove_duplicate=False)
                if name != first[id(parameter)]
            },
            dtype=dtype,
        )
        expected.check_files(model_path)
        return expected

    def check_files(self, model_path: Path) -> None:
        """Check the files' names first: vLLM silently starts from a checkpoint that lacks a part of a fused matrix.

        A checkpoint whose names are not the model's own (an older scheme that the loader renames) is let through.

        Raises:
            ModelUnreadable: no weights, an unreadable file, or parameters that are missing or of another shape.
        """
        found: dict[str, list[int]] = {}
        for file in sorted(model_path.glob("*.safetensors")):
            try:
                with safe_open(file, framework="pt") as opened:  # type: ignore[no-untyped-call]
                    found |= {name: list(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
            except Exception as error:
                raise ModelUnreadable(f"model.path: {str(file)!r} is damaged: {error}") from error
        if not found:
            raise ModelUnreadable(
                f"model.path {str(model_path)!r} holds no .safetensors file; save the model with save_pretrained"
            )
        if wrapped := wrapper_of(sorted(found)):
            raise ModelUnreadable(f"model.path {str(model_path)!r} cannot be loaded: its weights {'. '.join(wrapped)}")
        own = {self.aliases.get(name, name): shape for name, shape in found.items()}
        missing = sorted(self.shapes.keys() - own.keys())
        if missing and not own.keys() <= self.shapes.keys():
            return
        try:
            wanted = {name: list(shape) for name, shape in self.shapes.items()}
            refuse_parts(missing, {n: (own[n], wanted[n]) for n in wanted if n in own and own[n] != wanted[n]})
        except WeightsNotWhole as error:
            raise ModelUnreadable(f"model.path {str(model_path)!r}: {error}") from error

    def check(self, tensors: WeightTensors, dtypes: Mapping[str, str]) -> None:
        """Accept exactly the model's parameters; a tied parameter may also come under its second name.

        Raises:
            WeightsMismatch: names the first tensors that are missing, unknown or of another shape or dtype.
        """
        missing = sorted(self.shapes.keys() - {self.aliases.get(name, name) for name in tensors})
        unknown = sorted(tensors.keys() - self.shapes.keys() - self.aliases.keys())
        if missing or unknown:
            raise WeightsMismatch(
                f"{len(tensors)} tensors came, {len(self.shapes)} are the model's; missing {missing[:3]}, "
                f"unknown {unknown[:3]}. Publish every parameter under its Hugging Face name."
            )
        for name, array in tensors.items():
            shape = self.shapes[self.aliases.get(name, name)]
            if tuple(array.shape) != shape:
                raise WeightsMismatch(f"{name} has shape {tuple(array.shape)}, the model has {shape}")
            declared = dtypes.get(name)
            if declared != self.dtype or array.dtype != _ARRAY_DTYPES.get(self.dtype):
                raise WeightsMismatch(
                    f"{name} is {declared} in an array of {array.dtype}; this engine serves {self.dtype}. "
                    "Set model.dtype alike for trainer and rollout."
                )

    def loadable(self, tensors: WeightTensors) -> Iterator[tuple[str, torch.Tensor]]:
        """The checked tensors as torch tensors, each once under its first name, without a copy."""
        for name, array in tensors.items():
            if name in self.shapes or self.aliases[name] not in tensors:
                yield self.aliases.get(name, name), as_torch(array, self.dtype)


def model_without_memory(model_path: Path) -> Any:
    """The model in ``model_path`` on the meta device: it has names and shapes, and no weights.

    Raises:
        ModelUnreadable: transformers does not know the configuration, or there is none.
    """
    hide_broken_optionals()
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(model_path)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise ModelUnreadable(
            f"model.path {str(model_path)!r} holds no causal language model that transformers reads: {error}"
        ) from error
    model.tie_weights()
    return model


def as_torch(array: np.ndarray, dtype: str) -> torch.Tensor:
    """A view of ``array``; bfloat16 comes as uint16. The view is only read."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor


def repack_tied_heads(model: torch.nn.Module) -> None:
    """Pack heads that share the embedding's storage anew; otherwise they would keep using the old embedding."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    heads: list[Any] = [module for module in model.modules() if isinstance(module, ParallelLMHead)]
    others: list[Any] = [module for module in model.modules() if isinstance(module, VocabParallelEmbedding)]
    embeddings = {id(layer.weight) for layer in others if layer not in heads}
    for head in heads:
        if hasattr(head, "cpu_linear") and id(head.weight) in embeddings:
            dispatch_cpu_unquantized_gemm(head, remove_weight=False)


class Rollback:
    """Keeps the old weights, to restore them after a failed load.

    On a CPU, matrices are packed and replaced, never overwritten, so a reference to them is enough; the embedding,
    norms and biases are copied. On an accelerator the whole model is copied to the host.
    """

    def __init__(self, model: Any) -> None:
        self._tensors = [
            (tensor, tensor.detach().to("cpu", copy=True)) for tensor in _tensors_of(model) if tensor.numel() > 0
        ]
        self._packed = [(layer, layer.cpu_linear) for layer in model.modules() if hasattr(layer, "cpu_linear")]

    def restore(self) -> None:
        for tensor, old in self._tensors:
            tensor.data.copy_(old)
        for layer, packed in self._packed:
            layer.cpu_linear = packed


def _tensors_of(model: Any) -> Iterator[torch.Tensor]:
    yield from model.parameters()
    yield from model.buffers()


@torch.no_grad()
def reload_in_place(
    model: Any,
    model_config: Any,
    expected: Expected,
    tensors: WeightTensors,
    *,
    can_undo: bool,
    all_agree: Callable[[bool], bool],
) -> None:
    """Fill ``model`` with checked ``tensors``. On an error the old weights are back when this raises.

    ``can_undo`` False skips the copies: after an error the model must not be stepped until a reload succeeds.
    ``all_agree``: gets whether this rank has succeeded, and returns whether all ranks of the engine have.
    """
    rollback = Rollback(model) if can_undo else None
    error: BaseException | None = None
    try:
        fill(model, model_config, expected.loadable(tensors))
    except BaseException as raised:  # noqa: BLE001 - raised again when all ranks know
        error = raised
    if all_agree(error is None):
        return
    if rollback is not None:
        rollback.restore()
    raise error or WeightsMismatch("another rank of this engine could not load it")


def fill(model: Any, model_config: Any, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
    """Load ``tensors``, all that the model has, into the running ``model``."""
    from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload, initialize_layerwise_reload

    initialize_layerwise_reload(model)
    try:
        model.load_weights(tensors)
    finally:  # finishing puts real tensors back where meta ones stand; only then can the values be undone
        finalize_layerwise_reload(model, model_config)
    repack_tied_heads(model)
