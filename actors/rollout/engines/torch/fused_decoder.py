"""The fast decoder: Llama, Mistral, Qwen2 and Qwen3 as plain tensor code on the module's own weights.

    ids ─▶ embed ─▶ ┌ norm ─▶ q,k,v in one matmul ─▶ (q/k norm) ─▶ rotate ─▶ cache ─▶ attend ─▶ o ─┐ × layers
                    └ norm ─▶ gate,up in one matmul ─▶ silu(gate) · up ─▶ down ────────────────────┘
                    ─▶ norm ─▶ head ─▶ logits

Invariants
- Fused matrices own the storage and the module's parameters are views of them, so a weight load in place needs no
  second copy. Only the stacked q/k norms are derived, and ``weights_changed`` renews them; it also sees whether the
  head has got a weight of its own.
- On the CPU, in float32 and with one thread, a row's logits are the same bits whatever else is in the batch. BLAS takes
  other kernels for few rows or columns, and attention for a ragged last block: therefore matmuls have at least
  ``least_rows`` rows, decoding reads at least ``SHORTEST_SPAN`` columns, and prefill widths are multiples of
  ``LENGTH_BUCKET``. Masked positions contribute exact zeros, and a known prefix lies at the columns where it would have
  been computed.
- On CUDA a step of decoding is a replayed graph (``step_graphs.py``), unless a row has an adapter. To have few shapes
  that come often, rows are padded to a power of two and spans to multiples of ``CUDA_SPAN``.

Why it exists: on a tiny model the HF modules cost several times the arithmetic (``benchmarks/``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  torch's own name for it
from numpy.typing import NDArray
from torch import Tensor

from actors.models.matmul import linear
from actors.rollout.engines.torch.kv_cache import KvCache
from actors.rollout.engines.torch.prefill import behind_chunks, prefill_chunks
from actors.rollout.engines.torch.prefix_cache import KnownPrefixes
from actors.rollout.engines.torch.side_adapters import AdaptedRows, Part, SideAdapters
from actors.rollout.engines.torch.step_graphs import StepGraphs

_MODEL_TYPES: Final = ("llama", "mistral", "qwen2", "qwen3")
_ROPE_TYPES: Final = ("default", "linear", "llama3", "yarn")
LENGTH_BUCKET: Final = 16
SHORTEST_SPAN: Final = 32
CUDA_SPAN: Final = 64
FEWEST: Final = 4
MOST: Final = 16
"""Number of rows from which on every processor that was tried gives the same bits."""
_MANY: Final = 64


def _bucket(length: int) -> int:
    return -(-length // LENGTH_BUCKET) * LENGTH_BUCKET


def why_not_fused(model: Any, max_tokens: int) -> str:
    """Why ``FusedDecoder`` cannot run ``model``; empty if it can."""
    config = model.config
    if config.model_type not in _MODEL_TYPES:
        return f"model_type {config.model_type!r} is none of {', '.join(_MODEL_TYPES)}"
    if config.hidden_act not in ("silu", "swish"):
        return f"hidden_act {config.hidden_act!r} is not silu"
    windowed = getattr(config, "use_sliding_window", config.model_type == "mistral")
    window = getattr(config, "sliding_window", None) if windowed else None
    if window is not None and window < max_tokens:
        return f"its sliding window of {window} is shorter than {max_tokens} tokens"
    if (rope := model.model.rotary_emb.rope_type) not in _ROPE_TYPES:
        return f"rope_type {rope!r} is none of {', '.join(_ROPE_TYPES)}"
    return ""


class _Layer:
    """Holds one decoder layer's weights, fused."""

    def __init__(self, layer: Any, name: str, head_dim: int) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.qkv_parts = _parts(f"{name}.self_attn", attention, "q_proj", "k_proj", "v_proj")
        self.gate_up_parts = _parts(f"{name}.mlp", mlp, "gate_proj", "up_proj")
        self.o_parts = _parts(f"{name}.self_attn", attention, "o_proj")
        self.down_parts = _parts(f"{name}.mlp", mlp, "down_proj")
        self.qkv, self.qkv_bias = _fuse(attention.q_proj, attention.k_proj, attention.v_proj)
        self.gate_up, self.gate_up_bias = _fuse(mlp.gate_proj, mlp.up_proj)
        self.o, self.o_bias = attention.o_proj.weight.detach(), _bias(attention.o_proj)
        self.down, self.down_bias = mlp.down_proj.weight.detach(), _bias(mlp.down_proj)
        self.norm_1, self.norm_2 = layer.input_layernorm.weight.detach(), layer.post_attention_layernorm.weight.detach()
        self.heads = attention.q_proj.weight.shape[0] // head_dim
        self.kv_heads = attention.k_proj.weight.shape[0] // head_dim
        self._norms = (attention.q_norm.weight, attention.k_norm.weight) if hasattr(attention, "q_norm") else None
        self.qk_norm: Tensor | None = None
        self.renew()

    def matrices(self) -> tuple[Tensor, ...]:
        return self.qkv, self.o, self.gate_up, self.down

    def renew(self) -> None:
        """Stack the per-head norms of queries and keys: [heads + kv_heads, head_dim]."""
        if self._norms is not None:
            q, k = self._norms
            stacked = torch.cat([q.detach().expand(self.heads, -1), k.detach().expand(self.kv_heads, -1)])
            if self.qk_norm is None:
                self.qk_norm = stacked
            else:  # in place: a recorded step reads from the same address
                self.qk_norm.copy_(stacked)


