"""Errors between processes.

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
    """Flag that a retry would only meet the same error, so that code that retries or restarts stops, and says why."""
    blameless: ClassVar[bool] = False
    """Flag that the error is not the fault of the process that it ends: a restart then costs no restart budget."""


class TransportError(HeadraceError):
    """Base of the errors between two processes."""


class LinkTimeout(TransportError):
    """The other side did not answer in time. Infrastructure; retrying is safe."""


class HandshakeRefused(TransportError):
    """The other side refuses the link; the message says why and, for versions, which side is older."""


class InsecureBind(TransportError):
    """An endpoint was asked for at which others could connect: TCP without keys, or a directory that is not ours."""

    permanent = True


class MalformedInput(TransportError):
    """Bytes that no honest peer sends. Dropped and counted, never fatal."""


class MalformedEnvelope(MalformedInput):
    """The header frame cannot be read."""


class MalformedBody(MalformedInput):
    """The body does not fit the type that its header names."""
