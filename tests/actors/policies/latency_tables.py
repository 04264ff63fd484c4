"""Latency tables for tests, as a worker of a known pace would have measured them."""

from __future__ import annotations

from collections.abc import Callable

from actors.policies.assigning.latency_table import BATCHES, CONTEXTS, Cell, LatencyTable


def table_of(step_s: Callable[[float, float], float], *, steps: int = 10) -> LatencyTable:
    """What steps of ``step_s(batch, context_tokens)`` leave in a table, in all of its cells."""
    return LatencyTable(
        {
            (row, column): Cell(step_s(2.0**row, 192.0 * 2**column), steps, 2.0**row)
            for row in range(BATCHES)
            for column in range(CONTEXTS)
        }
    )


def linear(fixed_s: float = 0.008, sequence_s: float = 0.0001) -> LatencyTable:
    """A decode step takes a while, and a little more for each sequence."""
    return table_of(lambda batch, _: fixed_s + batch * sequence_s)
