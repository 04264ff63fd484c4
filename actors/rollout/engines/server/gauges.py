"""What a server tells of its KV cache at ``/metrics``, which is Prometheus' text."""

from __future__ import annotations

import re
from typing import Final

from actors.rollout.engines.server.client import ServerClient
from actors.rollout.errors import ServerRefuses

_LOOK_S: Final = 5.0
"""Least time between two looks: the text has tens of kilobytes."""
_KV_TOKENS: Final = re.compile(r'kv_cache_size_tokens="(\d+)"')
_PREEMPTIONS: Final = re.compile(r"^vllm:num_preemptions_total(?:\{.*\})? ([0-9.e+]+)", re.MULTILINE)


async def kv_tokens(client: ServerClient) -> int:
    """Tokens for which the server's KV cache has room; 0: it does not say."""
    found = _KV_TOKENS.search(await _metrics(client))
    return int(found.group(1)) if found else 0


class Preemptions:
    """Counts the requests that the server has set aside for want of KV blocks, whoever's they were."""

    def __init__(self, client: ServerClient) -> None:
        self._client = client
        self._total: int | None = None
        """Count at the last look; None: there was none."""
        self._next_s = 0.0

    async def new(self, now_s: float) -> int:
        """Preemptions since the last look, 0 at the first one, and if the next look is not due or tells nothing.

        Raises:
            ServerGone: the server does not answer.
        """
        if now_s < self._next_s:
            return 0
        self._next_s = now_s + _LOOK_S
        total = sum(int(float(count)) for count in _PREEMPTIONS.findall(await _metrics(self._client)))
        before, self._total = self._total, total
        return 0 if before is None else max(0, total - before)


async def _metrics(client: ServerClient) -> str:
    try:
        return await client.text("/metrics")
    except ServerRefuses:
        return ""
