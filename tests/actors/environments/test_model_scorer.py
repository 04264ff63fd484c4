"""A reward model: what it reads, in which batches, what of a long text it does not see, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import msgpack
import pytest

from actors.environments.errors import RewardRefused
from actors.environments.scoring.batches import Asked, Found
from actors.environments.scoring.examples import Example
from actors.environments.scoring.model_scorer import ModelScorer
from actors.environments.scoring.scorer_pool import ScorerPool
from configs.checks.checks import check_job
from configs.schema import JobConfig
from tests.reward_model import TAKES_TOKENS, save_reward_model
from tests.smallest_job import smallest_job


def job_with(path: str, **reward: Any) -> JobConfig:
    return smallest_job(reward={"kind": "model", "path": path, "timeout_s": 30, **({"device": "cpu"} | reward)})


def asked(job: JobConfig, *responses: str, prompt: Any = "2+2") -> list[Asked]:
    return [Asked(text, Example(prompt, "4", 0, {}), job.data) for text in responses]


def score(job: JobConfig, *responses: str, prompt: Any = "2+2") -> list[Found]:
    return ModelScorer("reward", job.reward).score(asked(job, *responses, prompt=prompt), lambda: None)


def by_hand(path: str, text: str) -> float:
    """What the model says of one text that has its special tokens already."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    auto: Any = AutoTokenizer
    ids = auto.from_pretrained(path)(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    model: Any = AutoModelForSequenceClassification.from_pretrained(path)
    with torch.inference_mode():
        return float(model(input_ids=ids[:, -TAKES_TOKENS:]).logits[0, 0])


def chat(*turns: tuple[str, str]) -> str:
    return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_each_gets_what_the_model_says_of_it_alone_whatever_its_batch(tmp_path: Path, device: str) -> None:
    """Texts of many lengths, in batches of at most 150 tokens with padding: one frame of life for each batch."""
    path = save_reward_model(tmp_path)
    job = job_with(path, batch_tokens=150, device=device)
    texts = ["4", "it is four", "a" * 30, "", "b" * 60, "no"]
    lives: list[int] = []
    found = ModelScorer("reward", job.reward).score(asked(job, *texts), lambda: lives.append(1))
    want = [by_hand(path, chat(("user", "2+2"), ("assistant", text))) for text in texts]
    assert [one.reward for one in found] == pytest.approx(want, abs=1e-4)
    assert len({round(value, 3) for value in want}) == len(texts), "the model tells them apart"
    assert 3 <= len(lives) < len(texts)


def test_chat_prompts_keep_their_turns_and_a_prefill_is_the_beginning_of_the_response(tmp_path: Path) -> None:
    path = save_reward_model(tmp_path)
    turns = [{"role": "system", "content": "brief"}, {"role": "user", "content": "2+2"}]
    prefilled = [*turns, {"role": "assistant", "content": "It "}]
    (plain,), (begun,) = (score(job_with(path), "is 4", prompt=prompt) for prompt in (turns, prefilled))
    assert plain.reward == pytest.approx(
        by_hand(path, chat(("system", "brief"), ("user", "2+2"), ("assistant", "is 4"))), abs=1e-4
    )
    assert begun.reward == pytest.approx(
        by_hand(path, chat(("system", "brief"), ("user", "2+2"), ("assistant", "It is 4"))), abs=1e-4
    )


def test_without_a_template_text_follows_text_and_chat_prompts_are_refused(tmp_path: Path) -> None:
    path = save_reward_model(tmp_path, template=None)
    job = job_with(path)
    assert score(job, "=4")[0].reward == pytest.approx(by_hand(path, "2+2=4"), abs=1e-4)
    (one,) = asked(job, "4", prompt=[{"role": "user", "content": "2+2"}])
    with pytest.raises(RewardRefused, match="its tokenizer has no chat template"):
        ModelScorer("reward", job.reward).try_once(one)


def test_what_is_too_long_loses_its_beginning_and_says_so(tmp_path: Path) -> None:
    path = save_reward_model(tmp_path)
    long = "c" * 300
    short, cut = score(job_with(path), "4", long)
    assert (short.cut, cut.cut) == (False, True)
    assert cut.reward == pytest.approx(by_hand(path, chat(("user", "2+2"), ("assistant", long))), abs=1e-4)
    few = score(job_with(path, max_tokens=20), "d" * 40)
    assert few[0].cut
    with pytest.raises(RewardRefused, match=f"max_tokens: 500, and the model in .* takes {TAKES_TOKENS}"):
        score(job_with(path, max_tokens=500), "4")


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"labels": 3}, "it has 3 labels, and a reward model has one"),
        ({"head": False}, "its weights lack score.weight, which would be drawn at random"),
        ({"pad_token": None, "eos_token": None}, "neither a pad token nor an end token"),
    ],
)
def test_what_is_no_reward_model_is_refused(tmp_path: Path, how: dict[str, Any], words: str) -> None:
    with pytest.raises(RewardRefused, match=words):
        ModelScorer("reward", job_with(save_reward_model(tmp_path, **how)).reward)


def test_an_end_token_stands_for_a_pad_token_that_is_missing(tmp_path: Path) -> None:
    path = save_reward_model(tmp_path, pad_token=None)
    want = by_hand(path, chat(("user", "2+2"), ("assistant", "4")))
    assert score(job_with(path), "4", "longer than that")[0].reward == pytest.approx(want, abs=1e-4)


def test_before_anything_is_loaded_its_files_are_looked_at(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "2+2", "answer": "4"}\n')
    path = save_reward_model(tmp_path / "model", labels=2)

    def said(path: str) -> list[str]:
        job = job_with(path).model_copy(update={"data": smallest_job(data={"path": str(tmp_path / "rows.jsonl")}).data})
        return [f"{field}: {wrong}" for field, wrong, _ in check_job(job)]

    assert said(path) == [f"reward.path: {path!r} has 2 labels, and a reward model has one"]
    for file in (tmp_path / "model").glob("tokenizer*"):
        file.unlink()
    assert "has no tokenizer" in said(path)[0]
    assert "no config.json" in said(str(tmp_path))[0]


async def test_the_pool_has_it_in_a_process_of_its_own_beside_the_others(tmp_path: Path) -> None:
    """Its reward is a part of the sum; a cut crosses the processes."""
    path = save_reward_model(tmp_path / "model")
    parts = [
        {"kind": "model", "path": path, "device": "cpu", "name": "liked", "weight": 2.0},
        {"kind": "exact_match", "name": "right"},
    ]
    pool = ScorerPool(smallest_job(reward={"parts": parts, "timeout_s": 30}))
    await pool.start()
    context = cast("bytes", msgpack.packb(["2+2", "4", 0, {}]))
    verdicts = await pool.score([("4", context), ("e" * 200, context)])
    await pool.close()
    liked = by_hand(path, chat(("user", "2+2"), ("assistant", "4")))
    assert verdicts[0].reward == pytest.approx(2 * liked + 1.0, abs=1e-4)
    assert verdicts[0].parts == pytest.approx((liked, 1.0), abs=1e-4)
    assert [verdict.cut for verdict in verdicts] == [False, True]
