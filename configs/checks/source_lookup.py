"""Names found by reading source code, so that nothing is imported and nothing runs in the head process."""

from __future__ import annotations

import ast
import difflib
import importlib.machinery
import importlib.util
import re
import sys
from pathlib import Path

_OUR_PACKAGES = ("actors", "configs", "main", "supervisors", "transport")
_FORM = re.compile(r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$")


def find_function(name: str) -> tuple[str, str] | None:
    """None if ``package.module:function`` exists, else (what is wrong, what to do).

    The working directory is searched last, as in the processes that will import it.
    """
    if not _FORM.match(name):
        return f"{name!r} is not of the form package.module:name", "Write it as my_rewards:score"
    module, _, function = name.partition(":")
    spec = _find_module(module)
    if spec is None:
        top = module.partition(".")[0]
        if top in _OUR_PACKAGES:
            return f"there is no module {module!r}: {top} is a package of Headrace", "Give yours another name"
        return f"there is no module {module!r}", "Install it, or start headrace in the directory that holds it"
    if spec.origin is None or not spec.origin.endswith(".py"):
        return None  # compiled: only an import could tell
    try:
        names = _top_level_names(ast.parse(Path(spec.origin).read_bytes()))
    except (SyntaxError, ValueError, OSError) as error:
        return f"the module {module!r} cannot be read: {error}", "Mend the module"
    if function in names or "*" in names:
        return None
    near = difflib.get_close_matches(function, names, n=1)
    return (
        f"the module {module!r} has no {function!r}",
        f"Did you mean {module}:{near[0]}?" if near else "Define it there",
    )


def definition_of(name: str) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """The definition of ``package.module:name``; None where its source does not tell: decorated, imported, twice."""
    module, _, function = name.partition(":")
    spec = _find_module(module)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    try:
        body = ast.parse(Path(spec.origin).read_bytes()).body
    except (SyntaxError, ValueError, OSError):
        return None  # find_function says so
    found = [n for n in body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef) and n.name == function]
    return found[0] if len(found) == 1 and not found[0].decorator_list else None


def source_file(name: str) -> str | None:
    """The file in which ``package.module:name`` would be defined; None where it has none that can be read."""
    spec = _find_module(name.partition(":")[0])
    return spec.origin if spec is not None and spec.origin is not None and spec.origin.endswith(".py") else None


def _find_module(module: str) -> importlib.machinery.ModuleSpec | None:
    search: list[str] | None = [*sys.path, str(Path.cwd())]
    spec: importlib.machinery.ModuleSpec | None = None
    parts = module.split(".")
    for depth in range(len(parts)):
        if search is None:
            return None  # a plain module has no submodules
        spec = importlib.machinery.PathFinder.find_spec(".".join(parts[: depth + 1]), search)
        if spec is None:
            return importlib.util.find_spec(module) if depth == 0 and len(parts) == 1 else None
        search = list(spec.submodule_search_locations) if spec.submodule_search_locations is not None else None
        if spec.origin is None and search:
            continue  # namespace package
    return spec


def _top_level_names(tree: ast.Module) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def reasoning_gym_tasks() -> list[str]:
    """The data sets of reasoning_gym, sorted; empty if it is not installed. About 20 ms; importing it takes seconds."""
    spec = importlib.util.find_spec("reasoning_gym")
    tasks: set[str] = set()
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for file in Path(folder).rglob("*.py"):
            tasks |= _registered(file.read_text(encoding="utf-8", errors="ignore"))
    return sorted(tasks)


def _registered(source: str) -> set[str]:
    names: set[str] = set()
    for first in re.findall(r"^register_dataset\(\s*([^,\s]+)\s*,", source, re.MULTILINE):
        literal = re.match(r"""^["'](\w+)["']$""", first)
        constant = re.search(rf"""^{re.escape(first)}(?:\s*:\s*\w+)?\s*=\s*["'](\w+)["']""", source, re.MULTILINE)
        if match := literal or constant:
            names.add(match[1])
    return names
