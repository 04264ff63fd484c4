"""Which library multiplies is a matter of the processor and the shape, and either gives the product."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  torch's own name for it

from actors.models import matmul

LARGE, SMALL = (256, 512), (96, 96)


@pytest.fixture
def on_amd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "onednn_is_faster", lambda: True)


@pytest.mark.usefixtures("on_amd")
@pytest.mark.parametrize("rows", [(1,), (4,), (33,), (2, 5)])
@pytest.mark.parametrize("biased", [False, True])
def test_the_product_is_torchs_own(rows: tuple[int, ...], biased: bool) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(*rows, LARGE[1]), torch.randn(LARGE), torch.randn(LARGE[0]) if biased else None
    assert matmul.takes_onednn(weight)
    torch.testing.assert_close(matmul.linear(x, weight, bias), F.linear(x, weight, bias), rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("on_amd")
def test_small_matrices_other_formats_and_other_devices_stay_with_torch() -> None:
    assert not matmul.takes_onednn(torch.ones(SMALL))
    assert not matmul.takes_onednn(torch.ones(LARGE, dtype=torch.bfloat16))
    assert not matmul.takes_onednn(torch.ones(LARGE, device="meta"))


@pytest.mark.parametrize(("vendor", "faster"), [("AuthenticAMD", True), ("GenuineIntel", False), ("", False)])
def test_only_a_processor_of_amds_with_avx_512_has_it(
    monkeypatch: pytest.MonkeyPatch, vendor: str, faster: bool
) -> None:
    asked = matmul.onednn_is_faster.__wrapped__
    monkeypatch.setattr(matmul.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(matmul, "_processor", lambda: f"vendor_id : {vendor}")
    assert asked() == faster
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert not asked()
