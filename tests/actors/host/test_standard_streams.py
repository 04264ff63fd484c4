"""A process that may lack a standard stream, or outlive who reads it: shown on real processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
TALKS = """
import sys
from actors.host.standard_streams import open_standard_streams
open_standard_streams(unbreakable={unbreakable})
with open(sys.argv[1], "w") as file:  # must not become anybody's standard output
    for _ in range(2000):
        print("x" * 100, "→")
        print("y", file=sys.stderr)
    sys.stdout.flush()
    file.write(f"{{file.fileno()}} {{len(sys.stdin.read())}}")
"""


def talk(tmp_path: Path, shell: str, *, unbreakable: bool = True, **env: str) -> tuple[int, str]:
    script, said = tmp_path / "talks.py", tmp_path / "said"
    script.write_text(TALKS.format(unbreakable=unbreakable))
    command = f"{sys.executable} {script} {said} {shell}"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"],
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=60,
        check=False,
    )
    return done.returncode, said.read_text() if said.exists() else ""


@pytest.mark.parametrize(
    "shell",
    ["<&-", ">&-", "2>&-", "<&- >&- 2>&-", ">/dev/full 2>/dev/full", "| true", "2>&1 | head -1 >/dev/null"],
)
def test_a_closed_full_or_broken_stream_ends_no_process(tmp_path: Path, shell: str) -> None:
    code, said = talk(tmp_path, shell)
    assert code == 0
    descriptor, read = said.split()
    assert int(descriptor) > 2 and read == "0"


def test_what_an_ascii_terminal_cannot_show_is_replaced(tmp_path: Path) -> None:
    code, said = talk(tmp_path, "", unbreakable=False, PYTHONIOENCODING="ascii", LC_ALL="C")
    assert code == 0 and said


def test_a_command_that_only_prints_says_so_when_it_cannot(tmp_path: Path) -> None:
    code, _ = talk(tmp_path, ">/dev/full", unbreakable=False)
    assert code != 0
