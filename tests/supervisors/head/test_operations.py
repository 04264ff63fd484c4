"""What the control socket does on a head: rows of files, and verbs that come at an awkward moment."""

from __future__ import annotations

import asyncio
import inspect
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from actors.control.errors import NotFound, NotNow
from actors.control.verbs import VERBS
from actors.protocol.jobs import JobState
from configs.limits import DEFAULT_LIMITS
from supervisors.head.head import Head
from supervisors.head.operations import Operations
from supervisors.jobs.job_tree import JobTree
from supervisors.machine.machine import LOCAL
from supervisors.machine.membership.nodes import Node, Nodes
from tests.smallest_job import smallest_job
from transport.address import ActorAddress, PeerId


def operations(**head: Any) -> Operations:
    """On a head that has no more than is named."""
    no_services = SimpleNamespace(all=[], get=lambda name: None, children=list)
    return Operations(cast(Head, SimpleNamespace(**{"limits": DEFAULT_LIMITS, "services": no_services, **head})))


# ------------------------------------------------------------ verbs


@pytest.mark.parametrize("op", [op for op, verb in VERBS.items() if not verb.of_server and not verb.streams])
def test_each_declared_verb_is_a_method_that_takes_its_arguments(op: str) -> None:
    assert set(inspect.signature(getattr(operations(), op)).parameters) == set(VERBS[op].__struct_fields__)


# ------------------------------------------------------------ files


def row(step: int) -> str:
    """As long as those of real runs."""
    return json.dumps({"step": step, "padding": "x" * 1500})


@pytest.mark.parametrize("last", [1, 3, 100, 1000])
async def test_metrics_are_whole_rows_while_the_next_one_is_being_written(tmp_path: Path, last: int) -> None:
    rows = [row(step) for step in range(200)]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*rows, row(200)[:700]]))
    ops = operations(jobs={"j": SimpleNamespace(run_dir=tmp_path)})
    assert [found["step"] for found in await ops.metrics("j", last)] == list(range(200))[-last:]


async def test_metrics_of_a_job_without_a_whole_row_are_none(tmp_path: Path) -> None:
    ops = operations(jobs={"j": SimpleNamespace(run_dir=tmp_path)})
    assert await ops.metrics("j", 5) == []
    (tmp_path / "metrics.jsonl").write_text(row(0)[:700])
    assert await ops.metrics("j", 5) == []


async def test_a_separator_inside_of_a_row_does_not_part_it(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"text": "a\u2028b"}\n')
    ops = operations(jobs={"j": SimpleNamespace(run_dir=tmp_path)})
    assert await ops.metrics("j", 5) == [{"text": "a\u2028b"}]


async def test_logs_are_the_last_lines_whatever_their_length(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "trainer.log").write_text("".join(f"{line} {'y' * 3000}\n" for line in range(100)))
    ops = operations(jobs={"j": SimpleNamespace(run_dir=tmp_path)})
    assert [line.split()[0] for line in await ops.logs("j", "trainer", 60)] == [str(n) for n in range(40, 100)]


async def test_reading_much_does_not_keep_the_loop_from_its_work(tmp_path: Path) -> None:
    """Sixty clients ask for ten thousand rows each: they are read one after the other, on a thread."""
    (tmp_path / "metrics.jsonl").write_text("\n".join(row(step) for step in range(4000)) + "\n")
    ops = operations(jobs={"j": SimpleNamespace(run_dir=tmp_path)})
    loop, worst_s, done = asyncio.get_running_loop(), 0.0, asyncio.Event()

    async def beat() -> None:
        nonlocal worst_s
        while not done.is_set():
            before_s = loop.time()
            await asyncio.sleep(0.01)
            worst_s = max(worst_s, loop.time() - before_s - 0.01)

    beating = asyncio.create_task(beat())
    found = await asyncio.gather(*(ops.metrics("j", 10_000) for _ in range(20)))
    done.set()
    await beating
    assert {len(rows) for rows in found} == {4000}
    assert worst_s < 0.5


