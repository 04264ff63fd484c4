"""The guide to adapters, as it is written but for the number of steps: its run, its merge and its lines for PEFT."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "guides" / "lora.md").read_text()
QUICKLY = ["--set", "steps=2", "--set", "model.warm_start_steps=5", "--set", "checkpoint.every=1"]


def fence(language: str) -> str:
    return re.findall(rf"^```{language}\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)[0].replace("150", "002")


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_commands_of_the_guide_give_an_adapter_that_peft_loads_and_a_whole_model(tmp_path: Path) -> None:
    (tmp_path / "configs").symlink_to(ROOT / "configs")

    def run(*command: str) -> None:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        done = subprocess.run(
            command, check=False, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240
        )
        assert done.returncode == 0, done.stderr[-3000:]

    began, merged = (line.partition("#")[0].split()[1:] for line in fence("sh").splitlines())
    run(sys.executable, str(ROOT / "main.py"), *began, *QUICKLY)
    run(sys.executable, str(ROOT / "main.py"), *merged)

    rows = [json.loads(line) for line in (tmp_path / "runs" / "lora" / "metrics.jsonl").read_text().splitlines()]
    told = {row["pull_bytes"] / row["weights_loaded"] for row in rows if row["weights_loaded"]}
    assert [f"{size:,.0f} bytes" in GUIDE for size in told] == [True]
    checkpoint = tmp_path / "runs" / "lora" / "checkpoints" / "step_000002"
    assert {"adapter_config.json", "adapter_model.safetensors", "trainer"} <= {
        file.name for file in checkpoint.iterdir()
    }
    assert (tmp_path / "models" / "speller" / "model.safetensors").is_file()
    if importlib.util.find_spec("peft") is not None:
        run(sys.executable, "-c", fence("python"))
