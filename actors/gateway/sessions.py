"""Episodes as the gateway sees them: one question of each at a time, answered by the ledger or by a turn of the model.

    question ─▶ the same one is under way, and this is a retry, or nobody waits for its answer? ─▶ join it
             └▶ wait for the one before ─▶ record (GetEpisode, once) ─▶ walk ─┬─ Answered ─▶ from the record
                                                                              └─ Takes ─▶ TakeTurn ─▶ CutTurn at a stop

    waits for                      unblocked by
    the question before            its end; environment.episode_s
    TakeTurn, GetEpisode, CutTurn  the scheduler, in its present life or the next; environment.episode_s

Invariants
- A turn goes on when its asker has left: the reply stays undelivered, and the same question gets it when asked again.
- The only state that the ledger does not have is what this life of the environment has not been told yet
  (``walk.Undelivered``).
- When the ledger contradicts a record, the record is fetched anew.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, TypeVar

import numpy as np

from actors.core.context import Context
from actors.core.errors import AskError, RemoteError
from actors.core.leader import Leader
from actors.core.message import Message
from actors.core.patience import ask_patiently
from actors.gateway.errors import TOO_LONG, HttpProblem, spent, wrong
from actors.gateway.off_loop import OffLoop
from actors.gateway.record import Record, Turn
from actors.gateway.replies import Reply, ReplyReader
from actors.gateway.walk import Answered, Question, Takes, Undelivered, Walk
from actors.protocol.episodes import CutTurn, EpisodeName, EpisodeRecord, GetEpisode, TakeTurn, TurnTaken
from actors.protocol.failures import Acknowledged, NotAccepted
from configs.schema import JobConfig

R = TypeVar("R", bound=Message)
_ROUNDS: Final = 3
"""Number of times that a question is compared with the ledger before the gateway gives up."""


@dataclass(frozen=True)
class Answer:
    """Holds a turn with all that a reply may contain."""

    episode: EpisodeName
    turn: Turn
    prompt: np.ndarray  # int32[n]
    tokens: np.ndarray  # int32[n]
    logprobs: np.ndarray  # float32[n]
    versions: np.ndarray  # int32[n]
    reply: Reply
    is_cut: bool
    """Whether the turn ended only because of its length."""


@dataclass
class Pending:
    """Holds a question from its arrival until it has been answered."""

    ended: asyncio.Future[Answer]
    listeners: int = 0
    heard: bool = False
    """Whether an agent has received the whole reply."""


@dataclass
class Session:
    """Holds what is known of one life of an episode's environment."""

    episode: EpisodeName
    record: Record | None = None
    ends_s: float = math.inf
    """Loop time at which the episode is over."""
    undelivered: Undelivered = field(default_factory=Undelivered)
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    pending: dict[bytes, Pending] = field(default_factory=dict[bytes, Pending])


