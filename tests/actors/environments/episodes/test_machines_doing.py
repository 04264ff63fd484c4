"""What the machine does to an episode is infrastructure: it is begun again, and the worker goes on."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from actors.environments.episodes.child import EpisodeOrder
from actors.environments.episodes.zygote_handle import ZygoteDied, ZygoteHandle
from actors.protocol.failures import FailureKind
from tests.actors.environments.episodes.test_worker import GAMES, count_down, named, staged
from tests.smallest_job import smallest_job


async def test_a_directory_that_cannot_be_made_costs_the_episode_and_not_the_worker(tmp_path: Path) -> None:
    async with staged(tmp_path, count_down, f"{GAMES}:Countdown") as (stage, _):
        shutil.rmtree(stage.directory)
        stage.directory.write_text("in the way")
        stage.begin(named())
        failure = (await stage.ends(1))[0].failure
        assert failure is not None and failure.kind is FailureKind.INFRASTRUCTURE
        stage.directory.unlink()
        stage.begin(named(attempt=2))
        assert (await stage.ends(2))[1].reward == 2.0


@pytest.mark.parametrize("error", [None, OSError("no room for a process")])
async def test_a_zygote_that_does_not_get_ready_is_no_episode_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError | None
) -> None:
    async def exec_(_: ZygoteHandle) -> None:
        if error is not None:
            raise error
        await asyncio.sleep(60)

    monkeypatch.setattr(ZygoteHandle, "_exec", exec_)
    handle = ZygoteHandle(smallest_job(limits={"ready_timeout_s": 0.05}), tmp_path / "log", lambda _: None)
    orders = [EpisodeOrder(key=str(i), directory="", log="") for i in range(2)]
    ended = await asyncio.gather(*[handle.run(order, 60.0) for order in orders], return_exceptions=True)
    assert [type(one) for one in ended] == [ZygoteDied] * 2
