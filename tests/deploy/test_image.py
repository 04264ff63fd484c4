"""What can be known of the image without building it: what is copied is there and enough, and what it calls exists."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LINES = (ROOT / "deploy" / "Dockerfile").read_text().splitlines()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
COPIED = [source for line in LINES if line.startswith("COPY ") for source in line.split()[1:-1]]


def test_what_is_copied_is_there_and_is_all_that_an_installation_needs() -> None:
    """Packages that the project finds, what its metadata names, and its modules."""
    assert [source for source in COPIED if not (ROOT / source).exists()] == []
    tools, project = PROJECT["tool"]["setuptools"], PROJECT["project"]
    patterns = tools["packages"]["find"]["include"]
    packages = [path.name for path in ROOT.iterdir() if any(fnmatch(path.name, pattern) for pattern in patterns)]
    wanted = {*packages, *(f"{module}.py" for module in tools["py-modules"]), "pyproject.toml", project["readme"]}
    assert wanted <= set(COPIED)
    for line in LINES:  # a directory is copied under its own name, else its package would have another one
        if line.startswith("COPY ") and (ROOT / line.split()[1]).is_dir():
            assert line.split()[1] == line.split()[2]


def test_extras_entrypoint_and_python_are_the_projects() -> None:
    text = "\n".join(LINES)
    project = PROJECT["project"]
    extras = {extra for found in re.findall(r"EXTRAS=([\w,]+)", text) for extra in found.split(",")}
    assert extras <= project["optional-dependencies"].keys()
    (entrypoint,) = re.findall(r'^ENTRYPOINT \["(\w+)"\]', text, re.MULTILINE)
    assert entrypoint in project["scripts"]
    (python,) = re.findall(r"^FROM python:3\.(\d+)", text, re.MULTILINE)
    assert int(python) >= int(re.findall(r"3\.(\d+)", project["requires-python"])[0])


def test_headrace_starts_with_nothing_but_what_is_copied(tmp_path: Path) -> None:
    for source in COPIED:
        (tmp_path / source).symlink_to(ROOT / source)
    command, environment = [sys.executable, "-P", "-m", "main", "node", "--help"], os.environ.copy()
    environment["PYTHONPATH"] = str(tmp_path)
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "--join" in done.stdout
