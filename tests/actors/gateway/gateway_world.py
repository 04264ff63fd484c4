"""A gateway with a scheduler that keeps rows in lists: the protocol of episodes without ledger, engines and trainer."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import openai

from actors.core.actor import Actor, concurrent, handles
from actors.core.system import ActorSystem
from actors.gateway.service import Gateway
from actors.protocol.episodes import (
    CutTurn,
    EpisodeEnded,
    EpisodeLeased,
    EpisodeName,
    EpisodeRecord,
    EpisodeWork,
    GetEpisode,
    LeaseEpisode,
    TakeTurn,
    TurnTaken,
)
from actors.protocol.failures import Acknowledged, EndedBefore, NotAccepted
from actors.protocol.job_news import Trouble
from actors.protocol.services import RegisterService
from actors.protocol.session_keys import SessionKeys, admin_key
from actors.protocol.tokens import FinishReason
from actors.roles import RoleArgs
from configs.limits import Limits
from tests.actors.gateway.bpe_tokenizer import CHATML, END, VOCABULARY, make_tokenizer, save_model
from tests.smallest_job import smallest_job
from transport.address import PeerId
from transport.memory_transport import MemoryNetwork, MemoryTransport

NAME = EpisodeName(3, 7, 1, 1)
Speak = Callable[[list[int], int], list[int]]


@dataclass
class Row:
    tokens: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    attempt: int = 1
    reward: float | None = None
    ended: bool = False
    turns_left: int = 16
    ends_s: float = field(default_factory=lambda: time.monotonic() + 60.0)
    running: tuple[int, asyncio.Future] | None = None

    @property
    def left_s(self) -> float:
        """Seconds that the episode still has."""
        return max(0.0, self.ends_s - time.monotonic())

    @left_s.setter
    def left_s(self, left_s: float) -> None:
        self.ends_s = time.monotonic() + left_s

    @property
    def turns(self) -> list[list[int]]:
        """Model tokens of each turn."""
        found: list[list[int]] = []
        for i, (token, version) in enumerate(zip(self.tokens, self.versions, strict=True)):
            if version >= 0:
                if i == 0 or self.versions[i - 1] < 0:
                    found.append([])
                found[-1].append(token)
        return found

    @property
    def contexts(self) -> list[list[int]]:
        starts = [i for i, version in enumerate(self.versions) if version == -2]
        return [self.tokens[a:b] for a, b in zip(starts, [*starts[1:], len(self.tokens)], strict=True)]


class FakeScheduler(Actor):
    """It keeps rows, and has ``speak`` say turns: all of it survives in ``rows`` when the actor is replaced."""

    def __init__(self, rows: dict[tuple[int, int, int], Row], speak: Speak) -> None:
        self.rows, self.speak = rows, speak
        self.turn_s = 0.0
        self.asked: list[Any] = []
        self.discarded = self.moves = 0
        self.troubles: list[Trouble] = []
        self.lease: EpisodeLeased = EpisodeLeased(work=None, retry_after_s=7.0)
        self.leases, self.lease_s = 0, 0.0
        """How often an episode was asked for, and how long the answer takes."""
        self.ended: list[EpisodeEnded] = []

    @handles(RegisterService)
    async def register(self, message: RegisterService) -> Acknowledged:
        assert message.role == "gateway"
        self.moves += message.moved
        return Acknowledged()

    @handles(Trouble)
    async def trouble(self, message: Trouble) -> None:
        self.troubles.append(message)

    @handles(GetEpisode)
    async def get(self, message: GetEpisode) -> EpisodeRecord:
        self.asked.append(message)
        row, status = self._row(message.episode)
        if row is None:
            return EpisodeRecord(status=status)
        tokens, versions = np.array(row.tokens, np.int32), np.array(row.versions, np.int32)
        logprobs = np.where(versions >= 0, -tokens / 1000, 0).astype(np.float32)
        return EpisodeRecord(
            status=status, tokens=tokens, logprobs=logprobs, versions=versions,
            model_tokens_left=1000, tokens_left=3000, turns_left=row.turns_left, left_s=row.left_s,
        )  # fmt: skip

    def _row(self, name: EpisodeName) -> tuple[Row | None, str]:
        row = self.rows.get((name.step, name.prompt, name.sibling))
        if row is None:
            return None, "unknown"
        if name.attempt != row.attempt:
            return None, "replaced"
        return (None, "ended") if row.ended else (row, "live")

    @handles(TakeTurn)
    @concurrent
    async def take(self, message: TakeTurn) -> TurnTaken:
        self.asked.append(message)
        row, status = self._row(message.episode)
        if row is None:
            return TurnTaken(status=status)
        spoken, offset = message.tokens.tolist(), message.offset
        if row.running is not None:
            if row.running[0] != offset or row.tokens[offset:] != spoken:
                raise NotAccepted("another turn runs")
            return await asyncio.shield(row.running[1])
        if message.diverged:
            self.discarded += sum(version >= 0 for version in row.versions[offset:])
            del row.tokens[offset:], row.versions[offset:]
        if offset != len(row.tokens):
            end = offset + len(spoken)
            if row.tokens[offset:end] == spoken and end < len(row.tokens) and row.versions[end] >= 0:
                last = next((i for i in range(end, len(row.tokens)) if row.versions[i] < 0), len(row.tokens))
                return self._taken(row, end, last)
            raise NotAccepted(f"the row ends at {len(row.tokens)}, not at {offset}")
        if row.turns_left == 0:
            return TurnTaken(status="spent")
        row.turns_left -= 1
        marks = [-1] * len(spoken)
        if message.fresh:
            marks[0] = -2
        begin = max(i for i, version in enumerate([*row.versions, *marks]) if version == -2)
        over: asyncio.Future[TurnTaken] = asyncio.get_running_loop().create_future()
        row.running = (offset, over)
        row.tokens += spoken
        row.versions += marks
        self.ctx.start_task(self._say(row, begin, message.turn_tokens, over), "a turn")
        return await asyncio.shield(over)

    async def _say(self, row: Row, begin: int, most: int, over: asyncio.Future[TurnTaken]) -> None:
        """The turn goes on, whether or not anybody waits for it."""
        await asyncio.sleep(self.turn_s)
        said = self.speak(row.tokens[begin:], most)[:most]
        begun = len(row.tokens)
        row.tokens += said
        row.versions += [4 + (i > len(said) // 2) for i in range(len(said))]
        row.running = None
        over.set_result(self._taken(row, begun, len(row.tokens)))

    def _taken(self, row: Row, begin: int, end: int) -> TurnTaken:
        tokens = np.array(row.tokens[begin:end], np.int32)
        finish = FinishReason.STOP if row.tokens[end - 1] == END_ID else FinishReason.LENGTH
        return TurnTaken(
            status="taken", offset=begin, tokens=tokens, logprobs=(-tokens / 1000).astype(np.float32),
            versions=np.array(row.versions[begin:end], np.int32), finish=int(finish),
        )  # fmt: skip

    @handles(CutTurn)
    async def cut(self, message: CutTurn) -> Acknowledged:
        self.asked.append(message)
        row, _ = self._row(message.episode)
        assert row is not None
        self.discarded += sum(version >= 0 for version in row.versions[message.length :])
        del row.tokens[message.length :], row.versions[message.length :]
        return Acknowledged()

    @handles(LeaseEpisode)
    @concurrent
    async def lease_one(self, message: LeaseEpisode) -> EpisodeLeased:
        self.leases += 1
        await asyncio.sleep(self.lease_s)
        return self.lease

    @handles(EpisodeEnded)
    async def end(self, message: EpisodeEnded) -> Acknowledged:
        row, status = self._row(message.episode)
        if row is None and status != "ended":
            raise NotAccepted(status)
        if row is None and self.ended[-1].reward != message.reward:
            raise EndedBefore("another reward")
        if row is not None:
            row.ended = True
            self.ended.append(message)
        return Acknowledged()

    def turns_asked(self) -> list[TakeTurn]:
        return [message for message in self.asked if isinstance(message, TakeTurn)]


TOKENIZER = make_tokenizer()
END_ID = int(TOKENIZER.convert_tokens_to_ids(END))


def babble(context: list[int], tokens: int) -> list[int]:
    """Random tokens that belong to the context; it ends by itself, or at its length."""
    noise = random.Random(repr(context))
    length = noise.randint(1, 24)
    return [*(noise.randrange(3, VOCABULARY) for _ in range(length)), END_ID]


def script(*texts: str | Sequence[int]) -> Speak:
    """Says these, one turn after the other."""
    left = list(texts)

    def speak(context: list[int], tokens: int) -> list[int]:
        text = left.pop(0)
        return (
            [*TOKENIZER(text, add_special_tokens=False)["input_ids"], END_ID] if isinstance(text, str) else list(text)
        )

    return speak


class World:
    """It is one run: a scheduler and a gateway over the memory transport, HTTP over loopback."""

    def __init__(self, run_dir: Path, speak: Speak, template: str | None, limits: Limits, **sections: Any) -> None:
        self.run_dir = run_dir
        environment = {"kind": "python", "path": "a:B", "episode_s": 60} | sections.pop("environment", {})
        self.job = smallest_job(environment=environment, reward={}, **sections)
        self.model = save_model(run_dir / "model", template)
        self.rows: dict[tuple[int, int, int], Row] = {}
        self.scheduler = FakeScheduler(self.rows, speak)
        self.limits = limits
        self._network = MemoryNetwork()
        self._lives = 1
        self._agents: list[openai.AsyncOpenAI] = []

    async def start(self) -> None:
        self.head = await self._system("head")
        await self.head.spawn("scheduler.j", self.scheduler)
        await self.start_gateway()

    async def start_gateway(self) -> None:
        self.side = await self._system("gateway")
        args = RoleArgs(
            role="gateway", name="gateway", node="n", job=self.job.model_dump_json(), model_path=str(self.model),
            run_dir=str(self.run_dir),
            scheduler=self.head.address("scheduler.j"), metrics=self.head.address("metrics.j"),
        )  # fmt: skip
        self.gateway = Gateway(args)
        await self.side.spawn("gateway", self.gateway)

    async def restart_gateway(self) -> None:
        await self.side.stop()
        await self.start_gateway()

    async def restart_scheduler(self) -> None:
        """Its next life, in the same process, with the rows that the ledger has kept."""
        await self.head.stop_actor("scheduler.j")
        for row in self.rows.values():
            row.running = None
        before = self.scheduler
        self.scheduler = FakeScheduler(self.rows, before.speak)
        self.scheduler.turn_s = before.turn_s
        await self.head.spawn("scheduler.j", self.scheduler)

    async def _system(self, name: str) -> ActorSystem:
        self._lives += 1
        transport = MemoryTransport(self._network, PeerId(name, self._lives))
        system = ActorSystem(transport, limits=self.limits)
        await system.start()
        return system

    async def stop(self) -> None:
        for agent in self._agents:
            await agent.close()
        await self.side.stop()
        await self.head.stop()

    def begin(self, name: EpisodeName = NAME) -> Row:
        row = self.rows[name.step, name.prompt, name.sibling] = Row(attempt=name.attempt)
        return row

    def key(self, name: EpisodeName = NAME) -> str:
        return SessionKeys(admin_key(self.run_dir), "j").sign(name)

    def agent(self, attempt: int = 1, **settings: Any) -> openai.AsyncOpenAI:
        """An unmodified SDK that drives the episode."""
        name = EpisodeName(NAME.step, NAME.prompt, NAME.sibling, attempt)
        self._agents.append(openai.AsyncOpenAI(base_url=self.url, api_key=self.key(name), **settings))
        return self._agents[-1]

    @property
    def url(self) -> str:
        return self.gateway.base_url

    @property
    def root(self) -> str:
        return self.url.removesuffix("/v1")

    def text(self, tokens: Sequence[int]) -> str:
        return TOKENIZER.decode(list(tokens), skip_special_tokens=False)


@asynccontextmanager
async def gateway_world(
    run_dir: Path,
    *,
    speak: Speak = babble,
    template: str | None = CHATML,
    limits: Limits | None = None,
    **sections: Any,
) -> AsyncIterator[World]:
    world = World(run_dir, speak, template, limits or Limits(backoff_first_s=0.02), **sections)
    await world.start()
    try:
        yield world
    finally:
        await world.stop()


def work(name: EpisodeName, context: bytes) -> EpisodeLeased:
    return EpisodeLeased(work=EpisodeWork(name, context, 55.0))
