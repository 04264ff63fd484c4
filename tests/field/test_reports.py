"""Cases from public bug reports of trainers like this one, each a script that runs the product as its user did.

``NAME/run`` makes its inputs, runs the command line and prints a PASS or FAIL line for each thing that must hold; its
first comment names the report. One by hand: ``HR_VENV=.venv bash tests/field/NAME/run SCRATCH``.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
LONGEST_S = 600


@pytest.mark.long
@pytest.mark.timeout(LONGEST_S + 30)
@pytest.mark.parametrize("name", sorted(script.parent.name for script in HERE.glob("*/run")))
def test_what_a_public_report_describes_does_not_happen_here(name: str, tmp_path: Path) -> None:
    environment = {**os.environ, "HR_VENV": sys.prefix, "TINY_CACHE": str(tmp_path.parent / "tiny_models")}
    script = subprocess.Popen(
        ["bash", str(HERE / name / "run"), str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL, text=True, env=environment, start_new_session=True,
    )  # fmt: skip
    try:
        said, _ = script.communicate(timeout=LONGEST_S)
    except subprocess.TimeoutExpired:
        os.killpg(script.pid, signal.SIGKILL)
        said, _ = script.communicate()
        pytest.fail(f"{name} is not over after {LONGEST_S} s\n{said[-4000:]}")
    assert script.returncode == 0 and "FAIL" not in said and "PASS" in said, said[-6000:]
    shutil.rmtree(tmp_path)
