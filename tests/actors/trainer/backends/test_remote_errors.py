"""An error of a backend in another process is the same error here."""

from __future__ import annotations

import errno

import pytest

from actors.host.room import NoSpaceLeft
from actors.trainer.backends.remote_errors import error_of, failed
from actors.trainer.errors import OutOfMemory, ServiceFailed


@pytest.mark.parametrize(
    "error",
    [OutOfMemory("none left"), NoSpaceLeft("at the machine of rank 3"), ValueError("no"), OSError(errno.EIO, "x")],
)
def test_an_error_comes_over_as_itself(error: Exception) -> None:
    made = error_of(failed(error))
    assert type(made) is type(error)
    assert str(made).endswith(str(error))
    assert getattr(made, "permanent", None) == getattr(error, "permanent", None)


def test_an_error_that_is_not_known_here_keeps_its_name() -> None:
    assert str(error_of(failed(KeyboardInterrupt("x")))) == "KeyboardInterrupt: x"  # type: ignore[arg-type]
    assert isinstance(error_of(failed(BrokenPipeError("x"))), OSError | ServiceFailed)
