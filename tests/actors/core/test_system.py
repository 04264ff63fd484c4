"""The process as a whole: hostile bytes, statistics, stalls, seeds, first use of a link, virtual time."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.core.actor import Actor, concurrent, handles
from actors.core.context import named_rng
from actors.core.errors import NotSent, RefusalReason, Refused, StaleTerm
from actors.core.kernel.links import MessageTooLarge
from actors.core.message import Done, Message, message
from actors.core.system import ActorSystem
from actors.core.terms import TermGuard
from configs.limits import DEFAULT_LIMITS
from transport.address import ActorAddress, PeerId
from transport.codec import encode_body
from transport.envelope import Envelope, Kind, encode_envelope
from transport.memory_transport import MemoryNetwork, MemoryTransport
from transport.sim.loop import SimulatedLoop
from transport.transport import DownReason, Frame, Lane, SendOutcome


@message("test_system.echo")
class Echo(Message):
    text: str
    job: str = ""


@message("test_system.hold")
class Hold(Message):
    pass


class Echoing(Actor):
    def __init__(self) -> None:
        self.heard: list[str] = []
        self.held = asyncio.Event()
        self.gate = asyncio.Event()

    @handles(Echo)
    async def echo(self, message: Echo) -> Echo:
        self.heard.append(message.text)
        return message

    @handles(Hold)
    @concurrent
    async def hold(self, message: Hold) -> None:
        self.held.set()
        await self.gate.wait()


class Bare:
    """A peer without a kernel: sends whatever bytes it likes and keeps what it gets."""

    def __init__(self) -> None:
        self.frames: list[list[Frame]] = []
        self.down: list[DownReason] = []

    def on_frames(self, peer: PeerId, lane: Lane, frames: list[Frame]) -> None:
        self.frames.append(frames)

    def on_peer_up(self, peer: PeerId) -> None: ...

    def on_peer_down(self, peer: PeerId, reason: DownReason) -> None:
        self.down.append(reason)


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def bare_peer(network: MemoryNetwork, system: ActorSystem) -> tuple[Bare, MemoryTransport]:
    bare, transport = Bare(), MemoryTransport(network, PeerId("bare", 99))
    await transport.start(bare)
    await transport.connect(system.endpoint, timeout_s=1)
    return bare, transport


async def test_random_frames_are_counted_and_harm_nobody(make_system: Any, network: MemoryNetwork) -> None:
    limits = DEFAULT_LIMITS.model_copy(update={"malformed_max": 10_000})
    system = await make_system("one", limits=limits)
    ref = await system.spawn("a", Echoing())
    _, transport = await bare_peer(network, system)
    rng = random.Random(7)
    for _ in range(1000):
        frames = [rng.randbytes(rng.randrange(40)) for _ in range(rng.randrange(4))]
        transport.send(system.peer, Lane.MESSAGE, frames)
        await turns(1)
    await turns()
    assert (await ref.ask(Echo(text="well"), Echo)).text == "well"
    assert system.counters()["malformed"] > 900
    assert system.counters().get("internal_errors", 0) == 0
    await transport.close(timeout_s=0)


async def test_well_formed_headers_with_nonsense_behind_them_harm_nobody(
    make_system: Any, network: MemoryNetwork
) -> None:
    limits = DEFAULT_LIMITS.model_copy(update={"malformed_max": 10_000})
    system = await make_system("one", limits=limits)
    ref = await system.spawn("a", Echoing())
    _, transport = await bare_peer(network, system)
    rng = random.Random(8)
    tags = ["", "core.down", "core.refusal", "core.target_gone", "test_system.echo", "test_system.hold", "no.such"]
    for _ in range(2000):
        envelope = Envelope(
            kind=Kind(rng.randrange(1, 14)),
            target=rng.choice(["a", "", "b"]),
            request_id=rng.randrange(5),
            tag=rng.choice(tags),
            number=rng.randrange(3),
            deadline_ms=rng.choice([-1, 0, 5]),
        )
        body = rng.choice([[], [rng.randbytes(10)], encode_body(Echo(text="x"))])
        transport.send(system.peer, rng.choice(list(Lane)), [encode_envelope(envelope), *body])
        await turns(1)
    await turns()
    assert (await ref.ask(Echo(text="well"), Echo)).text == "well"
    assert system.counters().get("internal_errors", 0) == 0
    await transport.close(timeout_s=0)


async def test_a_peer_that_goes_on_sending_nonsense_is_cut_off(make_system: Any, network: MemoryNetwork) -> None:
    system = await make_system("one")
    bare, transport = await bare_peer(network, system)
    for _ in range(system.limits.malformed_max):
        transport.send(system.peer, Lane.MESSAGE, [b"\xc1"])
    await turns()
    assert bare.down
    assert system.counters()["peers_cut_off"] == 1
    await transport.close(timeout_s=0)


async def test_a_body_that_does_not_fit_is_refused_with_the_reason(make_system: Any, network: MemoryNetwork) -> None:
    system = await make_system("one")
    await system.spawn("a", Echoing())
    bare, transport = await bare_peer(network, system)
    ask = Envelope(kind=Kind.ASK, target="a", request_id=5, tag="test_system.echo")
    transport.send(system.peer, Lane.MESSAGE, [encode_envelope(ask), *encode_body({"text": 3})])
    await turns()
    assert b"malformed" in bytes(bare.frames[0][1])
    await transport.close(timeout_s=0)


async def test_what_waits_in_the_mailbox_past_its_deadline_is_refused_unstarted(
    make_system: Any, network: MemoryNetwork
) -> None:
    """The asker here is bare, so that no CANCEL withdraws the question."""

    class Busy(Echoing):
        @handles(Hold)
        async def hold(self, message: Hold) -> None:
            self.held.set()
            await self.gate.wait()

    system = await make_system("one")
    busy = Busy()
    ref = await system.spawn("a", busy)
    held = asyncio.ensure_future(ref.ask(Hold(), Done))
    await busy.held.wait()
    bare, transport = await bare_peer(network, system)
    ask = Envelope(kind=Kind.ASK, target="a", request_id=5, tag="test_system.echo", deadline_ms=5)
    transport.send(system.peer, Lane.MESSAGE, [encode_envelope(ask), *encode_body(Echo(text="late"))])
    await asyncio.sleep(0.02)
    busy.gate.set()
    await held
    await turns()
    assert busy.heard == []
    assert b"expired" in bytes(bare.frames[0][1])
    await transport.close(timeout_s=0)


async def test_an_answer_from_another_peer_than_the_one_asked_is_dropped(
    make_system: Any, network: MemoryNetwork
) -> None:
    near, far = await make_system("near"), await make_system("far")
    echoing = Echoing()
    ref = near.ref((await far.spawn("a", echoing)).address)
    asked = asyncio.ensure_future(ref.ask(Hold(), Done))
    await echoing.held.wait()
    _, transport = await bare_peer(network, near)
    for request_id in range(1, 50):
        forged = Envelope(kind=Kind.REPLY, request_id=request_id, tag="core.done")
        transport.send(near.peer, Lane.MESSAGE, [encode_envelope(forged), *encode_body(Done())])
    await turns()
    assert not asked.done()
    echoing.gate.set()
    assert await asked == Done()
    await transport.close(timeout_s=0)


async def test_statistics_and_stalls_say_who_waits_for_whom(make_system: Any) -> None:
    near, far = await make_system("near"), await make_system("far")
    echoing = Echoing()
    address = (await far.spawn("slow", echoing)).address

    class Asker(Actor):
        async def on_start(self) -> None:
            self.ctx.start_task(self.ctx.ref(address).ask(Hold(), Done), "ask")

    await near.spawn("asker", Asker())
    await echoing.held.wait()
    await asyncio.sleep(0.01)
    (stall,) = near.sight().stalls
    assert stall.since_s >= 0.01
    assert (stall.waiter, stall.waits_for, stall.kind) == ("asker", str(address), "ask")
    (stall,) = far.sight(0.005).stalls
    assert (stall.waiter, stall.kind, stall.what) == ("slow", "handler", "test_system.hold")
    assert far.sight(60).stalls == []
    echoing.gate.set()


async def test_loop_lag_is_measured(make_system: Any) -> None:
    system = await make_system("one")
    for _ in range(4):
        await asyncio.sleep(0.03)
    lag = system.sight().loop_lag
    assert lag is not None and 0 <= lag.p50_s <= lag.max_s < 5


async def test_what_is_told_before_the_link_is_up_is_queued_in_order_and_bounded(make_system: Any) -> None:
    limits = DEFAULT_LIMITS.model_copy(update={"message_queue_frames": 3})
    near = await make_system("near", limits=limits)
    address = ActorAddress("a", PeerId("late", 500), "memory://late")
    ref = near.ref(address)
    outcomes = [ref.tell(Echo(text=str(n))) for n in range(4)]
    assert outcomes == [SendOutcome.QUEUED] * 3 + [SendOutcome.FULL]
    asked = asyncio.ensure_future(ref.ask(Echo(text="?"), Echo))
    with pytest.raises(NotSent):
        await asked
    late = await make_system("late", incarnation=500)
    echoing = Echoing()
    await late.spawn("a", echoing)
    async with asyncio.timeout(5):
        while len(echoing.heard) < 3:
            await asyncio.sleep(0.001)
    assert echoing.heard == ["0", "1", "2"]


async def test_an_ask_whose_deadline_passes_while_it_waits_for_the_link_is_never_sent(make_system: Any) -> None:
    near = await make_system("near")
    ref = near.ref(ActorAddress("a", PeerId("late", 500), "memory://late"))
    with pytest.raises(Exception, match="no answer within"):
        await ref.ask(Echo(text="too late"), Echo, timeout_s=0.02)
    late = await make_system("late", incarnation=500)
    echoing = Echoing()
    await late.spawn("a", echoing)
    await ref.ask(Echo(text="in time"), Echo)
    assert echoing.heard == ["in time"]
    assert near.counters()["expired_before_sending"] == 1


async def test_a_message_that_no_transport_carries_is_refused_where_it_is_sent(make_system: Any) -> None:
    limits = DEFAULT_LIMITS.model_copy(update={"message_max_bytes": 1000})
    near, far = await make_system("near", limits=limits), await make_system("far")
    ref = near.ref((await far.spawn("a", Echoing())).address)
    with pytest.raises(MessageTooLarge):
        ref.tell(Echo(text="x" * 2000))
    with pytest.raises(MessageTooLarge):
        await ref.ask(Echo(text="x" * 2000), Echo)


async def test_answers_that_find_the_lane_full_come_later_and_in_order(make_system: Any) -> None:
    narrow = DEFAULT_LIMITS.model_copy(update={"message_queue_frames": 4})
    near, far = await make_system("near"), await make_system("far", limits=narrow)
    ref = near.ref((await far.spawn("a", Echoing())).address)
    await ref.ask(Echo(text="link"), Echo)
    asks = [asyncio.ensure_future(ref.ask(Echo(text=str(n)), Echo, timeout_s=5)) for n in range(8)]
    assert [(await ask).text for ask in asks] == [str(n) for n in range(8)]


async def test_too_many_open_questions_are_refused(make_system: Any) -> None:
    system = await make_system("one", limits=DEFAULT_LIMITS.model_copy(update={"pending_asks": 1}))
    echoing = Echoing()
    ref = await system.spawn("a", echoing)
    asked = asyncio.ensure_future(ref.ask(Hold(), Done))
    await echoing.held.wait()
    with pytest.raises(Refused) as refused:
        await ref.ask(Echo(text=""), Echo)
    assert refused.value.reason is RefusalReason.TOO_MANY_ASKS
    echoing.gate.set()
    await asked


async def test_stopping_a_system_ends_its_open_questions(make_system: Any) -> None:
    near, far = await make_system("near"), await make_system("far")
    echoing = Echoing()
    ref = near.ref((await far.spawn("a", echoing)).address)
    asked = asyncio.ensure_future(ref.ask(Hold(), Done, timeout_s=60))
    await echoing.held.wait()
    await near.stop()
    with pytest.raises(Exception, match="stopped"):
        await asked


def test_random_streams_depend_on_the_seed_and_the_names_only() -> None:
    assert named_rng(1, "a", "b").random() == named_rng(1, "a", "b").random()
    others = [named_rng(2, "a", "b"), named_rng(1, "ab"), named_rng(1, "b", "a")]
    assert len({stream.random() for stream in [named_rng(1, "a", "b"), *others]}) == 4


@given(st.lists(st.integers(0, 20)))
def test_the_ruling_term_never_goes_back(terms: list[int]) -> None:
    guard = TermGuard()
    for index, term in enumerate(terms):
        ruling = max([0, *terms[:index]])
        if term < ruling:
            assert guard.is_stale(term)
            with pytest.raises(StaleTerm):
                guard.admit(term)
        else:
            assert guard.admit(term) is (term > ruling)
        assert guard.ruling == max(ruling, term)


def test_hours_of_waiting_and_blocking_calls_pass_at_once_under_virtual_time() -> None:
    class Sleeper(Actor):
        @handles(Echo)
        async def echo(self, message: Echo) -> Echo:
            await self.ctx.sleep(3600)
            return Echo(text=await self.ctx.run_blocking(str.upper, message.text))

    async def main() -> tuple[str, float]:
        network = MemoryNetwork()
        near = ActorSystem(MemoryTransport(network, PeerId("near", 1)))
        far = ActorSystem(MemoryTransport(network, PeerId("far", 2)))
        await near.start()
        await far.start()
        ref = near.ref((await far.spawn("sleeper", Sleeper())).address)
        text = (await ref.ask(Echo(text="x"), Echo, timeout_s=7200)).text
        now = asyncio.get_running_loop().time()
        await near.stop()
        await far.stop()
        return text, now

    loop = SimulatedLoop(seed=1)
    try:
        text, now = loop.run_until_complete(main())
    finally:
        loop.close()
    assert text == "X"
    assert 3600 <= now < 3700
