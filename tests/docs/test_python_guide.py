"""The cells of the guide to Python are Python, and take from the package what is there; ``tests/chaos`` runs them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import headrace as api

GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "python.md").read_text(encoding="utf-8")
CELLS = re.findall(r"^```python\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)
ERRORS_OF_OTHERS = {"Unreachable", "NotFound", "ImportError"}


def test_every_cell_can_be_run_and_what_it_imports_is_there() -> None:
    imported: list[str] = []
    for cell in CELLS:
        code = "\n".join(line for line in cell.splitlines() if not line.startswith("%%"))
        tree = compile(code, "cell", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | ast.PyCF_ONLY_AST)
        imported += [
            alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module == "headrace"
            for alias in node.names
        ]
    assert set(imported) == {"connect", "resume", "run_job", "start"} <= set(api.__all__)


def test_every_error_that_is_named_can_be_caught() -> None:
    rows = re.findall(r"^\| (`[^|]*) \|", GUIDE, re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert named - ERRORS_OF_OTHERS <= set(api.__all__)
    assert len(named) > 4
