"""Work on requests away from the gateway's loop: their JSON, templates, tokenization.

    request ─▶ room for one more of its key? ─▶ body ─▶ the key's turn ─▶ one of gateway_threads threads ─▶ result

Invariants
- The loop computes nothing whose time grows with a request: it answers, and says that it lives, whatever is asked.
- A key has one thread at a time, and few requests in work: an agent that asks for much makes nobody wait but itself.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import ParamSpec, TypeVar
from weakref import WeakValueDictionary

from actors.gateway.errors import HttpProblem
from configs.limits import Limits

P = ParamSpec("P")
R = TypeVar("R")


class OffLoop:
    """Runs functions on threads, one at a time for each key."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._pool = ThreadPoolExecutor(limits.gateway_threads, "gateway")
        self._turns = WeakValueDictionary[Hashable, asyncio.Lock]()
        self._requests = Counter[Hashable]()

    @contextmanager
    def room(self, key: Hashable) -> Iterator[None]:
        """Room for a request of ``key`` to be read. Raises HttpProblem: the key has too many of them."""
        if self._requests[key] >= self._limits.gateway_questions:
            text = f"{self._requests[key]} requests with this key are being read: ask again when one is answered"
            raise HttpProblem(429, "too_many_questions", text, retry_after_s=self._limits.gateway_busy_s)
        self._requests[key] += 1
        try:
            yield
        finally:
            self._requests[key] -= 1
            if not self._requests[key]:
                del self._requests[key]

    async def run(self, key: Hashable, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run ``function`` on a thread when it is the turn of ``key``; returns its result, or raises what it raises.

        Raises:
            HttpProblem: it has not ended within ``limits.gateway_read_s``.
        """
        turn = self._turns.setdefault(key, asyncio.Lock())
        limit_s = self._limits.gateway_read_s
        try:
            async with asyncio.timeout(limit_s), turn:
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(self._pool, lambda: function(*args, **kwargs))
        except TimeoutError as error:
            text = f"the request was not read within limits.gateway_read_s ({limit_s:g} s): ask again"
            raise HttpProblem(503, "busy", text, retry_after_s=self._limits.gateway_busy_s) from error

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
