"""No file of a run is named in two places: what it is called stands in ``configs/run_files.py`` alone."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path
from typing import Final

from configs import run_files

ROOT: Final = Path(__file__).resolve().parents[2]
NAMES: Final = {value for name, value in vars(run_files).items() if name.isupper() and "." in str(value)}
OTHER_FILES: Final = {
    ("actors/train_service/notes.py", "jobs.json"),
    ("supervisors/cli/new.py", "job.yaml"),
}
"""Files of other directories that have such a name."""


def test_the_names_of_a_runs_files_are_spelt_once() -> None:
    listed = subprocess.check_output(["git", "ls-files", "*.py"], cwd=ROOT, text=True, timeout=60).split()
    product = [file for file in listed if file.split("/")[0] in ("actors", "supervisors", "configs", "benchmarks")]
    spelt = {
        (file, str(node.value))
        for file in product
        for node in ast.walk(ast.parse((ROOT / file).read_text("utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in NAMES
    }
    assert {place for place in spelt - OTHER_FILES if place[0] != "configs/run_files.py"} == set()
