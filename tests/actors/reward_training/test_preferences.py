"""Preferences: what a row may hold, what is refused with its place, what is held out, and what is made of answers."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from actors.environments.prompts.sources import open_source
from actors.environments.scoring.reward_text import RewardText
from actors.reward_training.errors import CannotTrain
from actors.reward_training.made_preferences import pairs_of_answers
from actors.reward_training.preferences import Pair, read_preferences
from configs.schema import DataConfig
from tests.chat_tokenizer import CHATML, save_tokenizer

USER, BEST, WORST = (
    {"role": "user", "content": "2+2"},
    {"role": "assistant", "content": "4"},
    {"role": "assistant", "content": "5"},
)


class NoModel:
    """Stands for a model; ``RewardText`` wants its config, its modules' names and its number of embeddings."""

    class config:  # noqa: D106, N801 (the name that models have)
        max_position_embeddings = 128
        pad_token_id = None

        @classmethod
        def get_text_config(cls) -> Any:
            return cls

    def named_modules(self) -> list[Any]:
        return []

    def get_input_embeddings(self) -> Any:
        return SimpleNamespace(weight=np.empty((1000, 1)))


def text_of(tmp_path: Path, template: str | None = CHATML) -> RewardText:
    return RewardText(NoModel(), save_tokenizer(tmp_path / "tokenizer", template))


def file_of(tmp_path: Path, *rows: dict[str, Any]) -> Path:
    path = tmp_path / "prefs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(tmp_path: Path, row: dict[str, Any], template: str | None = CHATML) -> Any:
    (pair,) = read_preferences(file_of(tmp_path, row), "PREFERENCES")
    return pair.read(text_of(tmp_path, template))


def test_each_form_of_a_row_is_read_as_a_scorer_would_read_it(tmp_path: Path) -> None:
    want = ([USER, BEST], [USER, WORST])
    assert read(tmp_path, {"prompt": "2+2", "chosen": "4", "rejected": "5"}) == want
    assert read(tmp_path, {"prompt": [USER], "chosen": "4", "rejected": "5"}) == want
    assert read(tmp_path, {"prompt": "2+2", "chosen": [BEST], "rejected": [WORST]}) == want
    assert read(tmp_path, {"prompt": "2+2", "chosen": [USER, BEST], "rejected": [USER, WORST]}) == want
    assert read(tmp_path, {"prompt": None, "chosen": [USER, BEST], "rejected": [USER, WORST]}) == want
    assert read(tmp_path, {"prompt": "2+2=", "chosen": "4", "rejected": "5"}, None) == ("2+2=4", "2+2=5")
    assert read(tmp_path, {"chosen": "all of it", "rejected": "and this"}) == ("all of it", "and this")


def test_chats_want_a_template(tmp_path: Path) -> None:
    with pytest.raises(
        CannotTrain, match=r"prefs.jsonl, row 0 \(line 1\) holds chat messages, and .* no chat template"
    ):
        read(tmp_path, {"chosen": [BEST], "rejected": [WORST]}, None)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"chosen": "a"}, "no column 'rejected'; the row has chosen"),
        ({"rejected": "a", "chosen": None}, "no column 'chosen'; the row has chosen, rejected"),
        ({"chosen": "a", "rejected": "a"}, "chosen and rejected are equal, so neither is better"),
        ({"chosen": "a", "rejected": [WORST]}, "one of chosen and rejected is text, the other chat messages"),
        ({"chosen": 4, "rejected": "a"}, "column 'chosen' holds 4, expected text or a list of chat messages"),
        ({"chosen": "a", "rejected": "b", "prompt": 7}, "column 'prompt' holds 7"),
        ({"chosen": [{"content": "x"}], "rejected": [WORST]}, "column 'chosen' holds [{'content'"),
    ],
)
def test_a_row_that_is_no_pair_is_refused_with_its_line(tmp_path: Path, row: dict[str, Any], words: str) -> None:
    path = file_of(tmp_path, {"chosen": "good", "rejected": "bad"}, row)
    with pytest.raises(CannotTrain) as found:
        read_preferences(path, "PREFERENCES")
    assert str(found.value).startswith(f"PREFERENCES {path}, row 1 (line 2): ")
    assert words in str(found.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [("", "it has no rows"), ("no JSON\n", "row 0 (line 1)"), ("[1]", "a int; expected a JSON object")],
)
def test_a_file_without_pairs_is_refused(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "prefs.jsonl").write_text(content)
    with pytest.raises(CannotTrain) as found:
        read_preferences(tmp_path / "prefs.jsonl", "PREFERENCES")
    assert words in str(found.value)
    for name in ("none.jsonl", "tokens.bin"):
        (tmp_path / "tokens.bin").write_text("x")
        with pytest.raises(CannotTrain, match=f"PREFERENCES .*{name}: "):
            read_preferences(tmp_path / name, "PREFERENCES")


