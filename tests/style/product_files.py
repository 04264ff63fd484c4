"""The files of the product as syntax trees, for the tests that read them."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LAYERS = ["configs", "transport", "actors", "supervisors", "headrace", "main", "benchmarks"]


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = sorted(
    path for layer in LAYERS for path in [*(ROOT / layer).rglob("*.py"), ROOT / f"{layer}.py"] if path.exists()
)
MODULES = {name_of(path): path for path in FILES}
PRODUCT = {name: path for name, path in MODULES.items() if name.split(".")[0] != "benchmarks"}


@functools.cache
def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(text_of(path), filename=str(path))


@functools.cache
def imports_of(path: Path) -> list[tuple[str, int]]:
    return list(imports(tree_of(path)))


def imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every module that is imported, at any depth, with its line; what is for the type checker alone counts too."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"line {node.lineno}: relative imports hide the direction"
            inside = (f"{node.module}.{alias.name}" for alias in node.names)  # may be modules too
            named = {module if module in MODULES else node.module for module in inside}
            yield from ((module, node.lineno) for module in sorted(named))
        elif not isinstance(node, ast.expr):  # an import is a statement
            yield from imports(node)
