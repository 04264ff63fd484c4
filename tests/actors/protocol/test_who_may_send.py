"""The table of who may send what: complete, and obeyed for every message by whoever stands behind a link."""

from __future__ import annotations

import asyncio
import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any

import pytest

import actors
import supervisors
from actors.core import message as messages
from actors.core.actor import Actor, handles
from actors.core.errors import RefusalReason
from actors.core.kernel import inbound
from actors.core.kernel.answers import Refusal
from actors.core.message import Message, class_of, message, tag_of
from actors.core.senders import SenderKind, guard_of, leads, sender_of
from actors.core.system import ActorSystem
from actors.protocol.who_may_send import WHO_MAY_SEND, guard_for
from configs.limits import DEFAULT_LIMITS
from tests.simulated import run_simulated
from transport.address import PeerId
from transport.codec import decode_body
from transport.envelope import Envelope, Kind, decode_envelope, encode_envelope
from transport.memory_transport import MemoryNetwork, MemoryTransport
from transport.transport import DownReason, Frame, Lane

JOB = "demo"
PEERS = {
    SenderKind.HEAD: "head",
    SenderKind.MACHINE: "machine",
    SenderKind.AGENT: "n1",
    SenderKind.SERVICE: f"head.{JOB}.trainer",
    SenderKind.TRAIN_SERVICE: "head.service.train-0",
    SenderKind.WORKER: f"n1.{JOB}.rollout-0",
    SenderKind.RANK: f"head.{JOB}.trainer.rank1",
    SenderKind.STRANGER: f"n1.{JOB}.trainer",
}
RECEIVERS = {
    "head": f"scheduler.{JOB}",
    "machine": "agent",
    "n1": "agent",
    f"n1.{JOB}.rollout-1": "rollout-1",
    "head.service.train-1": "train-1",
    f"head.{JOB}.trainer.rank2": "trainer.rank2",
}


def product_tags() -> Iterator[str]:
    """Of every message class in ``actors`` and ``supervisors``, whichever file it stands in."""
    heavy = ("engines.vllm", "cli.plot")
    for package in (actors, supervisors):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not any(part in module.name for part in heavy):
                importlib.import_module(module.name)
    for tag, kind in messages._by_tag.items():
        if kind.__module__.startswith(("actors.", "supervisors.")):
            yield tag


def test_every_message_is_in_the_table_and_nothing_else_is() -> None:
    assert set(product_tags()) == set(WHO_MAY_SEND)


def test_names_say_what_a_peer_is() -> None:
    for kind, name in PEERS.items():
        assert sender_of(name).kind is kind
    assert sender_of("machine").node == sender_of("head").node == "head"
    assert sender_of("n1.job.with.dots.rollout-0") == (SenderKind.WORKER, "n1", "job.with.dots")
    assert sender_of("n1.job.rollout-n1.2") == (SenderKind.WORKER, "n1", "job"), "one of an elastic pool"
    assert sender_of("head.service.trainer") == (SenderKind.SERVICE, "head", "service"), "of a job with that name"
    assert sender_of("head.job.environments-0") == (SenderKind.SERVICE, "head", "job")
    assert sender_of("head.job.gateway") == (SenderKind.SERVICE, "head", "job")
    assert sender_of("head.job.trainer.rank1") == (SenderKind.RANK, "head", "job")
    assert sender_of("n1.job.trainer.rank1") == (SenderKind.RANK, "n1", "job"), "of a replica elsewhere"
    assert sender_of("n1.job.trainer").kind is SenderKind.STRANGER, "who leads is on the head's machine"
    assert leads("n1.job.trainer.rank1") == leads("head.job.trainer.rank1") == "head.job.trainer"
    assert leads("n1.job.rollout-n1.2.rank12") == "n1.job.rollout-n1.2"
    assert sender_of("n1.job.with.dots.rollout-n1.2.rank12") == (SenderKind.RANK, "n1", "job.with.dots")
    assert sender_of("head.job.rank1.trainer") == (SenderKind.SERVICE, "head", "job.rank1")
    for odd in (
        "",
        "n1.trainer.rank1",
        "head.job.weights.rank1",
        "head.rank1",
        "head.job.trainer.rank0",
        "n1.service.train-0",
        ".",
        "..",
        "a.b",
        "a..rollout-0",
        ".job.rollout-0",
        "head.job.",
        "head.job.agent",
        "n1.job.weights",
        "n1.job.environments-0",
    ):
        assert sender_of(odd).kind is SenderKind.STRANGER, odd


