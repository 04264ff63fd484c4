"""Which code of users the processes of this head may import, decided where something is imported by a job's name.

    headrace head --allow-functions A ─▶ environment variable ─▶ its processes, and theirs ─▶ why_not_allowed(name)

The head refuses a submitted job that names other code (``supervisors/head/allowed_functions.py``), so that its author
is told at once. What is said here holds wherever a name comes from: options that a library reads as names, say.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from typing import Final

_VARIABLE: Final = "HEADRACE_ALLOW_FUNCTIONS"
_A_NAME: Final = re.compile(r"[A-Za-z_][\w.]*(:\w*)?")
"""A module, or something in one. A command, a file or the id of a library is allowed as a whole."""


def allow_only(prefixes: Sequence[str]) -> None:
    """Have this process and all that it starts import no other code by names of jobs."""
    os.environ[_VARIABLE] = json.dumps(list(prefixes))


def allowed_here() -> list[str] | None:
    """The prefixes of names that may be imported; None: any."""
    said = os.environ.get(_VARIABLE)
    return None if said is None else [str(prefix) for prefix in json.loads(said)]


def is_allowed(name: str, prefixes: Sequence[str]) -> bool:
    """Whether a prefix allows ``name``. It ends where a name does: ``my_rewards`` allows ``my_rewards.math:score``."""
    if name in prefixes:
        return True
    return bool(_A_NAME.fullmatch(name)) and any(name.startswith((f"{one}.", f"{one}:")) for one in prefixes)


def why_not_allowed(name: str) -> str:
    """Why ``name`` may not be imported, or started, in this process; empty: it may."""
    prefixes = allowed_here()
    if prefixes is None or is_allowed(name, prefixes):
        return ""
    return f"{name!r} is not allowed: this head runs functions of {', '.join(prefixes)} only (--allow-functions)"
