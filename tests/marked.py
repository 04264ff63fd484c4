"""What marks a test function in all of its cases, as its file says it: read, not run."""

from __future__ import annotations

import ast
from pathlib import Path


def marks_by_test(file: Path) -> dict[str, set[str]]:
    """The names of a file's test functions → marks of their own and of the file."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    of_all: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
            of_all |= _named(node.value)
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return {
        one.name: of_all.union(*map(_named, one.decorator_list)) for one in functions if one.name.startswith("test")
    }


def _named(mark: ast.expr) -> set[str]:
    match mark:
        case ast.Attribute():
            return {mark.attr}
        case ast.List():
            return set[str]().union(*map(_named, mark.elts))
        case ast.Call() if ast.unparse(mark.func) != "pytest.mark.parametrize":  # whose cases may have some
            return _named(mark.func)
        case _:
            return set()