def test_a_training_service_hears_the_trainers_of_all_jobs_and_speaks_for_none() -> None:
    ours = {"t": frozenset([SenderKind.SERVICE, SenderKind.TRAIN_SERVICE])}
    at_service, at_head = guard_of(PeerId("head.service.train-0", 1), ours), guard_of(PeerId("head", 1), ours)
    for job in ("first", "second"):
        assert at_service(PeerId(f"head.{job}.trainer", 1), "t", "train-0") is None
    service = PeerId("head.service.train-0", 1)
    assert at_head(service, "t", "metrics.service.train-0") is None
    assert "does not" in (at_head(service, "t", "metrics.first") or "")


class Anything(Actor):
    """Handles every message there is, so that only the guard can refuse one; counts what gets through."""

    heard: list[str]

    async def on_start(self) -> None:
        self.heard = []


def hear_everything() -> type[Anything]:
    kinds = [class_of(tag) for tag in product_tags()]

    class Ear(Anything):
        @handles(*[kind for kind in kinds if kind is not None])
        async def hear(self, message: Any) -> None:
            self.heard.append(tag_of(type(message)))

    return Ear


class Attacker:
    """Speaks for a peer below its actor system: sends envelopes of its own making."""

    def __init__(self) -> None:
        self.answers: dict[int, tuple[Kind, list[Frame]]] = {}

    def on_frames(self, peer: PeerId, lane: Lane, frames: list[Frame]) -> None:
        envelope = decode_envelope(frames[0])
        self.answers[envelope.request_id] = (envelope.kind, frames[1:])

    def on_peer_up(self, peer: PeerId) -> None: ...
    def on_peer_down(self, peer: PeerId, reason: DownReason) -> None: ...


@pytest.mark.parametrize("own", RECEIVERS)
def test_what_the_table_does_not_allow_is_refused_from_every_kind_of_sender_to_every_kind_of_process(own: str) -> None:
    """Each message, from each kind, as a tell, as an ask and as a stream; the body is random: it is not even read."""
    target, ear = RECEIVERS[own], hear_everything()

    async def scenario() -> None:
        network = MemoryNetwork()
        guard = guard_for(PeerId(own, 1))
        limits = DEFAULT_LIMITS.model_copy(update={"malformed_max": 3 * len(WHO_MAY_SEND)})  # all of it cannot be read
        system = ActorSystem(MemoryTransport(network, PeerId(own, 1)), limits=limits, guard=guard)
        await system.start()
        await system.spawn(target, ear())
        for kind, name in PEERS.items():
            if name == own:
                continue
            attacker = Attacker()
            transport = MemoryTransport(network, PeerId(name, 2))
            await transport.start(attacker)
            peer = await transport.connect(system.endpoint, timeout_s=1.0)
            number = 0
            asked: dict[int, str] = {}
            for tag in WHO_MAY_SEND:
                for how in (Kind.TELL, Kind.ASK, Kind.STREAM_OPEN):
                    number += 1
                    asked[number] = tag
                    envelope = Envelope(kind=how, source="me", target=target, request_id=number, tag=tag)
                    transport.send(peer, Lane.MESSAGE, [encode_envelope(envelope), b"\xc1"])
                await settle()
            for number, tag in asked.items():
                how, body = attacker.answers[number]
                assert how is Kind.REFUSED
                reason = decode_body(Refusal, body).reason
                may = kind in WHO_MAY_SEND[tag] and guard(transport.peer, tag, target) is None
                assert (reason is RefusalReason.NOT_ALLOWED) is not may, (name, tag, reason)
                assert may or system.counters()["forbidden"] > 0
            await transport.close(timeout_s=1.0)
        await system.stop()

    async def settle() -> None:
        await asyncio.sleep(0.01)

    run_simulated(scenario())


