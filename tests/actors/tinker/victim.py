"""A tenant that works beside another one, which attacks: what it is told must be what it is told alone."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from configs.limits import Limits
from tests.actors.tinker.http_world import LIMITS, HttpWorld
from tests.actors.tinker.messages import ADAM, asked, created, retrieved, sent

ALLOWED = {400, 401, 404, 410, 413, 422, 429}
LONGEST = 3000
"""Characters of the longest answer that says no."""


class Victim:
    """A tenant that goes on with its work, whatever another one does."""

    def __init__(self, http: Any) -> None:
        self._http = http
        self._seq = self._samples = 0
        self.told: list[object] = []

    async def begin(self) -> None:
        self.session, self.model = await created(self._http)
        await self.go_on()
        self.path = f"tinker://{self.model}/sampler_weights/mine"
        body = {"session_id": self.session, "sampling_session_seq_id": 0, "model_path": self.path}
        async with self._http.post("create_sampling_session", json=body) as answer:
            self.sampler = (await answer.json())["sampling_session_id"]

    async def go_on(self) -> None:
        """Train a step, save, and say what was told."""
        self.told.append(await sent(self._http, asked(self.model, self._next(), (self._seq, 3))))
        self.told.append((await self._operation("optim_step", {"adam_params": ADAM}))["metrics"])
        for route in ("save_weights", "save_weights_for_sampler"):
            await self._operation(
                route, {"path": "mine", "overwrite": True} if route == "save_weights" else {"path": "mine"}
            )

    async def sample(self) -> None:
        self._samples += 1
        body: dict[str, Any] = {"sampling_session_id": self.sampler, "seq_id": self._samples, "num_samples": 2}
        body["sampling_params"] = {"max_tokens": 4, "seed": 1}
        body["prompt"] = {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}
        async with self._http.post("asample", json=body) as answer:
            self.told.append(await retrieved(self._http, (await answer.json())["request_id"]))

    async def _operation(self, route: str, body: dict[str, Any]) -> Any:
        self.request = f"{self.model}/{self._next()}"
        async with self._http.post(route, json=body | {"model_id": self.model, "seq_id": self._seq}) as answer:
            return await retrieved(self._http, (await answer.json())["request_id"])

    def _next(self) -> int:
        self._seq += 1
        return self._seq


@asynccontextmanager
async def beside_a_victim(directory: Path, limits: Limits = LIMITS) -> AsyncIterator[tuple[HttpWorld, Any, Victim]]:
    """A world in which the block attacks, with the attacker's connection; then the victim goes on, as it does alone."""
    numbers = list[list[object]]()
    for name in ("alone", "attacked"):
        (directory / name).mkdir()
        async with (
            HttpWorld(directory / name, limits) as world,
            world.client("alice") as http,
            world.client("mallory") as attacker,
        ):
            victim = Victim(http)
            await victim.begin()
            await victim.sample()
            if name == "attacked":
                yield world, attacker, victim
            for _ in range(2):
                await victim.go_on()
                await victim.sample()
            numbers.append(victim.told)
    assert numbers[0] == numbers[1], "the victim was told other numbers than it is told alone"


async def refusal(answer: aiohttp.ClientResponse) -> tuple[int, str]:
    """Status and sentence of an answer that says no."""
    text = await answer.text()
    assert answer.status in ALLOWED, (answer.status, text[:300])
    assert 15 < len(text) < LONGEST, text[:300]
    return answer.status, str(json.loads(text)["error"])
