"""Errors of a library that loads a model: which may pass, and what people read of them."""

from __future__ import annotations

import errno
import os

import pytest

from actors.models.model_errors import brief, passes


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ENOMEM, errno.EMFILE, errno.ENOSPC])
def test_what_the_machine_says_may_pass(number: int) -> None:
    assert passes(OSError(number, os.strerror(number)))


@pytest.mark.parametrize(
    "error",
    [OSError("no file named model.safetensors"), FileNotFoundError(errno.ENOENT, "gone"), ValueError("x"),
     ImportError("accelerate"), KeyError("q_proj"), PermissionError(errno.EACCES, "no")],
)  # fmt: skip
def test_what_the_directory_is_to_blame_for_comes_again(error: Exception) -> None:
    assert not passes(error)


def test_no_memory_may_pass() -> None:
    assert passes(MemoryError()) and passes(RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"))
    assert passes(RuntimeError("DefaultCPUAllocator: can't allocate memory"))


def test_the_list_of_all_architectures_is_left_out() -> None:
    error = ValueError("Unrecognized configuration class X.\nModel type should be one of A, B, C.")
    assert brief(error) == "Unrecognized configuration class X."


def test_words_that_say_little_alone_have_their_class_and_a_long_text_ends() -> None:
    assert brief(KeyError("q_proj")) == "KeyError: 'q_proj'"
    assert len(brief(ValueError("x" * 9999))) <= 400
