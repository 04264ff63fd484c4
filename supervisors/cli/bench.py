"""``headrace bench``: runs a module of benchmarks/, which is there in a clone of the repository and not in a package.

Only this module imports from benchmarks/, by name: a file in one of the folders ``_FLOORS``, or ``papers/command.py``.
"""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from supervisors.cli.command import EXIT_BAD_CONFIG, EXIT_FINISHED, fail, wrong

_FOLDER: Final = Path(__file__).resolve().parents[2] / "benchmarks"
_FLOORS: Final = ("data_plane", "jobs", "decisions", "gpu", "vllm", "serving")
"""Folders of benchmarks/ whose files each have a ``main``, but for those whose names begin with ``_``."""
_NOT_HERE: Final = (
    "the benchmarks are not part of an installed package: clone the repository, and run headrace bench there "
    "(make install, then .venv/bin/headrace bench)"
)


def bench(
    context: typer.Context,
    name: Annotated[
        str | None, typer.Argument(help="loop, …: a module of benchmarks/. Without a name: lists them.")
    ] = None,
) -> None:
    """Measure. Everything after NAME goes to the benchmark."""
    if not _are_here():
        fail(_NOT_HERE, EXIT_BAD_CONFIG)
    found = [file for floor in _FLOORS for file in (_FOLDER / floor).glob("*.py") if not file.stem.startswith("_")]
    files = {file.stem: file for file in sorted(found, key=lambda file: file.stem)}
    if name is None:
        lines = [f"  {stem:12} {_first_line(file)}" for stem, file in files.items()]
        fail("\n".join(["name a benchmark:", *lines]), EXIT_BAD_CONFIG)
    if name not in files:
        fail(f"there is no benchmark {name!r}; there are: {', '.join(files)}", EXIT_BAD_CONFIG)
    raise typer.Exit(int(_module(f"{files[name].parent.name}.{name}").main(context.args) or EXIT_FINISHED))


def papers(needed_by: str) -> Any:
    """The module ``benchmarks/papers/command.py``, which runs the studies of published results.

    Raises:
        ConfigError: ``needed_by`` asks for one, and benchmarks/ is not here.
    """
    if not _are_here():
        raise wrong(
            needed_by, "is a study of a paper, and benchmarks/ is not here", "Run it in a clone of the repository"
        )
    return _module("papers.command")


def _are_here() -> bool:
    """Whether the folder is ours: beside installed packages there may be another one of that name."""
    return (_FOLDER / "papers" / "command.py").exists()


def _module(name: str) -> Any:
    if str(_FOLDER.parent) not in sys.path:
        sys.path.insert(0, str(_FOLDER.parent))
    return importlib.import_module(f"benchmarks.{name}")


def _first_line(file: Path) -> str:
    """The first line of the module's docstring, without importing it."""
    return (ast.get_docstring(ast.parse(file.read_bytes())) or "").partition("\n")[0]
