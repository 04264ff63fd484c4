"""A job that is over takes no place from the next one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from actors.core.system import ActorSystem
from supervisors.jobs.job_news import JobNews
from supervisors.jobs.job_tree import JobTree
from supervisors.machine.machine import LocalMachine
from supervisors.machine.membership.nodes import Node, Nodes
from tests.simulated import run_simulated
from tests.smallest_job import smallest_job
from transport.address import ActorAddress, PeerId
from transport.memory_transport import MemoryNetwork, MemoryTransport


async def stuck(_: str) -> None:
    raise TimeoutError


@pytest.mark.parametrize("fails", [False, True])
def test_the_places_of_a_job_on_the_nodes_are_free_once_its_tree_is_down(
    fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a part of it could not be stopped: a head that serves other jobs goes on."""

    async def scenario() -> None:
        system = ActorSystem(MemoryTransport(MemoryNetwork(), PeerId("head", 1)))
        await system.start()
        job, nodes = smallest_job(), Nodes("head")
        taken = {process: process for process in ("j.rollout-0", "other.rollout-0")}
        node = Node("a", ActorAddress("agent", PeerId("a", 1)), slots=1, local=False, placed=taken)
        nodes._nodes["a"] = node
        news = JobNews(system, job.name)
        tree = JobTree(system, nodes, LocalMachine(), job, tmp_path, news, workers=1, adopting=False)
        worker = SimpleNamespace(name="rollout-0")
        tree._supervisors["rollout"] = cast(Any, SimpleNamespace(snapshot=lambda: [worker]))
        nodes.expect("j.trainer", [["j.trainer.rank1"]], 0)
        node.kept.add("j.trainer.rank1")
        if fails:
            monkeypatch.setattr(system, "actors", lambda: ["rollout.j"])
            monkeypatch.setattr(system, "stop_actor", stuck)
            with pytest.raises(TimeoutError):
                await tree.stop()
        else:
            await tree.stop()
        assert node.kept == set()
        assert node.placed.keys() == {"other.rollout-0"}
        await system.stop()

    run_simulated(scenario())
