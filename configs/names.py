"""Names of machines, jobs and actors: one rule, wherever a name enters, by a command line, a socket or a wire.

A name becomes part of file names, peer names and log lines, and is printed in terminals: so it has neither ``/`` nor
``..``, no spaces, no escapes, and an end.
"""

from __future__ import annotations

import re
from typing import Final

NAME_CHARACTERS_MAX: Final = 64
NODE_NAME_CHARACTERS_MAX: Final = 56
"""A machine's is shorter: a peer is called after machine, job and worker, a worker after its machine; 200 in all."""
SHARED: Final = "service"
"""Stands where a job's name does, in the names of processes that serve several jobs."""
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*", re.ASCII)
_RANK: Final = re.compile(r"(?<=.)\.rank[1-9][0-9]{0,3}$", re.ASCII)
"""Ends the name of each rank of a group but its leader's, which has number 0."""
_OF_THE_HEAD: Final = frozenset({"head", "machine"})
"""Names of peers that a head's machine has itself."""


def name_problem(name: str, *, longest: int = NAME_CHARACTERS_MAX) -> str:
    """What is wrong with ``name``, as the end of a sentence; empty: nothing."""
    if not name:
        return "is empty, expected a name such as gpu-1"
    shown = ascii(name) if len(name) <= longest else f"{name[:longest]!a}…"
    if len(name) > longest:
        return f"{shown} has {len(name)} characters, at most {longest} are allowed"
    if _NAME.fullmatch(name) is None or ".." in name:
        return f"{shown} is no name: expected letters, digits, dot, dash and underscore, a letter or digit first"
    return ""


def node_name_problem(name: str) -> str:
    """As ``name_problem``, for a machine that wants to join a head."""
    if name in _OF_THE_HEAD:
        return f"{name!r} is what the head's own machine is called, choose another one"
    return name_problem(name, longest=NODE_NAME_CHARACTERS_MAX)


def rank_name(leader: str, rank: int) -> str:
    """Name of one rank of the group that ``leader`` leads, an actor's or a process's; rank 0 is the leader itself."""
    return f"{leader}.rank{rank}" if rank else leader


def leader_of(name: str) -> str:
    """Name of who leads the rank group of ``name``: another one if that is a follower, else itself."""
    return _RANK.sub("", name)


def rank_of(name: str) -> int:
    """Number of the rank of that name; 0 if it leads."""
    found = _RANK.search(name)
    return int(found[0].removeprefix(".rank")) if found else 0


def follows(name: str) -> bool:
    """Whether that is the name of a rank that another one leads."""
    return leader_of(name) != name
