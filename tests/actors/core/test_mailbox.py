"""The queue itself: its bound, its order, what is always taken, and that a cancelled wait loses nothing."""

from __future__ import annotations

import asyncio

from actors.core.errors import RefusalReason
from actors.core.kernel.answers import Caller
from actors.core.kernel.delivery import Delivery, Handler
from actors.core.kernel.mailbox import Mailbox
from actors.core.message import Done
from transport.address import PeerId

HANDLER = Handler(method="done", concurrent=False, streams=False)
PEER = PeerId("somebody", 3)


def delivery(request_id: int) -> Delivery:
    return Delivery(Done(), "core.done", HANDLER, None, caller=Caller(PEER, request_id))


def request_ids(deliveries: list[Delivery]) -> list[int]:
    return [d.caller.request_id for d in deliveries if d.caller is not None]


def test_it_is_first_in_first_out_and_bounded() -> None:
    mailbox = Mailbox(2)
    for n in (1, 2):
        assert mailbox.room() is None
        mailbox.put(delivery(n))
    assert mailbox.room() is RefusalReason.MAILBOX_FULL
    taken = [mailbox.take(), mailbox.take(), mailbox.take()]
    assert request_ids([d for d in taken if d is not None]) == [1, 2]
    assert mailbox.room() is None


def test_what_the_actor_has_set_in_motion_is_taken_past_the_bound() -> None:
    mailbox = Mailbox(1)
    mailbox.put(delivery(1))
    mailbox.put(delivery(2))
    assert len(mailbox) == 2


def test_a_question_can_be_withdrawn_before_it_is_begun() -> None:
    mailbox = Mailbox(5)
    for n in (1, 2, 3):
        mailbox.put(delivery(n))
    assert mailbox.withdraw(Caller(PEER, 2))
    assert not mailbox.withdraw(Caller(PEER, 2))
    assert request_ids(mailbox.close()) == [1, 3]
    mailbox.put(delivery(4))
    assert mailbox.room() is RefusalReason.STOPPING and len(mailbox) == 0


async def test_a_cancelled_wait_loses_nothing() -> None:
    mailbox = Mailbox(5)
    reader = asyncio.ensure_future(mailbox.wait())
    await asyncio.sleep(0)
    mailbox.put(delivery(1))
    reader.cancel()
    await asyncio.gather(reader, return_exceptions=True)
    assert mailbox.take() is not None
