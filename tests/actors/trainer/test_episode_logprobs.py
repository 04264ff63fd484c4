"""An episode through the real ledger, engine and trainer: what was sampled is what is trained, to the last digits.

A turn moves to another engine in its middle, and a fresh context repeats what was said; both engines and the trainer
have the same weights.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from actors.fleet.dispatch import work_of
from actors.ledger import events as ev
from actors.ledger.batch import SampleState
from actors.ledger.ledger import Ledger
from actors.protocol.episodes import EpisodeLimits
from actors.protocol.groups import GroupGrant
from actors.protocol.work import SamplingParams
from actors.rollout.engine import EngineSpec, GenerationRequest
from actors.rollout.engines.torch.torch_engine import TorchEngine
from actors.trainer.backend import BackendSpec
from actors.trainer.backends.torch.torch_backend import TorchBackend
from actors.trainer.learning.rules import LearningRule
from actors.trainer.learning.samples import group_samples, pad
from configs.learning_schema import AlgorithmConfig
from tests.tiny_checkpoint import make_tiny_checkpoint

VOCAB, STOPS = 100, tuple(range(90, 100))
SAMPLING = SamplingParams(max_tokens=60, stop_token_ids=STOPS, seed=4)
LIMITS = EpisodeLimits(turns_max=9, turn_tokens=12, episode_tokens=200)
ROW = np.zeros(1, np.int32)


class Episode:
    """One episode of one prompt. Each turn begins on the first of two engines and moves to the other."""

    def __init__(self, engines: list[TorchEngine]) -> None:
        self.ledger, self.engines = Ledger(), engines
        self.ledger.apply(ev.Opened(1))
        none = np.zeros(0, np.int32)
        self.ledger.apply(ev.BatchIssued(0, 1, SAMPLING, np.zeros(1, np.int64), ROW, none, [b""], LIMITS))
        self.batch = self.ledger.batches[0]

    async def turn(self, ids: list[int], *, fresh: bool = False) -> list[int]:
        """The environment says ``ids``; returns what the model answers."""
        start = int(self.batch.length[0])
        end = start + len(ids)
        columns = [[start], [fresh], [len(ids)], ids, [end + LIMITS.turn_tokens]]
        self.ledger.apply(ev.Turned(0, ROW, *(np.array(column, np.int32) for column in columns)))
        await self._hand_out(self.engines[0], steps=3)
        if self.batch.state[0] == SampleState.QUEUED:
            await self._hand_out(self.engines[1], steps=100)
        assert self.batch.state[0] == SampleState.WAITING
        return self.batch.held(0)[end:].tolist()

    async def _hand_out(self, engine: TorchEngine, *, steps: int) -> None:
        number = self.ledger.next_assignment
        [work] = work_of(self.batch, ROW, number)
        [sample] = work.samples
        self.ledger.apply(ev.Assigned.to_one("w", 0, number, ROW))
        request = GenerationRequest(
            request=number, prompt=0, sibling=0, prompt_ids=work.prompt_ids, generated=sample.generated,
            sampling=SAMPLING, first=sample.first, limit=sample.limit,
        )  # fmt: skip
        engine.add([request])
        for step in range(steps + 2):
            if step == steps:
                engine.abort([number])
            if not engine.has_work:
                return
            out = await engine.step()
            self.ledger.apply(
                ev.TokensAppended.one(
                    "w", 0, out.requests, out.offsets, out.counts, out.finished, out.tokens, out.logprobs
                )
            )


async def engine_of(model: Path) -> TorchEngine:
    engine = TorchEngine()
    spec = EngineSpec(model_path=model, max_running=2, max_context_tokens=200, options={"tokens_per_step": 1})
    await engine.start(spec)
    return engine


async def test_what_an_episode_trains_is_what_was_sampled_in_each_of_its_contexts(tmp_path: Path) -> None:
    model = make_tiny_checkpoint(tmp_path, vocab=VOCAB, hidden=64, heads=2, kv_heads=1)
    engines = [await engine_of(model) for _ in range(2)]
    episode = Episode(engines)
    first = await episode.turn([5, 6, 7], fresh=True)
    second = await episode.turn([8, STOPS[0]])
    third = await episode.turn([5, 6, 7, *second, 9], fresh=True)  # a template that leaves out the first answer
    fourth = await episode.turn([10])
    for engine in engines:
        await engine.close()
    assert all((first, second, third, fourth))
    held = episode.batch.ragged(ROW)
    group = GroupGrant(
        job="j", step=0, prompt=0, replay=False, prompt_ids=np.zeros(0, np.int32), siblings=ROW, lengths=held.lengths,
        tokens=held.tokens, logprobs=held.logprobs, versions=held.versions, finished=episode.batch.finish,
        rewards=np.ones(1),
    )  # fmt: skip
    samples = group_samples(group, LearningRule(AlgorithmConfig(), 60), max_staleness=0)
    assert [sample.model_tokens for sample in samples] == [len(first) + len(second), len(third) + len(fourth)]
    backend = TorchBackend()
    await backend.start(BackendSpec(model_path=model))
    batch = pad(samples)
    scores = await backend.score(batch, temperature=1.0, reference=False)
    await backend.close()
    learned = batch.loss_weight > 0
    assert batch.input_ids[learned].tolist() == [*first, *second, *third, *fourth]
    np.testing.assert_allclose(scores[learned], batch.behaviour_logprobs[learned], atol=1e-5)
