"""Providers of several jobs under one command: whose machines are whose, and when they end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from configs.errors import ConfigError
from configs.schema import JobConfig
from supervisors.providers import job_provider
from supervisors.providers.job_provider import JobProvider, JobProviders, check_apart
from tests.smallest_job import smallest_job

TRACE = "at_s,node,event,kind\n0,{node},up,spot\n"


def job_with_machines(tmp_path: Path, name: str, node: str = "a") -> JobConfig:
    trace = tmp_path / f"{name}.csv"
    trace.write_text(TRACE.format(node=node))
    return smallest_job(
        name=name, cluster={"place_rollout": "elastic"}, provider={"kind": "local", "trace": str(trace)}
    )


async def test_each_provider_hears_of_its_own_job_and_ends_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    closed: list[str] = []
    aimed: list[tuple[str, Any]] = []

    @contextlib.asynccontextmanager
    async def providing(self: JobProvider, join: str) -> AsyncIterator[None]:
        opened.append(self._machines)
        yield
        closed.append(self._machines)

    def aim(self: JobProvider, workers: int, _: object) -> None:
        aimed.append((self._machines, workers))

    monkeypatch.setattr(job_provider.JobProvider, "_providing", providing)
    monkeypatch.setattr(job_provider.JobProvider, "_aim", aim)
    said: list[Mapping[str, Any]] = []
    jobs = {tmp_path / name: job_with_machines(tmp_path, name) for name in ("first", "second")}
    providers = JobProviders(jobs, said.append, keys=None, several=True)
    async with providers.providing("tcp://127.0.0.1:7001"):
        assert opened == ["first-", "second-"]
        providers.hear({"of_job": "second", "remote_workers": 3})
        assert aimed == [("second-", 3)]
        providers.hear({"of_job": "first", "processes": "gone"})
        for _ in range(3):
            await asyncio.sleep(0)
        assert closed == ["first-"]
    assert closed == ["first-", "second-"]
    assert [news["of_job"] for news in said] == ["second", "first"]


@pytest.mark.parametrize(
    ("names", "node", "says"),
    [
        (("Exp", "exp"), "a", "a machine of Exp would be called exp-1, as if it were one of exp"),
        (("exp", "exp-b"), "b-1", "a machine of exp would be called exp-b-1, as if it were one of exp-b"),
        (("a", "b"), "x" * 60, "characters, at most 56 are allowed"),
    ],
)
def test_jobs_whose_machines_could_not_be_told_apart_are_refused(
    tmp_path: Path, names: tuple[str, str], node: str, says: str
) -> None:
    jobs = [job_with_machines(tmp_path, name, node) for name in names]
    with pytest.raises(ConfigError, match=says):
        check_apart(jobs)


def test_a_name_that_another_begins_with_is_in_nobodys_way(tmp_path: Path) -> None:
    check_apart([job_with_machines(tmp_path, name) for name in ("exp", "exp-2", "exp-b")])
