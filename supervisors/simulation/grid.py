"""Machines of a simulated world that come and go by a provider: switched on, told to go, switched off."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from supervisors.providers.function_book import KIND as FUNCTION
from supervisors.providers.function_machines import FunctionMachines
from supervisors.providers.replay import Replay, planned
from supervisors.providers.simulated import SimulatedProvider, SwitchedOff
from supervisors.simulation.machine import SimulatedMachine
from supervisors.simulation.main_process import MainProcess, NodeMain
from supervisors.simulation.world import World


class SpotGrid:
    """Implements ``supervisors.providers.simulated.Grid``."""

    def __init__(self, world: World, windows: Mapping[str, float] | None = None) -> None:
        """``windows``: node → how long it is there after its notice."""
        self._world = world
        self._windows = windows or {}
        self._told: dict[str, SwitchedOff] = {}
        self._rng = world.rng("spot grid")

    def switch_on(self, node: str, kind: str, on_end: SwitchedOff) -> None:
        """It takes as long as a process to start."""
        self._told[node] = on_end
        low, high = self._world.scenario.costs.start_s
        self._world.in_background(self._boot(node, kind, self._rng.uniform(low, high)), f"boot {node}")

    async def _boot(self, node: str, kind: str, after_s: float) -> None:
        await asyncio.sleep(after_s)
        world = self._world
        if node in self._told and not world.over:
            window_s = self._windows.get(node, 0.0)
            slots = 1 if kind == FUNCTION else world.scenario.slots
            machine = world.machines.get(node)  # a run that is resumed counts its functions anew
            if machine is None:
                machine = SimulatedMachine(world, node, world.root / node, slots, kind, window_s)
            world.machines[node] = machine
            world.mains[node] = NodeMain(world, machine, node, self._main_ended)

    def tell_to_go(self, node: str) -> None:
        main = self._world.mains.get(node)
        if main is None:
            self._gone(node)  # it was still booting
        else:
            main.terminate()

    def switch_off(self, node: str) -> None:
        main = self._world.mains.get(node)
        if main is None:
            self._gone(node)
        else:
            main.lose_power()

    def _main_ended(self, main: MainProcess, code: int) -> None:
        self._gone(main.machine.name)

    def _gone(self, node: str) -> None:
        self._world.mains.pop(node, None)
        told = self._told.pop(node, None)
        if told is not None:
            told(node)


class FunctionGrid:
    """The machines of one job's functions. They are children of the head's machine: with it they end."""

    def __init__(self, world: World) -> None:
        limits = world.scenario.limits
        self._provider = SimulatedProvider(SpotGrid(world), close_window_s=limits.stop_timeout_s)
        self._machines = FunctionMachines(
            self._provider, limits.stop_timeout_s, lambda said: world.trace.note("function", said=said)
        )

    def hear(self, progress: Mapping[str, Any]) -> None:
        """What the head says of its job."""
        if (book := progress.get("functions")) is not None:
            self._machines.follow(str(book))

    async def close(self) -> None:
        await self._provider.close()

    def end(self) -> None:
        """At once."""
        for node in list(self._provider.running):
            self._provider.kill(node)


async def replay_in(world: World) -> None:
    """The scenario's trace, from when all of its jobs are ready."""
    spot = world.scenario.spot
    trace = planned(spot)
    grid = SpotGrid(world, trace.windows())
    provider = SimulatedProvider(grid, close_window_s=world.scenario.limits.stop_timeout_s)
    await world.until(world.is_ready)
    replay = Replay(
        trace,
        provider,
        target=spot.nodes_max,
        on_event=lambda event: world.trace.note("spot", node=event.node, event=event.what, priced=event.kind),
    )
    await replay.run()
