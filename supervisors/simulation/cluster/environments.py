"""Simulated environments, without child process or HTTP: they tell the scheduler what a gateway would tell for them.

    scheduler ─BeginEpisodes─▶ a task per episode: say ─▶ TakeTurn ─▶ the model's turn ─▶ say ─▶ … ─▶ EpisodeEnded

Invariants
- A later attempt plays from the beginning: turns that the ledger has are answered from there, at no cost, as long as
  the environment says the same. From where it says something else, it reports that it has diverged.
- A worker goes on without its scheduler, asks again until there is one, and drops all episodes once its lease lapsed.
- Its reports are checked: an environment has seen each token of the row that it ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import msgpack
import numpy as np

from actors.core.actor import handles
from actors.core.errors import AskError, RemoteError
from actors.core.message import Message
from actors.core.patience import Patience
from actors.core.ref import ActorRef
from actors.core.registered import RegisteredActor
from actors.core.tenure import RenewLease
from actors.protocol.episodes import (
    AbandonEpisodes,
    BeginEpisodes,
    EnvironmentRegistered,
    EpisodeEnded,
    EpisodeName,
    EpisodeWork,
    RegisterEnvironment,
    TakeTurn,
    TurnTaken,
)
from actors.protocol.failures import Acknowledged, Failure, FailureKind
from actors.protocol.services import RegisterService
from configs.schema import JobConfig
from supervisors.simulation.cluster.game import Game
from transport.address import ActorAddress

R = TypeVar("R", bound=Message)


@dataclass(frozen=True)
class Manners:
    """Says how simulated environments behave."""

    think_s: tuple[float, float]
    """Range of seconds that an environment thinks before each turn."""
    drift: float = 0.0
    """Value of ``Game.drift``."""
    fails: float = 0.0
    """Probability that an environment fails in a turn, through no fault of the model."""


class SimulatedEnvironments(RegisteredActor):
    """Works as an environment worker that plays ``Game``.

    ``ended`` is told of each end: prompt, row, reward; ``refused`` of questions that contradict the ledger.
    ``slowness``: factor by which its process is slowed down now.
    """

    def __init__(
        self,
        job: JobConfig,
        scheduler: ActorAddress,
        manners: Manners,
        *,
        draw: Callable[[], float],
        ended: Callable[[int, np.ndarray, float], None],
        refused: Callable[[str], None],
        slowness: Callable[[], float] = lambda: 1.0,
    ) -> None:
        self._job, self._scheduler, self._manners = job, scheduler, manners
        self._draw, self._ended, self._refused, self._slowness = draw, ended, refused, slowness
        self._playing: dict[EpisodeName, asyncio.Task[object]] = {}
        self._over: set[EpisodeName] = set()
        """Episodes whose end is being reported: they no longer take a slot."""

    @property
    def holds(self) -> int:
        """Number of episodes that this worker plays; the probes check that it drops to 0 after the lease."""
        return len(self._playing)

    async def on_start(self) -> None:
        self.obey(self._scheduler)
        await self.register()

    async def introduce(self, scheduler: ActorRef) -> None:
        asked_at_s, running = self.ctx.now(), list(self._playing)
        environment, name = self._job.environment, self.ctx.self_address.name
        offer = RegisterEnvironment(self._job.name, self.ctx.self_address, environment.slots, running)
        answer = await scheduler.ask(offer, EnvironmentRegistered)
        self._let_go([episode for episode in running if episode not in answer.kept])
        renewal = RenewLease(job=self._job.name, holder=name, lease=answer.lease)
        self.tenure.begin(scheduler, renewal, answer.lease_s, asked_at_s=asked_at_s)

    def lease_lapsed(self) -> None:
        """Abandon all episodes: by now others play them."""
        self._let_go(list(self._playing))
        self.register_again()

    def _let_go(self, episodes: list[EpisodeName]) -> None:
        for episode in episodes:
            if (task := self._playing.pop(episode, None)) is not None:
                task.cancel()

    @handles(BeginEpisodes)
    async def begin(self, order: BeginEpisodes) -> None:
        for work in order.episodes:
            if work.name not in self._playing:
                if self.is_registered and len(self._playing) - len(self._over) >= self._job.environment.slots:
                    self._refused(f"{work.name} is one more than {self.ctx.self_address.name} has slots for")
                self._playing[work.name] = self.ctx.start_task(self._drive(work), f"play {work.name}")

    @handles(AbandonEpisodes)
    async def abandon(self, order: AbandonEpisodes) -> None:
        self._let_go(order.episodes)

    # ------------------------------------------------------------ an episode

    async def _drive(self, work: EpisodeWork) -> None:
        try:
            try:
                async with asyncio.timeout(work.left_s):
                    news = await self._play(work)
            except TimeoutError:
                news = EpisodeEnded(self._job.name, work.name, 0.0, cause="time")
            if news is not None:
                self._over.add(work.name)
                await self._say(news, Acknowledged)
        except RemoteError as error:
            self._refused(f"{work.name}: {error.detail}")
        except AskError as error:
            self.ctx.log.warning("nobody asks how an episode ends", episode=str(work.name), error=str(error))
        finally:
            self._playing.pop(work.name, None)
            self._over.discard(work.name)

    async def _play(self, work: EpisodeWork) -> EpisodeEnded | None:
        """Play the episode to its end; None if the scheduler took it away."""
        name, environment = work.name, self._job.environment
        prompt = int(msgpack.unpackb(work.context)[2])
        game = Game(self._job.seed, prompt, name.sibling, environment.turns_max, self._manners.drift)
        row, said, cause = np.empty(0, np.int32), list[np.ndarray](), "ended"
        while (word := game.say(said, name.attempt)) is not None:
            low, high = self._manners.think_s
            await self.ctx.sleep((low + self._draw() * (high - low)) * self._slowness())
            if self._draw() < self._manners.fails:
                failure = Failure(FailureKind.NO_RESULT, "the game gave no answer")
                return EpisodeEnded(self._job.name, name, None, failure=failure, cause="failed")
            turn_tokens = environment.turn_tokens or self._job.rollout.max_tokens
            ask = TakeTurn(
                self._job.name, name, len(row), word.fresh, word.tokens, turn_tokens, diverged=name.attempt > 1
            )
            taken = await self._say(ask, TurnTaken)
            if taken.status == "spent":
                cause = "tokens"
                break
            if taken.status != "taken":
                return None
            said.append(taken.tokens)
            row = np.concatenate([row, word.tokens, taken.tokens])
        reward = game.reward(row)
        self._ended(prompt, row, reward)
        metrics = {"turns": float(len(said)), "guessed": float(game.secret in said[-1] if said else False)}
        return EpisodeEnded(self._job.name, name, reward, cause=cause, metrics=metrics)

    async def _say(self, message: Message, answer: type[R]) -> R:
        """Ask the scheduler's present life until it answers or patience ends: every question may be repeated."""
        patience = Patience(self.ctx.limits, self.ctx.rng("patience"), self._job.environment.episode_s)
        while True:
            try:
                return await self.ctx.ref(await self.scheduler.find()).ask(message, answer)
            except AskError as error:
                if isinstance(error, RemoteError) and error.declared:
                    raise
                if not await patience.again():
                    raise


class SimulatedGateway(RegisteredActor):
    """Registers as a gateway and does nothing more: simulated environments speak to the scheduler directly."""

    def __init__(self, job: JobConfig, scheduler: ActorAddress) -> None:
        self._job, self._scheduler = job, scheduler

    async def on_start(self) -> None:
        service = RegisterService(job=self._job.name, role="gateway", address=self.ctx.self_address)
        await self.keep_registered(self._scheduler, service, Acknowledged)
