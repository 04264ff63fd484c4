"""A hub name becomes a directory, by the real client from a small hub, or one message that says what to do."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from configs.limits import DEFAULT_LIMITS
from configs.schema import JobConfig
from supervisors.preparation.abandonable import Abandonable
from supervisors.preparation.hub_download import Order, _check_room, _Failed, fetch, read_report
from supervisors.preparation.model_preparation import prepare_model
from supervisors.preparation.phase import Phase
from supervisors.tree.errors import ModelNotFetched
from tests.smallest_job import smallest_job
from tests.supervisors.jobs.hub_server import HubServer, Repository
from transport.errors import HeadraceError

NAME = "acme/tiny-1.5"
MODEL: dict[str, bytes] = {
    "config.json": b'{"eos_token_id": 1}',
    "tokenizer.json": b"{}",
    "tokenizer_config.json": b'{"chat_template": ""}',
    "model.safetensors": b"weights one" * 1000,
}
EXTRA = {"pytorch_model.bin": b"pickle", "onnx/config.json": b"{}", "README.md": b"read me"}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    server = HubServer()
    monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
    for name in ("HF_TOKEN", "HF_HUB_CACHE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    yield server
    server.close()


def a_job(name: str = NAME, revision: str | None = None, **limits: Any) -> JobConfig:
    limits = DEFAULT_LIMITS.model_dump() | {"model_progress_s": 0.05} | limits
    return smallest_job(model={"path": name, "revision": revision}, limits=limits)


def a_run_dir(tmp_path: Path, name: str) -> Path:
    run_dir = tmp_path / name
    (run_dir / "logs").mkdir(parents=True)
    return run_dir


async def refusal(job: JobConfig, run_dir: Path) -> str:
    with pytest.raises(ModelNotFetched) as found:
        await prepare_model(job, run_dir)
    assert not (run_dir / "model.json").exists()
    assert isinstance(found.value, HeadraceError)
    return str(found.value)


async def test_a_hub_name_is_fetched_without_what_is_not_needed_and_its_commit_is_written_down(
    hub: HubServer, tmp_path: Path
) -> None:
    repository = hub.repositories[NAME] = Repository()
    commit = repository.commit(MODEL | EXTRA)
    run_dir, said = a_run_dir(tmp_path, "run"), list[str]()
    directory = await prepare_model(a_job(), run_dir, said.append)
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == MODEL
    assert directory.is_relative_to(tmp_path / "hf")
    assert sorted(hub.fetched) == sorted(MODEL)
    record = {"path": NAME, "revision": None, "commit": commit, "directory": str(directory)}
    assert json.loads((run_dir / "model.json").read_text()) == record
    assert said[0] == f"looking for the model {NAME}"
    assert commit[:12] in said[-1]
    hub.fetched.clear()
    assert await prepare_model(a_job(), a_run_dir(tmp_path, "second")) == directory
    assert hub.fetched == []  # the cache has it


async def test_a_download_says_how_far_it_is(hub: HubServer, tmp_path: Path) -> None:
    repository = hub.repositories[NAME] = Repository()
    repository.commit(MODEL | {"model.safetensors": bytes(30_000_000)})
    hub.flow.clear()
    shown: list[Phase] = []

    def show(phase: Phase) -> None:
        shown.append(phase)
        if phase.done:
            hub.flow.set()

    await prepare_model(a_job(), a_run_dir(tmp_path, "run"), show=show)
    assert any(0 < phase.done < phase.total for phase in shown)
    assert {(phase.name, phase.unit) for phase in shown} == {(f"downloading {NAME}", "bytes")}


async def test_a_resumed_run_keeps_its_commit_and_a_new_one_takes_the_newest(hub: HubServer, tmp_path: Path) -> None:
    repository = hub.repositories[NAME] = Repository()
    repository.commit(MODEL)
    run_dir = a_run_dir(tmp_path, "run")
    first = await prepare_model(a_job(), run_dir)
    newer = MODEL | {"model.safetensors": b"weights two"}
    repository.commit(newer)
    assert await prepare_model(a_job(), run_dir) == first
    new = await prepare_model(a_job(), a_run_dir(tmp_path, "new"))
    assert (new / "model.safetensors").read_bytes() == b"weights two"
    shutil.rmtree(tmp_path / "hf")  # the cache is gone too: the commit is fetched again, not the branch
    again = await prepare_model(a_job(), run_dir)
    assert (again / "model.safetensors").read_bytes() == MODEL["model.safetensors"]
    hub.broken_status = 503
    assert await prepare_model(a_job(), run_dir) == again  # a commit that is cached needs no hub


async def test_a_revision_is_a_branch_a_tag_or_a_commit(hub: HubServer, tmp_path: Path) -> None:
    repository = hub.repositories[NAME] = Repository()
    old = repository.commit(MODEL | {"model.safetensors": b"old"}, branch="v1")
    repository.commit(MODEL)
    for number, revision in enumerate(("v1", old)):
        directory = await prepare_model(a_job(revision=revision), a_run_dir(tmp_path, str(number)))
        assert (directory / "model.safetensors").read_bytes() == b"old"
    message = await refusal(a_job(revision="v2"), a_run_dir(tmp_path, "no such"))
    assert message.startswith("model.revision: 'v2' is no branch, tag or commit of acme/tiny-1.5 on http://127.0.0.1:")
    assert "remove model.revision" in message


async def test_offline_the_cache_is_enough_if_it_is_whole(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repositories[NAME] = Repository()
    hub.repositories[NAME].commit(MODEL)
    directory = await prepare_model(a_job(), a_run_dir(tmp_path, "online"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub.fetched.clear()
    said: list[str] = []
    assert await prepare_model(a_job(), a_run_dir(tmp_path, "offline"), said.append) == directory
    assert any("HF_HUB_OFFLINE" in message and message.endswith("the cache has it") for message in said)
    (directory / "model.safetensors").unlink()
    message = await refusal(a_job(), a_run_dir(tmp_path, "torn"))
    assert f"model.path: {NAME!r} is in the cache without model.safetensors ({directory})" in message
    message = await refusal(a_job("acme/other"), a_run_dir(tmp_path, "unknown"))
    assert f"model.path: 'acme/other' is not in the cache {tmp_path}/hf/hub, and" in message
    assert "HF_HUB_OFFLINE" in message
    assert "hf download acme/other --local-dir DIR) and set model.path to DIR" in message
    assert hub.fetched == []


async def test_a_cache_that_was_filled_by_others_is_used(hub: HubServer, tmp_path: Path) -> None:
    """As a directory copied from another machine: refs, snapshots, nothing else."""
    hub.close()
    commit = "0123456789abcdef0123456789abcdef01234567"
    place = tmp_path / "hf" / "hub" / "models--acme--tiny-1.5"
    snapshot = place / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text(commit)
    for name, data in MODEL.items():
        (snapshot / name).write_bytes(data)
    said: list[str] = []
    assert await prepare_model(a_job(), a_run_dir(tmp_path, "run"), said.append) == snapshot
    assert any("ConnectError" in message and message.endswith("the cache has it") for message in said)


async def test_a_hub_that_is_not_there_or_out_of_order_is_named_with_what_to_do(hub: HubServer, tmp_path: Path) -> None:
    hub.broken_status = 500
    message = await refusal(a_job(), a_run_dir(tmp_path, "broken"))
    assert f"model.path: {NAME!r} is not in the cache" in message
    assert f"the hub at {hub.endpoint} was of no help (HfHubHTTPError: Server error '500" in message
    hub.close()
    message = await refusal(a_job(), a_run_dir(tmp_path, "away"))
    assert f"the hub at {hub.endpoint} was of no help (ConnectError" in message
    assert "set model.path to DIR" in message


async def test_a_model_that_one_may_not_have_says_how_to_get_it(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, repository in (("acme/gated", Repository(gated=True)), ("acme/private", Repository(private=True))):
        hub.repositories[name] = repository
        repository.commit(MODEL)
    unknown = await refusal(a_job("acme/unknown"), a_run_dir(tmp_path, "1"))
    assert "Check the name" in unknown
    gated = await refusal(a_job("acme/gated"), a_run_dir(tmp_path, "2"))
    assert "GatedRepoError" in gated
    assert "Ask for access on its page and set HF_TOKEN" in gated
    assert "HF_TOKEN" in await refusal(a_job("acme/private"), a_run_dir(tmp_path, "3"))
    monkeypatch.setenv("HF_TOKEN", "hf_stranger")
    assert "GatedRepoError" in await refusal(a_job("acme/gated"), a_run_dir(tmp_path, "4"))
    monkeypatch.setenv("HF_TOKEN", "hf_expired")
    expired = await refusal(a_job(NAME), a_run_dir(tmp_path, "5"))
    assert "Invalid credentials" in expired
    assert "renew one that is refused" in expired
    monkeypatch.setenv("HF_TOKEN", "hf_friend")
    for number, name in enumerate(("acme/gated", "acme/private")):
        directory = await prepare_model(a_job(name), a_run_dir(tmp_path, f"friend {number}"))
        assert (directory / "model.safetensors").exists()


async def test_a_repository_that_is_no_model_is_refused_before_anything_is_fetched(
    hub: HubServer, tmp_path: Path
) -> None:
    hub.repositories[NAME] = Repository()
    hub.repositories[NAME].commit({"config.json": b"{}", "model.Q4.gguf": b"x", "original/model.safetensors": b"x"})
    message = await refusal(a_job(), a_run_dir(tmp_path, "run"))
    assert "at its top there is no tokenizer.json, model.safetensors" in message
    assert hub.fetched == []


async def test_old_weights_are_fetched_where_there_are_no_safetensors(hub: HubServer, tmp_path: Path) -> None:
    hub.repositories[NAME] = Repository()
    hub.repositories[NAME].commit(
        {name: data for name, data in MODEL.items() if name != "model.safetensors"} | {"pytorch_model.bin": b"old"}
    )
    directory = await prepare_model(a_job(), a_run_dir(tmp_path, "run"))
    assert (directory / "pytorch_model.bin").read_bytes() == b"old"


def fetchers() -> list[int]:
    """Pids of fetching processes that still run."""
    found: list[int] = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # a zombie among them
            found += [child.pid] if "supervisors.preparation.hub_download" in child.cmdline() else []
    return found


async def until(what: str, probe: Any) -> None:
    until_s = time.monotonic() + 30
    while not probe():
        assert time.monotonic() < until_s, what
        await asyncio.sleep(0.01)


async def test_a_download_that_stalls_is_ended_with_its_process(hub: HubServer, tmp_path: Path) -> None:
    hub.repositories[NAME] = Repository()
    hub.repositories[NAME].commit(MODEL)
    hub.flow.clear()
    message = await refusal(a_job(model_download_stall_s=1.5), a_run_dir(tmp_path, "run"))
    assert "nothing has come for limits.model_download_stall_s (1.5 s)" in message
    await until("the process to end", lambda: not fetchers())


async def test_a_download_that_takes_too_long_names_its_limit(hub: HubServer, tmp_path: Path) -> None:
    hub.repositories[NAME] = Repository()
    hub.repositories[NAME].commit(MODEL)
    hub.flow.clear()
    message = await refusal(a_job(model_download_timeout_s=1.5), a_run_dir(tmp_path, "run"))
    assert "limits.model_download_timeout_s (1.5 s)" in message
    await until("the process to end", lambda: not fetchers())


async def test_an_operator_need_not_wait_for_a_download_and_what_has_come_is_kept(
    hub: HubServer, tmp_path: Path
) -> None:
    hub.repositories[NAME] = Repository()
    hub.repositories[NAME].commit(MODEL | {"model.safetensors": bytes(30_000_000)})
    hub.flow.clear()
    run_dir, interrupted = a_run_dir(tmp_path, "run"), asyncio.Event()

    def when_bytes_come(phase: Phase) -> None:
        if phase.done:
            interrupted.set()

    before = Abandonable()
    async with asyncio.timeout(60):
        fetching = prepare_model(a_job(), run_dir, lambda _: None, when_bytes_come)
        assert await before.run(fetching, interrupted) is None
    assert before.abandoned
    assert not before.abandon()  # once
    await until("the process to end", lambda: not fetchers())
    hub.flow.set()
    assert (await prepare_model(a_job(), run_dir) / "model.safetensors").stat().st_size == 30_000_000


async def test_a_fetcher_that_crashes_is_told_with_its_last_words(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "huggingface_hub.py").write_text("raise SystemExit('a broken installation')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "broken"))
    message = await refusal(a_job(), a_run_dir(tmp_path, "run"))
    assert "ended without a word" in message
    assert "a broken installation" in message


async def test_a_damaged_record_is_not_guessed_at(hub: HubServer, tmp_path: Path) -> None:
    run_dir = a_run_dir(tmp_path, "run")
    (run_dir / "model.json").write_text("{")
    with pytest.raises(ModelNotFetched, match="remove it to take the newest"):
        await prepare_model(a_job(), run_dir)


async def test_a_directory_stays_as_it_is(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "acme" / "tiny-1.5").mkdir(parents=True)
    run_dir = a_run_dir(tmp_path, "run")
    assert await prepare_model(a_job(), run_dir) == Path(NAME)
    assert not (run_dir / "model.json").exists()


def test_a_full_disk_is_seen_before_the_download(tmp_path: Path) -> None:
    with pytest.raises(_Failed, match="GB are free") as found:
        _check_room(10**18)
    assert "HF_HOME" in found.value.report.fix
    _check_room(1)


def test_a_name_that_the_client_does_not_take_is_no_hub_name(hub: HubServer, tmp_path: Path) -> None:
    report = fetch(Order("acme/a--b", None, str(tmp_path / "report.json")))
    assert (report.stage, "is no hub name" in report.wrong) == ("failed", True)
    assert read_report(tmp_path / "report.json") == report


def test_the_head_loads_nothing_of_the_hub_client() -> None:
    program = "import sys, supervisors.trees\nprint(sorted({'huggingface_hub', 'tqdm', 'torch'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
