"""The typed error by which something ended: which one it is, whether it is permanent, and that it can be printed."""

from __future__ import annotations

import msgspec
import pytest

from actors.core.errors import RemoteError, ReplyError, StartFailed
from actors.core.kernel.answers import error_of, failure_of
from actors.core.reason import Reason, is_blameless, is_permanent, reason_of
from configs.limits import DEFAULT_LIMITS
from transport.address import ActorAddress, PeerId
from transport.errors import HeadraceError

THERE = ActorAddress("prompts", PeerId("rewards", 1))


class NoSuchModel(HeadraceError):
    permanent = True


class BadRow(ReplyError):
    permanent = True


def caused(error: Exception, cause: BaseException) -> Exception:
    error.__cause__ = cause
    return error


def test_an_actor_that_did_not_start_has_the_reason_for_which_it_did_not() -> None:
    failed = caused(StartFailed("trainer did not start: …"), NoSuchModel("model.path: nothing is there"))
    assert reason_of(failed) == Reason(error="NoSuchModel", message="model.path: nothing is there", permanent=True)


def test_a_group_has_the_reason_of_its_first_error() -> None:
    assert str(reason_of(ExceptionGroup("tasks", [OSError(28, "No space left on device")]))) == (
        "OSError: [Errno 28] No space left on device"
    )


def test_what_was_raised_from_a_permanent_error_is_permanent_and_keeps_its_own_words() -> None:
    reason = reason_of(caused(RuntimeError("the backend could not start"), NoSuchModel("x")))
    assert (reason.error, reason.permanent) == ("RuntimeError", True)
    assert not is_permanent(caused(RuntimeError("again"), OSError("disk")))


class Innocent(HeadraceError):
    blameless = True


def test_an_error_is_blameless_by_itself_and_not_by_what_it_was_raised_from() -> None:
    assert is_blameless(Innocent("gone"))
    assert is_blameless(caused(Innocent("gone"), OSError("link")))
    assert is_blameless(caused(StartFailed("no"), Innocent("gone")))
    assert not is_blameless(caused(RuntimeError("ours"), Innocent("gone")))
    assert not is_blameless(caused(Innocent("gone"), NoSuchModel("never")))


def test_a_permanent_error_of_another_role_is_permanent_here_too() -> None:
    """Through the wire's form, and for the asker that crashes with it."""
    failure = failure_of(BadRow("data.jsonl: row 3 has no prompt"), declared=True)
    error = error_of(msgspec.json.decode(msgspec.json.encode(failure), type=type(failure)), THERE, "q", stream=False)
    assert isinstance(error, RemoteError) and is_permanent(error)
    passing = error_of(failure_of(OSError("busy"), declared=False), THERE, "q", stream=False)
    assert not is_permanent(passing)


def test_a_chain_that_is_a_circle_is_looked_at_once() -> None:
    one, two = RuntimeError("1"), RuntimeError("2")
    one.__cause__, two.__cause__ = two, one
    assert not is_permanent(one)


@pytest.mark.parametrize("text", ["\x1b[31mred\x1b[0m", "bell\x07", "over\rwritten"])
def test_a_reason_holds_nothing_that_a_terminal_would_obey(text: str) -> None:
    message = reason_of(ValueError(text)).message
    assert "�" in message and not any(c in message for c in "\x1b\x07\r")


def test_a_reason_is_bounded() -> None:
    assert len(reason_of(ValueError("x" * 10**6)).message) == DEFAULT_LIMITS.exit_reason_characters
