"""Attention over packed rows, in which a position sees the path that leads to it: which ways there are to compute it.

    ends[R, L] ─ kind ─▶ a mask argument of four dimensions ─ transformers ─▶ the kind's function, in every layer

The tree of a row (``packing``) is one number for each position: where the subtree below it ends. Position i sees j if
j <= i < ends[j]. transformers hands a mask of four dimensions on to its attention function as it is, so the tree
travels as an argument: several threads may compute at once, and a layer that is recomputed in the backward pass finds
it again. Documents side by side are trees without branches.

    blocks   query rows in blocks, each with the keys that one of its rows may see (``blocks``)
    flex     torch's flex_attention with a mask of its own (``flex``): CUDA only, since it has no backward
             pass on a CPU
    dense    one mask bool[R, 1, L, L], for transformers' SDPA: what the others are held against, and what is left for a
             model that does not take an attention function of ours

Where transformers would find documents by itself it does so only without a cache and without a mask; with
``use_cache=True``, with a mask of ones, or with ``cu_seq_lens`` under SDPA documents see each other and nothing is
said. So nothing here relies on it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Protocol

import torch
from torch import nn

from actors.trainer.backends.torch.attention.blocks import Tree, attend_in_blocks, marked
from actors.trainer.backends.torch.attention.context import SharedTree
from actors.trainer.backends.torch.attention.flex import attend_by_flex, block_mask
from actors.trainer.backends.torch.packing import Layout
from actors.trainer.errors import ModelNotLoadable

_PROBED_WINDOW: Final = 3
"""Tokens that a sliding window holds while a model is probed: fewer than the example has."""


class RowAttention(Protocol):
    """One way to compute attention over packed rows."""

    implementation: str
    """Name of its function among those of transformers."""
    long_rows: bool
    """Whether only the keys that are seen cost something, so that a row may have any length."""

    def mask(self, layout: Layout, device: str) -> Any:
        """What the model takes as ``attention_mask`` for a layout with ``ends``."""
        ...


class DenseAttention:
    implementation = "sdpa"
    long_rows = False

    def mask(self, layout: Layout, device: str) -> Any:
        return torch.from_numpy(layout.mask).to(device)


class BlockAttention:
    implementation = "headrace_blocks"
    long_rows = True

    def mask(self, layout: Layout, device: str) -> Any:
        assert layout.ends is not None
        assert layout.position_ids is not None
        if layout.ranks is not None:
            return marked(SharedTree(layout.ends, layout.position_ids, device, layout.ranks))
        return marked(Tree(layout.ends, layout.position_ids, device))


class FlexAttention:
    implementation = "headrace_flex"
    long_rows = True

    def mask(self, layout: Layout, device: str) -> Any:
        assert layout.ends is not None
        return block_mask(layout.ends, device)


KINDS: Final[dict[str, RowAttention]] = {
    "dense": DenseAttention(),
    "blocks": BlockAttention(),
    "flex": FlexAttention(),
}
_FUNCTIONS: Final[dict[str, Callable[..., Any]]] = {"blocks": attend_in_blocks, "flex": attend_by_flex}


def _register() -> None:
    """Make our functions known to transformers. Without a tree they are SDPA, with the masks of SDPA."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    for name, function in _FUNCTIONS.items():
        AttentionInterface.register(KINDS[name].implementation, function)
        AttentionMaskInterface.register(KINDS[name].implementation, sdpa_mask)


def stay_uncompiled() -> None:
    """Keep our functions out of any graph that ``torch.compile`` makes: they read trees, which are no tensors."""
    for name, function in _FUNCTIONS.items():
        if not hasattr(function, "_torchdynamo_orig_callable"):
            _FUNCTIONS[name] = torch.compiler.disable(function)
    _register()


def use_attention(model: nn.Module, kind: str) -> None:
    """Let ``model`` compute packed rows by ``kind`` from now on, unless it does not use SDPA as transformers has it.

    Raises:
        ModelNotLoadable: there is no such kind.
    """
    from transformers import PreTrainedModel

    if kind not in KINDS:
        raise ModelNotLoadable(f"trainer.attention: {kind!r} is unknown, expected one of {', '.join(KINDS)}")
    if attention_of(model) is None:
        return
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    if all(part._can_set_attn_implementation() for part in parts):  # noqa: SLF001
        _register()
        _set(model, KINDS[kind])


def _set(model: nn.Module, kind: RowAttention) -> None:
    """Past the checks of ``set_attn_implementation``, which looks for the source of a class that sharding has made."""
    for part in model.modules():
        config: Any = getattr(part, "config", None)
        if attention_named(config) is not None:
            config._attn_implementation = kind.implementation  # noqa: SLF001


def attention_of(model: nn.Module) -> RowAttention | None:
    """The kind that ``model`` was set to; None: one that is none of ours, such as transformers' ``eager``."""
    return attention_named(model.config)


def attention_named(config: Any) -> RowAttention | None:
    """The same, of a configuration."""
    name = getattr(config, "_attn_implementation", None)
    return next((kind for kind in KINDS.values() if kind.implementation == name), None)


def kinds_to_try(model: nn.Module, device: str) -> Iterator[RowAttention]:
    """The kinds by which packed rows of ``model`` may be computed, best first; it is set to the one that is tried.

    Attention in chunks, and windows of which a kind knows nothing, would be ignored under a mask of ours: models with
    chunks are never packed, those with windows in blocks alone. After the last one the model has transformers' SDPA.

    Raises:
        ModelNotLoadable: it cannot be trained on ``device`` by the kind that it was set to.
    """
    config, first = model.config, attention_of(model)
    if first is KINDS["flex"] and torch.device(device).type == "cpu":
        raise ModelNotLoadable(
            "trainer.attention: flex is for CUDA, since flex_attention has no backward pass on a CPU; set it to blocks"
        )
    if first is None or getattr(config, "attention_chunk_size", None):
        return
    tried = [first] if first is KINDS["dense"] else [first, KINDS["blocks"], KINDS["dense"]]
    if windows(model):
        tried = [kind for kind in tried if kind is KINDS["blocks"]]
    for kind in dict.fromkeys(tried):
        _set(model, kind)
        yield kind
        if kind is KINDS["flex"]:
            warnings.warn("trainer.attention: flex gave other logits or failed, blocks are tried", stacklevel=2)
    _set(model, KINDS["dense"])


def windows(model: nn.Module) -> list[Any]:
    """The configurations and modules of ``model`` that have a sliding window."""
    config: Any = model.config
    owners = {id(owner): owner for owner in (config, config.get_text_config(), *model.modules())}
    return [owner for owner in owners.values() if isinstance(getattr(owner, "sliding_window", None), int)]


@contextmanager
def narrow_windows(model: nn.Module) -> Iterator[None]:
    """Within it sliding windows hold a few tokens, so that a short example shows whether they are obeyed."""
    before = [(owner, owner.sliding_window) for owner in windows(model)]
    for owner, _ in before:
        owner.sliding_window = _PROBED_WINDOW
    try:
        yield
    finally:
        for owner, window in before:
            owner.sliding_window = window
