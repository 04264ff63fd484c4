"""A wheel, unpacked where nothing of the repository is: presets by name, and folders of a user with our names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.chaos.small_job import simulated_job

ROOT = Path(__file__).parents[2]
REWARD = "def score(prompt, response, answer, **columns):\n    return float(len(response) % 2)\n"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a wheel puts into site-packages."""
    place = tmp_path_factory.mktemp("wheel")
    command = [
        sys.executable,
        "-P",
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(place),
    ]
    source = tmp_path_factory.mktemp("source")  # setuptools leaves its build folder beside the sources
    for name in ("actors", "configs", "supervisors", "transport", "main.py", "pyproject.toml", "README.md", "LICENSE"):
        (source / name).symlink_to(ROOT / name)
    subprocess.run([*command, str(source)], cwd=place, check=True, timeout=100)
    (wheel,) = place.glob("headrace-*.whl")
    zipfile.ZipFile(wheel).extractall(place / "site")
    return place / "site"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder of a user, with packages and a program that are called like ours."""
    for name in ("actors", "configs", "supervisors", "transport"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('the wrong package')\n")
    (tmp_path / "main.py").write_text("raise SystemExit('the wrong program')\n")
    (tmp_path / "my_reward.py").write_text(REWARD)
    return tmp_path


def headrace(installed: Path, project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The console script of an installation, in a project that is on the ``PYTHONPATH`` before it."""
    script = f"import sys; sys.path.append({str(installed)!r}); sys.path[:0] = [{str(project)!r}]\n"
    script += f"exec(compile(open({str(installed / 'supervisors/cli/entry.py')!r}).read(), 'entry', 'exec'),"
    script += f" {{'__name__': '__main__', '__file__': {str(installed / 'supervisors/cli/entry.py')!r}}})"
    command = [sys.executable, "-P", "-c", script, *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["PYTHONPATH"] = str(project)
    return subprocess.run(
        command, cwd=project, env=environment, capture_output=True, text=True, check=False, timeout=100
    )


def test_presets_are_found_by_name_and_bench_says_what_it_needs(installed: Path, project: Path) -> None:
    for name in ("quickstart", "configs/quickstart.yaml"):
        checked = headrace(installed, project, "check", name, "--json")
        assert checked.returncode == 0, checked.stderr
        assert json.loads(checked.stdout)["name"] == "quickstart"
    unknown = headrace(installed, project, "check", "quickstarts")
    assert (unknown.returncode, "quickstart_vllm" in unknown.stderr) == (2, True)
    bench = headrace(installed, project, "bench", "loop")
    assert (bench.returncode, "clone the repository" in bench.stderr) == (2, True)
    assert headrace(installed, project, "--version").stdout.startswith("headrace ")
    assert all((installed / name / "py.typed").is_file() for name in ("actors", "configs", "supervisors", "transport"))


def test_folders_with_our_names_beside_the_job_file_break_nothing(
    installed: Path, project: Path, small_model: Path
) -> None:
    """Head, role and scorer processes run our packages, and the user's own module all the same."""
    job: dict[str, Any] = simulated_job(
        small_model, reward={"kind": "function", "function": "my_reward:score"}, steps=2
    )
    (project / "job.yaml").write_text(yaml.safe_dump(job))
    done = headrace(installed, project, "run", "job.yaml", "--dir", "here", "--json")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert (summary["state"], summary["steps"], summary["prompts_lost"]) == ("finished", 2, 0)
    assert 0 < summary["reward_last"] < 1
