"""What too little memory looks like in torch and numpy, and OutOfMemory in its place.

The error of torch holds the frames of the pass that failed, and so its tensors: it is let go before ours is raised.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import wraps
from typing import Concatenate, Final, ParamSpec, TypeVar

import torch

from actors.host.host_memory import give_back_freed_memory
from actors.trainer.errors import OutOfMemory

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")

_WORDS: Final = ("can't allocate memory", "cannot allocate memory", "out of memory", "alloc_failed")
"""Phrases of torch's CPU allocator, the system, CUDA and cuBLAS, in small letters."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` says that the device, or this process, has no memory left."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in _WORDS)


def or_out_of_memory(work: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """``work``, a method, with OutOfMemory in place of errors that mean it."""

    @wraps(work)
    def tried(self: S, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return work(self, *args, **kwargs)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            said = str(error).strip().partition("\n")[0][:300] or type(error).__name__
        raise OutOfMemory(said)

    return tried


def give_back_unused() -> None:
    """Free what a failed pass has left, and what allocators keep: smaller tensors may need it in other pieces."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    give_back_freed_memory()
