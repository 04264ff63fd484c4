"""File descriptors: raises the limit as far as the system allows, and checks that it is enough for a run.

The soft limit that a shell sets (often 1024, on macOS 256) is for programs that use ``select``, unlike Headrace. Child
processes inherit the raised limit.
"""

from __future__ import annotations

import resource
from typing import Final

from transport.errors import HeadraceError

_OF_A_HEAD: Final = 100
"""Descriptors of a head without workers; measured: 74 with every service of a job and one worker."""
_OF_A_WORKER: Final = 8
"""Descriptors of one more worker: three lanes in the head, and in the machine process a pidfd and three lanes."""


class TooFewDescriptors(HeadraceError):
    """The system allows fewer open files than the run needs; the message has both figures and what to do."""

    permanent = True


def raise_soft_limit() -> None:
    """Raise the soft limit to the hard one, but at most to ``limits.open_files_max``."""
    from configs.limits import DEFAULT_LIMITS  # with pydantic: 0.1 s that a command's help need not take

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = DEFAULT_LIMITS.open_files_max
    wanted = most if hard == resource.RLIM_INFINITY else min(hard, most)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError):
            return  # a sandbox may forbid it; ``check_enough_for`` sees whether the limit is enough


def check_enough_for(workers: int) -> None:
    """Check that a run with so many rollout workers may open the files that it needs.

    Raises:
        TooFewDescriptors: the soft limit is lower.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _OF_A_HEAD + _OF_A_WORKER * workers
    if soft != resource.RLIM_INFINITY and soft < needed:
        raise TooFewDescriptors(
            f"open files: {soft} are allowed, expected {needed} or more for {workers} rollout workers; "
            f"raise the limit (ulimit -n {needed}; the hard limit is {_figure(hard)}), or lower rollout.workers"
        )


def _figure(limit: int) -> str:
    return "none" if limit == resource.RLIM_INFINITY else str(limit)
