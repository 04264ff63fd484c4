"""Checks of the code that ``environment`` names, by its source: class, agent and tools can be called as they will be.

What an episode needs beside it is looked for, too: a server, a library. Nothing is imported or started.
"""

from __future__ import annotations

import ast
import shlex
import shutil
import socket
import sys
from collections import Counter
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from configs.checks.definitions import (
    Definition,
    Misfit,
    definition_of,
    gives_no_value,
    lacks,
    misfit,
    misfit_of_method,
)
from configs.checks.source_lookup import LookUpFailed, find_function, find_modules
from configs.episode_schema import EnvironmentConfig
from configs.errors import Found
from configs.limits import DEFAULT_LIMITS

VERIFIERS_INSTALL: Final = "python -m venv DIR && DIR/bin/pip install verifiers==0.4.0 uv"
"""Command that makes an interpreter for ``environment.interpreter``: DIR/bin/python."""
_METHODS: Final = {"reset": ("row",), "step": ("answer",)}
"""Method that an environment must have → what it is given."""
_OPTIONS: Final = {"openenv": ("action", "observation", "reset"), "python": ("reward",)}
"""Kind → options of the environment that is ready-made."""
_OPTIONAL: Final = ("score", "metrics", "close")


def check_code(environment: EnvironmentConfig) -> list[Found]:
    """Problems of what ``environment.path`` and ``options`` name."""
    if environment.kind == "openenv" or (environment.kind == "python" and environment.path is None):
        return [*_check_options(environment), *_check_ready_made(environment)]
    if environment.kind not in ("python", "agent") or environment.path is None:
        return []
    if problem := find_function(environment.path):
        return [("environment.path", *problem)]
    definition = definition_of(environment.path)
    if definition is None:
        return []
    check = _why_no_agent if environment.kind == "agent" else _why_no_environment
    found = check(definition, environment)
    return [found] if found is not None else []


def _check_options(environment: EnvironmentConfig) -> list[Found]:
    takes = _OPTIONS[environment.kind]
    wrong = f"is no option of the ready-made environment of kind {environment.kind}"
    return [
        (f"environment.options.{name}", wrong, f"Remove it; there are: {', '.join(takes)}")
        for name in environment.options
        if name not in takes
    ]


def _check_ready_made(environment: EnvironmentConfig) -> list[Found]:
    reward = environment.options.get("reward")
    if environment.kind == "openenv" or not reward:
        return []
    problem = find_function(str(reward))
    return [("environment.options.reward", *problem)] if problem else []


def _why_no_environment(one: Definition, environment: EnvironmentConfig) -> Found | None:
    options = environment.options
    if not isinstance(one.node, ast.ClassDef):  # a function that makes environments does as well
        found = misfit(one.shown, one.node, [], options)
        if found is None:
            return None
        wrong = f"{found[0]}; it is called with environment.options to make an environment"
        return "environment.path", wrong, "Name a class with reset(row) and step(answer), or set kind to agent"
    for method, given in _METHODS.items():
        if lacks(one, method):
            wrong = f"{one.shown} has no method {method!r}"
            return "environment.path", wrong, "Write it: an environment has reset(row) and step(answer)"
        if found := misfit_of_method(one, method, given):
            return "environment.path", f"{one.shown}: {found[0]}", found[1]
    for method in _OPTIONAL:
        if found := misfit_of_method(one, method):
            return "environment.path", f"{one.shown}: {found[0]}", found[1]
    found = misfit_of_method(one, "__init__", (), options)
    return ("environment.options", f"{one.name}: {found[0]}", found[1]) if found else None


def _why_no_agent(one: Definition, environment: EnvironmentConfig) -> Found | None:
    if isinstance(one.node, ast.ClassDef):
        if not gives_no_value(one):
            return None
        wrong = f"{one.shown} is a class, and calling it gives an object, not a reward"
        called = f"Write agent = {one.node.name}() there, and name that"
        plain = "Name a function agent(row, client, **options), or set kind to python for a class with reset and step"
        return "environment.path", wrong, plain if lacks(one, "__call__") else called
    found = misfit(one.shown, one.node, ["row", "client"], environment.options)
    return ("environment.path", *found) if found else None


