"""A trainer that is to move with a replica: what is told, and what happens where it does not come to it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from supervisors.pool.replica_moves import ReplicaMoves


async def test_a_move_that_fails_is_told_and_the_next_look_tries_again() -> None:
    said: list[str] = []
    tries: list[int] = []
    replicas = SimpleNamespace(wanted=lambda _: "", astray=lambda _: True, in_words=lambda _: "rank 1 on n2")
    nodes = SimpleNamespace(replicas=replicas, subscribe=lambda _: lambda: None)
    news = SimpleNamespace(say=lambda message="", **_: said.append(message))

    async def restart() -> None:
        tries.append(1)
        raise TimeoutError("the trainer does not end")

    moves = ReplicaMoves(
        cast(Any, nodes), "j.trainer", cast(Any, news), runs=lambda: True, restart=restart, now=lambda: 0.0
    )
    for count in (1, 2):
        moves.look()
        moves.look()  # one move at a time
        for _ in range(3):
            await asyncio.sleep(0)
        assert len(tries) == count
    assert said == 2 * [
        "the trainer starts anew, with rank 1 on n2: a node is to go",
        "the trainer could not be started anew: TimeoutError: the trainer does not end",
    ]
