"""A run is followed over its control socket, which may be away, come back, or belong to a head with several jobs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from actors.control.server import ControlServer
from actors.control.socket import open_control_socket
from configs.limits import Limits
from supervisors.cli.console.feed import Feed
from supervisors.cli.console.live_run import LiveRun
from tests.actors.control.control_fakes import FakeBackend
from tests.supervisors.cli.console.recorded_run import row

LIMITS = Limits(console_ask_s=0.05)
PATIENCE_S = 20.0


class Head(FakeBackend):
    """It has rows, a tree and stalls."""

    async def metrics(self, job: str | None, last: int) -> list[dict[str, Any]]:
        return [row(0), row(1)][-last:]

    async def tree(self, job: str | None) -> list[dict[str, Any]]:
        return [{"name": "rollout-0", "role": "rollout", "node": "n", "pid": 7, "state": "running", "restarts": 1}]


@asynccontextmanager
async def served(backend: Head, endpoint: str) -> AsyncIterator[None]:
    server = ControlServer(backend, open_control_socket(endpoint, LIMITS), limits=LIMITS)
    await server.start()
    try:
        yield
    finally:
        await server.stop()


@asynccontextmanager
async def following(endpoint: str, job: str | None = None) -> AsyncIterator[tuple[LiveRun, Callable[..., Any]]]:
    news = asyncio.Event()
    live = LiveRun(lambda: endpoint, job, None, LIMITS, lambda _: news.set())

    async def until(holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not holds():
                news.clear()
                await news.wait()

    task = asyncio.create_task(live.run())
    try:
        yield live, until
    finally:
        task.cancel()
        await asyncio.wait([task])


async def test_steps_states_and_messages_arrive_as_they_happen(tmp_path: Path) -> None:
    backend, endpoint = Head(), f"ipc://{tmp_path}/c.sock"
    async with served(backend, endpoint), following(endpoint) as (live, until):
        await until(lambda: live.reachable)
        assert live.job == "demo" and [step["step"] for step in live.rows] == [0, 1]
        assert live.tree[0]["restarts"] == 1 and live.stalls is not None
        assert live.nodes[0]["given"] == {"0": ["demo.trainer"], "1": []}
        feed = Feed(None, LIMITS)
        feed.live = live
        feed.changed("live")
        assert [(row["device"], row["processes"]) for row in feed.snapshot()["devices"]] == [
            ("0", ["demo.trainer"]), ("1", [])
        ]  # fmt: skip
        backend.events.put_nowait({"kind": "step", "job": "demo", **row(2), "step": 3})
        backend.events.put_nowait({"kind": "message", "job": "demo", "message": "rollout-0 was started again"})
        backend.events.put_nowait({"kind": "state", "job": "demo", "state": "running", "waiting_for": "a worker"})
        await until(lambda: live.waiting_for == "a worker")
        assert live.rows[-1]["step"] == 2 and list(live.messages) == ["rollout-0 was started again"]


async def test_a_head_that_is_away_is_asked_again_until_it_is_back(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/c.sock"
    async with following(endpoint) as (live, until):
        await until(lambda: "no control server answers" in live.why)
        async with served(Head(), endpoint):
            await until(lambda: live.reachable)
        await until(lambda: not live.reachable)
        assert live.stalls is None and live.tree == []


async def test_of_several_jobs_one_must_be_named(tmp_path: Path) -> None:
    backend, endpoint = Head(), f"ipc://{tmp_path}/c.sock"
    backend.states["other"] = "running"
    async with served(backend, endpoint):
        async with following(endpoint) as (live, until):
            await until(lambda: "its jobs are demo, other" in live.why)
            assert not live.reachable and "--job" in live.why
        async with following(endpoint, "other") as (live, until):
            await until(lambda: live.reachable)
            assert live.status["job"] == "other"


async def test_a_run_that_has_no_socket_yet_is_found_when_it_has(tmp_path: Path) -> None:
    store = tmp_path / "control.endpoint"
    live = LiveRun(lambda: store.read_text(), None, None, LIMITS, lambda _: None)
    task = asyncio.create_task(live.run())
    async with served(Head(), f"ipc://{tmp_path}/c.sock"), asyncio.timeout(PATIENCE_S):
        while "No such file" not in live.why:
            await asyncio.sleep(0.01)
        store.write_text(f"ipc://{tmp_path}/c.sock")
        while not live.reachable:
            await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.wait([task])