def test_a_role_process_speaks_to_its_own_job_and_its_own_agent_only() -> None:
    head, agent, worker = (guard_for(PeerId(name, 1)) for name in ("head", "n1", f"n1.{JOB}.rollout-1"))
    mine, other = PeerId(f"n1.{JOB}.rollout-0", 2), PeerId("n2.other.rollout-0", 3)
    report = "scheduler.token_report"
    assert head(mine, report, f"scheduler.{JOB}") is None
    for target in (f"scheduler.{JOB}x", "scheduler.other", "scheduler", "nodes", "agent", JOB):
        assert head(mine, report, target) is not None, target
    assert head(other, report, f"scheduler.{JOB}") is not None
    assert worker(mine, "weights.get_chunks", "rollout-1-relay") is None
    assert "serves the job 'other'" in (worker(other, "weights.get_chunks", "rollout-1-relay") or "")
    assert agent(mine, "node.process_ready", "agent") is None
    assert "runs on n2" in (agent(other, "node.process_ready", "agent") or "")
    own_machine = guard_for(PeerId("machine", 1))
    assert own_machine(PeerId(f"head.{JOB}.weights", 4), "node.process_beacon", "agent") is None


def test_a_rank_hears_its_own_job_and_says_next_to_nothing() -> None:
    allowed = {tag for tag, kinds in WHO_MAY_SEND.items() if SenderKind.RANK in kinds}
    of_any_process = {tag for tag, kinds in WHO_MAY_SEND.items() if SenderKind.TRAIN_SERVICE in kinds}
    assert allowed - of_any_process == {"scheduler.register_service"}
    rank = guard_for(PeerId(f"head.{JOB}.trainer.rank1", 1))
    assert rank(PeerId(f"head.{JOB}.trainer", 1), "ranks.order", "trainer.rank1") is None
    assert rank(PeerId("head.other.trainer", 1), "ranks.order", "trainer.rank1") is not None
    assert rank(PeerId("head.service.train-0", 1), "ranks.order", "trainer.rank1") is not None
    of_service = guard_for(PeerId("head.service.train-0.rank1", 1))
    assert of_service(PeerId("head.service.train-0", 1), "ranks.order", "train-0.rank1") is None
    for other in ("head.service.train-1", f"head.{JOB}.trainer", "head.service.train-0.rank2"):
        assert of_service(PeerId(other, 1), "ranks.order", "train-0.rank1") is not None


def test_a_node_may_join_and_tell_of_its_processes_and_that_is_all() -> None:
    allowed = {tag for tag, kinds in WHO_MAY_SEND.items() if SenderKind.AGENT in kinds}
    assert allowed == {"nodes.join", "nodes.leave", "node.process_exited"}


def test_orders_to_start_to_signal_and_to_do_harm_come_from_the_head_only() -> None:
    for tag in ("node.spawn", "node.stop", "node.adopt", "faults.signal_child", "faults.apply", "rollout.drain"):
        assert WHO_MAY_SEND[tag] == {SenderKind.HEAD}
    for tag in ("jobs.cancel", "jobs.pause", "jobs.resume"):
        assert not WHO_MAY_SEND[tag], "the operator's orders are given within the head"


@message("test_who.order")
class Order(Message):
    pass


class Obedient(Actor):
    orders = 0

    @handles(Order)
    async def obey(self, order: Order) -> None:
        self.orders += 1


def test_what_is_refused_is_counted_and_logged_at_its_first_tenth_and_hundredth_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logged: list[int] = []
    monkeypatch.setattr(inbound, "log", Logged(logged))

    async def scenario() -> None:
        network = MemoryNetwork()
        system = ActorSystem(MemoryTransport(network, PeerId("head", 1)), guard=guard_for(PeerId("head", 1)))
        await system.start()
        obedient = Obedient()
        ref = await system.spawn("obedient", obedient)
        node = ActorSystem(MemoryTransport(network, PeerId("n1", 2)))
        await node.start()
        for _ in range(250):
            node.ref(ref.address).tell(Order())
        await node.connect(system.endpoint)
        await asyncio.sleep(1.0)
        assert (obedient.orders, system.counters()["forbidden"], logged) == (0, 250, [1, 10, 100])
        await node.stop()
        await system.stop()

    run_simulated(scenario())


class Logged:
    def __init__(self, attempts: list[int]) -> None:
        self._attempts = attempts

    def warning(self, event: str, **fields: Any) -> None:
        if "attempts" in fields:
            self._attempts.append(fields["attempts"])

    info = error = exception = warning
