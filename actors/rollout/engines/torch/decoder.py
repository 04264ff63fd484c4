"""How the torch engine computes logits: a protocol with two kinds.

- ``FusedDecoder`` (``fused_decoder.py``): Llama-like models, computed directly on the module's weights. Fast.
- ``GenericDecoder`` (``generic_decoder.py``): any HF causal LM with an attention cache, through its own ``forward``.

Invariants
- Rows are 0 … n - 1, one for each branch (``branches.py``); row i's cache holds all of its tokens but the newest.
- ``prefill`` appends rows behind the present ones. Behind a known prefix it computes what it would compute without.
- No method keeps a reference to its arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from actors.rollout.engines.torch.fused_decoder import FusedDecoder, why_not_fused
from actors.rollout.engines.torch.generic_decoder import GenericDecoder
from actors.rollout.engines.torch.prefix_cache import KnownPrefixes
from actors.rollout.errors import ModelUnreadable


class Decoder(Protocol):
    """Computes next-token logits for rows that grow by one token a call. Every call runs on the engine's thread."""

    shares_prefixes: bool
    """Whether a token's keys and values depend on nothing but the tokens before it."""
    prefilled_tokens: int
    """Tokens that ``prefill`` has computed so far."""

    def prefill(self, sequences: Sequence[NDArray[np.int32]], known: KnownPrefixes | None = None) -> Tensor:
        """Append a row for each of n ``sequences``, whose beginnings may be ``known``. Returns logits [n, vocab]."""
        ...

    def parts(self, row: int) -> list[Tensor]:
        """What a row holds, keys and values in an order that is the decoder's own: views [..., tokens, head_dim]."""
        ...

    def decode(self, tokens: NDArray[np.int64], lengths: NDArray[np.int64]) -> Tensor:
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
        """The model's parameters have new values: renew whatever was derived from them."""
        ...

    @property
    def rows(self) -> int: ...

    @property
    def cache_bytes(self) -> int: ...


def make_decoder(model: Any, kind: str, *, max_rows: int, max_tokens: int, prefill_tokens: int) -> Decoder:
    """The fast decoder if it fits ``model``, else the generic one. ``kind``: auto, fused or generic.

    Raises:
        ModelUnreadable: ``fused`` was asked for and does not fit, or the model keeps a state that no cache can hold.
    """
    if kind not in ("auto", "fused", "generic"):
        raise ModelUnreadable(f"rollout.engine_options.decoder is {kind!r}: expected auto, fused or generic")
    reason = why_not_fused(model, max_tokens) if kind != "generic" else "generic was asked for"
    if kind == "fused" and reason:
        raise ModelUnreadable(f"rollout.engine_options.decoder is 'fused', but {reason}: use auto")
    with torch.no_grad():
        if not reason:
            return FusedDecoder(model, max_rows=max_rows, max_tokens=max_tokens, prefill_tokens=prefill_tokens)
        return GenericDecoder(model, prefill_tokens=prefill_tokens)
