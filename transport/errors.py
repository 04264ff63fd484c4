"""What can go wrong between processes.

HeadraceError                      actors/core/errors.py continues this tree
└── TransportError
    ├── LinkTimeout        infrastructure; retry is safe, nothing was sent
    ├── HandshakeRefused   configuration: other protocol, other cluster, unknown key; do not retry
    ├── InsecureBind       configuration: others could connect, and there are no keys; do not retry
    └── MalformedInput     the sender's bug; the message is dropped and counted
        ├── MalformedEnvelope
        └── MalformedBody
"""

from __future__ import annotations

from typing import ClassVar


class HeadraceError(Exception):
    """Base of every error that Headrace raises on purpose."""

    permanent: ClassVar[bool] = False
    """Whether a repetition would only meet the same error: whoever retries or restarts stops, and says why."""
    blameless: ClassVar[bool] = False
    """Whether it says nothing against the process that ends by it: to start that again costs no restart budget."""


class TransportError(HeadraceError):
    """Something between two processes failed."""


class LinkTimeout(TransportError):
    """The other side did not answer in time. Infrastructure; retrying is safe."""


class HandshakeRefused(TransportError):
    """The other side will not talk to us; the message says why and which side is older."""


class InsecureBind(TransportError):
    """An endpoint was asked for at which others could connect: TCP without keys, or a directory that is not ours."""

    permanent = True


class MalformedInput(TransportError):
    """Bytes that no honest peer sends. Dropped and counted, never fatal."""


class MalformedEnvelope(MalformedInput):
    """The header frame cannot be read."""


class MalformedBody(MalformedInput):
    """The body does not fit the type that its header names."""
