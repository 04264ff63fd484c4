"""Cost models: what a decode step, a prefill, training and a transfer of weights take on given devices.

decode step   launches + all-reduces + the larger of (weights / bandwidth, batch · 2 parameters / peak)
              + batch · (layers · a little + context · KV bytes / bandwidth)
training      tokens · (18 parameters + attention) / (devices · peak · MFU)
weights       every instance gets all of them, over the links that it shares with those on its machine
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from actors.policies.assigning.generation_time import Instance
from benchmarks.papers.setups.hardware import DecodeCost, Device, TrainCost, Transformer

MACHINE_DEVICES = 8


@dataclass(frozen=True, slots=True)
class DecodePace:
    """A pace is a ``StepTime``: a roofline for the weights, and a share for each sequence."""

    fixed_s: float
    weights_s: float
    """Seconds for reading all weights."""
    compute_s: float
    """Seconds for one sequence's products with them."""
    sequence_s: float
    context_token_s: float

    def step_s(self, batch: float, context_tokens: float) -> float:
        products_s = max(self.weights_s, batch * self.compute_s)
        return self.fixed_s + products_s + batch * (self.sequence_s + self.context_token_s * context_tokens)


def decode_pace(model: Transformer, device: Device, cost: DecodeCost) -> DecodePace:
    """The pace of one instance of ``model.tensor_parallel`` devices."""
    tp, bandwidth = model.tensor_parallel, device.bandwidth_bytes_s * cost.bandwidth_use
    reduces = 2 * model.layers * cost.all_reduce_s if tp > 1 else 0.0
    return DecodePace(
        fixed_s=model.layers * cost.layer_s + reduces,
        weights_s=model.weight_bytes / tp / bandwidth,
        compute_s=2 * model.parameters / (tp * device.peak_flops * cost.compute_use),
        sequence_s=model.layers * cost.layer_sequence_s,
        context_token_s=model.kv_token_bytes / tp / bandwidth,
    )


def cache_tokens(model: Transformer, device: Device, cost: DecodeCost) -> float:
    """Tokens of one instance's KV cache: what weights leave of its devices' memory. Negative where they do not fit."""
    room = device.memory_bytes * cost.memory_use * model.tensor_parallel - model.weight_bytes
    return room / model.kv_token_bytes


def rollout_instance(
    model: Transformer, device: Device, cost: DecodeCost, *, places: int, reserve_tokens: int
) -> Instance:
    """One engine with what its devices' memory leaves for the KV cache.

    Raises:
        ValueError: the weights alone do not fit.
    """
    tp = model.tensor_parallel
    kv_tokens = cache_tokens(model, device, cost)
    if kv_tokens <= 0:
        raise ValueError(f"{model.name} on {tp} {device.name}: weights of {model.weight_bytes / 1e9:.0f} GB do not fit")
    return Instance(
        pace=decode_pace(model, device, cost),
        places=places,
        kv_tokens=kv_tokens,
        reserve_tokens=reserve_tokens,
        prefill_token_s=2 * model.parameters / (tp * device.peak_flops * cost.prefill_use),
    )


def train_token_s(model: Transformer, device: Device, cost: TrainCost, devices: int, tokens: np.ndarray) -> np.ndarray:
    """Seconds that each of these whole samples takes ``devices``, float64[n]; attention grows with the square."""
    lengths = np.asarray(tokens, np.float64)
    rate = devices * device.peak_flops * cost.flops_use
    attention = cost.flops_per_parameter * model.layers * model.hidden * lengths**2
    return (cost.flops_per_parameter * model.parameters * lengths + attention) / rate


def transfer_s(model: Transformer, device: Device, rollout_devices: int, *, wide_area_bytes_s: float = 0.0) -> float:
    """Trainer to all instances: trees over the machines' links, into each of which several instances' copies go.

    With a wide-area line, one copy crosses it first and is spread behind it.
    """
    copies = max(1, min(MACHINE_DEVICES, rollout_devices) // model.tensor_parallel)
    local_s = copies * model.weight_bytes / device.network_bytes_s
    return local_s + (model.weight_bytes / wide_area_bytes_s if wide_area_bytes_s else 0.0)