class Sessions:
    """Answers questions of agents. ``tell`` reports a trouble to people, by its kind."""

    def __init__(
        self,
        ctx: Context,
        off_loop: OffLoop,
        job: JobConfig,
        walk: Walk,
        reader: ReplyReader,
        positions: int,
        scheduler: Callable[[], Leader],
        tell: Callable[[str, str], None],
    ) -> None:
        self._ctx, self._job, self._walk, self._reader = ctx, job, walk, reader
        self._off_loop = off_loop
        self._scheduler, self._tell = scheduler, tell
        self.positions = positions
        """Most tokens of a context together with its answer."""
        self._sessions: OrderedDict[EpisodeName, Session] = OrderedDict()

    # ------------------------------------------------------------ questions

    def ask(self, episode: EpisodeName, question: Question, digest: bytes) -> Pending:
        """Begin to answer ``question``, or join the same one under way. ``digest`` tells it apart from others.

        Raises:
            HttpProblem: the episode has too many questions open, or the question too many stop texts.
        """
        if len(question.stop) > self._ctx.limits.gateway_stops:
            raise wrong("stop", f"{len(question.stop)} texts; expected at most {self._ctx.limits.gateway_stops}")
        session = self._session(episode)
        running = session.pending.get(digest)
        if running is not None and (question.is_retry or running.listeners == 0):
            return running
        if len(session.pending) >= self._ctx.limits.gateway_questions:
            text = f"this episode waits for {len(session.pending)} answers already: ask again when one has come"
            raise HttpProblem(429, "too_many_questions", text, retry_after_s=self._ctx.limits.gateway_busy_s)
        while digest in session.pending:
            digest += b"+"  # asked twice on purpose: two turns
        pending = session.pending[digest] = Pending(self._new_future())
        self._ctx.start_task(self._run(session, question, digest, pending), f"turn {digest[:4].hex()}")
        return pending

    def settle(self, pending: Pending) -> None:
        """Note whether the reply of ``pending`` was delivered, once it is there and whenever a listener leaves."""
        ended = pending.ended
        if not ended.done() or ended.cancelled() or ended.exception() is not None:
            return
        answer = ended.result()
        if (session := self._sessions.get(answer.episode)) is None:
            return
        if pending.heard:
            session.undelivered.delivered(answer.turn)
        elif not pending.listeners:
            session.undelivered.own.add(answer.turn.number)

    def _new_future(self) -> asyncio.Future[Answer]:
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        future.add_done_callback(lambda done: done.cancelled() or done.exception())  # retrieved: nobody may listen
        return future

    def _session(self, episode: EpisodeName) -> Session:
        session = self._sessions.setdefault(episode, Session(episode))
        self._sessions.move_to_end(episode)
        if (over := len(self._sessions) - self._ctx.limits.gateway_episodes) > 0:
            idle = (name for name, one in self._sessions.items() if not one.pending and one is not session)
            for name in list(itertools.islice(idle, over)):
                del self._sessions[name]
        return session

    async def _run(self, session: Session, question: Question, digest: bytes, pending: Pending) -> None:
        """Answer one question; an error becomes its answer."""
        try:
            async with asyncio.timeout(self._job.environment.episode_s), session.turn:
                answer = await self._answer(session, question)
            if not pending.ended.done():
                pending.ended.set_result(answer)
                self.settle(pending)
        except HttpProblem as problem:
            if problem.status in (401, 410):
                session.record = None  # so the next question is refused before anything is done for it
            self._fail(pending, problem)
        except (AskError, TimeoutError) as error:
            session.record = None
            self._fail(pending, self._away(error))
        except Exception as error:
            session.record = None
            self._ctx.log.exception("a question could not be answered", episode=str(session.episode))
            self._fail(pending, HttpProblem(500, "bug", f"the gateway failed on this request: {type(error).__name__}"))
        finally:
            del session.pending[digest]

    def _fail(self, pending: Pending, problem: HttpProblem) -> None:
        if not pending.ended.done():
            pending.ended.set_exception(problem)

    def _away(self, error: Exception) -> HttpProblem:
        text = f"the job's scheduler did not answer ({error or 'no answer in time'}): ask again"
        return HttpProblem(503, "scheduler_away", text, retry_after_s=self._ctx.limits.gateway_busy_s)

    async def refuse_over(self, episode: EpisodeName) -> None:
        """Raise HttpProblem if ``episode`` is over, or if the scheduler does not say whether it is."""
        try:
            await self._get(episode)
        except (AskError, TimeoutError) as error:
            raise self._away(error) from error

    # ------------------------------------------------------------ answers

    async def _answer(self, session: Session, question: Question) -> Answer:
        for _ in range(_ROUNDS):
            record = session.record
            if record is None:
                record = session.record = await self._get(session.episode)
                session.ends_s = self._ctx.now() + record.left_s
            decision = await self._off_loop.run(
                session.episode, self._walk.decide, record, session.undelivered, question, session.episode.attempt
            )
            try:
                if isinstance(decision, Answered):
                    turn = decision.turn
                    await self._get(session.episode)  # only to see that the episode goes on
                else:
                    turn = await self._take(session, record, question, decision)
                return await self._cut_at_stop(session, record, question, turn)
            except RemoteError as error:
                if not isinstance(error.raised, NotAccepted):
                    raise
                self._ctx.log.warning("the ledger has it otherwise", episode=str(session.episode), detail=error.detail)
                session.record = None
        raise HttpProblem(503, "contradicts_ledger", "the ledger of this episode has moved on: ask again")

    async def _take(self, session: Session, record: Record, question: Question, takes: Takes) -> Turn:
        if takes.unbridged:
            self._tell(
                "gateway_unbridged",
                "the chat template rewrites history (it drops old thinking, say), so a turn began a fresh context: its "
                "messages are computed again, and the row grows by them. Lower environment.turns_max, raise "
                "environment.episode_tokens, or use a template that keeps history",
            )
        room = self.positions - takes.context_tokens
        if room < 1:
            text = (
                f"the model's context length is {self.positions} tokens, and this request has "
                f"{takes.context_tokens} before the answer: shorten the messages"
            )
            raise HttpProblem(400, TOO_LONG, text, param="messages")
        if not takes.tokens:
            raise wrong("messages", "they render to no tokens: say something")
        asked = [question.turn_tokens, self._job.environment.turn_tokens, record.model_tokens_left, room]
        spoken = np.array(takes.tokens, np.int32)
        message = TakeTurn(
            job=self._job.name, episode=session.episode, offset=takes.offset, fresh=takes.fresh, tokens=spoken,
            turn_tokens=max(1, min(limit for limit in asked if limit is not None)), diverged=takes.diverged,
        )  # fmt: skip
        said = await self._taken(session, message)
        if said.status == "spent":
            session.record = None
            raise spent("tokens" if (await self._get(session.episode)).turns_left > 0 else "turns")
        refuse_over(said.status)
        if takes.diverged:
            session.record = None  # cut tokens return to the budget, which the ledger counts
        turns = next((i for i, turn in enumerate(record.turns) if turn.begin >= takes.offset), len(record.turns))
        session.undelivered.cut(turns)
        return record.add(takes.offset, spoken, said, fresh=takes.fresh)

    async def _taken(self, session: Session, message: TakeTurn) -> TurnTaken:
        """The model's turn; waits as long as the episode has time, which stands still while the job is paused."""
        while True:
            try:
                async with asyncio.timeout(max(0.0, session.ends_s - self._ctx.now())):
                    return await self._patiently(message, TurnTaken)
            except TimeoutError as error:
                left_s = (await self._get(session.episode)).left_s
                if left_s <= 0:
                    raise spent("time") from error
                session.ends_s = self._ctx.now() + max(left_s, self._ctx.limits.gateway_busy_s)

    async def _cut_at_stop(self, session: Session, record: Record, question: Question, turn: Turn) -> Answer:
        said = record.said(turn)
        run = self._off_loop.run
        kept = len(said)
        if question.stop:
            kept = await run(session.episode, self._reader.kept_tokens, said.tolist(), question.stop)
        if kept < len(said) and turn.end == record.length:
            length = turn.begin + kept
            cut = CutTurn(job=self._job.name, episode=session.episode, length=length)
            await self._patiently(cut, Acknowledged)
            record.cut(length)
        return await run(session.episode, self._made, session, record, turn, kept, question)

    def _made(self, session: Session, record: Record, turn: Turn, kept: int, question: Question) -> Answer:
        prompt, end = record.prompt(turn), turn.begin + kept
        tokens = record.tokens[turn.begin : end]
        opened = self._reader.opens_reasoning(prompt)
        reply = self._reader.read(tokens, opened=opened, chat=question.chat, stop=question.stop)
        stopped = kept < turn.end - turn.begin or int(tokens[-1]) in self._reader.ends
        stopped = stopped or any(one in self._reader.text(tokens) for one in question.stop)
        return Answer(
            session.episode, turn, prompt, tokens, record.logprobs[turn.begin : end], record.versions[turn.begin : end],
            reply, not stopped,
        )  # fmt: skip

    async def _get(self, episode: EpisodeName) -> Record:
        found = await self._patiently(GetEpisode(job=self._job.name, episode=episode), EpisodeRecord)
        refuse_over(found.status)
        return Record(found)

    async def _patiently(self, message: Message, reply: type[R]) -> R:
        scheduler, patience_s = self._scheduler(), self._job.environment.episode_s
        return await ask_patiently(
            self._ctx, lambda: scheduler.address, message, reply, renew=scheduler.find, patience_s=patience_s
        )


def refuse_over(status: str) -> None:
    """Raise HttpProblem where the episode takes no more questions."""
    if status == "replaced":
        text = "another attempt drives this episode since its environment was given up: this key has expired"
        raise HttpProblem(401, "key_expired", text)
    if status in ("ended", "unknown"):
        raise HttpProblem(410, "episode_ended", "this episode has ended: begin another one")
