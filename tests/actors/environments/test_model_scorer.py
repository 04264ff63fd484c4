"""A reward model: what it reads, in which batches, what of a long text it does not see, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import msgpack
import pytest

from actors.environments.errors import RewardRefused
from actors.environments.scoring.batches import Asked
from actors.environments.scoring.examples import Example
from actors.environments.scoring.model_scorer import ModelScorer
from actors.environments.scoring.scorer_frames import ScorerVerdict
from actors.environments.scoring.scorer_pool import ScorerPool
from configs.checks.checks import check_job
from configs.schema import JobConfig
from tests.chat_tokenizer import VOCABULARY, save_tokenizer
from tests.reward_model import TAKES_TOKENS, save_reward_model
from tests.smallest_job import smallest_job


def job_with(path: str, **reward: Any) -> JobConfig:
    return smallest_job(reward={"kind": "model", "path": path, "timeout_s": 30, **({"device": "cpu"} | reward)})


def asked(job: JobConfig, *responses: str, prompt: Any = "2+2") -> list[Asked]:
    return [Asked(text, Example(prompt, "4", 0, {}), job.data) for text in responses]


def score(job: JobConfig, *responses: str, prompt: Any = "2+2") -> list[ScorerVerdict]:
    return ModelScorer("reward", job.reward).score(asked(job, *responses, prompt=prompt), lambda: None)


def by_hand(path: str, text: str, most: int = TAKES_TOKENS) -> float:
    """What the model says of the last ``most`` tokens of one text that has its special tokens already."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    auto: Any = AutoTokenizer
    ids = auto.from_pretrained(path)(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    model: Any = AutoModelForSequenceClassification.from_pretrained(path)
    with torch.inference_mode():
        return float(model(input_ids=ids[:, -most:]).logits[0, 0])


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
    ],
)
def test_what_is_no_reward_model_is_refused(tmp_path: Path, how: dict[str, Any], words: str) -> None:
    with pytest.raises(RewardRefused, match=words):
        ModelScorer("reward", job_with(save_reward_model(tmp_path, **how)).reward)


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 8},
    "gemma2": {"head_dim": 8, "sliding_window": 8},
    "gpt2": {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": TAKES_TOKENS},
    "gpt_neox": {},
    "opt": {"ffn_dim": 16, "word_embed_proj_dim": 16},
    "bloom": {"n_layer": 1, "n_head": 2},
    "bert": {},
    "roberta": {"max_position_embeddings": TAKES_TOKENS + 1},
    "deberta-v2": {},
    "xlnet": {"d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 16},
    "bart": {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
             "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16},
}  # fmt: skip
"""Families of models that classify, each of which finds its reward, and ignores padding, in a way of its own."""
NEED_PADDING = ("bert", "roberta", "deberta-v2", "xlnet", "bart", "opt")
"""Families that cannot be built without a pad token."""


def save_family(path: Path, family: str, pad: int | None, **tokenizer: Any) -> str:
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification

    torch.manual_seed(3)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 2, "max_position_embeddings": TAKES_TOKENS, "initializer_range": 0.5}
    sizes = {"initializer_range": 0.5, "init_std": 0.5} if "n_layer" in FAMILIES[family] else sizes
    ids = {"pad_token_id": pad, "eos_token_id": 1, "bos_token_id": 3, "decoder_start_token_id": 1}
    config: Any = AutoConfig.for_model(family, vocab_size=VOCABULARY, num_labels=1, **(sizes | ids | FAMILIES[family]))
    AutoModelForSequenceClassification.from_config(config).save_pretrained(path)
    save_tokenizer(path, None, model_max_length=10_000, **tokenizer)
    return str(path)


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_what_transformers_says_of_each_text_alone(tmp_path: Path, family: str) -> None:
    """For each family, padding side, and pad token: one of its own, the end token, none, and one beyond the
    embedding. Texts end with the pad or the end token, or hold them; the longest take all positions. Bloom's and
    XLNet's have no last position, RoBERTa's begin after that of padding.
    """
    texts = ["4", "four<end>", "a" * 30, "b<end>c<end>", "<end><end>", "no<pad>", "<pad><pad>", "d" * 300]
    for pad, named, side in (
        (0, "<pad>", "left"),
        (1, "<end>", "right"),
        (None, None, "left"),
        (None, "[more]", "left"),
    ):
        known = 0 if pad is None and family in NEED_PADDING else pad
        path = save_family(tmp_path / f"{pad}{named}", family, known, pad_token=named, padding_side=side)
        kept = [text for text in texts if family != "bart" or "<end>" in text]  # it reads the reward at an end token
        found = score(job_with(path, batch_tokens=10_000), *kept)
        takes = {"bloom": 1000, "xlnet": 1000, "roberta": TAKES_TOKENS - (known or 0)}.get(family, TAKES_TOKENS)
        want = [by_hand(path, "2+2" + text, takes) for text in kept]
        assert [one.reward for one in found] == pytest.approx(want, abs=1e-4), (pad, named, side)


def test_a_token_beyond_the_embedding_costs_the_response_that_has_it_and_is_named(tmp_path: Path) -> None:
    path = save_reward_model(tmp_path, template=None, pad_token="[more]")
    right, wrong = score(job_with(path), "=4", "=[more]")
    assert right.reward == pytest.approx(by_hand(path, "2+2=4"), abs=1e-4)
    assert wrong.reward is None and "its token '[more]', its pad token, has id" in wrong.reason
    assert f"beyond the model's vocabulary of {VOCABULARY}" in wrong.reason


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
