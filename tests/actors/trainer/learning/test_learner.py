"""A learner's calls: whole or not at all, whatever ends one of them in the middle."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from actors.protocol.datums import Datum
from actors.protocol.training import AdamStep, Learned, LossSpec, MicroBatch
from actors.trainer.backend import BackendSpec
from actors.trainer.backends.simulated_backend import SimulatedBackend
from actors.trainer.errors import OutOfMemory
from actors.trainer.learning.learner import Learner

ADAM = AdamStep(learning_rate=0.1)


class Hindered(SimulatedBackend):
    """Adds the gradients of a pass, and then does what ``hinder`` does."""

    def __init__(self) -> None:
        super().__init__()
        self.hinder: Callable[[int], None] = lambda _: None
        self.passes = 0

    async def learn(self, batch: MicroBatch, loss: LossSpec, *, backward: bool = True) -> Learned:
        found = await super().learn(batch, loss, backward=backward)
        self.passes += 1
        self.hinder(self.passes)
        return found


async def started(budget_tokens: int = 8) -> tuple[Learner, Hindered]:
    backend = Hindered()
    await backend.start(BackendSpec(model_path=Path()))
    return Learner(backend, vocabulary=32, context_tokens=64, budget_tokens=budget_tokens), backend


def datums(seed: int, count: int = 4) -> list[Datum]:
    draw = np.random.default_rng(seed)

    def one() -> Datum:
        return Datum(draw.integers(0, 32, 5), draw.integers(0, 32, 5), {"weights": draw.normal(size=5)})

    return [one() for _ in range(count)]


class Hindrance(Exception):
    pass


def fail(number: int) -> None:
    if number == 6:
        raise Hindrance("in the middle of the second call")


def cancel(number: int) -> None:
    if number == 6:
        raise asyncio.CancelledError


@pytest.mark.parametrize(("hinder", "error"), [(fail, Hindrance), (cancel, asyncio.CancelledError)])
@pytest.mark.parametrize("again", [True, False])
async def test_a_call_that_ends_in_the_middle_leaves_nothing_and_the_calls_before_it_count_once(
    hinder: Callable[[int], None], error: type[BaseException], again: bool
) -> None:
    hindered, backend = await started()
    smooth, other = await started()
    backend.hinder = hinder
    await hindered.forward_backward(datums(0), "cross_entropy")
    with pytest.raises(error):
        await hindered.forward_backward(datums(1), "cross_entropy")
    if again:
        await hindered.forward_backward(datums(1), "cross_entropy")
    for seed in (0, 1)[: 1 + again]:
        await smooth.forward_backward(datums(seed), "cross_entropy")
    assert await hindered.optim_step(ADAM) == await smooth.optim_step(ADAM)
    assert backend.state() == other.state()


async def test_memory_that_runs_out_while_earlier_calls_are_computed_again_is_told_and_the_next_call_tries_once_more(
) -> None:  # fmt: skip
    learner, backend = await started()
    smooth, other = await started()

    def short(number: int) -> None:
        if number in (6, 8):
            raise OutOfMemory("a neighbour has it")

    backend.hinder = short
    await learner.forward_backward(datums(0), "cross_entropy")
    with pytest.raises(OutOfMemory):
        await learner.forward_backward(datums(1), "cross_entropy")
    await smooth.forward_backward(datums(0), "cross_entropy")
    assert await learner.optim_step(ADAM) == await smooth.optim_step(ADAM)
    assert backend.state() == other.state()


async def test_no_datums_are_a_call_without_a_loss() -> None:
    learner, _ = await started()
    told = await learner.forward_backward([], "ppo")
    assert (told.logprobs, told.metrics) == ([], {"loss:sum": 0.0})
    assert (await learner.optim_step(ADAM))["grad_norm"] == 0.0
