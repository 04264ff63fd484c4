"""Takes ``docs/images/console.png``: the page of a run with evaluations, while it goes on after a worker was killed.

PYTHONPATH=. .venv/bin/python docs/images/console.py DIR    runs it into DIR; wants Chromium and a quiet machine
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from docs.images.story import HEADRACE, tree, wait_for
from tests.supervisors.cli.console.chromium import Chromium

STEPS, KILLED_AT, TAKEN_AT = 120, 70, 82
DATA = "eval.data={source: reasoning_gym, task: spell_backward, task_args: {max_word_len: 5}}"
SETTINGS = (f"steps={STEPS}", "sync.mode=async", DATA, "eval.every=10", "eval.prompts=64")


def main(run_dir: Path) -> None:
    """Run the quickstart in ``run_dir``, and take the picture of its page."""
    sets = [word for setting in SETTINGS for word in ("--set", setting)]
    with subprocess.Popen([*HEADRACE, "run", "configs/quickstart.yaml", *sets, "--dir", str(run_dir)]) as job:
        wait_for(job, run_dir, KILLED_AT)
        os.kill(next(row["pid"] for row in tree(run_dir) if row["name"] == "rollout-1"), signal.SIGKILL)
        console = subprocess.Popen([*HEADRACE, "console", str(run_dir)], stdout=subprocess.PIPE, text=True)
        assert console.stdout is not None
        address = next(word for line in console.stdout for word in line.split() if word.startswith("http://"))
        with Chromium(run_dir / "browser", width=1280, height=1080) as browser:
            browser.open(address)
            wait_for(job, run_dir, TAKEN_AT)
            time.sleep(1)  # the page draws once a second
            browser.picture(Path(__file__).with_suffix(".png"), whole=False)
        console.send_signal(signal.SIGINT)
        console.wait(10)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
