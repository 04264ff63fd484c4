"""Training a reward model: the loss, what is written and who can load it, and what cannot be trained."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from actors.environments.scoring.batches import Asked
from actors.environments.scoring.examples import Example
from actors.environments.scoring.model_scorer import ModelScorer
from actors.reward_training.backbone import load_backbone
from actors.reward_training.errors import CannotTrain, TrainingFailed
from actors.reward_training.preferences import Pair
from actors.reward_training.train import TrainingOrder, train_reward_model
from actors.reward_training.training import Progress, RewardTrainer, encode
from configs.reward_training import RECORD, RewardTraining
from configs.schema import DataConfig
from configs.task_schema import Reward
from tests.reward_model import TAKES_TOKENS, save_reward_model

ROOT = Path(__file__).parents[3]
PAIRS = [
    Pair(f"{a + b}!", f"{a + b}" + "?" * (1 + a % 3), f"{a}+{b}=", f"row {a}") for a in range(20) for b in range(5)
]


def backbone(path: Path, **how: Any) -> str:
    return save_reward_model(path / "backbone", **{"head": False, **how})


def train(
    path: Path,
    pairs: list[Pair] = PAIRS,
    *,
    model: str = "",
    seed: int = 0,
    max_tokens: int | None = None,
    device: str = "cpu",
    **how: Any,
) -> tuple[dict[str, Any], list[str], list[Progress]]:
    said, told = list[str](), list[Progress]()
    how = {"preferences": "here", "lr": 1e-2, "epochs": 12.0, "batch_pairs": 8, "held_out": 0.2, **how}
    order = TrainingOrder(Path(model or backbone(path)), path / "out", RewardTraining(**how), seed, device, max_tokens)
    result = train_reward_model(order, pairs, named=lambda key: f"--{key}", say=said.append, tell=told.append)
    return result, said, told


def refused(path: Path, error: type[Exception] = CannotTrain, **how: Any) -> str:
    with pytest.raises(error) as found:
        train(path, **how)
    assert not (path / "out").exists() and not (path / "out.partial").exists()
    return str(found.value)


def trainer_of(model: str, pairs: list[Pair], max_tokens: int | None = None, **how: Any) -> RewardTrainer:
    loaded = load_backbone(Path(model), seed=0, device="cpu", max_tokens=max_tokens, named=str)
    encoded = encode(pairs, loaded)
    return RewardTrainer(loaded, encoded, encoded, RewardTraining(preferences="here", **how), 0)


def test_the_loss_is_that_of_bradley_and_terry_whatever_the_batches(tmp_path: Path) -> None:
    """By hand: the mean of -log σ(r_chosen - r_rejected) over the pairs of a step, before it is taken."""
    model, pairs = backbone(tmp_path), [*PAIRS[:7], Pair("a", "b" * 60, "long ", "row 7")]
    rewards = trainer_of(model, pairs).rewards()
    want = sum(math.log1p(math.exp(rejected - chosen)) for chosen, rejected in rewards) / len(pairs)
    for tokens in (1, 200, 100_000):
        (loss,) = trainer_of(model, pairs, batch_tokens=tokens, batch_pairs=8, steps=1).run(lambda _: None)
        assert loss == pytest.approx(want, abs=1e-5), tokens


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_what_is_written_scores_as_it_was_trained_and_transformers_reads_it(tmp_path: Path, device: str) -> None:
    """The scorer's, the trainer's and plain transformers' reward of one text are one number."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    result, said, told = train(tmp_path, device=device)
    out = tmp_path / "out"
    assert result["accuracy_held_out"] > 0.9 and said == []
    assert (result["steps"], result["path"]) == (told[-1].steps, str(out)) and told[-1].step == told[-1].steps
    assert sum(progress.accuracy is not None for progress in told) >= 9
    assert json.loads((out / RECORD).read_text()).items() <= result.items()
    scorer = ModelScorer("reward", Reward(kind="model", path=str(out), device="cpu"))
    asked = [Asked(str(pair.chosen), Example(str(pair.prompt), "", 0, {}), DataConfig()) for pair in PAIRS[:9]]
    scored = [one.reward for one in scorer.score(asked, lambda: None)]
    trained = [chosen for chosen, _ in trainer_of(str(out), PAIRS[:9]).rewards()]
    assert scored == pytest.approx(trained, abs=1e-5)
    auto: Any = AutoTokenizer
    tokenizer, model = auto.from_pretrained(out), AutoModelForSequenceClassification.from_pretrained(out)
    for pair, reward in zip(PAIRS[:9], scored, strict=True):
        chat = [{"role": "user", "content": pair.prompt}, {"role": "assistant", "content": pair.chosen}]
        ids = tokenizer(tokenizer.apply_chat_template(chat, tokenize=False), add_special_tokens=False)["input_ids"]
        with torch.inference_mode():
            assert float(model(input_ids=torch.tensor([ids])).logits[0, 0]) == pytest.approx(reward, abs=1e-4)


