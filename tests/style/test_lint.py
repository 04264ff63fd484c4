"""ruff and pyright, as tests; ``make lint`` is both. Pyright takes a minute: it is long here, and CI has make lint."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str, timeout_s: float = 900) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, check=False
    )


@pytest.mark.parametrize(
    "command", [["check", "--no-cache", "."], ["format", "--check", "--no-cache", "."]], ids=["rules", "format"]
)
def test_ruff_has_nothing_to_say(command: list[str]) -> None:
    """`make format` mends what can be mended by itself."""
    result = run("ruff", *command)
    assert result.returncode == 0, f"{result.stdout[-8000:]}\n{result.stderr[-2000:]}"


@pytest.mark.long
@pytest.mark.timeout(920)
def test_pyright_has_nothing_to_say() -> None:
    """Strict for the kernel, standard elsewhere; see [tool.pyright]."""
    result = run("pyright", "--warnings")
    if result.returncode not in (0, 1):
        pytest.skip(f"pyright cannot run here (it needs Node.js): {result.stderr[-300:]}")
    assert result.returncode == 0, result.stdout[-8000:]


def test_every_switched_off_rule_has_its_reason_beside_it() -> None:
    lines = (ROOT / "pyproject.toml").read_text().splitlines()
    start = lines.index("ignore = [")
    block = lines[start + 1 : lines.index("]", start)]
    without = [
        line
        for above, line in zip(["", *block], block, strict=False)
        if line.strip().startswith('"') and "#" not in line and "#" not in above
    ]
    assert without == []
