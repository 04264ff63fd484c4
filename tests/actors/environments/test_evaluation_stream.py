"""Prompts of the evaluation: each once, with contexts of their own, held against those of training."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from actors.environments.errors import SourceUnreadable
from actors.environments.prompts.evaluation_stream import EvaluationStream, Overlap
from actors.environments.prompts.sources import open_all_sources
from actors.environments.scoring.examples import Examples, source_of
from configs.schema import JobConfig
from supervisors.preparation.tiny_model import make_tiny_model
from tests.smallest_job import smallest_job


def job_of(tmp_path: Path, training: list[str], held_out: list[str]) -> JobConfig:
    for name, prompts in (("train", training), ("held_out", held_out)):
        rows = [json.dumps({"prompt": prompt, "answer": prompt.upper()}) + "\n" for prompt in prompts]
        (tmp_path / f"{name}.jsonl").write_text("".join(rows))
    return smallest_job(
        model={"source": "tiny", "hidden": 16, "layers": 1, "warm_start_steps": 0},
        data={"path": str(tmp_path / "train.jsonl")},
        eval={"data": {"path": str(tmp_path / "held_out.jsonl"), "shuffle": False}},
    )


def test_each_prompt_is_read_once_and_found_again_by_its_context(tmp_path: Path) -> None:
    job = job_of(tmp_path, ["a", "b"], ["c", "a", "d"])
    make_tiny_model(job, tmp_path / "model")
    sources = open_all_sources(job)
    stream = EvaluationStream(job, tmp_path / "model", tmp_path, sources)
    read = stream.read(0, 100)
    assert read["exhausted"] and read["overlap"] == 1, "a is trained on"
    contexts = [prompt[3] for prompt in read["prompts"]]
    assert {source_of(context) for context in contexts} == {"eval.data"}
    assert [Examples(sources).answer(context) for context in contexts] == ["C", "A", "D"]


def test_a_look_ends_in_time_and_goes_on_where_it_was(tmp_path: Path) -> None:
    job = job_of(tmp_path, ["a", "b", "b", "e"], ["c", "a", "b"])
    sources = open_all_sources(job)
    overlap = Overlap({"": sources[""]}, {"eval.data": sources["eval.data"]}, rows_max=3)
    looks = 1
    while not overlap.look(until_s=0.0):
        looks += 1
    assert overlap.equal == 2 and looks == 3 + 3 + 1, "a row a look, and no more rows than it may look at"


def test_of_an_environments_tasks_whole_rows_are_compared_since_prompts_may_be_equal(tmp_path: Path) -> None:
    for name, games in (("train", [1, 2, 3]), ("held_out", [3, 4])):
        rows = [json.dumps({"prompt": "Guess.", "answer": "7", "game": game}) + "\n" for game in games]
        (tmp_path / f"{name}.jsonl").write_text("".join(rows))
    job = smallest_job(
        reward={},
        environment={"kind": "python", "path": "games:Game"},
        data={"source": "jsonl", "path": str(tmp_path / "train.jsonl")},
        eval={"data": {"source": "jsonl", "path": str(tmp_path / "held_out.jsonl")}},
    )
    sources = open_all_sources(job)
    training, held_out = {"": sources[""]}, {"eval.data": sources["eval.data"]}
    by_row = Overlap(training, held_out, rows_max=10, whole_rows=job.has_episodes)
    by_prompt = Overlap(training, held_out, rows_max=10)
    assert by_row.look(until_s=math.inf) and by_prompt.look(until_s=math.inf)
    assert (by_row.equal, by_prompt.equal) == (1, 1), "one game of two, and one prompt of one"
    assert len(by_row._held_out) == 2 and len(by_prompt._held_out) == 1


def test_prompts_of_which_none_can_be_used_are_named_by_the_keys_of_the_evaluation(tmp_path: Path) -> None:
    job = job_of(tmp_path, ["a"], ["bbbb"])
    assert job.eval is not None
    short = job.eval.data.model_copy(update={"max_prompt_tokens": 1})
    job = job.model_copy(update={"eval": job.eval.model_copy(update={"data": short})})
    make_tiny_model(job, tmp_path / "model")
    stream = EvaluationStream(job, tmp_path / "model", tmp_path, open_all_sources(job))
    with pytest.raises(SourceUnreadable, match=r"eval.data.path .*: none of the 1 .*longer than eval.data.max_prompt"):
        stream.read(0, 1)
