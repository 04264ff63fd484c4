"""The guide to several GPUs says what the code says: the table of nodes, and the sentences of what is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from configs.checks.rank_checks import check_rank_places, check_sharding
from configs.errors import ConfigError
from configs.loader import job_from_mapping
from supervisors.cli.looking.tables import COLUMNS
from supervisors.jobs.device_needs import device_problems
from supervisors.machine.devices import find_devices
from supervisors.tree.errors import NoSuchDevices
from tests.smallest_job import smallest_job
from tests.supervisors.machine.fake_driver import fake_nvidia_smi

PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "several_gpus.md").read_text("utf-8")
REFUSED = dict(re.findall(r"^\| `([^`]+)`[^|]*\| `([^`]+)` \|$", PAGE.split("## What is refused")[1], re.MULTILINE))


def test_the_table_of_nodes_has_all_its_columns() -> None:
    header = next(line for line in PAGE.splitlines() if line.startswith("node "))
    assert re.split(r"  +", header) == [column.replace("_", " ") for column in COLUMNS["nodes"]]


@pytest.mark.parametrize("asked", [asked for asked in REFUSED if asked.startswith("--devices")])
def test_devices_are_refused_in_the_words_of_the_guide(asked: str, tmp_path: Path) -> None:
    with pytest.raises(NoSuchDevices) as refused:
        find_devices(asked.removeprefix("--devices "), {"PATH": fake_nvidia_smi(tmp_path, [0, 0])}, tmp_path / "none")
    assert str(refused.value) == REFUSED[asked]


def test_the_guide_shows_the_preset_word_for_word() -> None:
    assert (Path(__file__).parents[2] / "configs" / "fsdp.yaml").read_text("utf-8") in PAGE


def test_what_a_job_wants_is_refused_in_the_words_of_the_guide() -> None:
    job = smallest_job(rollout={"engine": "vllm", "tensor_parallel": 4})
    assert [wrong for _, wrong, _ in device_problems(job, 2)] == [REFUSED["rollout.tensor_parallel: 4"]]
    sharded = smallest_job(trainer={"backend": "fsdp", "ranks": 4})
    assert [wrong for _, wrong, _ in device_problems(sharded, 2)] == [REFUSED["trainer.ranks: 4"]]
    alone = smallest_job(trainer={"backend": "fsdp", "ranks": 2, "nodes": 2})
    assert [wrong for _, wrong, _ in check_rank_places(alone)] == [REFUSED["trainer.nodes: 2"]]
    uneven = smallest_job(trainer={"backend": "fsdp", "ranks": 4, "nodes": 3})
    assert [wrong for _, wrong, _ in check_sharding(uneven)] == [REFUSED["trainer.nodes: 3"]]
    numbered = smallest_job().model_dump(mode="json", exclude_unset=True) | {"trainer": {"device": "cuda:1"}}
    with pytest.raises(ConfigError, match=re.escape(REFUSED["trainer.device: cuda:1"])):
        job_from_mapping(numbered, "job.yaml")


@pytest.mark.parametrize(("option", "ids"), [(None, "0 1 2"), ("2", "0 1"), ("0,2", "0 2"), ("2,", "2"), ("none", "")])
def test_the_forms_of_the_option_mean_what_the_guide_says(option: str | None, ids: str, tmp_path: Path) -> None:
    assert option is None or f"| `{option}` |" in PAGE
    environ = {"PATH": fake_nvidia_smi(tmp_path, [0, 0, 0])}
    assert " ".join(find_devices(option, environ, tmp_path / "none").ids) == ids
