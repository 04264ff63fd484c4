"""Data sets with named columns: lines of JSON, and tables that the library ``datasets`` reads, which stay on disk.

Parquet files and directories as on the Hugging Face hub are written once, by ``datasets``, as Arrow files into its
cache (``HF_DATASETS_CACHE``); all processes of the machine map those, so rows cost no memory of their own.
"""

from __future__ import annotations

import contextlib
import glob
from pathlib import Path
from typing import Any, Protocol, cast

from actors.environments.errors import SourceUnreadable
from actors.environments.prompts.rows import Chat, Row, digest_of
from actors.environments.prompts.text_rows import TextRows
from configs.data_forms import DataForm, UnknownForm, chosen_split, wrong_answer
from configs.schema import DataConfig


class Table(Protocol):
    """Gives rows by their index, as ``datasets.Dataset`` and ``TextRows`` do."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> dict[str, Any]: ...


class _Columns:
    """Finds prompt and answer in a row's columns, and says what is wrong with them."""

    def __init__(self, table: Table, data: DataConfig, *, compares: bool, tasks: bool) -> None:
        if not len(table):
            raise SourceUnreadable(f"data.path {data.path}: no rows; expected at least one with {data.prompt_key!r}")
        self._table, self._data, self._compares, self._tasks = table, data, compares, tasks

    def __len__(self) -> int:
        return len(self._table)

    def where(self, index: int) -> str:
        return f"row {index}"

    def _row(self, record: dict[str, Any], index: int, digest: int) -> Row:
        data = self._data
        if data.prompt_key not in record and not self._tasks:
            raise self._wrong(index, f"no column {data.prompt_key!r} (data.prompt_key); the row has {sorted(record)}")
        prompt = record.pop(data.prompt_key, "")
        if not isinstance(prompt, str | list) and not self._tasks:
            what = "null" if prompt is None else f"a {type(prompt).__name__}"
            wrong = f"column {data.prompt_key!r} is {what}; expected a string or a list of chat messages"
            raise self._wrong(index, wrong)
        if self._compares and data.answer_key not in record:
            wrong = f"no column {data.answer_key!r} (data.answer_key), with which responses are compared"
            raise self._wrong(index, wrong)
        answer = record.pop(data.answer_key, None)
        if self._compares and (wrong := wrong_answer(answer)):
            raise self._wrong(index, f"column {data.answer_key!r} {wrong}")
        return Row(cast("str | Chat", prompt), answer, index, record, digest)

    def _wrong(self, index: int, what: str) -> SourceUnreadable:
        return SourceUnreadable(f"data.path {self._data.path}, {self.where(index)}: {what}")

    def score(self, answer: str, index: int) -> float:
        raise SourceUnreadable(
            "reward.kind reasoning_gym needs data.source reasoning_gym: a table has no scorer of its own"
        )


class LineSource(_Columns):
    """Reads rows of a text file."""

    def __init__(self, rows: TextRows, data: DataConfig, *, compares: bool = False, tasks: bool = False) -> None:
        super().__init__(rows, data, compares=compares, tasks=tasks)
        self._rows = rows
        self.fingerprint = rows.fingerprint

    def where(self, index: int) -> str:
        return self._rows.where(index)

    def row(self, index: int) -> Row:
        return self._row(self._rows[index], index, digest_of(self._rows.body(index).strip()))

    def check(self, index: int) -> None:
        columns = self._rows.columns(index) or {}
        prompt, answer = columns.get(self._data.prompt_key, b""), columns.get(self._data.answer_key, b"")
        plain = answer[:1] == b'"' or answer[:1].isdigit() or not self._compares
        if prompt[:1] not in (b'"', b"[") or not plain:
            self.row(index)


class TableSource(_Columns):
    """Reads rows of a ``datasets.Dataset``."""

    def __init__(self, table: Any, data: DataConfig, *, compares: bool = False, tasks: bool = False) -> None:
        super().__init__(table, data, compares=compares, tasks=tasks)
        self._dataset = table
        self.fingerprint = f"{table._fingerprint} {len(table)}"  # noqa: SLF001 (the library's own name for its content)
        self._suspects = self._with_nulls()

    def row(self, index: int) -> Row:
        record = dict(self._dataset[index])
        return self._row(record, index, digest_of(repr(sorted(record.items()))))

    def check(self, index: int) -> None:
        if index in self._suspects:
            self.row(index)

    def _with_nulls(self) -> set[int]:
        """Rows that may be wrong: the first (all rows have its types), and the first with a null in each column."""
        import pyarrow.compute as pc

        suspects = {0}
        arrow = self._dataset.with_format("arrow")
        for key in (self._data.prompt_key, *((self._data.answer_key,) if self._compares else ())):
            if key in self._dataset.column_names:
                column = arrow[key][:]
                if column.null_count:
                    suspects |= set(pc.indices_nonzero(pc.is_null(column)).to_pylist()[:1])  # pyright: ignore[reportAttributeAccessIssue]
        return suspects


def open_table(
    path: Path, form: DataForm, config: str | None = None, split: str | None = None, field: str = "data.path"
) -> Any:
    """The ``datasets.Dataset`` at ``path``, named in ``field``; ``config`` and ``split`` choose one of several.

    Raises:
        SourceUnreadable: the library cannot read the data; says why.
        UnknownForm: the splits do not fit ``split``, or none of several is the one to train on.
    """
    import datasets

    datasets.disable_progress_bars()
    try:
        if form is DataForm.PARQUET:
            return datasets.load_dataset("parquet", data_files=[glob.escape(str(path))], split="train")
        if form is DataForm.SAVED:
            loaded: Any = datasets.load_from_disk(str(path))
        else:
            loaded = datasets.load_dataset(str(path), config)
    except UnknownForm:
        raise
    except Exception as error:
        if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
            raise  # a disk that does not answer may do so later
        fix = "expected Parquet files, or a directory written by save_to_disk or laid out as on the hub"
        raise SourceUnreadable(f"{field} {path}: {type(error).__name__}: {error}; {fix}") from error
    if isinstance(loaded, datasets.Dataset):
        if split is not None:
            raise UnknownForm(f"{str(path)!r} is one data set without splits", "Remove data.split")
        return loaded
    splits = [str(name) for name in loaded]
    with contextlib.suppress(KeyError):
        return loaded[chosen_split(splits, path, split)]
    raise UnknownForm(f"{str(path)!r} is streamed", "Name a directory of files")