@pytest.mark.parametrize(
    "how", [{"pad_token": None}, {"pad_token": None, "eos_token": None}, {"head": True}, {"template": None}]
)
def test_other_tokenizers_and_a_classifier_are_trained_too(tmp_path: Path, how: dict[str, Any]) -> None:
    result, _, _ = train(tmp_path, model=backbone(tmp_path, **how))
    assert result["accuracy_held_out"] > 0.8
    scorer = ModelScorer("reward", Reward(kind="model", path=result["path"], device="cpu"))
    (found,) = scorer.score([Asked("9!", Example("4+5=", "", 0, {}), DataConfig())], lambda: None)
    ((trained, _),) = trainer_of(result["path"], [Pair("9!", "9", "4+5=", "")]).rewards()
    assert found.reward == pytest.approx(trained, abs=1e-5)


def test_equal_seeds_give_equal_files(tmp_path: Path) -> None:
    model = backbone(tmp_path)
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir(), (tmp_path / "c").mkdir()
    weights = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        train(tmp_path / name, model=model, seed=seed)
        weights.append((tmp_path / name / "out" / "model.safetensors").read_bytes())
    assert weights[0] == weights[1] != weights[2]


def test_a_model_of_half_precision_stays_one_and_its_accuracy_is_that_of_what_is_written(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = backbone(tmp_path)
    AutoModelForCausalLM.from_pretrained(model).to(torch.bfloat16).save_pretrained(model)
    result, _, _ = train(tmp_path, model=model)
    written = load_backbone(tmp_path / "out", seed=0, device="cpu", max_tokens=None, named=str)
    assert written.kept_in == torch.bfloat16
    assert result["accuracy_held_out"] > 0.8


def test_what_is_cut_or_reads_alike_is_counted_and_said(tmp_path: Path) -> None:
    long, alike = Pair("x" * 200, "y" * 200, None, "row 100"), Pair("a\u00e9", "a\u00e8", "2+2=", "row 101")
    result, said, _ = train(tmp_path, [*PAIRS, long, alike])
    assert (result["texts_cut"], result["pairs_left_out"], result["max_tokens"]) == (2, 1, TAKES_TOKENS)
    assert said[0].startswith(
        f"2 of 204 texts are longer than {TAKES_TOKENS} tokens and lose their beginning; raise --max"
    )
    assert said[1].startswith("1 of 102 pairs are left out")


def test_pairs_that_are_equal_once_they_are_cut_are_named_as_such(tmp_path: Path) -> None:
    """More pairs would not help: of each text the model reads the end alone."""
    alike = [Pair(f"yes {i}" + "x" * 200, f"no {i}" + "x" * 200, None, f"row {i}") for i in range(20)]
    said = refused(tmp_path, pairs=alike)
    assert said.startswith("20 of 20 pairs are left out, since the model would read the same text twice")
    assert f"only the last {TAKES_TOKENS} tokens" in said and "--max_tokens" in said and "more pairs" not in said


def test_a_model_that_cannot_be_one_is_refused(tmp_path: Path) -> None:
    model = backbone(tmp_path, labels=3, head=True)
    assert refused(tmp_path, model=model).startswith(f"--model {model}: it has 3 labels, and a reward model has one")


@pytest.mark.parametrize(("pad_token", "written"), [("<pad>", 0), ("<end>", None), ("[beyond]", None), (None, None)])
def test_what_is_written_names_a_pad_token_only_if_no_text_can_end_with_it(
    tmp_path: Path, pad_token: str | None, written: int | None
) -> None:
    """Otherwise transformers would read the reward before the end of a text, or an id that the embedding has not."""
    result, _, _ = train(tmp_path, model=backbone(tmp_path, pad_token=pad_token), epochs=1.0)
    assert json.loads((Path(result["path"]) / "config.json").read_text()).get("pad_token_id") == written


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"pairs": PAIRS[:1]}, "--held_out 0.2: of 1 pairs, which have 1 prompts, there are none"),
        ({"held_out": 1e-9}, "--held_out 1e-09: of 100 pairs, .* held out: .* so give more prompts, or raise it"),
        ({"pairs": [Pair(f"{i}", "no", "one", f"row {i}") for i in range(9)]}, ".* of 9 pairs, which have 1 prompts,"),
        ({"max_tokens": 500}, f"--max_tokens 500: the model in .* takes {TAKES_TOKENS}"),
        (
            {"pairs": [Pair("", "a", None, "row 3")]},
            "row 3: one of its texts cannot be read: it has no token; leave the row out",
        ),
    ],
)
def test_what_cannot_be_trained_is_said_with_what_to_do(tmp_path: Path, how: dict[str, Any], words: str) -> None:
    assert re.match(words, refused(tmp_path, **how))


