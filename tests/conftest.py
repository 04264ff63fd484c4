"""What every test starts from: offline, few threads, the same examples on each run."""

from __future__ import annotations

import os

from hypothesis import settings

pytest_plugins = ["supervisors.testing.pytest_plugin"]

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Time limits per example say more about the machine than about the code; pytest-timeout bounds the whole test.
settings.register_profile("default", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
