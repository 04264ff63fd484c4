"""Every transport: a link that breaks between two peers that live on is made again, as often as it breaks."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.contracts.transport_worlds import KINDS, WAIT_S, Recorder, World
from transport.transport import DownReason, Lane, SendOutcome

ROUNDS = 3


async def broken(world: World, here: Any, there: Any) -> None:
    """Break the link; returns as soon as ``here`` can tell."""
    world.break_link(here, there)
    async with asyncio.timeout(WAIT_S):
        while here.send(there.peer, Lane.MESSAGE, [b"into the breach"]) is not SendOutcome.NO_LINK:
            await asyncio.sleep(0.0005)


async def made_again_and_used(here: Any, there: Any, heard: Recorder, word: bytes) -> None:
    await here.connect(there.endpoint, timeout_s=WAIT_S)
    assert here.send(there.peer, Lane.MESSAGE, [word]) is SendOutcome.QUEUED
    await heard.until(lambda r: [word] in r.frames(Lane.MESSAGE))


@pytest.mark.parametrize("dialer_dials_again", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_link_that_breaks_and_is_made_again_at_once_replaces_nobody(kind: str, dialer_dials_again: bool) -> None:
    """Break, send at once, break again, send: the same life of the same peer is Unreachable for a moment, no more."""

    async def scenario(world: World) -> None:
        a, seen_a, b, seen_b = await world.pair()
        here, there, heard = (a, b, seen_b) if dialer_dials_again else (b, a, seen_a)
        for number in range(ROUNDS):
            await broken(world, here, there)
            await made_again_and_used(here, there, heard, str(number).encode())
        for seen, other in ((seen_a, b), (seen_b, a)):
            await seen.until(lambda r: len(r.ups()) == ROUNDS + 1 and len(r.downs()) == ROUNDS)
            assert seen.downs() == [(other.peer, DownReason.UNREACHABLE)] * ROUNDS
            assert [event[0] for event in seen.events if event[0] != "frames"] == ["up", *["down", "up"] * ROUNDS]

    World(kind).run(scenario)


@pytest.mark.parametrize("dialer_dials_again", [True, False])
def test_a_link_is_made_again_before_the_broken_one_has_settled(
    monkeypatch: pytest.MonkeyPatch, dialer_dials_again: bool
) -> None:
    """Reading what has arrived on the old link takes its time; the handshake of the new one may be faster."""
    monkeypatch.setattr("transport.zmq.links._SETTLE_S", 0.5)
    test_a_link_that_breaks_and_is_made_again_at_once_replaces_nobody("zmq-ipc", dialer_dials_again)
