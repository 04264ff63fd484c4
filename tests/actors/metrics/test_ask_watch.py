"""Asks that outlive their deadline are told of, once each; those that end are only counted."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from actors.core.actor import Actor, handles
from actors.core.errors import DeadlineExceeded
from actors.core.kernel.requests import Requests
from actors.core.message import Message, message
from actors.core.system import ActorSystem
from actors.metrics.recorder import Metrics
from actors.protocol.metrics import Flush, Flushed
from configs.schema import MetricsConfig
from tests.simulated import run_simulated
from transport.address import ActorAddress, PeerId
from transport.memory_transport import MemoryNetwork, MemoryTransport


@message("test.wait_for_ever")
class WaitForEver(Message):
    pass


class Silent(Actor):
    @handles(WaitForEver)
    async def wait(self, _: WaitForEver) -> Flushed:
        await self.ctx.sleep(1e6)
        return Flushed()


async def ask_in_vain(run_dir: Path) -> list[dict[str, object]]:
    """One ask with a deadline of 1 s to somebody who never answers; the events of ten seconds."""
    system = ActorSystem(MemoryTransport(MemoryNetwork(), PeerId("head", 1)))
    await system.start()
    metrics = await system.spawn("metrics", Metrics("j", run_dir, MetricsConfig(tensorboard=False)))
    silent = await system.spawn("silent", Silent())
    await system.spawn("asker", Asker(silent.address))
    await asyncio.sleep(10)
    await metrics.ask(Flush(job="j"), Flushed)
    await system.stop()
    return [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]


class Asker(Actor):
    def __init__(self, target: ActorAddress) -> None:
        self.target = target

    async def on_start(self) -> None:
        self.ctx.start_task(self._ask(), "ask")

    async def _ask(self) -> None:
        with pytest.raises(DeadlineExceeded):
            await self.ctx.ref(self.target).ask(WaitForEver(), Flushed, timeout_s=1.0)


def test_an_ask_that_ends_by_its_deadline_is_counted_and_not_told_of(tmp_path: Path) -> None:
    events = run_simulated(ask_in_vain(tmp_path))
    assert [row["event"] for row in events] == ["asks_counted"]
    assert (events[0]["process"], events[0]["opened"], events[0]["ended"], events[0]["open"]) == ("head", 2, 2, 0)


def test_an_ask_that_outlives_its_deadline_is_told_of_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Requests, "_expire", lambda self, waiter: None)
    overdue, counted = run_simulated(ask_in_vain(tmp_path))
    assert (overdue["event"], overdue["process"], overdue["asker"]) == ("ask_overdue", "head", "asker")
    assert overdue["question"] == "test.wait_for_ever"
    assert str(overdue["target"]).startswith("silent@head#")
    assert 0 < float(str(overdue["overdue_s"])) < 3
    assert (counted["event"], counted["opened"], counted["ended"], counted["open"]) == ("asks_counted", 2, 2, 0)
