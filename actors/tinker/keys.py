"""Keys of tenants, ``tml-TENANT-ID-EXPIRES-SIGNATURE``, which nobody has to store.

    DIRECTORY/tinker.key (0600)     the secret that signs them; removed, all keys are void at the next start
    DIRECTORY/tinker.revoked        what is void before its time, a line each:
                                        alice-3f9a1c2b    one key
                                        alice             all keys of alice that were made before this line

The client sends its key as ``X-API-Key``, and takes none that does not begin with ``tml-``.

Invariants
- A tenant is known by its name alone: what it owns stays its own under each key that is signed for it.
- The number of lines that name a tenant is part of what its keys sign. So one more line voids all that there were, and
  keys made later are good.
- A running server looks at the file with each request, and reads it when it has changed. While it cannot be read, what
  was void stays void.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import itertools
import re
import secrets
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Final

from actors.host.clock import time_of_day_s
from actors.host.whole_file import flush_to_disk, write_once
from actors.tinker.errors import Problem
from configs.tenants import TENANT_NAME

_FILE: Final = "tinker.key"
_REVOKED: Final = "tinker.revoked"
_PREFIX: Final = "tml-"
_TENANT: Final = re.compile(TENANT_NAME)
_KEY: Final = re.compile(rf"{_PREFIX}({TENANT_NAME})-([0-9a-f]{{8}})-([0-9a-f]{{1,12}})-([0-9a-f]{{32}})")
_SIGNATURE_CHARACTERS: Final = 32
"""Length of a signature in hexadecimal: 128 bits, which nobody guesses."""
_ID_CHARACTERS: Final = 8
_ASK: Final = "ask whoever runs this server for a new one"


class TenantKeys:
    """Signs, reads and revokes keys."""

    def __init__(self, directory: Path, secret: str) -> None:
        """Raises OSError: the file of revoked keys is there and cannot be read."""
        self._file = directory / _REVOKED
        self._secret = hmac.digest(secret.encode(), b"tenant keys", "sha256")
        self._seen = (0, 0)
        self._revoked = Counter[str]()
        self._look()

    @classmethod
    def of_directory(cls, directory: Path, *, make: bool = True) -> TenantKeys:
        """Keys signed with the secret in ``directory``; ``make``: made if there is none.

        Raises:
            OSError: it cannot be read, or made.
        """
        path = directory / _FILE
        if make and not path.exists():
            write_once(path, f"{secrets.token_hex(32)}\n")  # never over one that somebody else has just made
        return cls(directory, path.read_text("ascii").strip())

    # ------------------------------------------------------------ what operators do

    def new(self, tenant: str, *, days: int | None = None) -> str:
        """A further key of ``tenant``, good for so many days; None: for ever.

        Raises:
            ValueError: it is no name: 1 to 32 small letters, digits and _.
        """
        expires = 0 if days is None else int(time_of_day_s() + timedelta(days=days).total_seconds())
        return self._key(tenant, secrets.token_hex(_ID_CHARACTERS // 2), f"{expires:x}")

    def sign(self, tenant: str) -> str:
        """The key that is shown at a start: the same at each, until it is revoked. Raises ValueError, as ``new``."""
        ids = (self._digest(f"{tenant} {self._revoked[tenant]} {n}")[:_ID_CHARACTERS] for n in itertools.count())
        return self._key(tenant, next(one for one in ids if not self._revoked[f"{tenant}-{one}"]), "0")

    def revoke(self, what: str) -> str:
        """Make void one key, named by itself or as ``TENANT-ID``, or all that a tenant has; returns what was written.

        Raises:
            ValueError: it is none of them.
            OSError: the file cannot be written.
        """
        parts = _KEY.fullmatch(what)
        line = f"{parts[1]}-{parts[2]}" if parts else what
        if re.fullmatch(rf"{TENANT_NAME}(-[0-9a-f]{{{_ID_CHARACTERS}}})?", line) is None:
            raise ValueError(f"{what!r} is no key, no id of a key such as alice-3f9a1c2b, and no name of a tenant")
        with self._file.open("a", encoding="ascii") as file:  # and not written anew: another may revoke one just now
            file.write(f"{line}\n")
        flush_to_disk(self._file)
        self._look()
        return line

    # ------------------------------------------------------------ what a server asks

    def tenant(self, key: str) -> str:
        """Whose key it is.

        Raises:
            Problem: it is none that was signed here, or is not good any more.
        """
        with contextlib.suppress(OSError):
            self._look()
        parts = _KEY.fullmatch(key)
        if parts is None:
            raise Problem(401, f"X-API-Key: this key is none of this server's: {_ASK}")
        tenant, one, expires, signature = parts.groups()
        if not hmac.compare_digest(signature, self._signature(tenant, one, expires)):
            raise Problem(401, f"X-API-Key: this key is none of this server's, or was revoked: {_ASK}")
        if self._revoked[f"{tenant}-{one}"]:
            raise Problem(401, f"X-API-Key: the key {tenant}-{one} was revoked: {_ASK}")
        if 0 < int(expires, 16) <= time_of_day_s():
            raise Problem(401, f"X-API-Key: the time of the key {tenant}-{one} is over: {_ASK}")
        return tenant

    def _look(self) -> None:
        """Read the file of revoked keys, if it has changed. Raises OSError."""
        try:
            found = self._file.stat()
        except FileNotFoundError:
            self._seen, self._revoked = (0, 0), Counter()
            return
        seen = (found.st_mtime_ns, found.st_size)
        if seen != self._seen:
            self._revoked = Counter(self._file.read_text("utf-8", "replace").split())
            self._seen = seen

    def _key(self, tenant: str, one: str, expires: str) -> str:
        if _TENANT.fullmatch(tenant) is None:
            raise ValueError(f"{tenant!r} is no name of a tenant: use 1 to 32 of a-z, 0-9 and _")
        return f"{_PREFIX}{tenant}-{one}-{expires}-{self._signature(tenant, one, expires)}"

    def _signature(self, tenant: str, one: str, expires: str) -> str:
        return self._digest(f"{tenant}-{one}-{expires}-{self._revoked[tenant]}")[:_SIGNATURE_CHARACTERS]

    def _digest(self, text: str) -> str:
        return hmac.new(self._secret, text.encode(), hashlib.sha256).hexdigest()
