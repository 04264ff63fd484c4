"""Threads of torch's pool do not spin while they wait, in processes that generate and in those that train."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from actors.rollout.engine_kinds import create_engine
from actors.trainer.setup import make_backend

MAKERS = [lambda: create_engine("torch"), lambda: make_backend("torch")]


@pytest.mark.parametrize("make", MAKERS)
def test_threads_of_torch_rest_while_they_wait(make: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {name: os.environ[name] for name in os.environ if name != "OMP_WAIT_POLICY"})
    make()
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"


@pytest.mark.parametrize("make", MAKERS)
def test_what_the_user_has_set_stays(make: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    make()
    assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE"
