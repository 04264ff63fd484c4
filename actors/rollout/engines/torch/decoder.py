"""How the torch engine computes logits: a protocol with two kinds.

- ``FusedDecoder`` (``fused_decoder.py``): Llama-like models, computed directly on the module's weights. Fast.
- ``GenericDecoder`` (``generic_decoder.py``): any HF causal LM with an attention cache, through its own ``forward``.

Invariants
- Rows are 0 … n - 1, one for each branch (``branches.py``); row i's cache holds all of its tokens but the newest.
- ``prefill`` appends rows behind the present ones. A known prefix does not change what it computes for the rest.
- ``adapters``, int64[rows], are numbers in the decoder's ``SideAdapters``; 0, or None for all: the bare model.
- No method keeps a reference to its arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from actors.models.routers import Recorder, routers_of
from actors.rollout.engines.torch.fused_decoder import FusedDecoder, why_not_fused
from actors.rollout.engines.torch.generic_decoder import GenericDecoder
from actors.rollout.engines.torch.prefix_cache import KnownPrefixes
from actors.rollout.engines.torch.side_adapters import SideAdapters
from actors.rollout.errors import ModelUnreadable


class Decoder(Protocol):
    """Computes next-token logits for rows that grow by one token a call. Every call runs on the engine's thread."""

    shares_prefixes: bool
    """Whether a token's keys and values depend on nothing but the tokens before it."""
    prefilled_tokens: int
    """Tokens that ``prefill`` has computed so far."""

    routes: NDArray[np.uint8]
    """uint8[rows, bytes]: experts of each row's newest computed token (``models/routers.py``), if they are recorded."""

    def prefill(
        self,
        sequences: Sequence[NDArray[np.int32]],
        known: KnownPrefixes | None = None,
        adapters: NDArray[np.int64] | None = None,
    ) -> Tensor:
        """Append a row for each of n ``sequences``, whose beginnings may be ``known``. Returns logits [n, vocab]."""
        ...

    def parts(self, row: int) -> list[Tensor]:
        """A row's keys and values as views [..., tokens, head_dim]; their order is the decoder's own."""
        ...

    def decode(
        self, tokens: NDArray[np.int64], lengths: NDArray[np.int64], adapters: NDArray[np.int64] | None = None
    ) -> Tensor:
        """Add ``tokens`` [n], the newest of each row; ``lengths`` [n] include it. Returns logits [n, vocab]."""
        ...

    def arrange(self, sources: NDArray[np.int64], targets: NDArray[np.int64], rows: int) -> None:
        """Copy row ``sources[j]`` onto ``targets[j]``, then keep ``rows`` rows, which may be more than before.

        A source may come several times; the two sets are disjoint.
        """
        ...

    def clear(self) -> None:
        """Forget all rows and give the cache's memory back."""
        ...

    def weights_changed(self) -> None:
        """Renew whatever was derived from the model's parameters, which have new values."""
        ...

    @property
    def rows(self) -> int: ...


def make_decoder(
    model: Any,
    kind: str,
    *,
    max_rows: int,
    max_tokens: int,
    prefill_tokens: int,
    records_routes: bool = False,
    side: SideAdapters | None = None,
) -> Decoder:
    """The fast decoder if it fits ``model``, else the generic one. ``kind``: auto, fused or generic.

    Raises:
        ModelUnreadable: ``fused`` was asked for and does not fit, the model has no key-value cache, or routes are to be
            recorded and it has no router of a known family.
    """
    if kind not in ("auto", "fused", "generic"):
        raise ModelUnreadable(f"rollout.engine_options.decoder is {kind!r}: expected auto, fused or generic")
    reason = why_not_fused(model, max_tokens) if kind != "generic" else "generic was asked for"
    reason = reason or ("it records no routes (trainer.router_replay)" if records_routes else "")
    if kind == "fused" and reason:
        raise ModelUnreadable(f"rollout.engine_options.decoder is 'fused', but {reason}: use auto")
    with torch.no_grad():
        if not reason:
            return FusedDecoder(
                model, max_rows=max_rows, max_tokens=max_tokens, prefill_tokens=prefill_tokens, side=side
            )
        if records_routes and not routers_of(model):
            raise ModelUnreadable(
                f"trainer.router_replay is set, and {type(model).__name__} has no experts whose routers are known; "
                "unset it"
            )
        recorder = Recorder(model) if records_routes else None
        return GenericDecoder(model, prefill_tokens=prefill_tokens, recorder=recorder, side=side)
