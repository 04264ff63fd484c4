"""Every length model keeps the promises of ``actors/ranker/model.py``: made on the spot, given, and simulated."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.ranker.encoder import EncoderLengthModel
from actors.ranker.errors import RankerModelUnreadable
from actors.ranker.model import LengthModel, LengthPair
from actors.ranker.readers import PROMPT_TOKENS, GivenReader, MadeReader, Reader
from actors.ranker.simulated import SimulatedLengthModel
from tests.tiny_checkpoint import make_tiny_checkpoint

MARK = 40
"""Prompts that end in this token get responses ten times as long."""

Make = Callable[[], LengthModel]
ENCODERS = ["made", "given, of the policy's vocabulary", "given, of another vocabulary"]
ON_CUDA = pytest.param("made, on cuda", marks=pytest.mark.gpu)


async def inline(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def encoder(reader: Callable[[], Reader], home: Path, device: str = "cpu") -> EncoderLengthModel:
    return EncoderLengthModel(reader, home, inline, device=device)


@pytest.fixture(params=[*ENCODERS, ON_CUDA, "simulated"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    if request.param == "simulated":
        return lambda: SimulatedLengthModel(score_s=0.0, fit_s=0.0)
    policy = make_tiny_checkpoint(tmp_path / "policy", hidden=16, layers=1)
    if request.param.startswith("made"):
        device = "cuda" if request.param.endswith("cuda") else "cpu"
        return lambda: encoder(lambda: MadeReader(policy, 0), tmp_path / "home", device)
    vocab = 100 if "of the policy's" in request.param else 90
    given = make_tiny_checkpoint(tmp_path / "given", vocab=vocab, architecture="llama", hidden=16, max_position=64)
    return lambda: encoder(lambda: GivenReader(given, policy), tmp_path / "home")


def pairs(count: int = 24) -> list[LengthPair]:
    draw = np.random.default_rng(0)
    prompts = [draw.integers(8, 39, int(draw.integers(3, 20))).astype(np.int32) for _ in range(count)]
    for prompt in prompts[::4]:
        prompt[-2:] = MARK
    return [LengthPair(prompt, 200.0 if prompt[-1] == MARK else 20.0) for prompt in prompts]


def run(make: Make, scenario: Callable[[LengthModel], Awaitable[None]]) -> None:
    async def main() -> None:
        model = make()
        assert await model.start() == 0, "nothing has been kept yet"
        await scenario(model)
        await model.close()

    asyncio.run(main())


def test_what_is_fitted_raises_the_scores_of_prompts_that_get_long_responses(make: Make) -> None:
    async def scenario(model: LengthModel) -> None:
        lessons = pairs()
        for _ in range(30):
            await model.fit(lessons)
        scores = await model.score([pair.prompt_ids for pair in lessons])
        assert scores.dtype == np.float64
        assert scores.shape == (len(lessons),)
        assert np.mean(scores[::4]) > np.mean(np.delete(scores, np.s_[::4]))

    run(make, scenario)


def test_no_prompt_is_too_many_or_too_few_or_too_long(make: Make) -> None:
    async def scenario(model: LengthModel) -> None:
        await model.fit(pairs())
        assert (await model.score([])).shape == (0,)
        long = np.full(3 * PROMPT_TOKENS, 20, np.int32)
        assert np.isfinite(await model.score([long, np.zeros(0, np.int32), np.array([5], np.int32)])).all()
        assert (await model.score([long] * 300)).shape == (300,)

    run(make, scenario)


def test_scores_are_lengths_in_tokens_and_asking_twice_changes_nothing(make: Make) -> None:
    async def scenario(model: LengthModel) -> None:
        lessons = [LengthPair(np.array([8 + n, 9], np.int32), 500.0) for n in range(8)]
        for _ in range(5):
            await model.fit(lessons)
        first, second = [await model.score([pair.prompt_ids for pair in lessons]) for _ in range(2)]
        assert first.tolist() == second.tolist()
        assert 100.0 < first.mean() < 2500.0

    run(make, scenario)


@pytest.mark.parametrize("make", [*ENCODERS, ON_CUDA], indirect=True)
def test_the_next_life_of_an_encoder_goes_on_with_what_was_kept(make: Make) -> None:
    async def scenario(model: LengthModel) -> None:
        lessons = pairs()
        prompts = [pair.prompt_ids for pair in lessons]
        for _ in range(5):
            await model.fit(lessons)
        await model.keep(7)
        heir = make()
        assert await heir.start() == 7
        assert np.allclose(await heir.score(prompts), await model.score(prompts), rtol=1e-5)
        assert np.isfinite(await heir.fit(lessons))

    run(make, scenario)


def test_what_does_not_fit_or_is_damaged_is_passed_over(tmp_path: Path) -> None:
    policy, home = make_tiny_checkpoint(tmp_path / "policy", hidden=16, layers=1), tmp_path / "home"
    given = make_tiny_checkpoint(tmp_path / "given", hidden=16, layers=1)

    async def main() -> None:
        former = encoder(lambda: MadeReader(policy, 0), home)
        await former.start()
        await former.fit(pairs())
        await former.keep(1)
        assert await encoder(lambda: GivenReader(given, policy), home).start() == 0, "the job names another model now"
        (kept,) = home.iterdir()
        kept.write_bytes(kept.read_bytes()[:100])
        assert await encoder(lambda: MadeReader(policy, 0), home).start() == 0

    asyncio.run(main())


def test_a_directory_without_a_model_is_named_with_the_field(tmp_path: Path) -> None:
    policy = make_tiny_checkpoint(tmp_path / "policy", hidden=16, layers=1)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(RankerModelUnreadable, match=r"rollout\.ranker_model"):
        GivenReader(tmp_path, policy)
