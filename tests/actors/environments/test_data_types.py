"""Values of a data set reach a reward function as they are: nothing between the file and the function turns them."""

from __future__ import annotations

import gzip
import json
import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgpack
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.environments.errors import RowChanged, ScorerBroken, SourceUnreadable
from actors.environments.prompts.sources import open_source
from actors.environments.prompts.text_rows import TextRows
from actors.environments.scoring.examples import Examples
from actors.environments.scoring.scorer_pool import ScorerPool
from actors.environments.scoring.scorers import make_scorer
from configs.schema import DataConfig, JobConfig
from tests.smallest_job import smallest_job

HALF_PAIR = "\ud83d"
ANY_TEXT = st.text(st.characters() | st.just(HALF_PAIR), max_size=8)
ANY_VALUE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | ANY_TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ANY_TEXT, inner, max_size=3),
    max_leaves=8,
)


def data_of(path: Path, **more: Any) -> DataConfig:
    return DataConfig.model_validate({"path": str(path)} | more)


def same(one: object, other: object) -> bool:
    """Equal in type and value, NaN included."""
    return repr(one) == repr(other)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("types")


@settings(max_examples=150, deadline=None)
@given(rows=st.lists(st.tuples(ANY_VALUE, ANY_VALUE), min_size=1, max_size=4), form=st.sampled_from(["l", "a", "z"]))
def test_what_stands_in_a_row_arrives_in_type_and_value(folder: Path, rows: list[Any], form: str) -> None:
    """As lines, as an array, packed; and found again by the context that travels in the row's place."""
    records = [{"prompt": "p", "answer": answer, "more": more} for answer, more in rows]
    lines = "\n".join(json.dumps(record) for record in records)
    path = folder / {"l": "rows.jsonl", "a": "rows.json", "z": "rows.jsonl.gz"}[form]
    if form == "z":
        path.write_bytes(gzip.compress(lines.encode()))
    else:
        path.write_text(lines if form == "l" else json.dumps(records, indent=1))
    source = open_source(data_of(path), 0)
    for index, record in enumerate(records):
        source.check(index)
        context = msgpack.packb([index, source.row(index).digest])
        example = Examples({"": source}).of(context)
        assert same(example.answer, record["answer"]) and same(example.extra, {"more": record["more"]})


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\n \n\n\t\n"])
@pytest.mark.parametrize("last", [True, False])
def test_marks_line_ends_and_blank_lines_are_no_rows(tmp_path: Path, mark: bytes, end: bytes, last: bool) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(mark + end.join(b'{"prompt": "%d"}' % i for i in range(3)) + end * last)
    rows = TextRows(path)
    assert [rows[i]["prompt"] for i in range(len(rows))] == ["0", "1", "2"]


def test_a_row_deeper_than_can_be_parsed_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a", "more": 1}\n{"prompt": "a", "more": ' + "[" * 200_000 + "]" * 200_000 + "}\n")
    with pytest.raises(SourceUnreadable, match=r"row 1 \(line 2\)"):
        open_source(data_of(path), 0).row(1)


def frame() -> Any:
    import pandas as pd

    return pd.DataFrame(
        [
            {
                "prompt": "1+1=",
                "answer": ["2", "two"],
                "when": datetime(2020, 1, 2, tzinfo=UTC),
                "n": 2**62,
                "x": math.nan,
            }
            for _ in range(3)
        ]
    )


