"""Devices and models of simulated clusters: what a cost model needs to know of them, in plain units."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from configs.schema import NonNegativeInt, PositiveFloat, PositiveInt, Section

Fraction = Annotated[float, Field(gt=0, le=1)]


class Device(Section):
    """A device is one accelerator, of a machine that holds eight."""

    name: str
    """Name in the paper."""
    peak_flops: PositiveFloat
    """Peak in dense bf16, floating-point operations a second."""
    memory_bytes: PositiveFloat
    """Memory of one device."""
    bandwidth_bytes_s: PositiveFloat
    """Bandwidth of its memory."""
    network_bytes_s: PositiveFloat
    """Network of the whole machine, to others."""
    machine_price: PositiveFloat
    """Price of a machine, relative to the cheapest."""


class Transformer(Section):
    """A transformer is a dense decoder."""

    name: str
    """Name in the paper."""
    parameters: PositiveFloat
    """Parameters, all of them."""
    layers: PositiveInt
    """Decoder blocks."""
    hidden: PositiveInt
    """Width."""
    kv_heads: PositiveInt
    """Heads whose keys and values are kept."""
    head_tokens_bytes: PositiveInt = 512
    """Keys and values of one head and one token, in one layer: 2 · 128 · 2 bytes in bf16."""
    tensor_parallel: PositiveInt
    """Devices of one rollout instance."""

    @property
    def weight_bytes(self) -> float:
        """Size of the weights in bf16."""
        return 2 * self.parameters

    @property
    def kv_token_bytes(self) -> float:
        """Size of one token of context, over all layers and devices."""
        return float(self.layers * self.kv_heads * self.head_tokens_bytes)


class DecodeCost(Section):
    """Says what a step of an engine takes beyond moving bytes at full speed; fitted to Fig. 6 (7B on H800)."""

    memory_use: Fraction = 0.9
    """Part of a device's memory, for weights and KV cache."""
    bandwidth_use: Fraction = 0.8
    """Part of a device's bandwidth while weights and KV cache are read."""
    layer_s: PositiveFloat = 97e-6
    """Seconds for launching a layer, whatever the batch; from 8.4 ms at batch 1."""
    layer_sequence_s: PositiveFloat = 1e-6
    """Seconds in a layer, for each sequence, beside its KV cache: attention, sampling; from the slope up to batch
    256."""
    compute_use: Fraction = 0.7
    """Part of the peak, where products of matrices take longer than reading the weights; from batch 512."""
    table_context_tokens: NonNegativeInt = 1000
    """Context at which Fig. 6 is taken to have been measured; the paper does not say."""
    all_reduce_s: PositiveFloat = 12e-6
    """Seconds of an all-reduce of a few KB over NVLink; two a layer where an instance has several devices."""
    prefill_use: Fraction = 0.5
    """Part of the peak in a prefill."""


class TrainCost(Section):
    """Says what training takes: PPO with an actor, a critic and a reference of equal size."""

    flops_per_parameter: PositiveFloat = 18.0
    """Operations a token: 6 for the actor, 6 for the critic, 2 each for old and reference log-probabilities and old
    values."""
    flops_use: Fraction = 0.37
    """Part of the peak (MFU)."""
    step_s: PositiveFloat = 2.0
    """Seconds of the optimizers."""
    saturating_tokens: PositiveInt = 2048
    """Tokens for each device: a smaller micro-batch takes as long as one of this size."""
