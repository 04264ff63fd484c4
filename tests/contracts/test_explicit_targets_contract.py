"""What every train backend promises of explicit targets, and a ``Learner`` over it: ``actors/trainer/backend.py``.

Kinds and worlds are those of ``test_train_backend_contract.py``. Held against a plain model of transformers and torch's
own AdamW, but for those that compute no model, and adapters, whose plain model has none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actors.protocol.datums import Datum
from actors.protocol.training import NO_STATS, AdamStep, Learned, LossSpec, MicroBatch
from actors.trainer.backend import TrainBackend
from actors.trainer.backends.simulated_backend import SimulatedBackend
from actors.trainer.backends.torch.replicas import Replica
from actors.trainer.errors import CallRefused
from actors.trainer.learning.learner import Learner
from actors.weights.manifest import tensor_views
from tests.contracts.backend_worlds import Place, Start, started_backends, weights_of

WORLDS = [
    *("torch", "torch-adapter", "fsdp", "simulated", "bounded"),
    *("service:torch", "service:simulated", "fsdp:2"),
    *(
        pytest.param(world, marks=pytest.mark.long)
        for world in ("service:fsdp:2", "service:torch-adapter", "fsdp:2-adapter", "fsdp:2-experts", "fsdp:2-context")
    ),
    *(pytest.param(world, marks=pytest.mark.gpu) for world in ("torch-cuda", "fsdp-cuda")),
]
SMOOTH = AdamStep(learning_rate=0.05, eps=1.0)
"""With an epsilon of that size an update is about as long as the gradient, not only of its sign."""
MADE_UP = ("simulated", "bounded")
VOCABULARY = 100


@pytest.fixture(params=WORLDS)
async def start(request: pytest.FixtureRequest, place: Place) -> AsyncIterator[Start]:
    async with started_backends(request.param, place) as begin:
        yield begin


@pytest.fixture
def plain(request: pytest.FixtureRequest, place: Place) -> Any:
    """The world's model as transformers has it; None where there is none to compare with."""
    from transformers import AutoModelForCausalLM

    name = request.node.name
    if any(kind in name for kind in (*MADE_UP, "adapter")):
        return None
    return AutoModelForCausalLM.from_pretrained(place.moe_path if "experts" in name else place.model_path)


def learner_of(backend: TrainBackend, budget_tokens: int = 10_000) -> Learner:
    return Learner(backend, vocabulary=VOCABULARY, context_tokens=512, budget_tokens=budget_tokens)


def datums(count: int = 6, seed: int = 0, *, targets: int = 0, loss: str = "cross_entropy") -> list[Datum]:
    """Datums that begin alike by twos, with targets that are not their inputs; every third one has ``targets`` of them
    at each position.
    """
    rng, made = np.random.default_rng(seed), list[Datum]()
    stem = rng.integers(3, 99, 6)
    for index in range(count):
        own = rng.integers(3, 99, int(rng.integers(1, 9)))
        stem = rng.integers(3, 99, 6) if index % 2 == 0 else stem
        tokens = np.concatenate([stem, own]).astype(np.int32) if index else own.astype(np.int32)
        shape = (tokens.size, targets) if targets and index % 3 == 0 else (tokens.size,)
        columns = {"weights": rng.normal(size=shape).astype(np.float32)}
        if loss != "cross_entropy":
            columns = {
                "logprobs": rng.normal(-4.6, 0.3, shape).astype(np.float32),
                "advantages": (rng.normal(size=shape) * (rng.random(shape) < 0.7)).astype(np.float32),
                "sequence_ratio_mask": (rng.random(shape) < 0.7).astype(np.float32),
            }
            columns["sequence_ratio_mask"][0] = 1.0
        made.append(Datum(tokens, rng.integers(3, 99, shape).astype(np.int32), columns))
    return made


