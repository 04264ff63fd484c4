"""What an error says that transformers raised while it loaded a model: is it the model's, and in a sentence for people.

transformers, safetensors and torch raise whatever comes to hand: OSError, ValueError, ImportError, KeyError and their
own. Nearly all of it is the directory's fault and comes again; an error of the operating system may pass.
"""

from __future__ import annotations

import errno
from typing import Final

_LASTING: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.ELOOP})
"""Errors of the operating system that say something of the directory; by others, such as EIO, ESTALE or ENOMEM, it is
the disk or the machine that speaks."""
_SHOWN: Final = 400
"""Characters of a message that people read."""


def passes(error: Exception) -> bool:
    """Whether another try may go well: no memory, a disk that answers again."""
    if isinstance(error, MemoryError):
        return True
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno not in _LASTING
    return "out of memory" in str(error).lower() or "can't allocate memory" in str(error).lower()


def brief(error: Exception) -> str:
    """The first lines of what it says, with its class where the words alone would say little."""
    text = " ".join(line.strip() for line in str(error).splitlines() if line.strip())
    text = text.partition(" Model type should be one of ")[0]  # and then each that it knows
    text = text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1].rstrip()}…"
    return text if isinstance(error, OSError | ValueError | ImportError) and text else f"{type(error).__name__}: {text}"
