"""``linear`` as torch has it, by the faster of two libraries on this processor.

    x [..., k], weight [n, k] ─ float32, on a CPU of AMD's with AVX-512, at least ``LEAST_WEIGHTS`` ─ yes ─▶ oneDNN
                                                                                                   └ no ──▶ F.linear

Torch multiplies float32 matrices with MKL, which takes its kernels for AVX2 on processors that are not Intel's. oneDNN,
which comes with torch too, takes those for AVX-512: 2.2 times as fast on an EPYC, with the matrices of SmolLM2-135M.

Invariants
- Which library is taken depends on the processor and on the weight's shape, never on a measurement: two processes of a
  machine give the same bits.
- Both compute in float32; sums are in another order, as between two processors.
"""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F  # noqa: N812  torch's own name for it
from torch import Tensor

LEAST_WEIGHTS: Final = 1 << 16
"""Number of weights from which on oneDNN's slower call, by some 10 µs, no longer counts."""


@cache
def onednn_is_faster() -> bool:
    """Whether float32 matrices are multiplied faster by oneDNN than by MKL on this processor."""
    return (
        platform.machine() == "x86_64"
        and torch.backends.mkl.is_available()
        and torch.backends.mkldnn.is_available()  # oneDNN's older name
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and "AuthenticAMD" in _processor()
    )


def _processor() -> str:
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def takes_onednn(weight: Tensor) -> bool:
    """Whether ``linear`` multiplies by this weight with oneDNN."""
    is_large = weight.dtype == torch.float32 and weight.device.type == "cpu" and weight.numel() >= LEAST_WEIGHTS
    return is_large and onednn_is_faster()


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias`` by oneDNN; float32 on the CPU, and without a gradient."""
    operation: Any = torch.ops.mkldnn._linear_pointwise  # noqa: SLF001 (what torch.compile calls for a layer)
    return operation(x, weight, bias, "none", [], "")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``; without a gradient."""
    return onednn_linear(x, weight, bias) if takes_onednn(weight) else F.linear(x, weight, bias)
