"""Routes travel as bytes, and a router that is given its own experts computes what it did."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from actors.models.routers import Router, routers_of
from actors.trainer.backend import BackendSpec
from actors.trainer.backends.torch.causal_lm import load_model
from actors.trainer.errors import ModelNotLoadable
from benchmarks.gpu._model_family import make_model
from benchmarks.gpu.model_families import FAMILIES
from configs.checks.expert_checks import BALANCED, REPLAYED
from configs.model_files import route_bytes
from tests.smallest_job import smallest_job


class MixtralTopKRouter(nn.Module):
    """A router by name, of as many experts as a test wants."""

    def __init__(self, experts: int, top_k: int) -> None:
        super().__init__()
        self.num_experts, self.top_k = experts, top_k


@pytest.mark.parametrize(("experts", "size"), [(8, 1), (255, 1), (256, 2)])
def test_routes_are_bytes_of_the_fewest_that_hold_every_expert_and_none(experts: int, size: int) -> None:
    router = Router(MixtralTopKRouter(experts, 2))
    chosen = np.array([[0, experts - 1], [1, 0]])
    packed = router.packed(chosen)
    assert packed.dtype == np.uint8 and packed.shape == (2, router.width_bytes) == (2, 2 * size)
    assert router.unpacked(packed).tolist() == chosen.tolist()
    assert router.unpacked(np.zeros_like(packed)).tolist() == [[-1, -1]] * 2


def test_a_number_beyond_all_experts_is_no_route() -> None:
    assert Router(MixtralTopKRouter(4, 1)).unpacked(np.array([[4], [5], [255]], np.uint8)).tolist() == [[3], [-1], [-1]]


def routed_model(family: str, directory: Path, **spec: Any) -> Any:
    make_model(family, FAMILIES[family], directory)
    return load_model(directory, BackendSpec(model_path=directory, router_replay=True, **spec))


@pytest.mark.parametrize("family", REPLAYED)
def test_every_family_computes_the_same_with_its_own_experts_and_others_with_others_and_its_router_learns(
    tmp_path: Path, family: str
) -> None:
    """That the own experts change nothing is asked when the model is loaded, and would be refused there."""
    model = routed_model(family, tmp_path)
    ids = torch.arange(3, 19)[None]
    plain = model(input_ids=ids, use_cache=False).logits.detach()
    given = [torch.full((16, router.top_k), 1) for router in routers_of(model)]
    model.headrace_routed_experts._given = given
    moved = model(input_ids=ids, use_cache=False).logits
    assert (moved - plain).abs().max() > 1e-3
    moved.logsumexp(-1).sum().backward()
    for router in routers_of(model):
        weight = router.module.weight.grad
        assert weight is not None and torch.isfinite(weight).all()
    model.headrace_routed_experts._given = [torch.full_like(each, -1) for each in given]
    torch.testing.assert_close(model(input_ids=ids, use_cache=False).logits.detach(), plain)


@pytest.mark.parametrize("family", REPLAYED)
def test_the_scheduler_knows_by_the_config_how_many_bytes_the_routers_of_a_model_make(
    tmp_path: Path, family: str
) -> None:
    """Or it would refuse what sound engines say."""
    model = routed_model(family, tmp_path)
    job = smallest_job()
    replayed = job.model_copy(update={"trainer": job.trainer.model_copy(update={"router_replay": True})})
    assert route_bytes(replayed, tmp_path) == sum(router.width_bytes for router in routers_of(model)) > 0
    assert route_bytes(job, tmp_path) == 0


def test_the_router_has_a_gradient_through_the_weights_of_given_experts(tmp_path: Path) -> None:
    model = routed_model("qwen3_moe", tmp_path)
    model.headrace_routed_experts._given = [torch.tensor([[0, 2]]).expand(16, 2) for _ in routers_of(model)]
    model(input_ids=torch.arange(3, 19)[None], use_cache=False).logits.logsumexp(-1).sum().backward()
    assert all(router.module.weight.grad.norm() > 1e-3 for router in routers_of(model))


@pytest.mark.parametrize(
    ("changes", "key"), [({"router_replay": True}, "router_replay"), ({"load_balancing": True}, "")]
)
def test_a_model_without_experts_is_refused_by_key(tmp_path: Path, changes: dict[str, Any], key: str) -> None:
    make_model("qwen3", FAMILIES["qwen3"], tmp_path)
    with pytest.raises(
        ModelNotLoadable, match=rf"{key or 'load_balancing'}: Qwen3ForCausalLM has no experts.*unset it"
    ):
        load_model(tmp_path, BackendSpec(model_path=tmp_path, **changes))


def test_a_router_that_weighs_otherwise_than_is_known_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Router, "replayed", lambda self, output, given: (output[0], output[1] * 2, output[2]))
    with pytest.raises(ModelNotLoadable, match=r"computes other logits .* given the experts that they chose"):
        routed_model("qwen3_moe", tmp_path)


def test_families_that_are_balanced_can_be_replayed_too() -> None:
    assert set(BALANCED) < set(REPLAYED) <= set(FAMILIES)
