"""Snapshots on the torch engine: each gets what it gets alone, bit for bit, in float32 with one thread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from actors.models.adapter import AdapterSpec
from actors.protocol.sampling import SampleRequest
from actors.sampling.errors import SnapshotUnusable
from actors.sampling.sampler import SnapshotSampler
from actors.trainer.backend import BackendSpec
from actors.trainer.backends.torch.torch_backend import TorchBackend
from configs.limits import Limits
from tests.actors.sampling.sampling_world import ask, said, sampling, scores
from tests.actors.trainer.backends.test_adapter import scores_of, train
from tests.made_snapshots import write_adapter
from tests.tiny_checkpoint import make_tiny_checkpoint

FIRST_TURN_S = 0.0
"""Turns are closed at once, so that they change as often as they can."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def snapshots(base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path | None]:
    """The base, adapters of rank 1, 4 and 16 beside different layers, and a whole model."""
    root = tmp_path_factory.mktemp("snapshots")
    return [
        None,
        write_adapter(root / "1", base, rank=1, seed=1),
        write_adapter(root / "4", base, rank=4, targets=("q_proj", "lm_head"), seed=2),
        write_adapter(root / "16", base, rank=16, targets=("down_proj", "up_proj", "o_proj"), seed=3),
        make_tiny_checkpoint(root / "whole", seed=4),
    ]


@pytest_asyncio.fixture
async def sampler(base: Path) -> AsyncIterator[SnapshotSampler]:
    async with sampling("torch", base, limits=Limits(sampling_patience_s=FIRST_TURN_S), tokens_per_step=1) as made:
        yield made


def asked(snapshot: Path | None, number: int) -> SampleRequest:
    ids = [3 + (number * 11 + i) % 90 for i in range(4 + number % 3)]
    return ask(
        snapshot, ids=ids, seed=number, samples=1 + number % 3, max_tokens=5 + 3 * number,
        prompt_logprobs=True, top_prompt_logprobs=2,
    )  # fmt: skip


async def test_snapshots_asked_at_once_get_what_each_gets_alone(
    sampler: SnapshotSampler, snapshots: list[Path | None]
) -> None:
    requests = [asked(snapshot, number) for number in range(4) for snapshot in snapshots]
    together = await asyncio.gather(*(sampler.sample(request) for request in requests))
    alone = [await sampler.sample(request) for request in reversed(requests)][::-1]
    for one, other in zip(together, alone, strict=True):
        assert said(one) == said(other) and scores(one) == scores(other)
    assert len({str(said(one)) for one in alone}) == len(requests), "each snapshot and each seed says something else"


async def test_the_likeliest_tokens_are_told_at_each_position_of_a_sequence_up_to_its_stop(
    sampler: SnapshotSampler, snapshots: list[Path | None]
) -> None:
    plain, told, other = await asyncio.gather(
        sampler.sample(ask(snapshots[2], max_tokens=20)),
        sampler.sample(ask(snapshots[2], max_tokens=20, top_logprobs=3)),
        sampler.sample(ask(snapshots[1], max_tokens=20, top_logprobs=5, temperature=0.0)),
    )
    assert said(plain) == said(told)
    [one], [free], [greedy] = told.sequences, plain.sequences, other.sequences
    assert free.top_ids is None and free.top_logprobs is None
    assert one.top_ids is not None and one.top_logprobs is not None and greedy.top_ids is not None
    assert one.top_ids.shape == one.top_logprobs.shape == (20, 3) and greedy.top_ids.shape == (20, 5)
    assert greedy.top_ids[:, 0].tolist() == greedy.tokens.tolist()
    text = "".join(chr(29 + token) for token in one.tokens[4:6] if 3 <= token < 98)
    cut = (await sampler.sample(ask(snapshots[2], max_tokens=20, top_logprobs=3, stop=(text or "a",)))).sequences[0]
    assert cut.top_logprobs is not None and len(cut.top_logprobs) == len(cut.tokens)
    np.testing.assert_array_equal(cut.top_logprobs, one.top_logprobs[: len(cut.tokens)])


async def test_a_seed_gives_equal_tokens_and_without_one_each_request_has_its_own(sampler: SnapshotSampler) -> None:
    seeded = [await sampler.sample(ask(samples=2, max_tokens=12)) for _ in range(2)]
    assert said(seeded[0]) == said(seeded[1])
    assert said(seeded[0])[0] != said(seeded[0])[1], "the sequences of a request differ"
    unseeded = await asyncio.gather(*(sampler.sample(ask(seed=None, max_tokens=12)) for _ in range(3)))
    assert len({str(said(one)) for one in unseeded}) == 3


