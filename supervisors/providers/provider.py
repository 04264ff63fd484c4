"""The protocol of machine providers, which bring up node processes that join the head, and take them away again.

    start ─▶ a machine that runs ``headrace node --join HEAD --name NODE --kind KIND`` ─▶ it joins
    notice ─▶ SIGTERM ─▶ it leaves cleanly ─▶ gone, after ``window_s`` at the latest
    kill ─▶ gone, without warning

Kinds: ``local`` (processes on this machine), ``simulated`` (machines of a simulated cluster), ``slurm`` (jobs of a
Slurm cluster), ``kubernetes`` (pods). A new one implements ``Provider`` and passes
``tests/contracts/test_provider_contract.py``.

Invariants
- A node's name is used once: a machine that comes back has another, so nothing meant for a former life reaches it.
- The end of each started node is told once to ``on_end``, with its cause: ``notice`` or ``kill`` if we asked for it;
  else ``taken`` if the cluster took the machine back (preempted, its time was over, it went down), and ``failed`` if it
  could not be started or ended by itself. After that the node is not among ``running``.
- What a cluster says of a node is told to ``on_news`` in the cluster's words: while a machine is waited for, and before
  an end that nobody here asked for.
- ``on_runs`` is told once that a cluster runs a node. Only the head knows whether the machine is of use: it has joined,
  or it is given up.
- Orders for a node that is gone already do nothing, since a caller may not have heard yet of its end.
- After ``close`` nothing runs any more, and nothing can be started.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, Protocol

How = Literal["notice", "kill", "taken", "failed"]
OnEnd = Callable[[str, How], None]
"""Callback that is told a node and how it ended."""
OnNews = Callable[[str, str], None]
"""Callback that is told a node and a sentence of the cluster's about it."""

OnRuns = Callable[[str], None]
"""Callback that is told a node that its cluster has begun to run."""


class Provider(Protocol):
    """Starts and ends machines, as the module's docstring says."""

    on_end: OnEnd
    on_news: OnNews

    @property
    def running(self) -> Mapping[str, str]:
        """Nodes that were started and have not ended → their kinds."""
        ...

    def start(self, node: str, kind: str) -> None:
        """Bring up a machine of ``kind`` that will join as ``node``.

        A cluster may refuse it later: then the node ends as ``failed``.

        Raises:
            ProviderError: the name has been used, the provider is closed, or the machine cannot be started.
        """
        ...

    def notice(self, node: str, window_s: float) -> None:
        """Tell ``node`` to leave; after ``window_s`` it is gone in any case."""
        ...

    def kill(self, node: str) -> None:
        """Take ``node`` away at once."""
        ...

    async def close(self) -> None:
        """Give all machines back, cleanly where there is time. Idempotent."""
        ...


class ClusterProvider(Provider, Protocol):
    """Provides other hosts, which a cluster's scheduler assigns, and which outlive this process."""

    on_runs: OnRuns

    async def open(self) -> None:
        """Ask whether the cluster would start such machines, and end what a former life left. Call it first.

        Raises:
            ProviderError: the cluster would not, in its own words, or another head has this run's machines.
        """
        ...

    def give_up(self, node: str, why: str) -> None:
        """End a machine that runs but is of no use: it ends as ``failed``, with ``why`` and the end of its log."""
        ...
