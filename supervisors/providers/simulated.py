"""The provider ``simulated``: machines of a simulated cluster, under virtual time.

start ─▶ a machine is switched on ─▶ its start-up takes a random time ─▶ its node process joins
kill ──▶ its power is cut
"""

from __future__ import annotations

from typing import Protocol

from supervisors.providers.base import BookedProvider


class Grid(Protocol):
    """The operations of a simulated world that the provider needs."""

    def switch_on(self, node: str, kind: str, on_end: SwitchedOff) -> None: ...
    def tell_to_go(self, node: str) -> None: ...
    def switch_off(self, node: str) -> None: ...


class SwitchedOff(Protocol):
    def __call__(self, node: str) -> None: ...


class SimulatedProvider(BookedProvider):
    """Switches simulated machines on and off. Create it on the simulated loop."""

    def __init__(self, grid: Grid, *, close_window_s: float) -> None:
        super().__init__()
        self._grid = grid
        self._close_window_s = close_window_s

    def _begin(self, node: str, kind: str) -> None:
        self._grid.switch_on(node, kind, self._ended)

    def _tell_to_go(self, node: str) -> None:
        self._grid.tell_to_go(node)

    def _take_away(self, node: str) -> None:
        self._grid.switch_off(node)
