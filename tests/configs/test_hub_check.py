"""What the check of a job file says about a hub name, from a small hub."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from configs.checks.model_checks import hub_problem
from configs.hub_names import is_hub_name
from tests.supervisors.jobs.hub_server import HubServer, Repository


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    server = HubServer()
    server.repositories["acme/known"] = Repository()
    server.repositories["acme/known"].commit({"config.json": b"{}"})
    server.repositories["acme/private"] = Repository(private=True)
    monkeypatch.setenv("HF_ENDPOINT", server.endpoint + "/")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    for name in ("HF_HUB_OFFLINE", "HF_TOKEN", "HF_HUB_CACHE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    yield server
    server.close()


def test_a_known_name_passes_and_an_unknown_one_is_told(hub: HubServer) -> None:
    assert hub_problem("acme/known") is None
    wrong, fix = hub_problem("acme/unknown") or ("", "")
    assert "does not exist on the hub, or needs HF_TOKEN" in wrong
    assert "local directory" in fix


def test_with_a_token_the_download_itself_is_to_find_out(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert hub_problem("acme/private") is not None
    (tmp_path / "token").write_text("hf_friend")  # as `hf auth login` leaves it
    assert hub_problem("acme/private") is None
    (tmp_path / "token").unlink()
    monkeypatch.setenv("HF_TOKEN", "hf_friend")
    assert hub_problem("acme/private") is None


def test_offline_and_away_only_the_cache_counts(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.close()
    assert "cannot be reached" in (hub_problem("acme/known") or ("", ""))[0]
    monkeypatch.setenv("TRANSFORMERS_OFFLINE", "1")
    assert "forbids the hub" in (hub_problem("acme/known") or ("", ""))[0]
    (tmp_path / "hub" / "models--acme--known" / "snapshots").mkdir(parents=True)
    assert hub_problem("acme/known") is None


@pytest.mark.parametrize("name", ["Qwen/Qwen2.5-0.5B-Instruct", "acme/tiny_1"])
def test_a_hub_name_is_owner_and_model(name: str) -> None:
    assert is_hub_name(name)
    assert not is_hub_name(f"./{name}")
    assert not is_hub_name(f"/models/{name}")
    assert not is_hub_name(name.split("/")[1])
