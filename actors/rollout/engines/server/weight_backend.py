"""Runs inside a user's ``vllm serve`` process: maps weights that lie in a file of that machine, and loads them.

    vllm serve … --worker-extension-cls actors.rollout.engines.server.weight_backend.WorkerExtension
                 --weight-transfer-config '{"backend": "headrace"}'

    start_weight_update ─▶ update_weights {path, tensors} ─▶ finish_weight_update
    layers made empty       the file is mapped, read once      packed and sharded as at the server's start

Invariants
- This file imports nothing of Headrace, so that it can be copied to where a server runs, and named there.
- Importing it registers the backend. Every rank of the server maps the same file, and takes its part of each tensor.
- A load that fails leaves layers filled with something, so that the next load can begin; Headrace uses none of them.
- A head tied to the embedding keeps its own packed copy on a CPU, which no reload renews; it is packed anew here.
"""

# pyright: reportMissingImports=false
# vLLM is an optional extra.

from __future__ import annotations

import json
import math
import mmap
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

BACKEND = "headrace"
PROTOCOL = 1
"""Number of the form of ``Update`` and of what ``headrace_hello`` answers."""


@dataclass
class Init(WeightTransferInitInfo):
    """Holds nothing: there is nobody to meet."""


@dataclass
class Update(WeightTransferUpdateInfo):
    """Names a file of this machine, and the tensors in it: [name, dtype, shape, offset in bytes]."""

    path: str = ""
    tensors: list[Any] = field(default_factory=list[Any])


class MappedFileEngine(WeightTransferEngine[Init, Update]):
    """Loads every parameter of the model from one mapped file."""

    init_info_cls = Init
    update_info_cls = Update

    def init_transfer_engine(self, init_info: Init) -> None:
        """Do nothing: there is nobody to meet."""

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        try:
            self.receive_weights(self.parse_update_info(update_info))
        except BaseException:
            self._finalize()  # puts real tensors back where meta ones stand
            raise
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: Update) -> None:
        with open(update_info.path, "rb") as file, torch.no_grad():  # noqa: PTH123 - as vLLM's own
            mapped, model = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), cast("Any", self.model)
            model.load_weights(_tensors(mapped, update_info.tensors))

    def finish_weight_update(self) -> None:
        self._finalize()
        if self.device.type == "cpu":
            with torch.no_grad():
                _repack_tied_heads(self.model)

    def _finalize(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Do nothing: nothing is held."""


def _tensors(mapped: mmap.mmap, entries: list[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Views of the tensors, which are only read; the mapping goes with the last of them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        for name, dtype, shape, offset in entries:
            kind = getattr(torch, dtype)
            yield name, torch.frombuffer(mapped, dtype=kind, count=math.prod(shape), offset=offset).view(shape)


def _repack_tied_heads(model: torch.nn.Module) -> None:
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    heads: list[Any] = [module for module in model.modules() if isinstance(module, ParallelLMHead)]
    others: list[Any] = [module for module in model.modules() if isinstance(module, VocabParallelEmbedding)]
    embeddings = {id(layer.weight) for layer in others if layer not in heads}
    for head in heads:
        if hasattr(head, "cpu_linear") and id(head.weight) in embeddings:
            dispatch_cpu_unquantized_gemm(head, remove_weight=False)


class WorkerExtension:
    """Adds one method to each of the server's workers, which ``/collective_rpc`` calls."""

    def headrace_hello(self, path: str) -> str:
        """Answer as JSON: the protocol, the model's configuration, and whether the file ``path`` can be read here."""
        model_config = self.vllm_config.model_config  # type: ignore[attr-defined]
        config = json.loads(model_config.hf_config.to_json_string(use_diff=False))
        return json.dumps({"protocol": PROTOCOL, "config": config, "sees": os.access(path, os.R_OK)})


if BACKEND not in WeightTransferEngineFactory._registry:  # noqa: SLF001 - it has no other way to ask
    WeightTransferEngineFactory.register_engine(BACKEND, MappedFileEngine)
