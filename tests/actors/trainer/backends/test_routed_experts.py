"""Given experts reach exactly the positions they belong to, in every layout, and layers that are computed again too."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actors.models.routers import routers_of
from actors.trainer.backend import BackendSpec, LossSpec, MicroBatch, summed
from actors.trainer.backends.torch.causal_lm import ResponseLogits, load_model, response_positions
from actors.trainer.backends.torch.layers.routed_experts import laid_out
from actors.trainer.backends.torch.packing import packed, padded, plan_blocks
from actors.trainer.backends.torch.replicas import Replica
from actors.trainer.errors import BadMicroBatch
from actors.trainer.learning.samples import TrainSample, pad
from benchmarks.gpu._model_family import make_model
from benchmarks.gpu.model_families import FAMILIES
from tests.actors.trainer.random_samples import random_samples

EXPERTS, LAYERS, TOP_K = 4, 2, 2


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("moe")
    make_model("qwen3_moe", {**FAMILIES["qwen3_moe"], "vocab_size": 100}, path)
    return path


def loaded(directory: Path, **spec: Any) -> ResponseLogits:
    return ResponseLogits(load_model(directory, BackendSpec(model_path=directory, router_replay=True, **spec)), "cpu")


def routed(samples: list[TrainSample]) -> list[TrainSample]:
    """Each token's routes follow from the tokens before it, as an engine's would: siblings agree where alike."""
    found: list[TrainSample] = []
    for sample in samples:
        path = [*sample.prompt_ids.tolist(), *sample.tokens.tolist()]
        routes = [
            1 + np.random.default_rng(path[: sample.prompt_ids.size + at]).integers(0, EXPERTS, LAYERS * TOP_K)
            for at in range(sample.tokens.size)
        ]
        found.append(dataclasses.replace(sample, routes=np.array(routes, np.uint8)))
    return found


def batch_of(seed: int = 0) -> MicroBatch:
    """Two groups whose siblings begin alike, as a vocabulary of 3 makes them."""
    return pad(routed(random_samples([(5, [9, 6, 9]), (3, [4, 7])], seed, vocabulary=3)))


def logprobs(logits: ResponseLogits, batch: MicroBatch) -> torch.Tensor:
    return logits(batch, response_positions(batch)).logprobs(1.0)[0]


def test_packed_rows_and_padded_rows_give_each_token_its_own_experts(directory: Path) -> None:
    """The reference gives the hook, for one sequence alone, the experts position by position."""
    logits, batch = loaded(directory), batch_of()
    assert logits.may_pack
    results = []
    for logits.may_pack in (True, False):
        results.append(logprobs(logits, batch).detach())
    expected, experts = [], logits.experts
    assert experts is not None
    for row, (p, end) in enumerate(zip(batch.prompt_lengths.tolist(), batch.lengths.tolist(), strict=True)):
        routes = np.zeros((end, LAYERS, TOP_K), np.int64)
        routes[p - 1 : end - 1] = batch.routes[row, p:end].reshape(-1, LAYERS, TOP_K)  # type: ignore[index]
        experts._given = [torch.from_numpy(routes[:, layer] - 1) for layer in range(LAYERS)]
        experts._collects = False
        ids = torch.from_numpy(batch.input_ids[row, :end].astype(np.int64))
        scores = logits.model(input_ids=ids[None], use_cache=False).logits[0, p - 1 : end - 1].log_softmax(-1)
        expected.append(scores.gather(-1, ids[p:end, None])[:, 0].detach())
    for result in results:
        torch.testing.assert_close(result, torch.cat(expected), atol=2e-5, rtol=1e-4)
    plain = logprobs(logits, dataclasses.replace(batch, routes=None)).detach()
    assert (plain - results[0]).abs().max() > 0.01, "the routes say something else than the router"


def test_a_position_that_siblings_share_takes_the_routes_of_the_first(directory: Path) -> None:
    batch = batch_of()
    where = response_positions(batch)
    assert batch.routes is not None
    other = batch.routes.copy()
    other[1:3, 5] = 4  # siblings of the first row, at the first token, which all three predict from one position
    layout = packed(batch, where, [tuple(plan_blocks(batch))])
    flat = laid_out(dataclasses.replace(batch, routes=other), layout)
    assert layout.source is not None
    assert flat[layout.source[0, 5]].tolist() == batch.routes[0, 5].tolist()
    told = flat.any(axis=1)
    assert told.sum() == len(np.unique(layout.source[where])), "prompts choose for themselves, but for the last token"
    assert laid_out(batch, padded(batch, where)).any(axis=1).sum() == where.sum()


def test_layers_that_are_computed_again_take_the_same_experts(directory: Path) -> None:
    grads = []
    for way in ("none", "selective", "whole"):
        logits = loaded(directory, recompute=way)
        logprobs(logits, batch_of()).sum().backward()
        grads.append({name: own.grad for name, own in logits.model.named_parameters()})
    for name, grad in grads[0].items():
        for other in grads[1:]:
            torch.testing.assert_close(other[name], grad, msg=name)


def test_the_next_micro_batch_without_routes_chooses_for_itself(directory: Path) -> None:
    logits = loaded(directory)
    bare = dataclasses.replace(batch_of(), routes=None)
    before = logprobs(logits, bare).detach()
    logprobs(logits, batch_of())
    assert torch.equal(logprobs(logits, bare).detach(), before)


def test_routes_of_another_model_are_refused(directory: Path) -> None:
    batch = batch_of()
    assert batch.routes is not None
    with pytest.raises(BadMicroBatch, match="routes: 3 bytes a token, expected 4: 2 layers of experts"):
        logprobs(loaded(directory), dataclasses.replace(batch, routes=batch.routes[..., :3]))
    with pytest.raises(BadMicroBatch, match="routes: shape"):
        logprobs(loaded(directory), dataclasses.replace(batch, routes=batch.routes[:, :4]))


def balance(directory: Path, batch: MicroBatch, *, may_pack: bool = False) -> float:
    logits = loaded(directory, load_balancing=True)
    logits.may_pack = may_pack
    logprobs(logits, batch)
    assert logits.experts is not None
    return logits.experts.balance().item()


def test_padding_does_not_count_in_the_balance(directory: Path) -> None:
    [sample] = random_samples([(5, [4])])
    alone = pad([sample])
    wide = pad([sample, *random_samples([(5, [30])], seed=1)])
    rows = dataclasses.replace(
        wide, **{f: getattr(wide, f)[:1] for f in ("input_ids", "lengths", "prompt_lengths", "loss_weight", "stale",
                                                    "behaviour_logprobs", "advantages")}
    )  # fmt: skip
    assert rows.input_ids.shape[1] > alone.input_ids.shape[1]
    assert balance(directory, rows) == pytest.approx(balance(directory, alone), rel=1e-5)


def test_the_balance_is_that_of_transformers_a_layer_and_is_as_even_as_can_be_at_k(directory: Path) -> None:
    """By hand from the routers' logits: experts x sum of (share of choices) x (mean probability), layer by layer."""
    batch = pad(random_samples([(5, [9])]))
    logits, seen = loaded(directory, load_balancing=True), list[torch.Tensor]()
    hooks = [r.module.register_forward_hook(lambda _m, _a, out: seen.append(out[0])) for r in routers_of(logits.model)]
    logprobs(logits, batch)
    assert logits.experts is not None
    found = logits.experts.balance()
    for hook in hooks:
        hook.remove()
    by_hand = []
    for layer in seen:
        p = layer[:13].softmax(-1)
        chosen = torch.nn.functional.one_hot(p.topk(TOP_K).indices, EXPERTS).float()
        by_hand.append(EXPERTS * (chosen.mean(0).sum(0) * p.mean(0)).sum())
    torch.testing.assert_close(found, torch.stack(by_hand).mean())
    found.backward()
    assert all(router.module.weight.grad.norm() > 0 for router in routers_of(logits.model))


