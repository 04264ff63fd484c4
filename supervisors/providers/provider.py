"""Where machines come from: whatever brings up a node process that joins the head, and takes it away again.

    start ─▶ a machine that runs ``headrace node --join HEAD --name NODE --kind KIND`` ─▶ it joins
    notice ─▶ SIGTERM ─▶ it leaves in good order ─▶ gone, after ``window_s`` at the latest
    kill ─▶ gone, without a word

Kinds: ``local`` (processes on this machine), ``simulated`` (machines of a simulated cluster), ``slurm`` (jobs of a
Slurm cluster), ``kubernetes`` (pods). A new one implements ``Provider`` and passes
``tests/contracts/test_provider_contract.py``.

Invariants
- A node's name is used once: a machine that comes back has another one. So nothing meant for a former life reaches it.
- The end of each started node is told once to ``on_end``, with how it came: ``notice`` or ``kill`` if we asked for it;
  else ``taken`` if the cluster took the machine back (preempted, its time was over, it went down), and ``failed`` if it
  could not be had or ended by itself. After that it is not among ``running``.
- What a cluster says of a node is told to ``on_news`` in its own words: while a machine is waited for, and before an
  end that nobody here asked for.
- That a cluster runs a node is told once to ``on_runs``. Whether the machine is of use, only the head knows: it has
  joined, or it is given up.
- Orders for a node that is gone already do nothing: a provider is told of ends no earlier than anybody else.
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
"""Callback that is told a node that its cluster runs from now on."""


class Provider(Protocol):
    """See the module's docstring."""

    on_end: OnEnd
    on_news: OnNews

    @property
    def running(self) -> Mapping[str, str]:
        """Node → kind of those that were started and have not ended."""
        ...

    def start(self, node: str, kind: str) -> None:
        """Bring up a machine of ``kind`` that will join as ``node``.

        A cluster may refuse it later: then the node ends as ``failed``.

        Raises:
            ProviderError: the name has been used, the provider is closed, or the machine cannot be had.
        """
        ...

    def notice(self, node: str, window_s: float) -> None:
        """Tell ``node`` to go; after ``window_s`` it is gone, whatever it does."""
        ...

    def kill(self, node: str) -> None:
        """Take ``node`` away at once."""
        ...

    async def close(self) -> None:
        """Give everything back, in good order where there is time. Idempotent."""
        ...


class ClusterProvider(Provider, Protocol):
    """Its machines are other hosts, which a cluster's scheduler gives, and which outlive this process."""

    on_runs: OnRuns

    async def open(self) -> None:
        """Before anything else: ask whether the cluster would give such machines, and end what a former life left.

        Raises:
            ProviderError: it would not, or another head has this run's machines; in the cluster's own words.
        """
        ...

    def give_up(self, node: str, why: str) -> None:
        """End a machine that runs and is of no use: it has failed, for this reason, with the end of its log."""
        ...
