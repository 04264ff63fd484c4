"""Every outcome of tell and ask, in process and over a transport."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from actors.core.actor import Actor, concurrent, handles
from actors.core.errors import (
    DeadlineExceeded,
    NotSent,
    RefusalReason,
    Refused,
    RemoteError,
    ReplyError,
    SentNoReply,
    WrongReply,
)
from actors.core.message import Done, Message, message
from actors.core.system import ActorSystem
from actors.core.terms import TermGuard
from configs.limits import DEFAULT_LIMITS
from tests.broken_links import break_link
from tests.simulated import run_simulated
from tests.transport.test_link_faults import Memory
from transport.address import ActorAddress, PeerId
from transport.link_faults import FaultableTransport, LinkRule, Misbehaviour
from transport.memory_transport import MemoryNetwork
from transport.transport import Lane, SendOutcome

Pair = tuple[ActorSystem, ActorSystem]


@message("test_ask.add")
class Add(Message):
    amount: int


@message("test_ask.get")
class Get(Message):
    pass


@message("test_ask.total")
class Total(Message):
    total: int
    who: str = ""


@message("test_ask.array")
class Array(Message):
    values: np.ndarray


@message("test_ask.hold")
class Hold(Message):
    pass


@message("test_ask.fail")
class Fail(Message):
    declared: bool


@message("test_ask.command")
class Command(Message):
    term: int


@message("test_ask.unhandled")
class Unhandled(Message):
    pass


class NoSuchPrompt(ReplyError):
    pass


class Counter(Actor):
    def __init__(self) -> None:
        self.total = 0
        self.gate = asyncio.Event()
        self.held = asyncio.Event()
        self.guard = TermGuard()
        self.runs = 0

    @handles(Add)
    async def add(self, message: Add) -> None:
        self.total += message.amount

    @handles(Get)
    async def get(self, message: Get) -> Total:
        self.runs += 1
        return Total(total=self.total, who=str(self.ctx.sender and self.ctx.sender.name))

    @handles(Array)
    async def array(self, message: Array) -> Array:
        return Array(values=message.values * 2)

    @handles(Hold)
    async def hold(self, message: Hold) -> None:
        self.held.set()
        await self.gate.wait()

    @handles(Fail)
    async def fail(self, message: Fail) -> None:
        raise NoSuchPrompt("prompt 7") if message.declared else ValueError("a bug")

    @handles(Command)
    async def command(self, message: Command) -> None:
        self.guard.admit(message.term)


async def start(pair: Pair, actor: Actor | None = None) -> tuple[Any, Any]:
    near, far = pair
    actor = actor or Counter()
    ref = await far.spawn("counter", actor)
    return actor, near.ref(ref.address)


async def test_tells_arrive_in_order_before_the_ask_that_follows_them(pair: Pair) -> None:
    _, ref = await start(pair)
    for amount in range(10):
        assert ref.tell(Add(amount=amount)) is SendOutcome.QUEUED
    assert (await ref.ask(Get(), Total)).total == 45


async def test_arrays_travel_in_questions_and_replies(pair: Pair) -> None:
    _, ref = await start(pair)
    reply = await ref.ask(Array(values=np.arange(1000, dtype=np.int32)), Array)
    np.testing.assert_array_equal(reply.values, np.arange(1000, dtype=np.int32) * 2)


async def test_an_ask_of_a_handler_without_an_answer_gets_done(pair: Pair) -> None:
    _, ref = await start(pair)
    assert await ref.ask(Add(amount=1), Done) == Done()


async def test_another_type_than_expected_is_a_wrong_reply_and_nobody_crashes(pair: Pair) -> None:
    _, ref = await start(pair)
    with pytest.raises(WrongReply):
        await ref.ask(Get(), Array)
    assert (await ref.ask(Get(), Total)).total == 0


async def test_a_declared_error_is_the_answer_and_the_actor_lives_on(pair: Pair) -> None:
    _, ref = await start(pair)
    with pytest.raises(RemoteError) as caught:
        await ref.ask(Fail(declared=True), Done)
    assert (caught.value.error_type, caught.value.declared) == ("NoSuchPrompt", True)
    assert isinstance(caught.value.raised, NoSuchPrompt) and str(caught.value.raised) == caught.value.detail
    assert (await ref.ask(Get(), Total)).total == 0


async def test_a_bug_is_told_to_the_asker_and_crashes_the_actor(pair: Pair) -> None:
    _, ref = await start(pair)
    with pytest.raises(RemoteError) as caught:
        await ref.ask(Fail(declared=False), Done)
    assert (caught.value.error_type, caught.value.declared) == ("ValueError", False)
    assert caught.value.detail == "a bug" and caught.value.raised is None
    ended = await pair[1].wait_stopped("counter", timeout_s=5)
    assert ended.reason == "crashed" and isinstance(ended.error, ValueError)
    with pytest.raises(Refused) as refused:
        await ref.ask(Get(), Total)
    assert refused.value.reason is RefusalReason.UNKNOWN_ACTOR


async def test_a_crash_fails_at_once_those_who_wait_and_says_what_was_not_begun(pair: Pair) -> None:
    class Crashing(Counter):
        async def on_start(self) -> None:
            self.ctx.start_task(self.crash(), "crash")

        async def crash(self) -> None:
            await self.held.wait()
            await asyncio.sleep(0.01)
            raise RuntimeError("boom")

    _, ref = await start(pair, Crashing())
    working = asyncio.ensure_future(ref.ask(Hold(), Done, timeout_s=60))
    waiting = asyncio.ensure_future(ref.ask(Get(), Total, timeout_s=60))
    with pytest.raises(SentNoReply):
        await working
    with pytest.raises(Refused) as refused:
        await waiting
    assert refused.value.reason is RefusalReason.STOPPING


async def test_an_ask_ends_at_its_deadline_and_the_late_reply_is_counted(pair: Pair) -> None:
    actor, ref = await start(pair)
    with pytest.raises(DeadlineExceeded):
        await ref.ask(Hold(), Done, timeout_s=0.02)
    actor.gate.set()
    await ref.ask(Get(), Total)
    assert pair[0].counters()["late_replies"] == 1


async def test_work_whose_deadline_has_passed_is_refused_before_it_starts(pair: Pair) -> None:
    actor, ref = await start(pair)
    held = asyncio.ensure_future(ref.ask(Hold(), Done))
    await actor.held.wait()
    with pytest.raises(DeadlineExceeded):
        await ref.ask(Get(), Total, timeout_s=0.01)
    actor.gate.set()
    await held
    await ref.ask(Add(amount=1), Done)
    assert actor.runs == 0


async def test_a_full_mailbox_refuses_and_says_so(make_system: Any) -> None:
    limits = DEFAULT_LIMITS.model_copy(update={"mailbox_messages": 2})
    for remote in (False, True):
        near = await make_system(f"near{remote}", limits=limits)
        far = await make_system(f"far{remote}", limits=limits) if remote else near
        actor, ref = await start((near, far))
        held = asyncio.ensure_future(ref.ask(Hold(), Done))
        await actor.held.wait()
        ref.tell(Add(amount=1))
        ref.tell(Add(amount=1))
        with pytest.raises(Refused) as refused:
            await ref.ask(Get(), Total)
        assert refused.value.reason is RefusalReason.MAILBOX_FULL
        actor.gate.set()
        await held


async def test_a_refused_tell_is_counted_at_the_sender(pair: Pair) -> None:
    near, far = pair
    ref = near.ref(far.address("nobody"))
    ref.tell(Get())
    await (await far.spawn("somebody", Counter())).ask(Get(), Total)
    with pytest.raises(Refused):
        await ref.ask(Get(), Total)
    assert near.counters()["tells_refused.unknown_actor"] >= 1


async def test_a_message_without_a_handler_is_refused(pair: Pair) -> None:
    _, ref = await start(pair)
    with pytest.raises(Refused) as refused:
        await ref.ask(Unhandled(), Done)
    assert refused.value.reason is RefusalReason.NO_HANDLER


async def test_an_older_term_is_refused_and_the_actor_lives_on(pair: Pair) -> None:
    _, ref = await start(pair)
    await ref.ask(Command(term=2), Done)
    with pytest.raises(Refused) as refused:
        await ref.ask(Command(term=1), Done)
    assert refused.value.reason is RefusalReason.STALE_TERM
    await ref.ask(Command(term=2), Done)


async def test_mail_for_an_older_life_is_refused(pair: Pair) -> None:
    near, far = pair
    await far.spawn("counter", Counter())
    old = ActorAddress("counter", PeerId(far.peer.name, 7), far.endpoint)
    with pytest.raises(NotSent):
        await near.ref(old).ask(Get(), Total, timeout_s=1)


async def test_an_ask_without_a_way_to_the_target_is_not_sent(make_system: Any) -> None:
    near = await make_system("near")
    with pytest.raises(NotSent):
        await near.ref(ActorAddress("a", PeerId("nowhere", 3))).ask(Get(), Total)


async def test_losing_the_link_fails_the_ask_at_once(make_system: Any, network: Any) -> None:
    pair = await make_system("near"), await make_system("far")
    actor, ref = await start(pair)
    asked = asyncio.ensure_future(ref.ask(Hold(), Done, timeout_s=60))
    await actor.held.wait()
    break_link(network, "near", "far")
    with pytest.raises(SentNoReply):
        await asked
    actor.gate.set()
    assert (await ref.ask(Get(), Total)).total == 0, "the next use connects again"


async def test_handlers_run_one_at_a_time_unless_concurrent(pair: Pair) -> None:
    class Mixed(Counter):
        @handles(Hold)
        @concurrent
        async def hold(self, message: Hold) -> None:
            self.held.set()
            await self.gate.wait()

    one, blocked = await start(pair)
    asked = asyncio.ensure_future(blocked.ask(Hold(), Done))
    await one.held.wait()
    with pytest.raises(DeadlineExceeded):
        await blocked.ask(Get(), Total, timeout_s=0.02)
    one.gate.set()
    await asked

    mixed = Mixed()
    ref = pair[0].ref((await pair[1].spawn("mixed", mixed)).address)
    asked = asyncio.ensure_future(ref.ask(Hold(), Done))
    await mixed.held.wait()
    assert (await ref.ask(Get(), Total)).total == 0
    mixed.gate.set()
    assert await asked == Done()


async def test_a_cancelled_asker_interrupts_a_concurrent_handler(pair: Pair) -> None:
    class Mixed(Counter):
        interrupted = False

        @handles(Hold)
        @concurrent
        async def hold(self, message: Hold) -> None:
            self.held.set()
            try:
                await self.gate.wait()
            finally:
                self.interrupted = True

    actor, ref = await start(pair, Mixed())
    asked = asyncio.ensure_future(ref.ask(Hold(), Done))
    await actor.held.wait()
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    await ref.ask(Get(), Total)
    await ref.ask(Get(), Total)
    assert actor.interrupted
    assert actor.runs == 2


async def test_the_sender_is_known_to_the_handler(pair: Pair) -> None:
    near, far = pair
    await far.spawn("counter", Counter())

    class Asker(Actor):
        def __init__(self) -> None:
            self.who = ""

        async def on_start(self) -> None:
            self.who = (await self.ctx.ref(far.address("counter")).ask(Get(), Total)).who

    asker = Asker()
    await near.spawn("asker", asker)
    assert asker.who == "asker"


def test_an_ask_on_the_signal_lane_is_answered_while_messages_are_held_up() -> None:
    async def scenario() -> None:
        network, systems, ends = MemoryNetwork(), list[ActorSystem](), list[FaultableTransport]()
        for number, name in enumerate(("near", "far"), 1):
            ends.append(FaultableTransport(Memory(network, PeerId(name, number)), limits=DEFAULT_LIMITS))
            systems.append(ActorSystem(ends[-1], limits=DEFAULT_LIMITS))
            await systems[-1].start()
        _, ref = await start((systems[0], systems[1]))
        await ref.ask(Get(), Total)
        for end in ends:
            end.add(LinkRule(Misbehaviour.DELAY, lane=Lane.MESSAGE, delay_s=2.0))
        took_s: list[float] = []
        for lane in (Lane.SIGNAL, Lane.MESSAGE):
            began_s = asyncio.get_running_loop().time()
            await ref.ask(Get(), Total, 9.0, lane=lane)
            took_s.append(asyncio.get_running_loop().time() - began_s)
        assert took_s[0] < 0.1 and took_s[1] >= 4.0
        for system in systems:
            await system.stop()

    run_simulated(scenario())
