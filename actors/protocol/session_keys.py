"""Keys of the gateway: one for its operator, and one for each life of an episode, which nobody has to store.

    RUN/gateway.key (0600)  hr-admin-…      begins episodes; its text is also the secret that signs session keys
    session key             hr-<job>-<step>-<prompt>-<sibling>-<attempt>-<signature>
                            of the evaluation of version 3, <step> is e3

Invariants
- The file is made once, by the process that needs it first, and outlives every process of the run: keys stay good.
- A session key is valid by its signature alone. The scheduler knows whether its episode still goes on.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from pathlib import Path
from typing import Final

from actors.host.whole_file import write_once
from actors.protocol.episodes import EpisodeName
from actors.protocol.evaluations import short_name, step_of_short_name
from configs.run_files import GATEWAY_KEY
from transport.errors import HeadraceError

_ADMIN: Final = "hr-admin-"
_SIGNATURE_CHARACTERS: Final = 32
"""Length of a signature in hexadecimal: 128 bits, which nobody guesses."""


class BadKey(HeadraceError):
    """A key is none of this run's; the message says why."""


def admin_key(run_dir: Path) -> str:
    """The admin key of the run, made at the first call.

    Raises:
        BadKey: the file holds something else.
    """
    path = run_dir / GATEWAY_KEY
    if not path.exists():
        write_once(path, f"{_ADMIN}{secrets.token_hex(24)}\n")  # never over a key that somebody else has just made
    key = path.read_text("ascii", errors="replace").strip()
    if not key.startswith(_ADMIN):
        raise BadKey(f"{path} holds no admin key (expected {_ADMIN}…): remove it, and the next start makes one")
    return key


class SessionKeys:
    """Signs session keys of one job, and reads them."""

    def __init__(self, admin: str, job: str) -> None:
        self._admin, self._job = admin, job
        self._secret = hmac.digest(admin.encode(), b"session keys", "sha256")

    def is_admin(self, key: str) -> bool:
        """Whether ``key`` is the admin key; compared in constant time."""
        return hmac.compare_digest(key.encode("utf-8", "replace"), self._admin.encode())

    def sign(self, episode: EpisodeName) -> str:
        named = f"hr-{self._job}-{short_name(episode.step)}-{episode.prompt}-{episode.sibling}-{episode.attempt}"
        return f"{named}-{self._signature(named)}"

    def read(self, key: str) -> EpisodeName:
        """The episode that ``key`` was signed for.

        Raises:
            BadKey: it is no session key of this job, or was not signed here.
        """
        named, _, signature = key.rpartition("-")
        head, *parts = named.rsplit("-", 4)
        step = step_of_short_name(parts[0]) if len(parts) == 4 else None
        numbers = parts[1:]
        if head != f"hr-{self._job}" or step is None or not all(n.isascii() and n.isdecimal() for n in numbers):
            raise BadKey("this is no session key of this job: use the one that the episode was begun with")
        if not hmac.compare_digest(signature.encode("utf-8", "replace"), self._signature(named).encode()):
            raise BadKey("the signature of this session key is not this run's: use the key that it was begun with")
        return EpisodeName(step, *map(int, numbers))

    def _signature(self, named: str) -> str:
        return hmac.new(self._secret, named.encode(), hashlib.sha256).hexdigest()[:_SIGNATURE_CHARACTERS]