async def test_no_more_than_so_many_bytes_are_read_for_one_answer(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("\n".join(row(step) for step in range(200)) + "\n")
    limits = DEFAULT_LIMITS.model_copy(update={"control_read_bytes": 10_000})
    ops = operations(jobs={"j": SimpleNamespace(run_dir=tmp_path)}, limits=limits)
    assert [found["step"] for found in await ops.metrics("j", 100)] == list(range(194, 200))


# ------------------------------------------------------------ drain


class Register:
    """The register of a head with remote machines of these names."""

    def __init__(self, *names: str) -> None:
        agent = ActorAddress("agent", PeerId("n", 1))
        self.present = [Node("head", agent, 4, local=True), *(Node(name, agent, 1, local=False) for name in names)]

    def usable_by(self, _: str) -> list[Node]:
        return self.present

    def owner_of(self, _: str) -> str:
        return ""

    def knows(self, name: str) -> bool:
        return any(node.name == name for node in self.present)

    def drain(self, name: str) -> bool:
        for node in self.present:
            node.draining = node.draining or node.name == name
        return self.knows(name)

    def undrain(self, name: str) -> bool:
        (node,) = [node for node in self.present if node.name == name]
        node.draining = node.leaving
        return not node.leaving


def running(place: str) -> Any:
    job = smallest_job(cluster={"place_rollout": place, "nodes": int(place == "remote")})

    async def nothing(_: str) -> int:
        return 0

    tree = SimpleNamespace(pool=SimpleNamespace(drain_worker=nothing, drain_node=nothing))
    return SimpleNamespace(job=job, state=JobState.RUNNING, tree=tree)


async def test_the_heads_own_machine_is_not_drained_with_what_a_job_cannot_do_without() -> None:
    nodes = Register("node-1")
    with pytest.raises(NotNow, match="head is the head's own machine"):
        await operations(jobs={"j": running("local")}, nodes=nodes).drain("head")
    assert not nodes.present[0].draining


async def test_the_last_machine_of_a_job_whose_workers_must_be_elsewhere_is_not_drained() -> None:
    nodes = Register("node-1", "node-2")
    ops = operations(jobs={"j": running("remote")}, nodes=nodes)
    assert await ops.drain("node-1") == {"target": "node-1", "workers": 0}
    with pytest.raises(NotNow, match="node-2 is the last machine for the workers of j"):
        await ops.drain("node-2")
    assert await ops.undrain("node-1") == {"target": "node-1"}
    await ops.drain("node-2")


async def test_the_last_machine_may_go_where_the_head_can_take_its_workers() -> None:
    assert (await operations(jobs={"j": running("spread")}, nodes=Register("n")).drain("n"))["target"] == "n"


async def test_only_a_machine_that_was_drained_from_here_is_taken_back() -> None:
    nodes = Register("node-1")
    ops = operations(jobs={}, nodes=nodes)
    with pytest.raises(NotFound, match="'node-2'"):
        await ops.undrain("node-2")
    nodes.present[1].draining = nodes.present[1].leaving = True
    with pytest.raises(NotNow, match="node-1 has said itself that it goes"):
        await ops.undrain("node-1")


def being_prepared(run_dir: Path) -> Any:
    """A run whose model is not there yet: it has a tree without supervisors."""
    job, news = smallest_job(), cast(Any, SimpleNamespace(record=None))
    system = SimpleNamespace(address=lambda name: ActorAddress(name, PeerId("head", 1)))
    tree = JobTree(cast(Any, system), Nodes("head"), LOCAL, job, run_dir, news, workers=1, adopting=False)
    return SimpleNamespace(job=job, state=JobState.SUBMITTED, tree=tree)


async def test_a_node_is_drained_while_a_job_is_still_being_prepared(tmp_path: Path) -> None:
    ops = operations(jobs={"j": being_prepared(tmp_path)}, nodes=Register("node-1"))
    assert await ops.drain("node-1") == {"target": "node-1", "workers": 0}
    with pytest.raises(NotFound, match="node-2"):
        await ops.drain("node-2")


async def test_a_job_that_is_submitted_while_a_node_is_drained_is_not_in_the_way() -> None:
    jobs: dict[str, Any] = {}

    async def drain(_: str) -> int:
        name = f"k{len(jobs)}"  # another request's work, while this one waits
        jobs[name] = SimpleNamespace(state=JobState.FINISHED, job=smallest_job())
        return 0

    tree = SimpleNamespace(pool=SimpleNamespace(drain_worker=drain, drain_node=drain))
    jobs["j"] = SimpleNamespace(state=JobState.RUNNING, tree=tree, job=smallest_job())
    ops = operations(jobs=jobs, nodes=Register("node-1"))
    assert (await ops.drain("node-1"))["workers"] == 0
