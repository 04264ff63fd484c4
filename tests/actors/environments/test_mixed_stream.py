"""Several sources by weight: one stream, the same from any ordinal, slice by slice, and after a restart."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import msgpack
import pytest

from actors.environments.errors import RowChanged, SourceUnreadable
from actors.environments.prompts.mixed_stream import Stream, open_stream
from actors.environments.prompts.sources import open_sources
from actors.environments.scoring.examples import Examples, row_of, source_of
from configs.schema import JobConfig
from tests.chat_tokenizer import save_tokenizer
from tests.smallest_job import smallest_job

WEIGHTS = {"easy": 3.0, "hard": 1.0}
ROWS = {"easy": 7, "hard": 20}


@pytest.fixture
def job(tmp_path: Path) -> JobConfig:
    """Two files, of which the shorter has the larger weight; each has a template of its own."""
    save_tokenizer(tmp_path / "model")
    for name, count in ROWS.items():
        rows = [{"prompt": f"{name} {i}", "answer": str(i)} for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return mixed(tmp_path)


def mixed(tmp_path: Path, **data: Any) -> JobConfig:
    mix = [
        {"name": name, "weight": weight, "path": str(tmp_path / f"{name}.jsonl"), "template": f"{name}: {{prompt}}"}
        for name, weight in WEIGHTS.items()
    ]
    return smallest_job(seed=5, data={"mix": mix, **data})


def opened(job: JobConfig, tmp_path: Path, run_dir: Path | None = None) -> Stream:
    return open_stream(job, tmp_path / "model", run_dir, open_sources(job))


def texts(read: dict[str, Any]) -> list[str]:
    return [text for _, _, text, _ in read["prompts"]]


def test_each_source_has_its_share_and_shows_each_of_its_rows_once_an_epoch(job: JobConfig, tmp_path: Path) -> None:
    read = opened(job, tmp_path).read(0, 84)
    assert [ordinal for ordinal, *_ in read["prompts"]] == list(range(84))
    names = Counter(text.partition(":")[0] for text in texts(read))
    assert abs(names["hard"] - 21) <= 1, "a quarter of them"
    hard = [text for text in texts(read) if text.startswith("hard")]
    easy = [text for text in texts(read) if text.startswith("easy")]
    assert len(set(hard[:20])) == 20 and all(len(set(easy[i : i + 7])) == 7 for i in range(0, 56, 7))
    assert {text.partition(":")[0] for text in texts(read)[:8]} == {"easy", "hard"}, "they alternate"


def test_a_stream_that_has_just_been_opened_goes_on_at_any_ordinal(job: JobConfig, tmp_path: Path) -> None:
    whole = opened(job, tmp_path).read(0, 90)["prompts"]
    for start in (1, 13, 64):
        assert opened(job, tmp_path).read(start, 20)["prompts"] == whole[start : start + 20]


def test_slices_that_end_at_once_give_the_same_prompts(job: JobConfig, tmp_path: Path) -> None:
    whole = opened(job, tmp_path).read(0, 40)["prompts"]
    hurried, found = opened(job, tmp_path, tmp_path), list[Any]()
    for _ in range(400):
        found += hurried.read(len(found), 40 - len(found), 0.0)["prompts"]
        if len(found) == 40:
            break
    assert found == whole


def test_what_was_seen_of_each_source_is_kept_for_the_next_process(job: JobConfig, tmp_path: Path) -> None:
    opened(job, tmp_path, tmp_path).read(0, 30)
    assert {path.name for path in tmp_path.glob("prompt_rows*")} == {f"prompt_rows.{name}.jsonl" for name in ROWS}
    again = opened(job, tmp_path, tmp_path).read(30, 1)
    assert again["rows"] == again["checked"] == 27
    assert not again["replaced"]


def test_the_job_ends_before_the_first_prompt_of_a_source_that_is_through(job: JobConfig, tmp_path: Path) -> None:
    read = opened(mixed(tmp_path, epochs=1), tmp_path).read(0, 90)
    assert read["exhausted"]
    names = Counter(text.partition(":")[0] for text in texts(read))
    assert names["easy"] == 7
    assert texts(read) == texts(opened(job, tmp_path).read(0, len(read["prompts"])))


def test_a_response_is_scored_by_the_row_of_its_own_source(job: JobConfig, tmp_path: Path) -> None:
    sources = open_sources(job)
    examples = Examples(sources)
    for _, _, text, context in opened(job, tmp_path).read(0, 40)["prompts"]:
        example = examples.of(context)
        assert text == f"{source_of(context)}: {example.prompt}"
        assert example.answer == str(row_of(context))
    with pytest.raises(RowChanged, match="row 0 of other"):
        examples.of(msgpack.packb([0, 0, "other"]))


def test_rows_that_are_passed_over_are_told_with_their_source(job: JobConfig, tmp_path: Path) -> None:
    long = {"prompt": "x" * 200, "answer": "1"}
    (tmp_path / "hard.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [long, long | {"prompt": "x"}]))
    read = opened(mixed(tmp_path, max_prompt_tokens=40), tmp_path).read(0, 16)
    assert sum(read["passed"].values()) == 1
    assert next(iter(read["first"].values())).startswith("hard, ")


def test_a_row_that_is_wrong_in_any_source_is_said_before_the_first_prompt(job: JobConfig, tmp_path: Path) -> None:
    with (tmp_path / "hard.jsonl").open("a") as file:
        file.write('{"prompt": null, "answer": "1"}\n')
    with pytest.raises(SourceUnreadable, match=r"hard\.jsonl.*line 21"):
        opened(job, tmp_path).read(0, 1)
