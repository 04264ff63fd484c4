"""What ``trainer.compile`` does not go with, and what a machine lacks for it, is refused before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from configs.checks import compile_checks
from configs.checks.compile_checks import check_compile
from configs.schema import JobConfig
from tests.smallest_job import smallest_job


@pytest.fixture(autouse=True)
def a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "Python.h").touch()
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(compile_checks.sysconfig, "get_path", lambda _: str(tmp_path))
    monkeypatch.setattr(compile_checks.shutil, "which", lambda name: f"/usr/bin/{name}")


def job(**changes: Any) -> JobConfig:
    own = smallest_job()
    return own.model_copy(
        update={"trainer": own.trainer.model_copy(update={"backend": "torch", "compile": True, **changes})}
    )


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({}, ""),
        ({"recompute": "whole"}, ""),
        ({"backend": "simulated", "recompute": "auto"}, ""),
        ({"compile": False, "backend": "fsdp"}, ""),
        ({"backend": "fsdp"}, "trainer.backend is fsdp"),
        ({"service": "trained"}, "trainer.service is set"),
        ({"attention": "flex"}, "trainer.attention is flex"),
        ({"recompute": "selective"}, "trainer.recompute is selective"),
        ({"recompute": "offload"}, "trainer.recompute is offload"),
        ({"micro_batch_tokens": "auto"}, "trainer.micro_batch_tokens is auto"),
        ({"router_replay": True}, "trainer.router_replay is set"),
    ],
)
def test_what_compiled_layers_do_not_go_with_is_refused(changes: dict[str, Any], wrong: str) -> None:
    found = check_compile(job(**changes), on_cpu=True, has_triton=False)
    assert [field for field, _, _ in found] == ["trainer.compile"] * bool(wrong)
    assert not wrong or wrong in found[0][1]


def test_the_balance_of_experts_is_refused() -> None:
    own = job()
    algorithm = own.algorithm.model_copy(update={"load_balancing": 0.1})
    (found,) = check_compile(own.model_copy(update={"algorithm": algorithm}), on_cpu=True, has_triton=False)
    assert "algorithm.load_balancing" in found[1]


@pytest.mark.parametrize(("on_cpu", "missing"), [(True, "C++ compiler g++"), (False, "C compiler gcc")])
def test_a_machine_without_a_compiler_is_told(monkeypatch: pytest.MonkeyPatch, on_cpu: bool, missing: str) -> None:
    monkeypatch.setattr(compile_checks.shutil, "which", lambda _: None)
    (found,) = check_compile(job(), on_cpu=on_cpu, has_triton=True)
    assert missing in found[1]
    assert "leave it out" in found[2]


def test_a_compiler_that_is_named_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "icpx")
    monkeypatch.setattr(compile_checks.shutil, "which", lambda name: name if name == "g++" else None)
    (found,) = check_compile(job(), on_cpu=True, has_triton=True)
    assert "C++ compiler icpx" in found[1]


def test_headers_of_python_and_triton_are_looked_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (found,) = check_compile(job(), on_cpu=False, has_triton=False)
    assert "triton" in found[1]
    (tmp_path / "Python.h").unlink()
    (found,) = check_compile(job(), on_cpu=True, has_triton=False)
    assert "Python.h" in found[1]
