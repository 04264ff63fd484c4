"""A data set's hub name becomes a directory of the run, by the real library from a small hub, or one sentence."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from actors.environments.prompts.sources import open_sources
from configs.checks.checks import check_job
from configs.schema import JobConfig
from supervisors.preparation.data_preparation import prepare_data
from supervisors.tree.errors import DataNotFetched
from tests.smallest_job import smallest_job
from tests.supervisors.jobs.hub_server import HubServer, Repository

NAME = "acme/sums"
CARD = b"""---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train.jsonl}
  - {split: test, path: main/test.jsonl}
- config_name: hard
  data_files:
  - {split: train, path: hard/train.jsonl}
---
"""


def lines(kind: str, count: int) -> bytes:
    return b"".join(json.dumps({"question": f"{kind} {i}", "answer": str(i)}).encode() + b"\n" for i in range(count))


FILES = {
    "README.md": CARD,
    "main/train.jsonl": lines("main", 12),
    "main/test.jsonl": lines("test", 5),
    "hard/train.jsonl": lines("hard", 7),
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    server = HubServer()
    server.repositories[f"datasets/{NAME}"] = Repository()
    server.repositories[f"datasets/{NAME}"].commit(FILES)
    monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
    for name in ("HF_TOKEN", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "HF_DATASETS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    yield server
    server.close()


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "run" / "logs").mkdir(parents=True)
    return tmp_path / "run"


def job(**data: Any) -> JobConfig:
    return smallest_job(data={"path": NAME, "prompt_key": "question", "config": "main"} | data)


async def refusal(job: JobConfig, run_dir: Path) -> str:
    with pytest.raises(DataNotFetched) as found:
        await prepare_data(job, run_dir, lambda _: None)
    assert found.value.permanent
    assert not list(run_dir.glob("dataset*")), "nothing that looks like a data set is left"
    assert "\n" not in str(found.value)
    return str(found.value)


@pytest.mark.timeout(120)
async def test_a_hub_name_is_fetched_once_and_kept_for_a_resume(hub: HubServer, run_dir: Path, tmp_path: Path) -> None:
    said: list[str] = []
    assert check_job(job()) == []
    prepared = await prepare_data(job(), run_dir, said.append)
    assert prepared.data.path == str(run_dir / "dataset")
    assert (prepared.data.config, prepared.data.split, prepared.data.revision) == (None, None, None)
    (source,) = open_sources(prepared).values()
    assert [source.row(i).prompt for i in range(len(source))] == [f"main {i}" for i in range(12)]
    assert said[0] == f"looking for the data set {NAME}"
    assert said[-1] == f"the data set is {NAME}: 12 rows, kept in {run_dir / 'dataset'}"

    hub.close()
    shutil.rmtree(tmp_path / "hf")
    assert await prepare_data(job(), run_dir, said.append) == prepared, "neither hub nor cache is needed any more"
    assert len(said) == 2


@pytest.mark.timeout(120)
async def test_config_split_and_a_part_of_a_split_are_those_of_the_library(hub: HubServer, run_dir: Path) -> None:
    """In a mix each source is fetched to a directory of its own; a file beside them stays where it is."""
    file = run_dir.parent / "own.jsonl"
    file.write_bytes(lines("own", 3))
    hub_keys = {"path": NAME, "prompt_key": "question"}
    mix = [
        {"name": "part", "config": "main", "split": "train[:4]", **hub_keys},
        {"name": "hard", "config": "hard", **hub_keys},
        {"name": "own", "path": str(file), "prompt_key": "question"},
    ]
    prepared = await prepare_data(smallest_job(data={"mix": mix}), run_dir, lambda _: None)
    sources = open_sources(prepared)
    assert {name: len(source) for name, source in sources.items()} == {"part": 4, "hard": 7, "own": 3}
    assert {path.name for path in run_dir.glob("dataset*")} == {"dataset-part", "dataset-hard"}
    assert prepared.data.mix[2].path == str(file)


@pytest.mark.timeout(200)
async def test_what_cannot_be_had_is_one_sentence_with_field_and_remedy(
    hub: HubServer, run_dir: Path, tmp_path: Path
) -> None:
    unknown = await refusal(job(path="acme/nothing"), run_dir)
    assert unknown.startswith("data.path: 'acme/nothing' is neither a file or directory here nor a data set")
    assert "Check the name; if it is private set HF_TOKEN" in unknown

    split = await refusal(job(split="dev"), run_dir)
    assert split.startswith("data.split: 'dev'") and "train" in split and "test" in split

    config = await refusal(job(config="easy"), run_dir)
    assert config.startswith("data.config: 'easy'") and "main" in config

    revision = await refusal(job(revision="v9"), run_dir)
    assert revision.startswith("data.revision: 'v9' is no branch, tag or commit")

    shutil.rmtree(tmp_path / "hf")
    hub.repositories[f"datasets/{NAME}"].private = True
    private = await refusal(job(), run_dir)
    assert private.startswith(f"data.path: {NAME!r} is neither") and "HF_TOKEN" in private


@pytest.mark.timeout(120)
async def test_without_a_hub_the_cache_does_and_without_both_one_sentence_says_so(
    hub: HubServer, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await prepare_data(job(), run_dir, lambda _: None)
    shutil.rmtree(run_dir / "dataset")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    said: list[str] = []
    prepared = await prepare_data(job(), run_dir, said.append)
    assert len(next(iter(open_sources(prepared).values()))) == 12
    assert "was of no help; the cache has acme/sums" in said[1]

    shutil.rmtree(run_dir / "dataset")
    assert (await refusal(job(revision="main"), run_dir)).startswith("data.revision: the hub at ")
    shutil.rmtree(tmp_path / "hf")
    offline = await refusal(job(), run_dir)
    assert offline.startswith(f"data.path: {NAME!r} is neither a file or directory here nor in the cache")
    assert "Start again where the hub can be reached" in offline


async def test_columns_that_the_data_lack_are_said_before_a_model_is_fetched(hub: HubServer, run_dir: Path) -> None:
    with pytest.raises(DataNotFetched) as found:
        await prepare_data(job(prompt_key="prompt"), run_dir, lambda _: None)
    wrong = "data.prompt_key: the data set has no column 'prompt' (it has: question, answer)"
    assert str(found.value) == f"{wrong}. Use one of its columns: question, answer"


@pytest.mark.parametrize(
    ("data", "field"),
    [
        ({"path": "acme/rows.jsonl", "config": None}, "data.path"),
        ({"path": "no/such/place", "config": None}, "data.path"),
        ({"mix": [{"name": "a", "path": NAME}]}, "data.path"),
        ({"mix": [{"name": "a", "path": NAME}, {"name": "a", "path": NAME}], "path": None, "config": None}, "data.mix"),
    ],
)
def test_what_is_no_hub_name_or_said_twice_is_refused_by_the_check(data: dict[str, Any], field: str) -> None:
    problems = check_job(job(**{"prompt_key": "prompt"} | data))
    assert field in [problem[0] for problem in problems], problems
