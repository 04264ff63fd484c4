"""Keys of tenants: ``tml-TENANT-SIGNATURE``, which nobody has to store.

    DIRECTORY/tinker.key (0600)     the secret that signs them; removed, all keys are void at the next start

The client sends its key as ``X-API-Key``, and takes none that does not begin with ``tml-``. A tenant is known by its
name alone: what it owns stays its own under each key that is signed for it.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from pathlib import Path
from typing import Final

from actors.host.whole_file import write_once
from actors.tinker.errors import Problem

_FILE: Final = "tinker.key"
_PREFIX: Final = "tml-"
_TENANT: Final = re.compile(r"[a-z0-9_]{1,32}")
_SIGNATURE_CHARACTERS: Final = 32
"""Length of a signature in hexadecimal: 128 bits, which nobody guesses."""


class TenantKeys:
    """Signs and reads keys."""

    def __init__(self, secret: str) -> None:
        self._secret = hmac.digest(secret.encode(), b"tenant keys", "sha256")

    @classmethod
    def of_directory(cls, directory: Path) -> TenantKeys:
        """Keys signed with the secret in ``directory``, made at the first call. Raises OSError."""
        path = directory / _FILE
        if not path.exists():
            write_once(path, f"{secrets.token_hex(32)}\n")  # never over one that somebody else has just made
        return cls(path.read_text("ascii").strip())

    def sign(self, tenant: str) -> str:
        """The key of ``tenant``.

        Raises:
            ValueError: it is no name: 1 to 32 small letters, digits and _.
        """
        if _TENANT.fullmatch(tenant) is None:
            raise ValueError(f"{tenant!r} is no name of a tenant: use 1 to 32 of a-z, 0-9 and _")
        return f"{_PREFIX}{tenant}-{self._signature(tenant)}"

    def tenant(self, key: str) -> str:
        """Whose key it is.

        Raises:
            Problem: it is none that was signed here.
        """
        tenant, _, signature = key.removeprefix(_PREFIX).rpartition("-")
        expected = self._signature(tenant) if _TENANT.fullmatch(tenant) else ""
        right = hmac.compare_digest(signature.encode("utf-8", "replace"), expected.encode())
        if not (right and expected and key.startswith(_PREFIX)):
            raise Problem(401, "X-API-Key: this key is none of this server's: ask whoever runs it for one")
        return tenant

    def _signature(self, tenant: str) -> str:
        return hmac.new(self._secret, tenant.encode(), hashlib.sha256).hexdigest()[:_SIGNATURE_CHARACTERS]