@pytest.fixture
def forms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """The same three rows in every form that ``datasets`` reads."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    table = datasets.Dataset.from_pandas(frame())
    frame().to_parquet(tmp_path / "rows.parquet")
    table.save_to_disk(str(tmp_path / "saved"))
    datasets.DatasetDict(train=table, test=table.select([0])).save_to_disk(str(tmp_path / "splits"))
    datasets.DatasetDict(dev=table, test=table).save_to_disk(str(tmp_path / "no_train"))
    (tmp_path / "hub" / "data").mkdir(parents=True)
    frame().to_parquet(tmp_path / "hub" / "data" / "train-00000-of-00001.parquet")
    return {
        "parquet": tmp_path / "rows.parquet",
        "saved": tmp_path / "saved",
        "splits": tmp_path / "splits",
        "hub": tmp_path / "hub",
    }


@pytest.mark.parametrize("form", ["parquet", "saved", "splits", "hub"])
def test_tables_are_read_from_files_and_directories_with_their_types(forms: dict[str, Path], form: str) -> None:
    source = open_source(data_of(forms[form], source="hf_dataset"), 0)
    assert len(source) == 3
    for index in range(3):
        source.check(index)
    row = source.row(1)
    assert (
        row.answer == ["2", "two"] and row.extra["when"] == datetime(2020, 1, 2, tzinfo=UTC) and row.extra["n"] == 2**62
    )
    assert row.digest == open_source(data_of(forms[form]), 0).row(1).digest


def test_a_table_is_read_whatever_letters_its_path_has(forms: dict[str, Path]) -> None:
    odd = forms["parquet"].parent / "a#b?c%41d[1]*"
    odd.mkdir()
    assert len(open_source(data_of(forms["parquet"].rename(odd / "rows.parquet")), 0)) == 3


def test_splits_without_train_are_named(forms: dict[str, Path]) -> None:
    with pytest.raises(SourceUnreadable, match=r"dev, test.*none of them is train"):
        open_source(data_of(forms["saved"].parent / "no_train"), 0)


def test_a_null_prompt_far_down_a_table_is_found_before_the_first_row_is_used(tmp_path: Path) -> None:
    import pandas as pd

    pd.DataFrame({"prompt": ["a"] * 50 + [None], "answer": "1"}).to_parquet(tmp_path / "p.parquet")
    source = open_source(data_of(tmp_path / "p.parquet"), 0)
    with pytest.raises(SourceUnreadable, match=r"row 50.*'prompt' is null"):
        for index in range(len(source)):
            source.check(index)


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"prompt": "a", "answer": None}, "null"),
        ({"prompt": "a"}, "no column 'answer'"),
        ({"prompt": "a", "answer": ["1"]}, "list"),
        ({"prompt": "a", "answer": True}, "bool"),
    ],
)
def test_an_answer_that_nothing_can_equal_is_refused_where_text_is_compared(
    tmp_path: Path, row: dict[str, Any], complaint: str
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "a", "answer": "1"}) + "\n" + json.dumps(row))
    source = open_source(data_of(path), 0, compares=True)
    source.check(0)
    with pytest.raises(SourceUnreadable, match=rf"row 1 \(line 2\).*{complaint}"):
        source.check(1)
    open_source(data_of(path), 0).check(1)  # a function may make of it what it likes


@pytest.mark.parametrize(("answer", "response"), [(7, "7"), (-1.5, "-1.5"), ("7", "7")])
@pytest.mark.parametrize("kind", ["exact_match", "math_verify"])
def test_a_number_is_compared_as_its_text(answer: object, response: str, kind: str) -> None:
    example = Examples({}).of(msgpack.packb(["p", answer, 0, {}]))
    assert make_scorer(smallest_job(reward={"kind": kind}))(response, example) == 1.0


def test_a_row_that_has_changed_gives_no_answer_of_another_one(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a", "answer": "1"}\n{"prompt": "b", "answer": "2"}\n')
    context = msgpack.packb([1, open_source(data_of(path), 0).row(1).digest])
    path.write_text('{"prompt": "a", "answer": "1"}\n{"prompt": "b", "answer": "3"}\n')
    with pytest.raises(RowChanged, match="row 1"):
        Examples({"": open_source(data_of(path), 0)}).of(context)
    path.write_text('{"prompt": "a", "answer": "1"}\n')
    with pytest.raises(RowChanged, match="row 1"):
        Examples({"": open_source(data_of(path), 0)}).of(context)


SEEING = """
def score(prompt, response, answer, **columns):
    with open("{seen}", "a") as file:
        file.write(repr((answer, columns)) + "\\n")
    columns.clear()
    return 1.0
"""


@pytest.fixture
def seeing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A reward function that notes what it is given, and a tokenizer."""
    from tests.tiny_checkpoint import save_tokenizer

    (tmp_path / "seeing.py").write_text(SEEING.replace("{seen}", str(tmp_path / "seen.txt")))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path.cwd()}")
    (tmp_path / "model").mkdir()
    save_tokenizer(tmp_path / "model", 100)
    return tmp_path


def job_of(path: Path, **more: Any) -> JobConfig:
    reward = {"kind": "function", "function": "seeing:score"}
    return smallest_job(data={"path": str(path), "shuffle": False}, reward=reward, **more)


ODD = [
    {"prompt": "a", "answer": 2**70, "s": HALF_PAIR, "x": math.nan, "deep": [[[{"k": None}]]]},
    {"prompt": "b", "answer": None, "tests": "t" * (1 << 20)},
    {"prompt": "c", "tests": True},
]


async def test_a_function_in_its_process_gets_what_no_message_could_carry(seeing: Path) -> None:
    """Integers beyond 64 bits, half a surrogate pair, NaN, megabytes: eight of them in a message of a few bytes."""
    path = seeing / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in ODD))
    pool = ScorerPool(job_of(path), seeing / "log", seeing / "model", seeing)
    await pool.start()
    read = await pool.read(0, 3)
    contexts = [context for *_, context in read["prompts"]]
    verdicts = await pool.score([("r", context) for context in contexts for _ in range(2)])
    await pool.close()
    assert [verdict.reward for verdict in verdicts] == [1.0] * 6
    assert max(len(context) for context in contexts) < 32
    given = (seeing / "seen.txt").read_text(encoding="utf-8").splitlines()
    wanted = [(row.get("answer"), {k: v for k, v in row.items() if k not in ("prompt", "answer")}) for row in ODD]
    assert given[0] in map(repr, wanted), "the trial before the start"
    assert given[1:] == [repr(row) for row in wanted for _ in range(2)]


async def test_what_cannot_be_read_at_the_start_says_whose_fault_it_is(seeing: Path) -> None:
    """Data and tokenizer: for good. A verifier: its own error."""
    missing = ScorerPool(job_of(seeing / "nowhere.jsonl"), seeing / "log", seeing / "model", seeing)
    with pytest.raises(SourceUnreadable, match=r"nowhere\.jsonl"):
        await missing.start()
    assert not psutil.Process().children(), "those that could start are gone with the one that could not"
    (seeing / "seeing.py").write_text("oops(")
    broken = ScorerPool(job_of(seeing / "nowhere.jsonl"), seeing / "log")
    with pytest.raises(ScorerBroken):
        await broken.start()
