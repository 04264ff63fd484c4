"""Episodes begun and ended from outside: ``environment.kind: external``.

    POST /v1/episodes       admin key ─▶ {key, base_url, task, attempt, deadline_s}, or 429 and Retry-After
    POST /v1/episodes/end   session key, {reward} or {failure} ─▶ {}

Invariants
- An episode is ended with its own key, and once: a repeated end gets the same answer and changes nothing. With another
  reward it is refused as a conflict, until the episode's step is trained.
- A request that repeats an ``Idempotency-Key`` gets the episode that was begun for that key. Otherwise a lost answer
  would leave an episode that nobody drives, until ``environment.episode_s`` are over.
- Where environment workers drive the episodes, an agent can neither begin one nor reward itself.
"""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final

from aiohttp import web

from actors.core.context import Context
from actors.core.errors import AskError, RemoteError
from actors.core.leader import Leader
from actors.core.patience import ask_patiently
from actors.environments.errors import RowChanged
from actors.environments.prompts.sources import open_sources
from actors.environments.scoring.examples import Examples
from actors.gateway.errors import HttpProblem, wrong
from actors.gateway.http import Http, as_json
from actors.gateway.off_loop import OffLoop
from actors.gateway.requests import EndRequest, parsed
from actors.gateway.sessions import refuse_over
from actors.protocol.episodes import (
    EpisodeEnded,
    EpisodeLeased,
    EpisodeName,
    EpisodeRecord,
    GetEpisode,
    LeaseEpisode,
)
from actors.protocol.failures import Acknowledged, EndedBefore, Failure, FailureKind
from actors.protocol.rewards import beyond_limit
from configs.schema import JobConfig

_ASKED_AS: Final = "Idempotency-Key"
"""Header with a text of the agent's choice, the same whenever the agent repeats a request."""


class EpisodeRoutes:
    """Serves agents outside the job. ``base_url`` gives the URL at which they reach the model."""

    def __init__(
        self, ctx: Context, http: Http, off_loop: OffLoop, job: JobConfig, scheduler: Callable[[], Leader],
        base_url: Callable[[], str],
    ) -> None:  # fmt: skip
        self._off_loop = off_loop
        self._ctx, self._http, self._scheduler, self._job, self._base_url = ctx, http, scheduler, job, base_url
        self._examples: Examples | None = None
        self._begun: OrderedDict[str, tuple[EpisodeName, dict[str, Any]] | None] = OrderedDict()
        """Episode begun for each ``Idempotency-Key``, with the answer; None while the episode is being begun."""

    def add_to(self, app: web.Application) -> None:
        app.router.add_post("/v1/episodes", self.begin)
        app.router.add_post("/v1/episodes/end", self.end)
        app.router.add_post("/s/{key}/v1/episodes/end", self.end)

    async def begin(self, request: web.Request) -> web.StreamResponse:
        if not self._http.has_admin_key(request):
            raise HttpProblem(401, "not_admin", "episodes are begun with the admin key: the text of RUN/gateway.key")
        self._check_kind()
        await self._http.body(request)
        asked_as = request.headers.get(_ASKED_AS, "")
        return as_json(await self._begin_once(asked_as) if asked_as else (await self._begin())[1])

    async def _begin_once(self, asked_as: str) -> dict[str, Any]:
        if asked_as in self._begun:
            if (known := self._begun[asked_as]) is None:
                busy_s = self._ctx.limits.gateway_busy_s
                raise HttpProblem(503, "busy", "the same question is being answered: ask again", retry_after_s=busy_s)
            name, body = known
            found = await self._ask(GetEpisode(job=self._job.name, episode=name), EpisodeRecord)
            refuse_over(found.status)
            return body | {"deadline_s": found.left_s}
        self._begun[asked_as] = None
        try:
            self._begun[asked_as] = name, body = await self._begin()
        except BaseException:
            self._begun.pop(asked_as, None)
            raise
        over = len(self._begun) - self._ctx.limits.gateway_episodes
        answered = [key for key, known in self._begun.items() if known is not None]
        for key in answered[: max(0, over)]:
            del self._begun[key]
        return body

    async def _begin(self) -> tuple[EpisodeName, dict[str, Any]]:
        leased = await self._ask_lease()
        if leased.work is None:
            text = "no episode may begin now: the batches that staleness allows are under way"
            raise HttpProblem(429, "none_to_begin", text, retry_after_s=leased.retry_after_s)
        name = leased.work.name
        task = await self._ctx.run_blocking(self._task, leased.work.context)
        return name, {
            "key": self._http.keys.sign(name),
            "base_url": self._base_url(),
            "task": task,
            "attempt": name.attempt,
            "deadline_s": leased.work.left_s,
        }

    async def end(self, request: web.Request) -> web.StreamResponse:
        episode = self._http.episode(request)
        self._check_kind()
        with self._off_loop.room(episode):
            said = await self._off_loop.run(episode, parsed, await self._http.body(request), EndRequest)
        if len(said.metrics) > (most := self._ctx.limits.episode_metrics):
            raise wrong("metrics", f"{len(said.metrics)} numbers; expected at most {most} (limits.episode_metrics)")
        if (said.reward is None) == (said.failure is None):
            raise wrong(
                "reward", "expected either reward (a number) or failure (a text: it runs again, without a result)"
            )
        for name, value in {"reward": said.reward or 0.0, **said.metrics}.items():
            if not math.isfinite(value):
                raise wrong(name, f"{value} is no finite number")
        if beyond := beyond_limit([said.reward or 0.0], self._job.reward.limit):
            raise wrong("reward", beyond)
        failure = None
        if said.failure is not None:
            text = said.failure[: self._ctx.limits.error_text_chars]
            failure = Failure(FailureKind.NO_RESULT, text, "agent outside")
        cause = "ended" if failure is None else "failed"
        ended = EpisodeEnded(
            job=self._job.name, episode=episode, reward=said.reward, failure=failure, cause=cause, metrics=said.metrics
        )
        try:
            await self._ask(ended, Acknowledged)
        except RemoteError as error:
            if isinstance(error.raised, EndedBefore):
                raise HttpProblem(410, "conflict", f"the episode cannot end again: {error.detail}") from error
            raise HttpProblem(
                410, "episode_ended", f"the episode takes no end from this key: {error.detail}"
            ) from error
        return as_json({})

    def _check_kind(self) -> None:
        if self._job.environment.kind != "external":
            text = (
                f"environment.kind is {self._job.environment.kind}: its environment workers begin and end the episodes"
            )
            raise HttpProblem(403, "not_external", text)

    async def _ask_lease(self) -> EpisodeLeased:
        return await self._ask(LeaseEpisode(job=self._job.name), EpisodeLeased)

    async def _ask(self, message: Any, reply: type[Any]) -> Any:
        scheduler = self._scheduler()
        try:
            return await ask_patiently(self._ctx, lambda: scheduler.address, message, reply, renew=scheduler.find)
        except RemoteError:
            raise
        except AskError as error:
            text = f"the job's scheduler did not answer ({error}): ask again"
            raise HttpProblem(503, "scheduler_away", text, retry_after_s=self._ctx.limits.gateway_busy_s) from error

    def _task(self, context: bytes) -> dict[str, Any]:
        """The row of the data that ``context`` names, as plain JSON."""
        if self._examples is None:
            self._examples = Examples(open_sources(self._job))
        try:
            row = self._examples.of(context)
        except RowChanged as error:
            raise HttpProblem(500, "row_changed", str(error)) from error
        plain = {**row.extra, "row": row.index, "prompt": row.prompt, "answer": row.answer}
        return json.loads(json.dumps(plain, default=str))
