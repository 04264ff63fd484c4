"""What each kind of environment needs, and which keys belong to another kind. Nothing of the user's is imported."""

from __future__ import annotations

import shlex
import shutil
from typing import Final

from configs.checks.source_lookup import find_function
from configs.episode_schema import EnvironmentConfig
from configs.schema import JobConfig

_KINDS_OF: Final = {
    "path": ("python", "agent", "verifiers"),
    "options": ("python", "agent", "verifiers", "openenv"),
    "url": ("openenv",),
    "interpreter": ("verifiers",),
    "tools": ("python", "openenv"),
}
"""Key of ``environment`` → the kinds that it belongs to."""
_MCP: Final = "mcp:"
VERIFIERS_INSTALL: Final = "python -m venv DIR && DIR/bin/pip install verifiers==0.4.0 uv"
"""How to come by an interpreter for ``environment.interpreter``: DIR/bin/python."""

Found = tuple[str, str, str]
"""(field, what is wrong, what to do)."""


def check_environment(job: JobConfig) -> list[Found]:
    """Problems of ``environment`` by itself."""
    environment = job.environment
    found = [*_check_keys(environment), *_check_tools(environment)]
    if environment.kind == "verifiers":
        found += _check_verifiers(environment)
    if environment.kind == "openenv" and not (environment.url or "").startswith(("http://", "https://")):
        found.append(
            (
                "environment.url",
                f"is {environment.url!r}, and environment.kind is openenv",
                "Write it as http://host:port",
            )
        )
    if environment.kind in ("python", "agent") and environment.path is not None:
        problem = find_function(environment.path)
        found += [("environment.path", *problem)] if problem else []
    elif environment.kind == "agent" or (environment.kind == "python" and not environment.tools):
        wrong = f"is missing, and environment.kind is {environment.kind}"
        found.append(("environment.path", wrong, "Name your class or function as package.module:name"))
    elif environment.kind == "python" and not environment.options.get("reward"):
        wrong = "says no reward, and environment.path names no class that would give one"
        found.append(
            (
                "environment.options",
                wrong,
                "Name the function as {reward: package.module:name}, or set environment.path",
            )
        )
    return found


def _check_verifiers(environment: EnvironmentConfig) -> list[Found]:
    """Whether the interpreter has the library, and the library the environment, shows when it is started."""
    found: list[Found] = []
    if not environment.path:
        wrong = "is missing, and environment.kind is verifiers"
        found.append(("environment.path", wrong, "Name the environment as its library does: its id"))
    if environment.interpreter is not None and shutil.which(environment.interpreter) is None:
        wrong = f"{environment.interpreter!r} is no program that can be run"
        found.append(("environment.interpreter", wrong, f"Name a Python that has verifiers: {VERIFIERS_INSTALL}"))
    return found


def _check_keys(environment: EnvironmentConfig) -> list[Found]:
    found: list[Found] = []
    for key, kinds in _KINDS_OF.items():
        if environment.kind not in kinds and getattr(environment, key) != EnvironmentConfig.model_fields[key].default:
            wrong = f"is set, but environment.kind is {environment.kind}"
            found.append((f"environment.{key}", wrong, f"Remove it, or set environment.kind to {' or '.join(kinds)}"))
    return found


def _check_tools(environment: EnvironmentConfig) -> list[Found]:
    found: list[Found] = []
    for i, name in enumerate(environment.tools):
        if not name.startswith(_MCP):
            problem = find_function(name)
            found += [(f"environment.tools.{i}", *problem)] if problem else []
            continue
        words = shlex.split(name.removeprefix(_MCP))
        if not words or shutil.which(words[0]) is None:
            wrong = f"{name!r} names no program that can be started"
            found.append(
                (f"environment.tools.{i}", wrong, "Write it as 'mcp: COMMAND', with a command of this machine")
            )
    return found
