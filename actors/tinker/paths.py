"""Names of saved weights: ``tinker://RUN/{weights|sampler_weights}/NAME``.

RUN is the id of the model that was saved. A path names a row of the operation log, never a file: where the weights lie
is the log's to say, and whether a tenant may read them is asked of the model's owner.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal

from actors.tinker.errors import OperationRefused

Kind = Literal["weights", "sampler_weights"]

_SCHEME: Final = "tinker://"
_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._=+@-]{0,127}")
_KINDS: Final[dict[str, Kind]] = {"weights": "weights", "sampler_weights": "sampler_weights"}


@dataclass(frozen=True)
class WeightsPath:
    """Names saved weights."""

    run: str
    kind: Kind
    name: str

    def __str__(self) -> str:
        return f"{_SCHEME}{self.run}/{self.kind}/{self.name}"


def checked_name(name: str) -> str:
    """``name``, if weights can be saved under it.

    Raises:
        OperationRefused: it cannot.
    """
    if _NAME.fullmatch(name) is None:
        what = "1 to 128 letters, digits and . _ - = + @, not beginning with a sign (no slash)"
        raise OperationRefused(f"path: {name[:200]!r} is no name for weights: use {what}")
    return name


def read_path(text: str) -> WeightsPath:
    """The path that ``text`` says.

    Raises:
        OperationRefused: it is none.
    """
    parts = text.removeprefix(_SCHEME).split("/")
    kind = _KINDS.get(parts[1]) if len(parts) == 3 else None
    if not text.startswith(_SCHEME) or kind is None or not parts[0] or _NAME.fullmatch(parts[2]) is None:
        what = "tinker://RUN/weights/NAME or tinker://RUN/sampler_weights/NAME"
        raise OperationRefused(f"path: {text[:300]!r} names no weights: expected {what}")
    return WeightsPath(parts[0], kind, parts[2])