@pytest.mark.parametrize("recomputed", [False, True])
def test_the_coefficient_moves_the_routers_by_the_weight_of_the_micro_batch_and_0_only_measures(
    directory: Path, recomputed: bool
) -> None:
    grads, stats = list[torch.Tensor](), []
    for coefficient in (None, 0.0, 0.5, 1.0):
        spec = BackendSpec(
            model_path=directory, load_balancing=True, recompute="whole" if recomputed else "none", router_replay=True
        )
        replica = Replica(load_model(directory, spec), "cpu")
        told = replica.accumulate(batch_of(), LossSpec(load_balancing=coefficient))
        stats.append(summed([told, replica.taken_stats()]))
        grads.append(torch.cat([r.module.weight.grad.flatten() for r in routers_of(replica.logits.model)]))
    assert torch.equal(grads[0], grads[1])
    torch.testing.assert_close(2 * (grads[2] - grads[1]), grads[3] - grads[1], rtol=1e-3, atol=1e-5)
    assert (grads[3] - grads[1]).norm() > 1e-3
    assert stats[0].imbalance_sum == 0.0
    assert (
        stats[1].imbalance_sum == pytest.approx(stats[3].imbalance_sum)
        and stats[1].imbalance_sum > stats[1].tokens * 0.5
    )
