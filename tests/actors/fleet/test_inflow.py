"""Reports that wait go into the ledger a few at a time, and the head's loop hears others in between."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from actors.core.actor import Delivery
from actors.fleet.inflow import Inflow
from actors.protocol.tokens import TokenReport
from actors.protocol.work import EngineStats
from configs.limits import DEFAULT_LIMITS

InWorld = Callable[..., None]


def delivered(tokens: int, sequence: int = 0) -> Delivery:
    """A report of one row with so many tokens, from a worker that nobody knows."""
    one, many = np.zeros(1, np.int32), np.zeros(tokens, np.int32)
    report = TokenReport.of(
        job="j", worker="stranger", term=1, sequence=sequence, policy_version=0, assignments=one, offsets=one,
        counts=one + tokens, finished=one, tokens=many, logprobs=many, stats=EngineStats(),
    )  # fmt: skip
    return Delivery(message=report, tag="", handler=cast(Any, None), sender=None)


def inflow(entry_tokens: int) -> Inflow:
    limits = DEFAULT_LIMITS.model_copy(update={"entry_tokens": entry_tokens})
    scope = SimpleNamespace(ctx=SimpleNamespace(limits=limits))
    return Inflow(cast(Any, scope), *cast(Any, (None, None, None)))


@given(st.lists(st.integers(0, 40), max_size=30), st.integers(1, 64))
def test_turns_keep_the_order_and_hold_few_tokens_before_their_last_report(sizes: list[int], entry_tokens: int) -> None:
    batch = [delivered(tokens) for tokens in sizes]
    turns = list(inflow(entry_tokens).portions(batch))
    assert [delivery for turn in turns for delivery in turn] == batch

    def weight(turn: list[Delivery]) -> int:
        return sum(cast(TokenReport, delivery.message).weight for delivery in turn)

    assert all(weight(turn[:-1]) < entry_tokens for turn in turns)
    assert all(weight(turn) >= entry_tokens for turn in turns[:-1]), "a turn ends only where it is full"


def test_others_are_heard_between_two_turns_of_one_batch(in_world: InWorld) -> None:
    async def scenario(world: Any) -> None:
        await world.start_head()
        await asyncio.sleep(1)  # whoever registers has done so: what is ready in one turn runs in any order
        heard: list[str] = []
        world.scheduler._fleet.inflow.take = lambda turn: (
            heard.append("reports"),
            asyncio.get_running_loop().call_soon(heard.append, "others"),
        )
        full = world.config.limits.entry_tokens
        await world.scheduler.token_report([delivered(full), delivered(full), delivered(1)])
        assert heard == ["reports", "others", "reports", "others", "reports"]

    in_world(scenario)
