"""Models and processes for the contracts of backends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.gpu._model_family import make_model
from benchmarks.gpu.model_families import FAMILIES
from tests.contracts.backend_worlds import Place
from tests.rank_processes import RankProcesses
from tests.tiny_checkpoint import make_tiny_checkpoint


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def moe_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of experts with the dense model's vocabulary."""
    path = tmp_path_factory.mktemp("moe")
    make_model("qwen3_moe", {**FAMILIES["qwen3_moe"], "vocab_size": 100}, path)
    return path


@pytest.fixture(scope="module")
def ranks() -> Iterator[Callable[[str, int], RankProcesses]]:
    """The processes of a world of that many ranks, with followers of that kind, started once."""
    worlds: dict[tuple[str, int], RankProcesses] = {}

    def world_of(kind: str, size: int) -> RankProcesses:
        if (kind, size) not in worlds:
            worlds[kind, size] = RankProcesses(kind, size)
        return worlds[kind, size]

    yield world_of
    for world in worlds.values():
        world.close()


@pytest.fixture
def place(
    model_path: Path,
    moe_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    ranks: Callable[[str, int], RankProcesses],
) -> Place:
    return Place(model_path, moe_path, tmp_path_factory.mktemp("service"), ranks)
