"""What every test starts from: offline, few threads, the same examples on each run, a cache of its own."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from tests.scheduling import GroupScheduling

pytest_plugins = ["supervisors.testing.pytest_plugin"]

# the pairs of keys that this user's processes share are made there, and not among those in use
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="headrace-tests-")
atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")
if "HEADRACE_CACHE" not in os.environ:  # the cache of whoever runs the tests is theirs
    os.environ["HEADRACE_CACHE"] = tempfile.mkdtemp(prefix="headrace-test-cache-")
    atexit.register(shutil.rmtree, os.environ["HEADRACE_CACHE"], ignore_errors=True)

# Time limits per example say more about the machine than about the code; pytest-timeout bounds the whole test.
settings.register_profile("default", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> GroupScheduling | None:
    """For ``-n``, as long as no other ``--dist`` was asked for."""
    if config.getvalue("dist") != "load":
        return None
    from tests.scheduling import GroupScheduling

    config.option.loadscopereorder = False
    return GroupScheduling(config, log)


def pytest_configure(config: pytest.Config) -> None:
    from tests.suite_times import SuiteTimes

    config.pluginmanager.register(SuiteTimes(tells=not hasattr(config, "workerinput")))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """``slow`` is what the suite lists as that, and what is no part of ``make test``.

    In the processes of ``-n``: what takes longest first.
    """
    from tests.slow_tests import SLOW
    from tests.suite_times import function_of

    for item in items:
        if function_of(item.nodeid) in SLOW or item.get_closest_marker("long") or item.get_closest_marker("cluster"):
            item.add_marker("slow")
    if hasattr(config, "workerinput"):
        from tests.scheduling import turn

        items.sort(key=lambda item: turn(item.path))


@pytest.fixture(scope="module", autouse=True)
def engines_are_collected(request: pytest.FixtureRequest) -> Iterator[None]:
    """vLLM's layers complain if they are collected while a later test makes a model without memory (``meta``)."""
    yield
    if "engine" in request.node.name or "vllm" in request.node.name:
        gc.collect()


@pytest.fixture(scope="session", autouse=True)
def shared_memory_is_left_as_it_was(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What runs and services of the tests have left there goes with the session, also where a test was cut short."""
    yield
    from actors.weights.segments import remove_segments

    for id_file in tmp_path_factory.getbasetemp().rglob("memory.id"):
        remove_segments(id_file.parent)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """What is marked ``gpu`` is skipped where torch finds no CUDA device; torch is imported for such tests alone."""
    if item.get_closest_marker("gpu") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("torch finds no CUDA device")
