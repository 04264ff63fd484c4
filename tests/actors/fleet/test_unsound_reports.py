"""What a worker says and no sound engine can have said costs the worker its lease, and neither the job nor a sample."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from actors.core.errors import RemoteError
from actors.protocol.tokens import TOKEN, TokenReport
from actors.protocol.workers import Registered, RegisterWorker
from tests.actors.scheduler_world import FakeWorker

InWorld = Callable[..., None]
VOCABULARY = 64


def with_token(report: TokenReport, column: str, value: float) -> TokenReport:
    tokens = np.frombuffer(report.token_bytes, TOKEN).copy()
    tokens[column][-1] = value
    return msgspec.structs.replace(report, token_bytes=tokens.tobytes())


def with_routes(report: TokenReport, width: int) -> TokenReport:
    return msgspec.structs.replace(report, route_bytes=bytes(width * (len(report.token_bytes) // TOKEN.itemsize)))


def of_version(report: TokenReport, version: int) -> TokenReport:
    return msgspec.structs.replace(report, policy_version=version)


LIES: dict[str, Callable[[TokenReport], TokenReport]] = {
    "an id beyond the vocabulary": lambda report: with_token(report, "id", VOCABULARY),
    "an id of a million": lambda report: with_token(report, "id", 10**6),
    "a negative id": lambda report: with_token(report, "id", -1),
    "a version that was never published": lambda report: of_version(report, 10**6),
    "a version that is no number of 32 bits": lambda report: of_version(report, 1 << 40),
    "a version beyond the bound": lambda report: of_version(report, report.policy_version - 1),
    "no version": lambda report: of_version(report, -1),
    "a log-probability that is no number": lambda report: with_token(report, "logprob", math.nan),
    "an infinite log-probability": lambda report: with_token(report, "logprob", -math.inf),
    "experts of another width": lambda report: with_routes(report, 6),
    "bytes that are no rows": lambda report: msgspec.structs.replace(report, row_bytes=report.row_bytes[1:]),
}


class Liar(FakeWorker):
    """Says something else than it has generated, in each report from ``first_version`` on."""

    lie: Callable[[TokenReport], TokenReport]
    first_version = 1

    def report(self, rows: list[tuple[int, int, int, int]]) -> TokenReport:
        report = super().report(rows)
        return type(self).lie(report) if self.version >= self.first_version else report

    async def register_again(self) -> None:
        offer = RegisterWorker(
            job="j", worker=self.ctx.self_address, node="n", engine="fake", slots=16, policy_version=0, again=True
        )
        await self.ctx.ref(self.scheduler).ask(offer, Registered)


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("kind", LIES)
def test_a_worker_that_says_nonsense_loses_its_lease_and_the_job_goes_on(
    in_world: InWorld, kind: str, mode: str
) -> None:
    """The fake trainer and scorer hold every token against the right one. So nothing of the nonsense has entered."""
    is_bound = kind == "a version beyond the bound"

    async def scenario(world: Any) -> None:
        world.vocabulary, world.route_bytes = VOCABULARY, 4
        await world.start(workers=1)
        liar_class = type("OneLiar", (Liar,), {"lie": staticmethod(LIES[kind]), "first_version": 2 if is_bound else 1})
        liar = liar_class(world.scheduler_at)
        await (await world.system("rollout-1")).spawn("rollout-1", liar)
        await world.until(lambda: 2 in world.trained)
        if not (is_bound and mode == "async"):  # there the version before is a right one
            await world.until(lambda: "rollout-1" not in world.scheduler._workers.by_name)
            with pytest.raises(RemoteError, match="was dismissed"):
                await liar.register_again()
        assert await world.job.wait_over(600.0) == "finished"
        names = [(s[0], s[1]) for step in sorted(world.trained) for s in world.trained[step]]
        assert names == [(p, s) for p in range(4 * 12) for s in range(4)], "no sample is lost"

    in_world(scenario, steps=12, sync={"mode": mode})


class Overflowing(FakeWorker):
    """A sound worker whose model overflows at one prompt."""

    prompt = 6

    def report(self, rows: list[tuple[int, int, int, int]]) -> TokenReport:
        report = super().report(rows)
        tokens = np.frombuffer(report.token_bytes, TOKEN).copy()
        for i, (number, *_) in enumerate(rows):
            held = self.held.get(number, (self.ended.get(number, -1),))
            tokens["logprob"][i] = math.nan if held[0] == self.prompt else 0.0
        return msgspec.structs.replace(report, token_bytes=tokens.tobytes())

    async def assign(self, order: Any) -> None:
        await super().assign(order)
        for work in order.work:
            self.ended.update({sample.assignment: work.prompt for sample in work.samples})

    @property
    def ended(self) -> dict[int, int]:
        return self.__dict__.setdefault("_ended", {})


def test_a_prompt_at_which_every_engine_overflows_is_set_aside_and_costs_no_worker_its_lease(
    in_world: InWorld,
) -> None:
    async def scenario(world: Any) -> None:
        await world.start_head()
        await world.start_rewards()
        for name in ("rollout-0", "rollout-1", "rollout-2"):
            await (await world.system(name)).spawn(name, Overflowing(world.scheduler_at))
        await world.start_trainer()
        assert await world.job.wait_over(600.0) == "finished"
        names = [(s[0], s[1]) for step in sorted(world.trained) for s in world.trained[step]]
        assert names == [(p, s) for p in range(16) for s in range(4) if p != Overflowing.prompt]
        assert len(world.scheduler._workers.by_name) == 3
        await asyncio.sleep(0)

    in_world(scenario, steps=4)