def check_tools(functions: dict[str, str]) -> list[Found]:
    """Problems of tools that are functions, by their keys."""
    found: list[Found] = []
    names: list[str] = []
    for key, name in functions.items():
        if problem := find_function(name):
            found.append((key, *problem))
        elif definition := definition_of(name):
            names.append(definition.node.name)
            found += [(key, *problem)] if (problem := _why_no_tool(definition)) else []
    for name, count in Counter(names).items():
        if count > 1:
            wrong = f"{count} of them are called {name!r}, and the model could not tell them apart"
            found.append(("environment.tools", wrong, "Rename one of them"))
    return found


def _why_no_tool(one: Definition) -> Misfit | None:
    if isinstance(one.node, ast.ClassDef):
        return f"{one.shown} is a class, and a tool is a function", "Name a function"
    arguments = one.node.args
    by_position = [*arguments.posonlyargs, *([arguments.vararg] if arguments.vararg else [])]
    if by_position:
        wrong = f"{one.shown} takes {by_position[0].arg!r} by position only, and the model names each argument"
        return wrong, "Write it without * and /"
    return None


def why_no_tool_server(command: str) -> Misfit | None:
    """Why ``command`` cannot be started in an episode; None: it can, as far as its words tell."""
    try:
        program, *words = shlex.split(command)
        interpreter = shutil.which(program)
    except ValueError:  # no word, or a quotation mark that nothing closes
        interpreter, words = None, list[str]()
    if interpreter is None:
        return "names no program that can be started", "Write it as 'mcp: COMMAND', with a command of this machine"
    if not Path(interpreter).name.startswith("python") or not words:
        return None
    if words[0].endswith(".py") and not (Path(words[0]).is_absolute() and Path(words[0]).is_file()):
        return f"names no file {words[0]!r} in the directory of an episode, which is its own", "Write the whole path"
    if words[0] == "-m" and words[1:] and _cannot_import(interpreter, words[1]):
        return f"needs the module {words[1]!r}, which {interpreter} cannot import", "Install it there"
    return None


def _cannot_import(interpreter: str, module: str) -> bool:
    """Whether that Python has no such module, for sure.

    A job file may be anybody's, so no program that it names is run to check it: other interpreters than ours are judged
    by the files of their virtual environment.
    """
    try:
        if module in find_modules([module]):
            return False
        home = Path(interpreter).absolute().parents[1]
        if home.samefile(sys.prefix):
            return True
        settings = (home / "pyvenv.cfg").read_text("utf-8").lower()
        files = [file for folder in home.glob("lib*/python3*/site-packages") for file in folder.iterdir()]
    except (LookUpFailed, OSError):
        return False
    top = module.partition(".")[0]
    may = any(file.name.startswith(top) or file.suffix == ".pth" for file in files)
    return bool(files) and not may and "include-system-site-packages = true" not in settings


def why_no_server(url: str) -> tuple[str, str] | None:
    """Why nobody answers at ``url``; None: somebody does."""
    try:
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        socket.create_connection((parts.hostname or "", port), timeout=DEFAULT_LIMITS.hub_probe_s).close()
    except (OSError, ValueError) as error:
        return f"nobody answers at {url}: {error}", "Start the server before the run, or mend the address"
    return None


def why_no_verifiers(interpreter: str) -> tuple[str, str] | None:
    """Why environments of that library cannot be run by ``interpreter``; None: the library may be installed there."""
    if not _cannot_import(interpreter, "verifiers"):
        return None
    return f"{interpreter} has no package verifiers", f"Make one ({VERIFIERS_INSTALL}), and name DIR/bin/python"
