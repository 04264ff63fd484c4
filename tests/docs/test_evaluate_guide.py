"""The guide to evaluation, run as it is written."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from actors.host.best_link import best_of

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "guides" / "evaluate.md"


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_guide_runs_as_written_and_a_checkpoint_by_itself_says_what_its_run_said(tmp_path: Path) -> None:
    text = GUIDE.read_text(encoding="utf-8")
    (job,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    commands = [line for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]
    (tmp_path / "evaluate.yaml").write_text(job, encoding="utf-8")
    said = [run_in(tmp_path, line.split()) for line in commands]
    rows = [json.loads(line) for line in (tmp_path / "runs/evaluate/eval.jsonl").read_text().splitlines()]
    assert [row["version"] for row in rows] == [0, 10, 20]
    for row in rows:
        assert row["samples"] == 128 and row["version_min"] == row["version_max"] == row["version"]
        assert row["pass_at_k"]["1"] <= row["pass_at_k"]["2"] <= row["pass_at_k"]["4"]
    trained = [row for row in rows if row["version"]]
    best = best_of(tmp_path / "runs/evaluate/checkpoints")
    assert best is not None
    (of_best,) = (row for row in rows if best.name == f"step_{row['version']:06d}")
    assert of_best["avg_at_k"] == max(row["avg_at_k"] for row in trained)
    again = json.loads(said[-1].splitlines()[-1])
    assert again == {key: of_best[key] for key in ("avg_at_k", "pass_at_k", "samples", "response_tokens_mean")}
    columns = set(re.findall(r"^\| (`.*?) \|", text, re.MULTILINE))
    assert {name for cell in columns for name in re.findall(r"`(\w+)`", cell)} == set(rows[0])


def run_in(directory: Path, words: list[str]) -> str:
    assert words[0] == "headrace"
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-P", "-m", "main", *words[1:]],
        cwd=directory, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout
