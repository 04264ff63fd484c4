"""How many rows a matmul needs on this machine, so that a row's bits do not depend on the others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from actors.models.matmul import linear as multiply
from actors.rollout.engines.torch import fused_decoder as module
from actors.rollout.engines.torch.fused_decoder import FEWEST, MOST, least_rows


@pytest.mark.parametrize("shape", [(96, 96), (100, 96), (192, 96), (384, 96), (96, 192), (960, 576), (576, 1536)])
def test_from_that_many_rows_on_every_row_has_the_same_bits(shape: tuple[int, int]) -> None:
    """The matrices of the model in test_decoders, and two of SmolLM2's, which may be multiplied by another library."""
    generator = torch.Generator().manual_seed(1)
    weight, hidden = torch.randn(shape, generator=generator), torch.randn(100, shape[1], generator=generator)
    whole, least = multiply(hidden, weight), least_rows([weight])
    assert FEWEST <= least <= MOST
    for rows in range(least, 100):
        assert torch.equal(multiply(hidden[:rows], weight), whole[:rows]), rows


def test_the_matrix_that_needs_most_rows_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor whose BLAS takes another kernel for fewer than 6 rows, and for fewer than 9 of 32 columns."""

    def linear(hidden: Tensor, weight: Tensor) -> Tensor:
        few = hidden.shape[0] < (9 if weight.shape[1] == 32 else 6)
        return hidden.double().matmul(weight.double().t()).float() + (1.0 if few else 0.0)

    monkeypatch.setattr(module, "linear", linear)
    narrow, wide = torch.ones(8, 16), torch.ones(8, 32)
    assert least_rows([narrow]) == 6
    assert least_rows([narrow, wide]) == 9
    assert least_rows([]) == FEWEST


def test_where_no_bits_are_promised_nothing_is_tried() -> None:
    assert least_rows([torch.ones(4, 4, dtype=torch.bfloat16), torch.ones(4, 4, device="meta")]) == FEWEST
