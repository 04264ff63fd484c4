"""The reward worker: decodes finished responses and has them scored in processes of their own.

    scheduler ──Score(prompts, responses)──▶ decode ──▶ scorer pool ──▶ Scored(verdicts) ──▶ scheduler

    scheduler ──ShowSamples──▶ decode ──▶ Samples ──▶ metrics          some of each step, for people to read

The worker is stateless, so every question can be asked again. A verifier that fails or runs out of time yields a typed
failure (``no_result``), never a reward of 0.

The weight version of each token says who wrote that token; turns cover a response without a gap:

    versions    3  3  3  -1 -1   4  4   -2 -1   5
               └ model ┘ └env ┘ └mod┘  └env ┘ └model
                                       fresh: a new context begins here
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from actors.core.actor import Actor, concurrent, handles
from actors.core.registered import RegisteredActor
from actors.core.terminal_text import shares, shortened
from actors.environments.errors import RewardError
from actors.environments.prompts.prompt_source import PromptSource
from actors.environments.prompts.tokenizer import TextCodec
from actors.environments.scoring.examples import row_of, source_of
from actors.environments.scoring.scorer_frames import ScorerVerdict
from actors.environments.scoring.scorer_pool import ScorerPool
from actors.host.import_guard import import_transformers_without_torch
from actors.protocol.endings import Ending
from actors.protocol.episodes import FRESH
from actors.protocol.failures import Acknowledged, FailureKind
from actors.protocol.job_news import Trouble
from actors.protocol.metrics import Samples, ShownSample, ShownTurn
from actors.protocol.rewards import SampleToShow, Score, Scored, ShowSamples, Verdict, beyond_limit
from actors.protocol.services import RegisterService
from actors.protocol.work_track import WorkTrack
from actors.roles import RoleArgs
from configs.run_files import LOGS


class RewardWorker(RegisteredActor):
    """Answers ``Score``: takes several questions at once, and scores as many as there are scorer processes."""

    def __init__(self, args: RoleArgs, pool: ScorerPool, codec: TextCodec | None = None) -> None:
        self._args = args
        self._job = args.job_config
        self._pool = pool
        self._codec = codec
        self._track = WorkTrack(
            self._job.name, "rewards", "score", lambda: self.ctx.ref(self.scheduler.beside(args.metrics))
        )

    async def on_start(self) -> None:
        self._codec = self._codec or await self.ctx.run_blocking(self._make_codec)
        await self._pool.start()
        service = RegisterService(job=self._job.name, role="rewards", address=self.ctx.self_address)
        await self.keep_registered(self._args.scheduler, service, Acknowledged)
        self._track.start(self.ctx)
        for warning in self._pool.warnings:
            trouble = Trouble(job=self._job.name, kind="reward_trial", text=f"before the first step: {warning}")
            self.ctx.ref(self.scheduler.address).tell(trouble)

    def _make_codec(self) -> TextCodec:
        import_transformers_without_torch()  # verifiers, which may want torch, are in processes of their own
        shown = self._job.reward.special_tokens
        return TextCodec(Path(self._args.model_path), self._job.data, special_tokens=shown)

    async def on_stop(self) -> None:
        await self._pool.close()

    @handles(Score)
    @concurrent
    async def score(self, message: Score) -> Scored:
        assert self._codec is not None
        names: list[tuple[int, int]] = []
        items: list[tuple[str, bytes]] = []
        for item in message.items:
            for response in item.responses:
                names.append((item.prompt, response.sibling))
                items.append((self._codec.decode(response.token_ids), item.context))
        with self._track.work():
            verdicts = await self._pool.score(items)
        if cut := sum(verdict.cut for verdict in verdicts):
            self._tell_of_cut(cut)
        limit, named = self._job.reward.limit, zip(names, verdicts, strict=True)
        return Scored(verdicts=[_verdict(*name, verdict, limit) for name, verdict in named])

    def _tell_of_cut(self, samples: int) -> None:
        text = (
            "samples were longer than the reward model reads: it saw them without the beginning of their prompts. "
            "Raise reward.max_tokens as far as the model allows, or lower data.max_prompt_tokens or rollout.max_tokens"
        )
        self.ctx.ref(self.scheduler.address).tell(
            Trouble(job=self._job.name, kind="reward_cut", text=text, count=samples)
        )

    @handles(ShowSamples)
    @concurrent
    async def show(self, message: ShowSamples) -> None:
        try:
            answers = await self._pool.answers([sample.context for sample in message.samples])
        except RewardError as error:
            self.ctx.log.warning("samples are shown without their answers", error=str(error))
            answers = [""] * len(message.samples)
        rows = [self._row(message.step, *shown) for shown in zip(message.samples, answers, strict=True)]
        self.ctx.ref(self._args.metrics).tell(Samples(job=message.job, step=message.step, rows=rows))

    def _row(self, step: int, sample: SampleToShow, answer: str) -> ShownSample:
        """A line of samples.jsonl."""
        assert self._codec is not None
        longest, names = self._job.limits.sample_text_chars, self._job.reward.names
        trained = sample.versions[sample.versions >= 0]
        return ShownSample(
            step=step,
            chosen=sample.chosen,
            prompt=sample.prompt,
            sibling=sample.sibling,
            source=source_of(sample.context) if self._job.data.mix else "",
            row=row_of(sample.context),
            reward=sample.reward,
            reward_parts=dict(zip(names, sample.parts or [None] * len(names), strict=True)),
            finish=Ending(sample.finish).label,
            tokens=len(trained),
            versions=[int(trained.min()), int(trained.max())] if len(trained) else [],
            reason=sample.reason,
            prompt_text=shortened(self._codec.decode(sample.prompt_ids), longest),
            turns=shown_turns(sample.token_ids, sample.versions, self._codec.decode, longest),
            answer=shortened(answer, longest),
        )


def _verdict(prompt: int, sibling: int, verdict: ScorerVerdict, limit: float) -> Verdict:
    beyond = "" if verdict.reward is None else beyond_limit([verdict.reward, *verdict.parts], limit)
    if verdict.reward is not None and not beyond:
        return Verdict(prompt=prompt, sibling=sibling, reward=verdict.reward, parts=verdict.parts)
    return Verdict(
        prompt=prompt,
        sibling=sibling,
        reward=None,
        failure_kind=FailureKind.NO_RESULT.value,
        failure_message=f"the scorer returned {beyond}" if beyond else verdict.reason,
    )


@dataclass(frozen=True, slots=True)
class TurnSpan:
    """Marks the part of a response from ``start`` to ``end`` that one side has written."""

    role: str
    """``model`` or ``environment``."""
    start: int
    end: int
    fresh: bool = False
    """Whether a fresh context begins with it."""


def turn_spans(versions: np.ndarray) -> list[TurnSpan]:
    """The turns of a response, by the version of each token; empty if there are no tokens."""
    model = versions >= 0
    begins = np.ones(len(versions), np.bool_)
    begins[1:] = (model[1:] != model[:-1]) | (versions[1:] == FRESH)
    starts = np.nonzero(begins)[0].tolist()
    return [
        TurnSpan("model" if model[start] else "environment", start, end, bool(versions[start] == FRESH))
        for start, end in itertools.pairwise([*starts, len(versions)])
    ]


def shown_turns(
    tokens: np.ndarray, versions: np.ndarray, decode: Callable[[np.ndarray], str], chars: int
) -> list[ShownTurn]:
    """A response as people read it, in about ``chars`` characters; one without tokens is an empty turn of the model."""
    spans = turn_spans(versions) or [TurnSpan("model", 0, 0)]
    texts = [decode(tokens[span.start : span.end]) for span in spans]
    return [
        ShownTurn(role=span.role, text=shortened(text, share), tokens=span.end - span.start, fresh=span.fresh)
        for span, text, share in zip(spans, texts, shares([len(text) for text in texts], chars), strict=True)
    ]


def build(args: RoleArgs) -> dict[str, Actor]:
    """Make reward worker and prompt source, which share the processes that hold the data set."""
    log = Path(args.run_dir) / LOGS / f"{args.name}-tasks.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    pool = ScorerPool(args.job_config, log, Path(args.model_path), Path(args.run_dir))
    return {args.name: RewardWorker(args, pool), "prompts": PromptSource(args, pool)}
