"""The ranker: learns how long responses get, in a process of its own, and says what it expects (StreamRL 1.5).

    scheduler ──ScorePrompts───▶ asked ─┐          ┌─ score ─▶ LengthScores ──▶ scheduler
    scheduler ──ObserveLengths─▶ pairs ─┴▶ work ──▶┤
                                                   └─ fit, a slice at a time; after the last: score anew

    loop    waits for                                 unblocked by
    work    a question, or enough new pairs           ScorePrompts, ObserveLengths

Invariants
- Nobody waits for the ranker: questions and answers are tells, and a missing score counts as the median. Killed and
  started again, it goes on with its model as of the last refresh, and learns from what is committed from then on.
- Questions go before lessons: between two slices of a refresh everything that was asked is answered.
- No score is given before the first refresh: those of an untrained model would be an order by chance.
- Lessons are the newest ``limits.ranker_pairs`` pairs, so the model follows the policy as that drifts.
- Its process has a low priority, so that generation and training come first where cores are short.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from pathlib import Path

import numpy as np

from actors.core.actor import Actor, handles
from actors.core.registered import RegisteredActor
from actors.protocol.failures import Acknowledged
from actors.protocol.lengths import LengthScores, ObserveLengths, ScorePrompts
from actors.protocol.metrics import Event
from actors.protocol.services import RegisterService
from actors.ranker.model import LengthModel, LengthPair
from actors.roles import RoleArgs

_NICENESS = 10
"""Increment of the process's niceness: generation and training come first."""


class Ranker(RegisteredActor):
    """Learns lengths for one job. ``model``: a ready-made one (tests, simulations) instead of the encoder."""

    def __init__(self, args: RoleArgs, model: LengthModel | None = None) -> None:
        self._args = args
        self._job = args.job_config
        self._given_model = model
        self._asked: deque[ScorePrompts] = deque()
        """Questions to answer now."""
        self._recent: deque[ScorePrompts] = deque()
        """Questions whose prompts may not have been handed out yet: answered anew after each refresh."""
        self._new_pairs = 0
        self._news = asyncio.Event()
        self.refreshes = 0

    async def on_start(self) -> None:
        limits = self.ctx.limits
        self._pairs: deque[LengthPair] = deque(maxlen=limits.ranker_pairs)
        self._recent = deque(maxlen=self._job.staleness + 2)
        self._model = self._given_model or self._make_model()
        self.refreshes = await self._model.start()
        service = RegisterService(job=self._job.name, role="ranker", address=self.ctx.self_address)
        await self.keep_registered(self._args.scheduler, service, Acknowledged)
        self.ctx.start_task(self._work(), "rank")

    async def on_stop(self) -> None:
        await self._model.close()

    def _make_model(self) -> LengthModel:
        from actors.ranker.encoder import EncoderLengthModel
        from actors.ranker.readers import GivenReader, MadeReader, Reader

        os.nice(_NICENESS)
        policy, given, seed = Path(self._args.model_path), self._job.rollout.ranker_model, self._job.seed

        def make_reader() -> Reader:
            return MadeReader(policy, seed) if given is None else GivenReader(Path(given), policy)

        home = Path(self._args.run_dir) / "ranker"
        device = self._job.rollout.ranker_device
        return EncoderLengthModel(make_reader, home, self.ctx.run_blocking, seed=seed, device=device)

    # ------------------------------------------------------------ what comes in

    @handles(ScorePrompts)
    async def score_prompts(self, question: ScorePrompts) -> None:
        if all(question.step != known.step for known in self._recent):
            self._recent.append(question)
        self._asked.append(question)
        self._news.set()

    @handles(ObserveLengths)
    async def observe_lengths(self, lesson: ObserveLengths) -> None:
        prompts = _prompts(lesson.prompt_lengths, lesson.prompt_ids)
        self._pairs.extend(map(LengthPair, prompts, lesson.response_tokens.tolist()))
        self._new_pairs += len(prompts)
        self._recent = deque((q for q in self._recent if q.step > lesson.step), maxlen=self._recent.maxlen)
        self._news.set()

    # ------------------------------------------------------------ the work

    async def _work(self) -> None:
        while True:
            await self._news.wait()  # bounded by the job: without news there is nothing to do
            self._news.clear()
            await self._reply()
            if self._new_pairs >= self.ctx.limits.ranker_refresh_pairs:
                await self._refresh()

    async def _refresh(self) -> None:
        """Fine-tune on the newest pairs, then score anew the prompts that may still wait."""
        self._new_pairs = 0
        began_s, loss = self.ctx.now(), 0.0
        for _ in range(self.ctx.limits.ranker_refresh_slices):
            loss = await self._model.fit(list(self._pairs))
            await self._reply()
        self.refreshes += 1
        await self._model.keep(self.refreshes)
        self._asked.extend(self._recent)
        await self._reply()
        fields: dict[str, float | int | str] = {"refresh": self.refreshes, "pairs": len(self._pairs)}
        fields |= {"loss": round(loss, 4), "seconds": round(self.ctx.now() - began_s, 3)}
        self.ctx.log.info("ranker refreshed", **fields)
        metrics = self.scheduler.beside(self._args.metrics)
        self.ctx.ref(metrics).tell(Event(job=self._job.name, name="ranker_refreshed", fields=fields))

    async def _reply(self) -> None:
        if self.refreshes == 0:
            self._asked.clear()  # the first refresh answers what is recent
        while self._asked:
            question = self._asked.popleft()
            scores = await self._model.score(_prompts(question.prompt_lengths, question.prompt_ids))
            answer = LengthScores(job=self._job.name, refresh=self.refreshes, keys=question.keys, scores=scores)
            self.ctx.ref(self.scheduler.address).tell(answer)


def _prompts(lengths: np.ndarray, ids: np.ndarray) -> list[np.ndarray]:
    return np.split(ids, np.cumsum(lengths)[:-1]) if len(lengths) else []


def build(args: RoleArgs) -> dict[str, Actor]:
    return {args.name: Ranker(args)}
