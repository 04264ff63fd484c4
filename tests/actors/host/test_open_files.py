"""Descriptors: as many as the hard limit allows, and a sentence where those are too few."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from actors.host.open_files import TooFewDescriptors, check_enough_for

ROOT = Path(__file__).resolve().parents[3]


def test_the_soft_limit_is_raised_to_the_hard_one() -> None:
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 512));"
        "from actors.host.open_files import raise_soft_limit; raise_soft_limit();"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "(512, 512)"


def test_too_few_are_refused_with_what_is_allowed_and_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 64))
    with pytest.raises(
        TooFewDescriptors, match=r"64 are allowed, expected \d+ or more for 2 rollout workers; .*ulimit"
    ):
        check_enough_for(2)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    check_enough_for(100)
