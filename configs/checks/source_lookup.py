"""Finds modules and names in them by reading source code: no code of the user is imported or run.

name ─▶ find_modules.py, in a process with the path of those that will import it ─▶ file ─▶ syntax tree ─▶ names
"""

from __future__ import annotations

import ast
import difflib
import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from configs.limits import DEFAULT_LIMITS
from configs.python_path import python_path

_OUR_PACKAGES = ("actors", "configs", "headrace", "main", "supervisors", "transport")
_FORM = re.compile(r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$")
_FINDER: Final = Path(__file__).with_name("find_modules.py")
_CHANGES_THE_PATH: Final = ("sys.path", "sys.modules", "meta_path", "addsitedir")
"""Words of modules whose own imports can be found only by importing them."""


class LookUpFailed(Exception):
    """The interpreter has not answered; the message says why."""


class NoModule(Exception):
    """There is no module of that name."""


def find_function(name: str) -> tuple[str, str] | None:
    """None if ``package.module:function`` exists, else (what is wrong, what to do)."""
    if not _FORM.match(name):
        return f"{name!r} is not of the form package.module:name", "Write it as my_rewards:score"
    module, _, function = name.partition(":")
    try:
        tree = parsed(module)
    except NoModule:
        top = module.partition(".")[0]
        if top in _OUR_PACKAGES:
            return f"there is no module {module!r}: {top} is a package of Headrace", "Give yours another name"
        return f"there is no module {module!r}", "Install it, or start headrace in the directory that holds it"
    except LookUpFailed as error:
        return f"the module {module!r} cannot be looked for: {error}", "Mend that, and try again"
    except (SyntaxError, ValueError, OSError) as error:
        return f"the module {module!r} cannot be read: {error}", "Mend the module"
    if tree is None:
        return None  # compiled: only an import could tell
    names = _top_level_names(tree)
    if function not in names and "*" not in names:
        near = difflib.get_close_matches(function, names, n=1)
        return (
            f"the module {module!r} has no {function!r}",
            f"Did you mean {module}:{near[0]}?" if near else "Define it there",
        )
    return _missing_import(module, tree)


def _missing_import(module: str, tree: ast.Module) -> tuple[str, str] | None:
    """What the module imports as it begins, and nobody could import here."""
    imports = dict(_plain_imports(tree))
    if not imports or any(word in ast.unparse(tree) for word in _CHANGES_THE_PATH):
        return None
    try:
        there = find_modules(imports)
    except LookUpFailed:
        return None
    for name, line in imports.items():
        if name not in there:
            wrong = f"the module {module!r} imports {name!r} (line {line}), and there is no such module"
            return wrong, f"Install {name}, or start headrace in the directory that holds it"
    return None


def _plain_imports(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """The packages that a module imports in any case, each with its line."""
    for node in tree.body:
        if isinstance(node, ast.Import):
            yield from ((alias.name.partition(".")[0], node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0], node.lineno


def parsed(module: str) -> ast.Module | None:
    """The syntax tree of ``module``; None if it has no Python source.

    Raises:
        NoModule, LookUpFailed, OSError, SyntaxError, ValueError: it cannot be found, or not read.
    """
    file = _located(module, python_path(), tuple(sys.path))
    return None if file is None else ast.parse(Path(file).read_bytes())


def source_file(name: str) -> str | None:
    """The file in which ``package.module:name`` would be defined; None if there is no Python source."""
    try:
        return _located(name.partition(":")[0], python_path(), tuple(sys.path))
    except (NoModule, LookUpFailed):
        return None


@functools.lru_cache(maxsize=64)
def _located(module: str, path: str, further: tuple[str, ...]) -> str | None:
    """The arguments beside ``module`` tell apart what was found from another directory. What raises is not kept."""
    found = find_modules([module])
    if module not in found:
        raise NoModule(module)
    return found[module]


def find_modules(modules: Iterable[str]) -> dict[str, str | None]:
    """Those of ``modules`` that can be imported, each with its source file, if it has one.

    They are found by the processes' path, and last by this program's own, which a run from Python takes over.

    Raises:
        LookUpFailed: the interpreter does not answer.
    """
    question = json.dumps({"modules": list(modules), "path": [folder for folder in sys.path if folder]})
    try:
        answer = subprocess.run(
            [sys.executable, "-P", str(_FINDER)],
            input=question, capture_output=True, text=True, timeout=DEFAULT_LIMITS.source_lookup_s, check=True,
            env={**os.environ, "PYTHONPATH": python_path()},
        )  # fmt: skip
        found = json.loads(answer.stdout.splitlines()[-1])
        return {name: entry["file"] for name, entry in found.items() if entry is not None}
    except subprocess.CalledProcessError as error:
        raise LookUpFailed((error.stderr.strip().splitlines() or [f"exit code {error.returncode}"])[-1]) from error
    except (OSError, ValueError, LookupError, subprocess.TimeoutExpired) as error:
        raise LookUpFailed(str(error)) from error


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
