"""What every provider promises (``supervisors/providers/provider.py``), asserted for all kinds."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from configs.limits import Limits
from supervisors.head.head import Head
from supervisors.machine.membership.nodes import Nodes
from supervisors.providers.local import LocalProvider
from supervisors.providers.provider import Provider
from supervisors.providers.simulated import SimulatedProvider
from supervisors.providers.slurm import SlurmProvider
from supervisors.providers.slurm_script import MachineJob
from supervisors.simulation.cluster.world import SpotGrid, World
from supervisors.simulation.runner import _dismantle
from supervisors.tree.errors import ProviderError
from tests.kubernetes.api_server import MISSING
from tests.slurm_cluster import SlurmCluster, slurm_cluster
from tests.smallest_job import smallest_job
from tests.supervisors.simulation.scenarios import scenario
from transport.sim.loop import SimulatedLoop

if TYPE_CHECKING:
    from tests.kubernetes.worlds import Cluster

LIMITS = Limits(stop_timeout_s=10.0, cluster_look_s=0.4)


class Place:
    """A provider, the head that its machines join, and what it told."""

    def __init__(self, provider: Provider, nodes: Callable[[], Nodes], dies: Callable[[str], None]) -> None:
        self.provider = provider
        self.dies = dies
        """A machine ends, and nobody had asked for it."""
        self.ends: list[tuple[str, str]] = []
        self._nodes = nodes
        provider.on_end = lambda node, how: self.ends.append((node, how))

    def joined(self) -> dict[str, str]:
        return {node.name: node.kind for node in self._nodes().present if not node.local and not node.draining}

    async def until(self, holds: Callable[[], object]) -> None:
        async with asyncio.timeout(60):
            while not holds():
                await asyncio.sleep(0.02)


Scene = Callable[[Place], Awaitable[None]]


def on_this_machine(scene: Scene, directory: Path) -> None:
    async def main() -> None:
        head = Head(run_root=directory, listen=f"ipc://{directory}/head", limits=LIMITS)
        await head.start()
        provider = LocalProvider(join=head.endpoint, slots=1, logs=directory, limits=LIMITS)
        try:
            await scene(Place(provider, lambda: head.nodes, lambda node: provider._children[node].send_signal(9)))
        finally:
            await provider.close()
            await head.stop()

    asyncio.run(main())


def in_a_simulated_world(scene: Scene, directory: Path) -> None:
    loop = SimulatedLoop(1)
    world = World(scenario(jobs=[{"name": "a", "steps": 5000}]), 1, directory, loop)

    def nodes() -> Nodes:
        assert world.head is not None
        assert world.head.head is not None
        return world.head.head.nodes

    async def main() -> None:
        world.start()
        await world.until(world.is_ready)
        provider = SimulatedProvider(SpotGrid(world), close_window_s=LIMITS.stop_timeout_s)
        try:
            await scene(Place(provider, nodes, lambda node: world.mains[node].kill()))
            await provider.close()
        finally:
            world.stop()

    try:
        loop.run_until_complete(loop.create_task(main()))
    finally:
        _dismantle(world, loop)


def on_a_slurm_cluster(scene: Scene, directory: Path) -> None:
    async def main(cluster: SlurmCluster) -> None:
        head = Head(run_root=directory, listen=f"ipc://{directory}/head", limits=LIMITS)
        await head.start()
        job = smallest_job(provider={"slurm": {"partition": "spot"}})
        provider = SlurmProvider(MachineJob(job, head.endpoint, "headrace-test", directory, None, 5.0, "life"), LIMITS)
        await provider.open()

        def dies(node: str) -> None:
            cluster.command("scancel", "-s", "KILL", cluster.id_of(node))

        try:
            await scene(Place(provider, lambda: head.nodes, dies))
        finally:
            await provider.close()
            await head.stop()
        assert cluster.jobs() == {}

    with slurm_cluster(directory / "slurm", 4) as cluster:
        asyncio.run(main(cluster))


def on_kubernetes(
    cluster: Callable[[Path], AbstractAsyncContextManager[Cluster]], scene: Scene, directory: Path
) -> None:
    """Pods are processes of this machine; what the API server says is real, or was."""

    async def main() -> None:
        head = Head(run_root=directory, listen=f"ipc://{directory}/head", limits=LIMITS)
        await head.start()
        try:
            async with cluster(directory) as there:
                provider = there.provider(head.endpoint, limits=LIMITS)
                await provider.open()
                processes, pod_of = there.kubelet.processes, there.kubelet.pod_of
                try:
                    await scene(Place(provider, lambda: head.nodes, lambda node: processes[pod_of(node)].kill()))
                finally:
                    await provider.close()
                assert await there.pods() == []
        finally:
            await head.stop()

    asyncio.run(main())


def on_recorded_kubernetes(scene: Scene, directory: Path) -> None:
    from tests.kubernetes.worlds import recorded

    on_kubernetes(recorded, scene, directory)


def on_real_kubernetes(scene: Scene, directory: Path) -> None:
    from tests.kubernetes.api_server import ApiServer
    from tests.kubernetes.worlds import real

    server = ApiServer(directory)
    try:
        server.start()
        server.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "train"}})
        on_kubernetes(lambda place: real(place, server), scene, directory)
    finally:
        server.stop()


WORLDS = {
    "local": on_this_machine,
    "simulated": in_a_simulated_world,
    "slurm": on_a_slurm_cluster,
    "kubernetes": on_recorded_kubernetes,
    "kubernetes-real": on_real_kubernetes,
}
MARKS = {
    "slurm": [pytest.mark.cluster],
    "kubernetes": [pytest.mark.skipif(find_spec("lightkube") is None, reason="lightkube is not installed")],
    "kubernetes-real": [
        pytest.mark.cluster,
        pytest.mark.long,
        pytest.mark.skipif(MISSING, reason="there is no kube-apiserver, or no etcd"),
    ],
}


@pytest.fixture(params=[pytest.param(name, marks=MARKS.get(name, [])) for name in sorted(WORLDS)])
def play(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Scene], None]:
    return lambda scene: WORLDS[request.param](scene, tmp_path)


def test_machines_join_with_their_kind_and_each_end_is_told_once_with_how_it_came(
    play: Callable[[Scene], None],
) -> None:
    async def scene(place: Place) -> None:
        provider = place.provider
        kinds = {"a": "spot", "b": "spot", "c": "h20", "d": "spot"}
        for node, kind in kinds.items():
            provider.start(node, kind)
        assert dict(provider.running) == kinds
        await place.until(lambda: place.joined() == kinds)

        provider.notice("a", 30.0)
        await place.until(lambda: place.ends == [("a", "notice")])
        provider.kill("b")
        await place.until(lambda: place.ends[1:] == [("b", "kill")])
        place.dies("c")
        await place.until(lambda: place.ends[2:] == [("c", "failed")])
        await place.until(lambda: place.joined() == {"d": "spot"})
        assert dict(provider.running) == {"d": "spot"}

        for node in ("a", "b", "c"):
            provider.kill(node)
            provider.notice(node, 0.0)
        await provider.close()
        await place.until(lambda: place.joined() == {})
        assert place.ends[3:] == [("d", "notice")]
        assert not provider.running

    play(scene)


def test_a_name_is_used_once_a_window_ends_and_nothing_starts_after_the_close(play: Callable[[Scene], None]) -> None:
    async def scene(place: Place) -> None:
        provider = place.provider
        provider.start("a", "spot")
        with pytest.raises(ProviderError, match="has been used"):
            provider.start("a", "spot")
        provider.notice("a", 0.0)
        await place.until(lambda: place.ends)
        with pytest.raises(ProviderError, match="has been used"):
            provider.start("a", "spot")
        await provider.close()
        await provider.close()
        with pytest.raises(ProviderError, match="is closed"):
            provider.start("b", "spot")
        assert place.ends == [("a", "notice")]

    play(scene)
