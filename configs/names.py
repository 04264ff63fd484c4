"""One rule for names of machines, jobs and actors, wherever one comes in: command line, control socket or network.

A name becomes part of file names, peer names and log lines, and is printed in terminals: so it has neither ``/`` nor
``..``, no spaces, no escapes, and a limited length.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Final

NAME_CHARACTERS_MAX: Final = 64
NODE_NAME_CHARACTERS_MAX: Final = 56
"""Longest name of a machine; it recurs in the names of its workers and peers, which may have 200 characters."""
SHARED: Final = "service"
"""Word in place of a job's name in the names of processes that serve several jobs."""
SERVING: Final = "serving"
"""Word in place of a job's name in the names of the processes that serve models to programs of other people."""
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*", re.ASCII)
_RANK: Final = re.compile(r"(?<=.)\.rank[1-9][0-9]{0,3}$", re.ASCII)
"""Ending of the name of each rank of a group, except the leader, rank 0."""
_OF_THE_HEAD: Final = frozenset({"head", "machine"})
"""Names of the peers on the head's own machine."""


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
    """What is wrong with the name of a machine that wants to join a head, as ``name_problem`` says it."""
    if name in _OF_THE_HEAD:
        return f"{name!r} is what the head's own machine is called, choose another one"
    return name_problem(name, longest=NODE_NAME_CHARACTERS_MAX)


def rank_name(leader: str, rank: int) -> str:
    """Name of one rank of the group of actors or processes that ``leader`` leads; rank 0 is the leader itself."""
    return f"{leader}.rank{rank}" if rank else leader


def leader_of(name: str) -> str:
    """Name of the leader of a follower's rank group; ``name`` itself if it is no follower's."""
    return _RANK.sub("", name)


def rank_of(name: str) -> int:
    """Number of the rank called ``name``; 0 if it leads."""
    found = _RANK.search(name)
    return int(found[0].removeprefix(".rank")) if found else 0


def follows(name: str) -> bool:
    """Whether ``name`` is that of a follower in a rank group."""
    return leader_of(name) != name


def ranks_in_words(names: Collection[str]) -> str:
    """The ranks that ``names`` have, which follow each other: ``rank 1``, ``ranks 2 and 3``, ``ranks 4 to 7``."""
    ranks = sorted(map(rank_of, names))
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {ranks[0]} {'and' if len(ranks) == 2 else 'to'} {ranks[-1]}"


def served_model(number: int) -> str:
    """Name under which a training service knows a model of a client; no job may be called so."""
    return f"{SERVING}.{number}"


def is_served_model(job: str) -> bool:
    """Whether ``job`` is a client's model, and no job."""
    return job.startswith(f"{SERVING}.")


def sampler_name(model: int, number: int) -> str:
    """Name of one of the processes that sample the served model at that place of the serving file."""
    return f"sampler-{model}-{number}"
