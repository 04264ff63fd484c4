"""Answers the gateway's questions about an episode: its record in the ledger, and the model's next turn.

    TakeTurn ─▶ place it in the row ─┬─ a new turn ─▶ (EpisodeCut) Turned ─▶ the fleet ─┐
                                     └─ it is there already ────────────────────────────┴▶ over ─▶ durable ─▶ TurnTaken

Invariants
- A question may be repeated, by this life of the gateway or the next: it is joined while its turn runs, and answered
  from the ledger afterwards.
- A turn is durable before the gateway gets it, so that a crash cannot undo a turn that somebody has seen.
- At most ``limits.turns_waiting_max`` questions wait; there are fewer episodes than that.
"""

from __future__ import annotations

import asyncio

import numpy as np

from actors.fleet.scope import JobScope
from actors.ledger import events as ev
from actors.protocol.episodes import CutTurn, EpisodeName, EpisodeRecord, GetEpisode, TakeTurn, TurnTaken
from actors.protocol.failures import NotAccepted
from actors.scheduler.episode_rows import EpisodePlace, EpisodeRows, Key, shown
from actors.scheduler.episode_turns import SPENT, NextTurn


class Turns:
    """Answers one job's gateway."""

    def __init__(self, scope: JobScope, rows: EpisodeRows) -> None:
        self._scope, self._rows = scope, rows
        self._longest_s = scope.job.environment.episode_s
        self._waiting = 0

    def record(self, question: GetEpisode, left_s: float) -> EpisodeRecord:
        """The episode's record up to the last whole turn. ``left_s``: seconds that the episode still has."""
        self._scope.check_job(question.job)
        place = self._rows.find(question.episode)
        if isinstance(place, str):
            return EpisodeRecord(status=place)
        view = place.view()
        tokens, logprobs, versions = view.record()
        return EpisodeRecord(
            status="live",
            context=place.context,
            tokens=tokens,
            logprobs=logprobs,
            versions=versions,
            model_tokens_left=view.model_tokens_left,
            tokens_left=view.tokens_left,
            turns_left=view.turns_left,
            left_s=left_s,
        )

    async def take(self, ask: TakeTurn) -> TurnTaken:
        """Have the turn generated, unless it is in the row already, and wait until it is over.

        Raises:
            NotAccepted: the question contradicts the ledger, too many wait already, or the turn takes too long.
        """
        self._scope.check_job(ask.job)
        place = self._rows.find(ask.episode)
        if isinstance(place, str):
            return TurnTaken(status=place)
        if self._waiting >= self._scope.limits.turns_waiting_max:
            raise NotAccepted(f"{self._waiting} questions wait for their turns, as many as may: ask again")
        meaning = place.view().place(ask)
        if meaning == SPENT:
            return TurnTaken(status=SPENT)
        if isinstance(meaning, str):
            raise NotAccepted(f"{shown(ask.episode)}: {meaning}")
        if isinstance(meaning, NextTurn):
            self._begin(place, ask, meaning)
        self._waiting += 1
        try:
            async with asyncio.timeout(self._longest_s):
                return await self._until_over(ask.episode, ask.offset + len(ask.tokens))
        except TimeoutError as error:
            raise NotAccepted(f"{shown(ask.episode)}: its turn has lasted as long as an episode may") from error
        finally:
            self._waiting -= 1

    def _begin(self, place: EpisodePlace, ask: TakeTurn, turn: NextTurn) -> None:
        if turn.cut:
            self._rows.apply(ev.EpisodeCut(place.batch.step, place.rows, np.array([ask.offset], np.int32)))
        event = ev.Turned(
            step=place.batch.step,
            rows=place.rows,
            offsets=np.array([ask.offset], np.int32),
            fresh=np.array([ask.fresh], np.uint8),
            counts=np.array([len(ask.tokens)], np.int32),
            tokens=np.asarray(ask.tokens, np.int32),
            limits=np.array([turn.limit], np.int32),
        )
        self._rows.apply(event)
        self._scope.assign()

    async def _until_over(self, name: EpisodeName, start: int) -> TurnTaken:
        while True:
            place = self._rows.find(name)
            if isinstance(place, str):
                return TurnTaken(status=place)
            turn = place.view().turn_at(start)
            if turn is not None:
                await self._rows.durable()
                return TurnTaken("taken", start, turn.tokens, turn.logprobs, turn.versions, int(turn.finish))
            await self._rows.news(Key.of(name))

    async def cut(self, order: CutTurn) -> None:
        """Cut the last turn, once.

        Raises:
            NotAccepted: more than the last turn would be cut, or another turn is under way.
        """
        self._scope.check_job(order.job)
        place = self._rows.find(order.episode)
        if isinstance(place, str):
            return
        view = place.view()
        if order.length != len(view.marks):
            if not place.waits or not view.last_turn() <= order.length < view.whole:
                raise NotAccepted(
                    f"{shown(order.episode)} is to be cut to {order.length} tokens; its last turn is {view.last_turn()}"
                    f" to {view.whole}{'' if place.waits else ', and another one is under way'}"
                )
            self._rows.apply(ev.EpisodeCut(place.batch.step, place.rows, np.array([order.length], np.int32)))
        await self._rows.durable()