def test_parquet_is_read_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    table = pa.table({"chosen": ["a", "b"], "rejected": ["c", None]})
    parquet.write_table(table, tmp_path / "prefs.parquet")  # pyright: ignore[reportUnknownMemberType]
    with pytest.raises(CannotTrain, match="row 1: no column 'rejected'"):
        read_preferences(tmp_path / "prefs.parquet", "PREFERENCES")


def test_what_is_held_out_follows_from_the_prompt_alone() -> None:
    prompts = [f"{n}+1" for n in range(2000)]
    held = {prompt for prompt in prompts if Pair("a", "b", prompt, "").is_held_out(0.2)}
    assert 300 < len(held) < 500
    assert held == {prompt for prompt in prompts if Pair("other", [], prompt, "elsewhere").is_held_out(0.2)}
    assert {prompt for prompt in prompts if Pair("a", "b", prompt, "").is_held_out(0.1)} < held
    turns: list[Any] = [{"role": "user", "content": "how many"}]
    shared = [Pair([*turns, {"role": "assistant", "content": str(n)}], [*turns, BEST], None, "") for n in range(5, 45)]
    assert len({pair.is_held_out(0.5) for pair in shared}) == 1, "conversations that begin alike stay together"
    assert len({Pair(str(n), "b", None, "").is_held_out(0.5) for n in range(40)}) == 2


GYM = DataConfig(source="reasoning_gym", task="spell_backward", size=300)


def test_the_better_one_of_made_pairs_is_better_by_the_tasks_own_scorer() -> None:
    source = open_source(GYM, 3)
    pairs = pairs_of_answers({"": (GYM, source)}, 3, 400)
    assert pairs == pairs_of_answers({"": (GYM, source)}, 3, 400)
    assert pairs != pairs_of_answers({"": (GYM, source)}, 4, 400)
    index_of = {source.row(i).prompt: i for i in range(len(source))}
    good = [
        tuple(source.score(str(text), index_of[str(pair.prompt)]) for text in (pair.chosen, pair.rejected))
        for pair in pairs
    ]
    assert all(chosen > rejected for chosen, rejected in good)
    assert sum(chosen < 1 for chosen, _ in good) / len(good) > 0.3, "wrong ones have an order too"


def test_made_pairs_come_from_all_sources_and_from_files(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{n}+1=", "answer": n + 1}) + "\n" for n in range(50)))
    table = DataConfig(path=str(path), template="Q: {prompt}")
    pairs = pairs_of_answers({"gym": (GYM, open_source(GYM, 0)), "sums": (table, open_source(table, 0))}, 0, 100)
    assert [pair.data for pair in pairs[:4]] == [GYM, table, GYM, table]
    assert pairs[1].read(text_of(tmp_path, None))[0] == f"Q: {pairs[1].prompt}{pairs[1].chosen}"


@pytest.mark.parametrize(("answer", "words"), [(None, "has no answer to make a pair of"), ("", "has no answer")])
def test_data_without_answers_makes_no_pairs(tmp_path: Path, answer: str | None, words: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "2+2=", "answer": answer}) + "\n")
    data = DataConfig(path=str(path))
    with pytest.raises(CannotTrain, match=words):
        pairs_of_answers({"": (data, open_source(data, 0))}, 0, 10)