def plain_call(model: Any, batch: Sequence[Datum], loss: str) -> tuple[list[np.ndarray], float]:
    """Log-probabilities and the loss of a model that is asked for each datum by itself; its gradients add up."""
    found, total = list[np.ndarray](), 0.0
    for datum in batch:
        logs = model(input_ids=torch.from_numpy(datum.tokens.astype(np.int64))[None]).logits[0].log_softmax(-1)
        wanted = torch.from_numpy(datum.targets.astype(np.int64).reshape(datum.tokens.size, -1))
        new = logs.gather(1, wanted).reshape(datum.targets.shape)
        columns = {name: torch.from_numpy(column) for name, column in datum.columns.items()}
        if loss == "cross_entropy":
            value = -(columns["weights"] * new).sum()
        else:
            ratio, gain = torch.exp(new - columns["logprobs"]), columns["advantages"]
            value = -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).sum()
        value.backward()
        found.append(new.detach().numpy())
        total += value.item()
    return found, total


class PlainAdam:
    """AdamW of torch over a plain model, with hyper-parameters that change from step to step."""

    def __init__(self, model: Any) -> None:
        self._model = model
        decays, stays = ([own for own in model.parameters() if (own.dim() >= 2) is matrix] for matrix in (True, False))
        self._adam = torch.optim.AdamW([{"params": decays}, {"params": stays}])

    def step(self, adam: AdamStep) -> float:
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), adam.max_grad_norm or 1e30)
        for group, decay in zip(self._adam.param_groups, (adam.weight_decay, 0.0), strict=True):
            group |= {"lr": adam.learning_rate, "betas": (adam.beta1, adam.beta2), "eps": adam.eps}
            group["weight_decay"] = decay
        self._adam.step()
        self._adam.zero_grad()
        return norm.item()


async def assert_weights_are(backend: TrainBackend, model: Any, directory: Path, atol: float = 2e-5) -> None:
    path = directory / "exported"
    manifest = await backend.export_segment(path, job="j", policy_version=0, chunk_bytes=1 << 20)
    named = dict(model.named_parameters())
    for name, view in tensor_views(manifest, path.read_bytes()).items():
        np.testing.assert_allclose(view, named[name].detach().numpy(), atol=atol, err_msg=name)


STEPS = [
    dataclasses.replace(SMOOTH, beta1=0.5, beta2=0.6, weight_decay=0.3),
    dataclasses.replace(SMOOTH, learning_rate=0.02, max_grad_norm=0.5),
    dataclasses.replace(SMOOTH, learning_rate=0.1, beta1=0.95, eps=0.5),
]


@pytest.mark.parametrize(("loss", "targets"), [("cross_entropy", 3), ("ppo", 0)])
async def test_targets_are_learned_as_a_plain_model_learns_them_with_hyper_parameters_of_each_step(
    start: Start, plain: Any, tmp_path: Path, loss: str, targets: int
) -> None:
    if plain is None:
        pytest.skip("there is no plain model to compare with")
    backend = await start(learning_rate=77.0, max_grad_norm=1e-9, warmup_steps=3, weight_decay=5.0)
    learner, optimizer = learner_of(backend), PlainAdam(plain)
    for seed, adam in enumerate(STEPS):
        batch = datums(seed=seed, targets=targets, loss=loss)
        told = await learner.forward_backward(batch, loss)
        logprobs, total = plain_call(plain, batch, loss)
        assert told.metrics["loss:sum"] == pytest.approx(total, rel=1e-3, abs=1e-3)
        for found, expected in zip(told.logprobs, logprobs, strict=True):
            assert found.dtype == np.float32
            np.testing.assert_allclose(found, expected, atol=5e-4)
        result = await learner.optim_step(adam)
        assert result["grad_norm"] == pytest.approx(optimizer.step(adam), rel=1e-3)
        assert (result["learning_rate"], result["skipped"]) == (adam.learning_rate, 0.0)
        await assert_weights_are(backend, plain, tmp_path, atol=2e-4)


