"""Rows of a JSON text file: one object a line, or one array of objects, also packed with gzip.

    file ──one pass──▶ where each row lies (24 bytes a row) ── row i ──▶ its bytes ──▶ parsed, anew each time

Invariants
- No row is kept parsed: a process that reads millions of rows keeps only their positions. The text of a packed file or
  of an array is kept.
- A row is as Python's ``json`` reads it: integers of any size, NaN, half surrogate pairs and key order are kept.
- Blank lines are no rows; a byte order mark and carriage returns do no harm.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import weakref
import zlib
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

import msgspec
import xxhash

from actors.environments.errors import SourceUnreadable

_MARK: Final = b"\xef\xbb\xbf"
_BEGINNING_BYTES: Final = 1 << 16
"""Bytes at the start of a file within which an array must begin."""
_columns = msgspec.json.Decoder(dict[str, msgspec.Raw])
_elements = msgspec.json.Decoder(list[msgspec.Raw])


class TextRows:
    """Gives the rows of one file by their index."""

    def __init__(self, path: Path, field: str = "data.path") -> None:
        """Find where the rows lie. ``field``: key of the job file that names ``path``.

        Raises:
            SourceUnreadable: the file is missing, may not be read, or is not packed as its name says.
        """
        self._path = path
        self._named = f"{field} {path}"
        self._starts, self._ends, self._lines = array("q"), array("q"), array("q")
        self._text: bytes | None = None
        """The whole text, where the file itself cannot be read from the middle."""
        digest = xxhash.xxh3_128()
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            weakref.finalize(self, os.close, self._descriptor)
            with open(self._descriptor, "rb", closefd=False) as file:
                self._find(file, digest)
        except (FileNotFoundError, IsADirectoryError, PermissionError, gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise SourceUnreadable(f"{self._named}: {error}; expected a readable file of JSON lines") from error
        self.fingerprint = digest.hexdigest()

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Row ``index``.

        Raises:
            SourceUnreadable: the row is no JSON object; names the line.
        """
        body = self.body(index)
        try:
            row = json.loads(body.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            raise SourceUnreadable(
                f"{self._named}, {self.where(index)}: {error}; expected one JSON object a line"
            ) from error
        if not isinstance(row, dict):
            raise SourceUnreadable(
                f"{self._named}, {self.where(index)}: a {type(row).__name__}; expected a JSON object"
            )
        return cast("dict[str, Any]", row)

    def body(self, index: int) -> bytes:
        start, end = self._starts[index], self._ends[index]
        return os.pread(self._descriptor, end - start, start) if self._text is None else self._text[start:end]

    def where(self, index: int) -> str:
        """The row in words that help a person to find it."""
        return f"row {index} (line {self._lines[index]})" if self._lines else f"row {index}"

    def columns(self, index: int) -> dict[str, bytes] | None:
        """The row's columns, cut out but not parsed; None if only ``__getitem__`` can read the row."""
        try:
            return {name: bytes(raw) for name, raw in _columns.decode(self.body(index)).items()}
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return None

    def _find(self, file: BinaryIO, digest: xxhash.xxh3_128) -> None:
        packed = self._path.suffix.lower() == ".gz"
        if packed:
            with gzip.open(file) as unpacked:
                self._text = unpacked.read()
            digest.update(self._text)
        text = file if self._text is None else io.BytesIO(self._text)
        begins = text.read(_BEGINNING_BYTES).removeprefix(_MARK).lstrip()[:1]
        text.seek(0)
        if begins == b"[":
            self._find_elements(text.read(), digest)
        else:
            self._find_lines(text, digest)

    def _find_lines(self, lines: Iterable[bytes], digest: xxhash.xxh3_128) -> None:
        at, packed = 0, self._text is not None
        for number, line in enumerate(lines, start=1):
            start, at = at, at + len(line)
            if not packed:
                digest.update(line)
            if number == 1 and line.startswith(_MARK):
                start += len(_MARK)
            if at > start and not line.isspace() and line != _MARK:
                self._starts.append(start)
                self._ends.append(at)
                self._lines.append(number)

    def _find_elements(self, text: bytes, digest: xxhash.xxh3_128) -> None:
        """Keep an array's elements as text, one behind the other."""
        text = text.removeprefix(_MARK)
        digest.update(text)
        try:
            elements = [bytes(raw) for raw in _elements.decode(text)]
        except (
            msgspec.MsgspecError,
            ValueError,
            RecursionError,
        ):  # NaN and half surrogate pairs are no JSON, yet data sets hold them
            elements = [json.dumps(element).encode() for element in self._loosely(text)]
        at = 0
        for element in elements:
            self._starts.append(at)
            at += len(element)
            self._ends.append(at)
        self._text = b"".join(elements)

    def _loosely(self, text: bytes) -> list[Any]:
        try:
            return cast("list[Any]", json.loads(text.decode("utf-8")))
        except (ValueError, RecursionError) as error:
            fix = "expected an array of objects, or one object a line"
            raise SourceUnreadable(f"{self._named}: {error}; {fix}") from error