async def test_without_max_tokens_a_sequence_fills_the_context(sampler: SnapshotSampler) -> None:
    [one] = (await sampler.sample(ask(max_tokens=None))).sequences
    assert (one.stop_reason, len(one.tokens)) == ("length", 96 - 3)


async def test_a_stop_token_or_text_is_the_end_of_the_sequence_and_part_of_it(sampler: SnapshotSampler) -> None:
    [free] = (await sampler.sample(ask(max_tokens=60))).sequences
    tokens = free.tokens.tolist()
    at = next(n for n, token in enumerate(tokens) if 3 <= token < 98 and n > 5)
    by_token = (await sampler.sample(ask(max_tokens=60, stop=(tokens[at],)))).sequences[0]
    first = tokens.index(tokens[at])
    assert (by_token.stop_reason, by_token.tokens.tolist()) == ("stop", tokens[: first + 1])
    whole = "".join(chr(29 + t) if t < 98 else "\n" for t in tokens if t >= 3)  # one character a token
    text = whole[4:6]
    by_text = (await sampler.sample(ask(max_tokens=60, stop=("no such text", text)))).sequences[0]
    ended = by_text.tokens.tolist()
    assert by_text.stop_reason == "stop" and ended == tokens[: len(ended)] and len(ended) < len(tokens)
    np.testing.assert_array_equal(by_text.logprobs, free.logprobs[: len(ended)])
    assert len((await sampler.sample(ask(max_tokens=60, stop=("no such text",)))).sequences[0].tokens) == 60


async def test_the_end_token_ends_a_sequence_if_stop_is_not_said_and_nothing_does_if_it_is_empty(
    sampler: SnapshotSampler,
) -> None:
    many = {"samples": 12, "max_tokens": 80, "temperature": 3.0}
    ended = (await sampler.sample(ask(stop=None, **many))).sequences
    by_end = [one for one in ended if one.stop_reason == "stop"]
    assert by_end and all(one.tokens[-1] == 1 and 1 not in one.tokens[:-1] for one in by_end)
    free = (await sampler.sample(ask(stop=(), **many))).sequences
    assert all(one.stop_reason == "length" and len(one.tokens) == 80 for one in free)
    for one, other in zip(ended, free, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens[: len(one.tokens)])


async def test_prompts_have_the_scores_of_the_trainer_that_made_the_snapshot(
    base: Path, sampler: SnapshotSampler, tmp_path: Path
) -> None:
    adapter, backend = AdapterSpec(rank=4, alpha=8.0, targets=("all-linear", "lm_head")), TorchBackend()
    await backend.start(BackendSpec(model_path=base, adapter=adapter, learning_rate=0.02))
    await train(backend)
    (tmp_path / "snapshot").mkdir()
    await backend.export_checkpoint(tmp_path / "snapshot")
    result = await sampler.sample(ask(tmp_path / "snapshot", ids=(3, 4, 5, 6, 7), max_tokens=30))
    [one] = result.sequences
    trained = await scores_of(backend, one.tokens.tolist())
    np.testing.assert_allclose(one.logprobs, trained, atol=1e-5)
    row = [3, 4, 5, 6, 7, *one.tokens.tolist()]
    scored = await sampler.sample(ask(tmp_path / "snapshot", ids=row, max_tokens=1, prompt_logprobs=True))
    assert scored.prompt_logprobs is not None and np.isnan(scored.prompt_logprobs[0])
    assert scored.top_prompt_ids is None
    np.testing.assert_allclose(scored.prompt_logprobs[5:], trained, atol=1e-5)
    await backend.close()


async def test_a_snapshot_that_cannot_be_served_fails_its_own_requests_alone(
    base: Path, sampler: SnapshotSampler, snapshots: list[Path | None], tmp_path: Path
) -> None:
    """One whose layers are missing here, one of another size, one whose weights overflow, and none at all."""
    wide = make_tiny_checkpoint(tmp_path / "wide", hidden=64)
    bad = {
        write_adapter(tmp_path / "foreign", wide, rank=2): "has shape",
        wide: "differs from the served",
        write_adapter(tmp_path / "overflowing", base, rank=2, spread=1e30): "has no numbers for this prompt",
        tmp_path / "nothing": "expected a directory with adapter_config.json",
    }
    good = [asked(snapshot, number) for number in range(3) for snapshot in snapshots[:3]]
    alone = [said(await sampler.sample(request)) for request in good]
    for _ in range(2):
        waiting = [asyncio.ensure_future(sampler.sample(request)) for request in good]
        refused = [
            asyncio.ensure_future(sampler.sample(asked(snapshot, number))) for number in range(2) for snapshot in bad
        ]
        assert [said(await one) for one in waiting] == alone
        for one, text in zip(refused, [*bad.values()] * 2, strict=True):
            with pytest.raises(SnapshotUnusable, match=text):
                await one