@pytest.mark.parametrize("loss", ["cross_entropy", "gspo"])
async def test_the_result_of_a_call_does_not_depend_on_how_it_was_cut(start: Start, tmp_path: Path, loss: str) -> None:
    one, two = await start(), await start()
    batch = datums(8, targets=4 if loss == "cross_entropy" else 0, loss=loss)
    whole, fine = learner_of(one), learner_of(two, 12)
    first, second = await whole.forward_backward(batch, loss), await fine.forward_backward(batch, loss)
    assert first.metrics["loss:sum"] == pytest.approx(second.metrics["loss:sum"], rel=1e-3, abs=1e-3)
    for found, other, datum in zip(first.logprobs, second.logprobs, batch, strict=True):
        assert found.shape == datum.targets.shape
        np.testing.assert_allclose(found, other, atol=1e-4)
    assert (await whole.optim_step(SMOOTH))["grad_norm"] > 0
    await fine.optim_step(SMOOTH)
    np.testing.assert_allclose(await weights_of(one, tmp_path), await weights_of(two, tmp_path), atol=2e-5)


async def test_two_calls_and_a_step_are_as_one_call_with_all_and_a_step(start: Start, tmp_path: Path) -> None:
    one, two = await start(), await start()
    batch = datums(8)
    parts, whole = learner_of(one), learner_of(two)
    told = [await parts.forward_backward(some, "cross_entropy") for some in (batch[:3], batch[3:])]
    of_all = await whole.forward_backward(batch, "cross_entropy")
    assert sum(part.metrics["loss:sum"] for part in told) == pytest.approx(of_all.metrics["loss:sum"], rel=1e-3)
    norms = [(await learner.optim_step(SMOOTH))["grad_norm"] for learner in (parts, whole)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)
    np.testing.assert_allclose(await weights_of(one, tmp_path), await weights_of(two, tmp_path), atol=2e-5)


async def test_a_forward_pass_alone_tells_the_same_and_adds_nothing(start: Start, tmp_path: Path) -> None:
    backend = await start()
    learner, batch = learner_of(backend), datums(targets=2)
    before = await weights_of(backend, tmp_path)
    alone = await learner.forward_backward(batch, "cross_entropy", forward_only=True)
    assert (await learner.optim_step(SMOOTH))["grad_norm"] == 0.0
    np.testing.assert_array_equal(await weights_of(backend, tmp_path), before)
    learned = await learner.forward_backward(batch, "cross_entropy")
    for found, expected in zip(alone.logprobs, learned.logprobs, strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-6)
    assert alone.metrics["loss:sum"] == pytest.approx(learned.metrics["loss:sum"], rel=1e-5)
    assert (await backend.step(weight=1.0, adam=SMOOTH)).stats == NO_STATS


async def test_a_position_without_weight_is_told_and_not_learned(start: Start) -> None:
    """An adapter's second matrix is 0 at first, which a step of a plain call changes."""
    backend = await start()
    learner = learner_of(backend)
    silent = [Datum(d.tokens, d.targets, {"weights": np.zeros_like(d.columns["weights"])}) for d in datums()]
    told = await learner.forward_backward(silent, "cross_entropy")
    assert all((found < 0).all() for found in told.logprobs)
    assert told.metrics["loss:sum"] == 0.0
    assert (await learner.optim_step(SMOOTH))["grad_norm"] == 0.0


async def test_gradients_of_a_job_and_of_targets_add_up(start: Start) -> None:
    """``learn`` without targets gives the sums of ``accumulate``, at whatever weights."""
    backend = await start()
    shape = (2, 6)
    draw = np.random.default_rng(1)
    ids = draw.integers(3, 99, shape).astype(np.int32)
    weight = (draw.normal(size=shape) * (np.arange(6) > 1)).astype(np.float32)
    batch = MicroBatch(
        input_ids=ids,
        lengths=np.full(2, 6, np.int32),
        prompt_lengths=np.full(2, 2, np.int32),
        behaviour_logprobs=np.full(shape, -4.6, np.float32),
        advantages=np.ones(shape, np.float32),
        loss_weight=weight,
    )
    opposite = dataclasses.replace(batch, loss_weight=-weight)
    spec = LossSpec(function="importance_sampling")
    await backend.accumulate(batch, spec)
    one = (await backend.step(weight=1.0, adam=dataclasses.replace(SMOOTH, learning_rate=0.0))).grad_norm
    await backend.accumulate(batch, spec)
    await backend.learn(opposite, spec)
    assert (await backend.step(weight=1.0, adam=SMOOTH)).grad_norm < 1e-4 * one


