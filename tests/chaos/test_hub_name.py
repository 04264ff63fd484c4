"""A real run whose model has a hub name: fetched from a small hub, interrupted, resumed with its commit."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from small_job import TORCH_TRAINER, simulated_job

from supervisors.testing.run_under_test import HeadraceRun
from tests.supervisors.jobs.hub_server import HubServer, Repository, files_of

NAME = "acme/small"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, small_model: Path) -> Iterator[HubServer]:
    server = HubServer()
    server.repositories[NAME] = Repository()
    server.repositories[NAME].commit(files_of(small_model))
    monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    yield server
    server.close()


@pytest.fixture
def start(headrace_run: Callable[..., HeadraceRun], small_model: Path) -> Callable[..., HeadraceRun]:
    def start(steps: int, **sections: Any) -> HeadraceRun:
        return headrace_run(simulated_job(small_model, steps=steps, **sections) | {"model": {"path": NAME}})

    return start


@pytest.mark.timeout(400)
@pytest.mark.long
@pytest.mark.parametrize("trainer", ["simulated", "torch"])
def test_a_run_of_a_hub_name_is_interrupted_while_it_downloads_and_resumed_with_its_first_commit(
    hub: HubServer, start: Callable[..., HeadraceRun], tmp_path: Path, trainer: str
) -> None:
    hub.flow.clear()  # the download stops in its middle
    run = start(6, **(TORCH_TRAINER if trainer == "torch" else {}))
    report = tmp_path / "run" / "model_download.json"
    run.wait_until("the download", lambda: report.exists() and "downloading" in report.read_text())
    run.interrupt()
    summary = run.finish(timeout_s=120, clean=False)
    assert (run.process.returncode, summary["state"], summary["steps"]) == (130, "interrupted", 0)

    hub.flow.set()
    run.resume()
    run.wait_for_step(1)
    run.interrupt()
    run.finish(state="interrupted")
    record = json.loads((tmp_path / "run" / "model.json").read_text())
    assert record["commit"] == hub.repositories[NAME].refs["main"]

    hub.repositories[NAME].commit({"config.json": b"another model"})
    hub.close()
    run.resume()
    summary = run.finish()
    assert summary["steps"] == 6
    assert json.loads((tmp_path / "run" / "model.json").read_text()) == record
    assert trainer == "simulated" or (Path(summary["checkpoint"]) / "tokenizer.json").exists()


@pytest.mark.timeout(400)
def test_a_hub_name_that_leads_nowhere_fails_with_one_message(
    hub: HubServer, start: Callable[..., HeadraceRun]
) -> None:
    """The check before the start sees the repository; that it is gated shows when its files are fetched."""
    hub.repositories[NAME].gated = True
    run = start(1)
    summary = run.finish(timeout_s=120, clean=False)
    assert (run.process.returncode, summary["state"], summary["steps"]) == (1, "failed", 0)
    assert summary["error"].startswith(f"model.path: {NAME!r} was not fetched as a whole")
    assert "GatedRepoError" in summary["error"]
    assert run._errors.read_text().count("was not fetched as a whole") == 1, "the terminal says it once"
    assert "Ask for access on its page and set HF_TOKEN" in summary["error"]
