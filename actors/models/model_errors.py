"""Judges an error that transformers raised while it loaded a model: may a retry help, and what are people told?

transformers, safetensors and torch raise whatever comes to hand: OSError, ValueError, ImportError, KeyError and their
own. Nearly all of it is the directory's fault and comes again; an error of the operating system may pass.
"""

from __future__ import annotations

import errno
from typing import Final

from transport.errors import HeadraceError

_LASTING: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.ELOOP})
"""Errors of the operating system that are the directory's fault; others, such as EIO, ESTALE or ENOMEM, are the disk's
or the machine's."""
_SHOWN: Final = 400
"""Number of characters of a message that people are shown."""


def passes(error: Exception) -> bool:
    """Whether another try may go well, as when memory was short or a disk did not answer."""
    if isinstance(error, MemoryError):
        return True
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno not in _LASTING
    return "out of memory" in str(error).lower() or "can't allocate memory" in str(error).lower()


def brief(error: Exception) -> str:
    """The beginning of the error's text, with its class where the text alone would say little."""
    text = " ".join(line.strip() for line in str(error).splitlines() if line.strip())
    text = text.partition(" Model type should be one of ")[0]  # a list of every type follows
    text = text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1].rstrip()}…"
    return (
        text
        if isinstance(error, OSError | ValueError | ImportError | HeadraceError) and text
        else f"{type(error).__name__}: {text}"
    )