def test_a_directory_that_holds_no_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "it has no tokenizer that can be read" in refused(tmp_path, model=str(tmp_path / "empty"))
    model = Path(backbone(tmp_path))
    (model / "model.safetensors").write_bytes(b"cut")
    assert "it cannot be loaded as a model that classifies" in refused(tmp_path, model=str(model))


def test_a_loss_that_is_no_number_ends_it_and_nothing_is_written(tmp_path: Path) -> None:
    words = refused(tmp_path, TrainingFailed, lr=1e30)
    assert words.startswith("the loss is nan") and "lower the learning rate (lr 1e+30)" in words


def test_no_directory_of_its_name_is_there_when_it_is_killed_and_the_next_one_begins_anew(tmp_path: Path) -> None:
    model = backbone(tmp_path)
    code = f"""
import os
from pathlib import Path
from tests.actors.reward_training.test_training import PAIRS, TrainingOrder, RewardTraining, train_reward_model
order = TrainingOrder(Path({model!r}), Path({str(tmp_path / "out")!r}), RewardTraining(preferences="x"), 0, "cpu")
import transformers
saved = transformers.PreTrainedModel.save_pretrained
def dies(*a, **k):
    saved(*a, **k)
    os.kill(os.getpid(), 9)
transformers.PreTrainedModel.save_pretrained = dies
train_reward_model(order, PAIRS, named=str, say=print, tell=print)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, timeout=90, check=False)
    assert done.returncode == -9, done.stderr.decode()
    assert (tmp_path / "out.partial" / "model.safetensors").exists() and not (tmp_path / "out").exists()
    train(tmp_path, model=model)
    assert (tmp_path / "out" / RECORD).exists() and not (tmp_path / "out.partial").exists()


def test_a_second_training_to_the_same_directory_is_refused_and_the_first_one_is_whole(tmp_path: Path) -> None:
    order = TrainingOrder(Path(backbone(tmp_path)), tmp_path / "out", RewardTraining(preferences="x"), 0, "cpu")
    refusals = list[str]()

    def begin_another(_: Progress) -> None:
        with pytest.raises(CannotTrain) as found:
            train_reward_model(order, PAIRS, named=str, say=print, tell=print)
        refusals.append(str(found.value))

    train_reward_model(order, PAIRS, named=str, say=print, tell=begin_another)
    where = tmp_path / "out"
    wanted = f"{where}: another training is writing it ({where}.partial); wait for its end, or name another directory"
    assert set(refusals) == {wanted}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["backbone", "out"]
    assert (where / RECORD).exists() and not (where / "training.lock").exists()


def test_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    def interrupted(_: Progress) -> None:
        raise KeyboardInterrupt

    order = TrainingOrder(Path(backbone(tmp_path)), tmp_path / "out", RewardTraining(preferences="x"), 0, "cpu")
    named: Callable[[str], str] = str
    with pytest.raises(KeyboardInterrupt):
        train_reward_model(order, PAIRS, named=named, say=print, tell=interrupted)
    assert [path.name for path in tmp_path.iterdir()] == ["backbone"]
