"""What the command lines and the reports of benchmarks have in common.

Each benchmark takes ``--json`` and then prints one line of it on stdout and nothing else, else a table for people.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from actors.core.strict_json import strict_json

Result = dict[str, Any]

BUSY_LOAD: Final = 0.5
"""Cores kept busy by others, above which a result says so."""


def command_line(name: str, document: str | None) -> argparse.ArgumentParser:
    """The parser of ``headrace bench NAME``: ``document`` is what its module says of itself."""
    parser = argparse.ArgumentParser(
        prog=f"headrace bench {name}", description=document, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="JSON only on stdout")
    return parser


def add_job_options(parser: argparse.ArgumentParser, job: Path) -> None:
    """Which job is measured, and on which cores; ``job`` is the file unless another is named."""
    parser.add_argument("--job", type=Path, default=job)
    parser.add_argument("--set", action="append", metavar="a.b=c", help="override a key of the job file; repeatable")
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--model", type=Path, help="take this model instead of making one")


def add_check_option(parser: argparse.ArgumentParser) -> None:
    """``--check``, of benchmarks whose result has ``missed``: what of its goals it has not reached."""
    parser.add_argument("--check", action="store_true", help="exit 1 if a goal is missed")


def measured(measure: Callable[[argparse.Namespace, Path], Result], options: argparse.Namespace) -> Result:
    """What ``measure`` finds in a directory of its own, with a note if others kept the machine busy."""
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as scratch:
        result = measure(options, Path(scratch))
    if result["hardware"]["load_before"] > BUSY_LOAD:
        result["note"] = "the machine was busy before the measurement began: these figures are not to be quoted"
    return result


def print_figures(result: Result) -> None:
    """The table of a benchmark that has no better one: a figure a line."""
    for name, value in result.items():
        if name != "note":
            print(f"  {name:<28} {value}")


def show(result: Result, options: argparse.Namespace, print_table: Callable[[Result], None] = print_figures) -> None:
    """One line of JSON with ``--json``, else a table."""
    if options.json:
        print(strict_json(result), flush=True)
        return
    print_table(result)
    if note := result.get("note"):
        print(f"  {note}")


def show_and_check(
    result: Result, options: argparse.Namespace, print_table: Callable[[Result], None] = print_figures
) -> int:
    """``show``; 1 if goals are missed and ``--check`` asks for that."""
    show(result, options, print_table)
    return 1 if options.check and result["missed"] else 0
