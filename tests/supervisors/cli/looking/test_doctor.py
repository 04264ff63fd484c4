"""The doctor: what it says about this machine, and that nothing breaks it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from supervisors.cli.looking import machine_report as doctor
from tests.supervisors.machine.fake_driver import fake_nvidia_smi


def line(name: str, checks: doctor.Report) -> doctor.Check:
    return next(check for check in checks if check["name"] == name)


def test_a_set_up_machine_is_healthy_and_the_report_is_plain_data() -> None:
    checks = doctor.report()
    assert checks.healthy, [check for check in checks if check["state"] == "problem"]
    assert json.loads(json.dumps(checks)) == list(checks)
    console = Console(width=200, record=True, quiet=True)
    console.print(checks)
    assert line("torch engine", checks)["state"] == "ok"


def test_the_devices_that_processes_are_given_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", fake_nvidia_smi(tmp_path, [0, 0]))
    [check] = doctor._devices()
    assert (check["state"], check["found"]) == ("ok", "0, 1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    [check] = doctor._devices()
    assert (check["state"], check["found"]) == ("missing", "none")


def test_a_missing_vllm_is_said_with_the_way_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version", lambda name: None)
    [check] = doctor._vllm()
    assert (check["state"], "make vllm" in check["advice"]) == ("missing", True)


def test_another_series_of_vllm_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version", lambda name: "0.99.1" if name == "vllm" else None)
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: object())
    [check] = doctor._vllm()
    assert (check["state"], check["found"]) == ("problem", "vLLM 0.99.1")


def test_what_only_some_jobs_need_is_named_with_who_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.importlib.metadata, "requires", lambda name: ["wandb<0.20; extra == 'wandb'"])
    monkeypatch.setattr(doctor, "_version", {"wandb": "0.31.0", "matplotlib": "3.9"}.get)
    found = {check["name"]: check for check in doctor._add_ons()}
    assert (found["wandb"]["state"], found["wandb"]["found"]) == ("problem", "wandb 0.31.0 (needs <0.20)")
    assert (found["plotting"]["state"], found["plotting"]["advice"]) == ("ok", "headrace plot")
    for name, advice in {"verifiers": "environment.kind: verifiers", "mcp": "Headrace speaks MCP itself"}.items():
        assert found[name]["state"] == "missing"
        assert advice in found[name]["advice"]


def test_a_sandbox_for_what_a_model_writes_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    [check] = doctor._sandbox()
    assert (check["state"], "bubblewrap" in check["advice"]) == ("missing", True)
    (tmp_path / "bwrap").write_text("#!/bin/sh\n")
    (tmp_path / "bwrap").chmod(0o755)
    [check] = doctor._sandbox()
    assert (check["state"], check["found"]) == ("ok", "bwrap")


def test_a_requirement_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        doctor.importlib.metadata, "requires", lambda name: ["numpy>=999", "nothing-such>=1", "pytest; extra == 'test'"]
    )
    [check] = doctor._dependencies()
    assert check["state"] == "problem"
    assert "numpy" in check["found"]
    assert "nothing-such is missing" in check["found"]
    assert "pytest" not in check["found"]


def test_little_shared_memory_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = SimpleNamespace(total=64 << 20, used=0, free=64 << 20)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda place: usage)
    [check] = doctor._shared_memory()
    assert (check["state"], "--shm-size" in check["advice"]) == ("problem", True)


def test_a_check_that_fails_is_a_line_of_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> object:
        raise RuntimeError("a library that is half there")

    monkeypatch.setattr(doctor.importlib, "import_module", broken)
    failed = line("torch", doctor.report())
    assert (failed["state"], "half there" in failed["found"]) == ("problem", True)
