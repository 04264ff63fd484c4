"""A head that serves jobs was started with limits of its own: a job's children are judged by those of the job."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import NoReturn

import pytest

from actors.core.actor import Actor
from actors.core.system import ActorSystem
from configs.limits import Limits
from configs.schema import JobConfig
from supervisors.jobs.job_news import JobNews
from supervisors.jobs.job_tree import JobTree
from supervisors.machine.machine import LocalMachine
from supervisors.machine.membership.nodes import Nodes
from supervisors.tree.children import actor_child
from supervisors.tree.errors import SupervisorGaveUp
from supervisors.tree.strategies import Strategy
from supervisors.tree.supervisor import SupervisionEvent, Supervisor
from tests.simulated import run_simulated
from tests.smallest_job import smallest_job
from transport.address import PeerId
from transport.memory_transport import MemoryNetwork, MemoryTransport

OF_JOB = Limits(start_attempts_max=5, restart_max=1, backoff_first_s=2.0, backoff_max_s=2.0)


class FullMachine(LocalMachine):
    """A job's first actor does not start on it."""

    def metrics(self, job: JobConfig, run_dir: Path) -> NoReturn:
        raise OSError("no space left")


async def head() -> ActorSystem:
    """With the limits that there are without a job file."""
    system = ActorSystem(MemoryTransport(MemoryNetwork(), PeerId("head", 1)))
    await system.start()
    return system


def never() -> NoReturn:
    raise AssertionError("the core did not get so far")


def test_a_job_tree_tries_as_often_as_the_job_says(tmp_path: Path) -> None:
    async def scenario() -> None:
        system = await head()
        job = smallest_job(limits=OF_JOB.model_copy(update={"restart_max": 9}).model_dump())
        news = JobNews(system, job.name)
        tree = JobTree(system, Nodes("head"), FullMachine(), job, tmp_path, news, workers=1, adopting=False)
        with pytest.raises(SupervisorGaveUp, match="5 starts in a row failed; last: no space left"):
            await tree.start_core(never)

    run_simulated(scenario())


def test_a_supervisor_keeps_the_budget_and_the_pauses_that_it_is_given() -> None:
    async def scenario() -> None:
        system, events = await head(), list[SupervisionEvent]()
        child = actor_child("a", Actor, node="here")
        supervisor = Supervisor("fleet", Strategy.ONE_FOR_ONE, [child], on_event=events.append, limits=OF_JOB)
        await system.spawn("fleet", supervisor)
        for exits in (1, 2):
            await supervisor.ready(10.0)
            await system.stop_actor("a", "crashed")
            while [event.kind for event in events].count("exited") < exits:
                await asyncio.sleep(0.1)
        with pytest.raises(SupervisorGaveUp, match="1 restarts in 120 s are used up"):
            await supervisor.ready(10.0)
        assert [event.kind for event in events] == [
            "started", "exited", "restarting", "started", "exited", "gave_up"
        ]  # fmt: skip
        assert events[3].at_s - events[2].at_s >= 0.8 * OF_JOB.backoff_first_s

    run_simulated(scenario())
