"""What can go wrong with a question to the sampler; the asker gets it as the answer.

HeadraceError
└── ReplyError
    └── SamplingError
        ├── BadSampleRequest   the asker's fault: a field cannot be served as it is; do not repeat
        ├── SnapshotUnusable   the snapshot's fault: no such directory, or no weights for the base model; do not repeat
        ├── EngineLost         the machine's fault: engine or disk failed under the request; repeat it
        └── SamplerClosed      nobody's fault: the sampler has ended, or is ending; repeat it elsewhere
"""

from __future__ import annotations

from actors.core.errors import ReplyError


class SamplingError(ReplyError):
    """A question to the sampler has no result."""


class BadSampleRequest(SamplingError):
    """A field of the request cannot be served; the message names it, its value, and what was expected."""

    permanent = True


class SnapshotUnusable(SamplingError):
    """The snapshot cannot be served beside this base model; the message says why."""

    permanent = True


class EngineLost(SamplingError):
    """The engine, which is started anew, or a disk failed while it worked for the request. Asking again is safe."""


class SamplerClosed(SamplingError):
    """The sampler takes no more questions. Asking another one, or a next life of this one, is safe."""
