"""The loops of the guide learn: its programs run as they are written, on a tiny model, with larger steps."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_checkpoint import make_tiny_checkpoint

GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "own_loop.md").read_text(encoding="utf-8")
EXAMPLES, REWARDS, PYTHON = re.findall(r"^```python\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The model that the guide names, from the folder in which its programs run."""
    monkeypatch.chdir(tmp_path)
    return make_tiny_checkpoint(tmp_path / "models" / "Qwen3-0.6B")


def run(program: str) -> dict[str, Any]:
    """What a program's names are at its end."""
    names: dict[str, Any] = {}
    exec(program.replace("1e-3", "1e-2"), names)
    return names


def check_learned(names: dict[str, Any]) -> None:
    for what, sign in (("losses", -1), ("rewards", 1)):
        if what in names:
            first, last = sum(names[what][:3]), sum(names[what][-3:])
            assert len(names[what]) == 12
            assert sign * (last - first) > 0.2 * abs(first), (what, names[what])


@pytest.mark.filterwarnings("ignore")  # the client warns of its own next versions
async def test_the_loops_with_the_client_learn(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tinker")
    from tests.supervisors.serving.served_here import served_here

    async with served_here({"base": model}, tmp_path / "served") as variables:
        for name, value in (variables | {"TINKER_TELEMETRY": "0"}).items():
            monkeypatch.setenv(name, value)
        for program in (EXAMPLES, REWARDS):
            names = await asyncio.to_thread(run, program)
            check_learned(names)
            await asyncio.to_thread(lambda service: service.close("success").result(), names["service"])


def test_the_loops_from_python_learn(model: Path) -> None:
    names = run(PYTHON)
    assert {"losses", "rewards"} < set(names)
    check_learned(names)
