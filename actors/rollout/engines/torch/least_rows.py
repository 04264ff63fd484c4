"""From how many rows on a matmul gives each row the same bits, however many stand beside it.

BLAS takes other kernels for few rows. For how few is a matter of the processor and of the shape: below 4 on most that
were tried; on one with AVX-512 FP16 up to 4 rows of 96 columns, and up to 15 of 512. So it is tried, once for a model,
with the model's own matrices.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import torch
from torch import Tensor

from actors.host.matmul import linear

FEWEST: Final = 4
MOST: Final = 16
"""Rows from which on no processor that was tried differs."""
_MANY = 64


def least_rows(weights: Iterable[Tensor]) -> int:
    """For these matrices [n, k] together; ``FEWEST`` where no bits are promised: not in float32, or not on the CPU."""
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