def refused(batch: list[Datum]) -> list[tuple[str, list[Datum], str, dict[str, float]]]:
    """(what the error says, datums, loss, parameters) of calls that cannot be computed."""
    good = batch[0]

    def other(**changes: Any) -> list[Datum]:
        fields: dict[str, Any] = {"tokens": good.tokens, "targets": good.targets, "columns": good.columns}
        return [good, Datum(**(fields | changes))]

    bad = good.targets.copy()
    bad[0] = VOCABULARY
    return [
        (r"datum 1: targets: token 100 at position 0, expected 0 to 99", other(targets=bad), "cross_entropy", {}),
        (r"datum 1: weights: missing", other(columns={}), "cross_entropy", {}),
        (r"loss: 'stable_reinforce' is not computed here", batch, "stable_reinforce", {}),
        (r"parameters: dro needs beta", batch, "dro", {}),
    ]


async def test_a_call_that_is_refused_changes_nothing(start: Start, tmp_path: Path) -> None:
    one, two = await start(), await start()
    batch = datums()
    for backend, disturbed in ((one, True), (two, False)):
        learner = learner_of(backend)
        for seed in range(2):
            await learner.forward_backward(datums(seed=seed), "cross_entropy")
            if disturbed:
                for says, wrong, loss, parameters in refused(batch):
                    with pytest.raises(CallRefused, match=says):
                        await learner.forward_backward(wrong, loss, parameters)
                for changes in ({"learning_rate": 1e9}, {"beta2": 1.0}, {"eps": float("nan")}, {"max_grad_norm": -1.0}):
                    with pytest.raises(CallRefused, match=rf"adam\.{next(iter(changes))}: .* expected a number from"):
                        await learner.optim_step(dataclasses.replace(SMOOTH, **changes))
            await learner.optim_step(SMOOTH)
    np.testing.assert_array_equal(await weights_of(one, tmp_path), await weights_of(two, tmp_path))


async def test_with_a_critic_or_another_optimizer_it_is_refused_and_the_life_goes_on(start: Start) -> None:
    critics = await start(critic_warmup=0)
    with pytest.raises(CallRefused, match="without a critic"):
        await learner_of(critics).forward_backward(datums(), "cross_entropy")
    other = await start(optimizer="muon", adapter=None)
    with pytest.raises(CallRefused, match="cannot be those of muon"):
        await learner_of(other).optim_step(SMOOTH)
    for backend in (critics, other):
        assert (await backend.step(weight=1.0)).grad_norm == 0.0


