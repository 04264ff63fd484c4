"""Two actor systems on one in-memory network, and the same test over both ways of delivery."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from actors.core.system import ActorSystem
from configs.limits import DEFAULT_LIMITS, Limits
from transport.address import PeerId
from transport.memory_transport import MemoryNetwork, MemoryTransport

MakeSystem = Callable[..., Awaitable[ActorSystem]]


@pytest.fixture
def network() -> MemoryNetwork:
    return MemoryNetwork()


@pytest.fixture
async def make_system(network: MemoryNetwork) -> AsyncIterator[MakeSystem]:
    """Make systems that are stopped at the end."""
    systems: list[ActorSystem] = []

    async def make(
        name: str, *, limits: Limits = DEFAULT_LIMITS, incarnation: int | None = None, seed: int = 0
    ) -> ActorSystem:
        peer = PeerId(name, incarnation or 1000 + len(systems))
        system = ActorSystem(MemoryTransport(network, peer, limits=limits), limits=limits, seed=seed)
        await system.start()
        systems.append(system)
        return system

    yield make
    for system in systems:
        await system.stop()


@pytest.fixture(params=["in_process", "over_transport"])
async def pair(request: pytest.FixtureRequest, make_system: MakeSystem) -> tuple[ActorSystem, ActorSystem]:
    """The system of the asker and the system of the target: the same one, or two."""
    near = await make_system("near")
    return (near, near) if request.param == "in_process" else (near, await make_system("far"))