def _parts(name: str, owner: Any, *linears: str) -> list[Part]:
    """Columns that each of some linear layers of ``owner`` has where they are joined."""
    stops = np.cumsum([getattr(owner, one).weight.shape[0] for one in linears]).tolist()
    return [Part(f"{name}.{one}", start, stop) for one, start, stop in zip(linears, [0, *stops], stops, strict=False)]


def _bias(layer: Any) -> Tensor | None:
    return None if layer.bias is None else layer.bias.detach()


def _fuse(*linears: Any) -> tuple[Tensor, Tensor | None]:
    """Join several matrices into one; the modules' parameters become views of it."""
    weight = torch.cat([part.weight.detach() for part in linears])
    bias = None if linears[0].bias is None else torch.cat([part.bias.detach() for part in linears])
    start = 0
    for part in linears:
        stop = start + part.weight.shape[0]
        part.weight.data = weight[start:stop]
        if bias is not None:
            part.bias.data = bias[start:stop]
        start = stop
    return weight, bias


class FusedDecoder:
    """Implements ``Decoder``; see the module's docstring."""

    shares_prefixes = True
    routes: NDArray[np.uint8] = np.zeros((0, 0), np.uint8)
    """Nothing: these models have no experts."""

    def __init__(
        self, model: Any, *, max_rows: int, max_tokens: int, prefill_tokens: int, side: SideAdapters | None = None
    ) -> None:
        """``side``: adapters that rows may have; None: they have none."""
        self._side = side or SideAdapters(model)
        self._adapted: AdaptedRows | None = None
        """Adapters of the rows that are computed."""
        body, config = model.model, model.config
        self._head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._lm_head = model.lm_head
        self._embed, self._head = body.embed_tokens.weight.detach(), model.lm_head.weight.detach()
        self._head_parts = [Part("lm_head", 0, len(self._head))]
        self._norm, self._eps = body.norm.weight.detach(), config.rms_norm_eps
        self._layers = [_Layer(one, f"model.layers.{at}", self._head_dim) for at, one in enumerate(body.layers)]
        self._prefill_tokens = prefill_tokens
        self._scale = self._head_dim**-0.5
        positions = torch.arange(_bucket(max_tokens), device=self._embed.device).unsqueeze(0)
        cos, sin = body.rotary_emb(self._embed, positions)
        half = self._head_dim // 2
        # rotate_half(x) * sin equals the half-swapped x times a sin whose first half is negated
        self._cos, self._sin = cos[0].contiguous(), torch.cat([-sin[0, :, :half], sin[0, :, half:]], -1).contiguous()
        first = self._layers[0]
        self._least_rows = least_rows([self._head, *first.matrices()])  # all layers are alike
        self._cache = KvCache(
            layers=len(self._layers),
            heads=first.kv_heads,
            head_dim=self._head_dim,
            max_rows=max(max_rows, self._least_rows),
            max_tokens=_bucket(max_tokens),
            like=self._embed,
        )
        self._most_rows = max(max_rows, self._least_rows)
        self._graphs = StepGraphs(self._embed.device) if self._embed.is_cuda else None
        self._rows = 0
        self.prefilled_tokens = 0

    @property
    def rows(self) -> int:
        return self._rows

    def parts(self, row: int) -> list[Tensor]:
        return self._cache.parts(row)

    def weights_changed(self) -> None:
        for layer in self._layers:
            layer.renew()
        if self._lm_head.weight.data_ptr() != self._head.data_ptr():  # it was tied, and has got an adapter
            self._head = self._lm_head.weight.detach()
            if self._graphs is not None:
                self._graphs.clear()

    def clear(self) -> None:
        self._rows = 0
        self._cache.clear()
        if self._graphs is not None:
            self._graphs.clear()

    def arrange(self, sources: NDArray[np.int64], targets: NDArray[np.int64], rows: int) -> None:
        self._cache.reserve(max(rows, self._least_rows), self._cache.width, used_rows=self._rows)
        if len(sources):
            self._cache.move(self._index(sources), self._index(targets))
        self._rows = rows

    def _reserve(self, rows: int, longest: int, *, used_rows: int) -> None:
        """Reserve whole buckets of columns, since attention reads whole buckets."""
        self._cache.reserve(max(rows, self._least_rows), _bucket(longest), used_rows=used_rows)

    def _index(self, values: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(values).to(self._embed.device)

    # ------------------------------------------------------------------ prefill

    def prefill(
        self,
        sequences: Sequence[NDArray[np.int32]],
        known: KnownPrefixes | None = None,
        adapters: NDArray[np.int64] | None = None,
    ) -> Tensor:
        adapters = np.zeros(len(sequences), np.int64) if adapters is None else adapters
        logits = torch.empty(len(sequences), self._head.shape[0], dtype=self._head.dtype, device=self._head.device)
        longest = max(len(sequence) for sequence in sequences)
        self._reserve(self._rows + len(sequences), longest + 1, used_rows=self._rows)
        lengths = np.array([len(sequence) for sequence in sequences], np.int64)
        begun = np.array([known.tokens(i) if known else 0 for i in range(len(sequences))], np.int64)
        new = np.flatnonzero(begun == 0)
        for chunk in prefill_chunks(lengths[new].tolist(), self._prefill_tokens):
            rows = self._index(new[chunk])
            self._adapted = self._side.rows(adapters[new[chunk]])
            logits[rows] = self._prefill_chunk([sequences[i] for i in new[chunk]], rows + self._rows)
        if known is not None:
            rest = np.flatnonzero(begun)
            for chunk in behind_chunks((lengths - begun)[rest].tolist(), lengths[rest].tolist(), self._prefill_tokens):
                chosen, rows = rest[chunk], self._index(rest[chunk])
                for part in prefill_chunks(begun[chosen].tolist(), self._prefill_tokens):  # what is read is a copy
                    few = chosen[part]
                    self._cache.begin(self._index(few) + self._rows, *known.read(few.tolist()))
                self._adapted = self._side.rows(adapters[chosen])
                logits[rows] = self._prefill_behind([sequences[i] for i in chosen], begun[chosen], rows + self._rows)
        self._rows += len(sequences)
        self.prefilled_tokens += int((lengths - begun).sum())
        return logits

    def _prefill_chunk(self, sequences: list[NDArray[np.int32]], targets: Tensor) -> Tensor:
        """Compute n ``sequences`` into the cache's rows ``targets``; returns logits [n, vocab]."""
        n, width = len(sequences), _bucket(max(len(sequence) for sequence in sequences))
        ids = np.zeros((n, width), np.int64)
        for i, sequence in enumerate(sequences):
            ids[i, : len(sequence)] = sequence
        hidden = F.embedding(self._index(ids).view(-1), self._embed)
        cos, sin = self._cos[:width].repeat(n, 1).unsqueeze(1), self._sin[:width].repeat(n, 1).unsqueeze(1)
        last = np.array([len(sequence) - 1 for sequence in sequences]) + np.arange(n) * width
        for number, layer in enumerate(self._layers):
            q, k, v = self._project(layer, hidden, cos, sin)
            q, k, v = (part.view(n, width, -1, self._head_dim).transpose(1, 2) for part in (q, k, v))
            self._cache.write_prefix(number, targets, k, v)
            # right padding: a real token never sees a pad, so causality is the whole mask
            mixed = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=self._scale, enable_gqa=q.shape[1] != k.shape[1]
            )
            mixed = mixed.transpose(1, 2).reshape(n * width, -1)
            hidden = self._finish_layer(layer, hidden, mixed)
        return self._logits(hidden[self._index(last)])

    def _prefill_behind(self, sequences: list[NDArray[np.int32]], begun: NDArray[np.int64], targets: Tensor) -> Tensor:
        """As ``_prefill_chunk``, but the cache's rows already hold the first ``begun`` (int64[n]) tokens of each."""
        lengths = np.array([len(sequence) for sequence in sequences], np.int64)
        n, width, span = len(sequences), _bucket(int((lengths - begun).max())), self._span(int(lengths.max()))
        behind = np.arange(width)
        real = behind < (lengths - begun)[:, None]
        positions = np.minimum(begun[:, None] + behind, lengths[:, None] - 1)  # a pad repeats the last token
        ids = np.stack([sequence[at] for sequence, at in zip(sequences, positions, strict=True)]).astype(np.int64)
        at, entries = self._index(positions.ravel()), self._index(np.flatnonzero(real))
        hidden = F.embedding(self._index(ids).view(-1), self._embed)
        cos, sin = self._cos[at].unsqueeze(1), self._sin[at].unsqueeze(1)
        places = self._cache.places(at[entries], targets.repeat_interleave(width)[entries])
        hidden_from = torch.arange(span, device=at.device) > at.view(n, 1, width, 1)
        bias = torch.zeros(hidden_from.shape, dtype=hidden.dtype, device=at.device)
        bias = bias.masked_fill_(hidden_from, -torch.inf)
        for number, layer in enumerate(self._layers):
            q, k, v = self._project(layer, hidden, cos, sin)
            self._cache.store(number, places, k[entries], v[entries])
            keys, values = self._cache.of_rows(number, targets, span)
            q, group = q.view(n, width, -1, self._head_dim).transpose(1, 2), layer.heads // layer.kv_heads
            if q.is_cuda and group > 1:  # CUDA's kernels with a mask need a key head for each query head
                keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
            mixed = F.scaled_dot_product_attention(
                q, keys, values, attn_mask=bias, scale=self._scale, enable_gqa=q.shape[1] != keys.shape[1]
            )
            hidden = self._finish_layer(layer, hidden, mixed.transpose(1, 2).reshape(n * width, -1))
        last = lengths - begun - 1 + np.arange(n) * width
        return self._logits(hidden[self._index(last)])

    def _span(self, longest: int) -> int:
        """Number of columns of the cache that attention reads for rows of up to ``longest`` tokens."""
        return min(max(_bucket(longest), SHORTEST_SPAN), self._cache.width)

    # ------------------------------------------------------------------ decode

    def decode(
        self, tokens: NDArray[np.int64], lengths: NDArray[np.int64], adapters: NDArray[np.int64] | None = None
    ) -> Tensor:
        n = len(tokens)
        adapters = np.zeros(n, np.int64) if adapters is None else adapters
        spare = self._padded_rows(n) - n
        if spare > 0:  # spare rows compute garbage at position 0 of free slots
            tokens = np.concatenate([tokens, np.zeros(spare, np.int64)])
            lengths = np.concatenate([lengths, np.ones(spare, np.int64)])
            adapters = np.concatenate([adapters, np.zeros(spare, np.int64)])
        longest = int(lengths.max())
        self._reserve(len(tokens), longest, used_rows=n)
        self._adapted = self._side.rows(adapters)
        if self._graphs is None or self._adapted is not None:
            return self._decode(self._index(tokens), self._index(lengths - 1), self._span(longest))[:n]
        span = min(-(-longest // CUDA_SPAN) * CUDA_SPAN, self._cache.width)
        return self._graphs.step(self._decode, tokens, lengths - 1, span, place=self._cache.place)[:n]

    def _padded_rows(self, n: int) -> int:
        if self._graphs is not None:
            n = min(1 << (n - 1).bit_length(), self._most_rows)
        return max(n, self._least_rows)

    def _decode(self, tokens: Tensor, positions: Tensor, span: int) -> Tensor:
        """Logits after one more token a row, at ``positions``; nothing here waits for the device."""
        rows = len(tokens)
        cos, sin = self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)
        hidden = F.embedding(tokens, self._embed)
        bias = self._bias_of(positions, span, hidden.dtype)
        places = self._cache.places(positions)
        for number, layer in enumerate(self._layers):
            q, k, v = self._project(layer, hidden, cos, sin)
            keys, values = self._cache.append(number, places, k, v, rows, span)
            hidden = self._finish_layer(layer, hidden, self._attend(q, keys, values, bias))
        return self._logits(hidden)

    def _bias_of(self, positions: Tensor, span: int, dtype: torch.dtype) -> Tensor:
        """Attention bias: 0 up to a row's newest token and -inf behind it, [rows * kv_heads, 1, span]."""
        behind = torch.arange(span, device=positions.device) > positions.unsqueeze(1)
        bias = torch.zeros(behind.shape, dtype=dtype, device=positions.device).masked_fill_(behind, -torch.inf)
        return bias.repeat_interleave(self._cache.heads, 0).unsqueeze(1)

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, bias: Tensor) -> Tensor:
        """Attend with one query a row: q [n, heads, d], keys and values [n * kv_heads, span, d]; to [n, heads * d]."""
        n, heads, width = q.shape
        grouped = q.reshape(keys.shape[0], -1, width)
        scores = torch.baddbmm(bias, grouped, keys.transpose(1, 2), alpha=self._scale)
        weights = torch.softmax(scores, -1, dtype=torch.float32).to(values.dtype)
        return torch.bmm(weights, values).view(n, heads * width)

    # ------------------------------------------------------------------ shared

    def _rms(self, x: Tensor, weight: Tensor) -> Tensor:
        if x.dtype == torch.float32:
            scale = torch.rsqrt(x.square().mean(-1, keepdim=True).add_(self._eps))
            return (x * scale).mul_(weight)
        wide = x.float()
        return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._eps)).to(x.dtype)

    def _project(self, layer: _Layer, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Normed and rotated queries and keys, and values, of hidden [n, h]: [n, heads or kv_heads, head_dim] each."""
        d, half = self._head_dim, self._head_dim // 2
        qkv = self._linear(self._rms(hidden, layer.norm_1), layer.qkv, layer.qkv_bias, layer.qkv_parts)
        qkv = qkv.view(hidden.shape[0], -1, d)
        qk, v = qkv[:, : layer.heads + layer.kv_heads], qkv[:, layer.heads + layer.kv_heads :]
        if layer.qk_norm is not None:
            qk = self._rms(qk, layer.qk_norm)
        qk = qk * cos + torch.cat([qk[..., half:], qk[..., :half]], -1).mul_(sin)
        return qk[:, : layer.heads], qk[:, layer.heads :], v

    def _finish_layer(self, layer: _Layer, hidden: Tensor, mixed: Tensor) -> Tensor:
        hidden = hidden + self._linear(mixed, layer.o, layer.o_bias, layer.o_parts)
        normed = self._rms(hidden, layer.norm_2)
        gate, up = self._linear(normed, layer.gate_up, layer.gate_up_bias, layer.gate_up_parts).chunk(2, -1)
        return hidden + self._linear(F.silu(gate).mul_(up), layer.down, layer.down_bias, layer.down_parts)

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, parts: list[Part]) -> Tensor:
        """Outputs [n, out] of x [n, in] by joined layers, ``parts``, and by the adapters of the rows."""
        y = linear(x, weight, bias)
        if self._adapted is not None:
            self._adapted.add(y, x, parts)
        return y

    def _logits(self, hidden: Tensor) -> Tensor:
        """Logits [n, vocab] of hidden [n, h]; padded to the least rows, so that few rows give the same bits as many."""
        n = hidden.shape[0]
        normed = self._rms(F.pad(hidden, (0, 0, 0, max(0, self._least_rows - n))), self._norm)
        logits = linear(normed, self._head)[:n]
        if self._adapted is not None:
            self._adapted.add(logits, normed[:n], self._head_parts)
        return logits


def least_rows(weights: Iterable[Tensor]) -> int:
    """Number of rows from which on a matmul with these matrices [n, k] gives a row the same bits in any batch.

    BLAS takes other kernels for few rows. How few depends on the processor and the shape: below 4 on most that were
    tried; on one with AVX-512 FP16 up to 4 rows of 96 columns, and up to 15 of 512. So it is measured for each model,
    with its own matrices. ``FEWEST`` where equal bits are not promised: not in float32, or not on the CPU.
    """
    by_shape = {weight.shape: weight for weight in weights}
    return max((_least_rows(weight) for weight in by_shape.values()), default=FEWEST)


def _least_rows(weight: Tensor) -> int:
    if weight.device.type != "cpu" or weight.dtype != torch.float32:
        return FEWEST
    hidden = torch.randn(_MANY, weight.shape[1], generator=torch.Generator().manual_seed(0))
    many = linear(hidden, weight)
    for rows in range(MOST - 1, FEWEST - 1, -1):
        if not torch.equal(linear(hidden[:rows], weight), many[:rows]):
            return rows + 1
    return FEWEST