async def test_what_was_saved_is_loaded_with_its_optimizer_or_with_a_new_one(
    start: Start, plain: Any, tmp_path: Path
) -> None:
    """With moments as they were further steps are the same, bit for bit; without them they are those of a new AdamW."""
    backend = await start(warmup_steps=4)
    learner = learner_of(backend)
    await learner.forward_backward(datums(), "cross_entropy")
    await learner.optim_step(SMOOTH)
    await learner.save(tmp_path / "saved")
    saved = await weights_of(backend, tmp_path)
    after: dict[bool, np.ndarray] = {}
    for optimizer in (True, False):
        await learner.forward_backward(datums(seed=5), "cross_entropy")
        await learner.load(tmp_path / "saved", optimizer=optimizer)
        np.testing.assert_array_equal(await weights_of(backend, tmp_path), saved)
        await learner.forward_backward(datums(seed=1), "cross_entropy")
        await learner.optim_step(SMOOTH)
        after[optimizer] = await weights_of(backend, tmp_path)
    assert (after[True] != after[False]).any()
    again = await start(warmup_steps=4)
    goes_on = learner_of(again)
    await goes_on.load(tmp_path / "saved", optimizer=True)
    await goes_on.forward_backward(datums(seed=1), "cross_entropy")
    await goes_on.optim_step(SMOOTH)
    np.testing.assert_array_equal(await weights_of(again, tmp_path), after[True])
    if plain is not None:
        plain_call(plain, datums(), "cross_entropy")
        PlainAdam(plain).step(SMOOTH)
        plain_call(plain, datums(seed=1), "cross_entropy")
        PlainAdam(plain).step(SMOOTH)
        await backend.load(tmp_path / "saved", optimizer=False)
        assert (await backend.step(weight=1.0)).learning_rate == pytest.approx(0.01 / 4)
        await learner.load(tmp_path / "saved", optimizer=False)
        await learner.forward_backward(datums(seed=1), "cross_entropy")
        await learner.optim_step(SMOOTH)
        await assert_weights_are(backend, plain, tmp_path, atol=2e-4)


async def test_a_gradient_that_is_not_finite_takes_no_step_and_the_next_call_begins_anew(
    start: Start, tmp_path: Path
) -> None:
    backend = await start()
    learner = learner_of(backend)
    before = await weights_of(backend, tmp_path)
    large = np.full(20, 3e38, np.float32)
    await learner.forward_backward([Datum(np.arange(20), np.full(20, 7), {"weights": large})] * 2, "cross_entropy")
    result = await learner.optim_step(SMOOTH)
    assert result["skipped"] == 1.0
    assert not np.isfinite(result["grad_norm"])
    np.testing.assert_array_equal(await weights_of(backend, tmp_path), before)
    await learner.forward_backward(datums(), "cross_entropy")
    result = await learner.optim_step(SMOOTH)
    assert result["skipped"] == 0.0
    assert np.isfinite(await weights_of(backend, tmp_path)).all()


def leave_no_memory(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    """From now on passes of more than so many padded tokens fail for lack of memory, when they have added gradients."""

    def failing(self: Replica, batch: MicroBatch, loss: LossSpec, *, backward: bool) -> Learned:
        found = computed(self, batch, loss, backward=backward)
        if batch.input_ids.size > tokens:
            raise RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: 1 byte")
        return found

    computed = Replica.learn
    monkeypatch.setattr(Replica, "learn", failing)
    monkeypatch.setattr(SimulatedBackend, "memory_tokens", tokens)


async def test_a_call_that_finds_no_memory_is_computed_in_smaller_parts_and_the_calls_before_it_still_count(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = await start(), await start()
    if one.kind == "fsdp":
        pytest.skip("ranks begin anew, as the contract of train backends asserts")
    short, plenty = learner_of(one), learner_of(two)
    for learner in (short, plenty):
        await learner.forward_backward(datums(1, seed=1), "cross_entropy")
    with monkeypatch.context() as patched:
        leave_no_memory(patched, tokens=40)
        told = await short.forward_backward(datums(8), "cross_entropy")
        assert short.budget_tokens <= 40
        long = Datum(np.ones(50, np.int32), np.ones(50, np.int32), {"weights": np.ones(50, np.float32)})
        with pytest.raises(CallRefused, match="the longest has 50 tokens, for which there is no memory even alone"):
            await short.forward_backward([*datums(2), long], "cross_entropy")
    expected = await plenty.forward_backward(datums(8), "cross_entropy")
    for found, other in zip(told.logprobs, expected.logprobs, strict=True):
        np.testing.assert_allclose(found, other, atol=1e-4)
    norms = [(await learner.optim_step(SMOOTH))["grad_norm"] for learner in (short, plenty)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)
    np.testing.assert_allclose(await weights_of(one, tmp_path), await weights_of(two, tmp_path), atol=2e-5)
