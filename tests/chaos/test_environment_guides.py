"""The guides to agents and environments run as written: their files in a directory, and their command."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from configs.python_path import python_path

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^`(\S+)`[^\n]*:\n\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)
WHOLE_JOB = re.compile(r"^```yaml\n(name: .*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("guide", ["train_your_agent", "write_an_environment"])
def test_a_guide_runs_as_written(guide: str, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "guides" / f"{guide}.md").read_text("utf-8")
    files = dict(FENCE.findall(page))
    assert "tasks.jsonl" in files
    assert len(files) >= 2
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    (job,) = WHOLE_JOB.findall(page)
    (tmp_path / "job.yaml").write_text(job)
    assert "headrace run job.yaml" in page
    done = subprocess.run(
        [sys.executable, "-P", "-m", "main", "run", "job.yaml", "--json"],
        cwd=tmp_path, capture_output=True, text=True, timeout=380, check=False,
        env={**os.environ, "PYTHONPATH": python_path()},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads(done.stdout.splitlines()[-1])
    assert (summary["steps"], summary["samples"], summary["samples_dropped"]) == (2, 32, 0)
