"""Finds the form of the data at ``data.path`` by the path; ``data.source: jsonl`` counts where its ending says nothing.

*.jsonl, *.ndjson, *.json, each also with .gz ──▶ TEXT       one object a line, or one array of objects
*.parquet ─────────────────────────────────────▶ PARQUET
a directory of save_to_disk ───────────────────▶ SAVED      one data set, or several splits
any other directory with data files in it ─────▶ FOLDER     as on the Hugging Face hub: data/train-*.parquet

Data named on a hub, ``owner/name``, is fetched into a directory of save_to_disk before it is read.
"""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Final

TEXT_ENDINGS: Final = (".jsonl", ".ndjson", ".json", ".jsonl.gz", ".ndjson.gz", ".json.gz")
_FOLDER_ENDINGS: Final = (*TEXT_ENDINGS, ".parquet", ".csv", ".arrow")
_SAVED_FILES: Final = ("dataset_dict.json", "dataset_info.json", "state.json")
_DEEPEST: Final = 3
"""Levels of folders in which data files are looked for, the named one included."""
_ANSWER_KINDS: Final = (str, int, float)


class DataForm(enum.Enum):
    """The forms in which rows are stored."""

    TEXT = "text"
    PARQUET = "parquet"
    SAVED = "saved"
    FOLDER = "folder"


class UnknownForm(ValueError):
    """The data has no form that can be read. ``fix`` says what to do."""

    def __init__(self, wrong: str, fix: str) -> None:
        super().__init__(wrong)
        self.fix = fix


def form_of(path: Path, source: str) -> DataForm:
    """The form of what lies at ``path``, which exists.

    Raises:
        UnknownForm: it has no form that can be read.
    """
    name = path.name.lower()
    if path.is_dir():
        if any((path / file).is_file() for file in _SAVED_FILES):
            return DataForm.SAVED
        if data_files(path):
            return DataForm.FOLDER
        wrong = f"{str(path)!r} is a directory without data files"
        raise UnknownForm(wrong, "Name a directory written by save_to_disk, or one that holds data/train-*.parquet")
    if name.endswith(".parquet"):
        return DataForm.PARQUET
    if name.endswith(TEXT_ENDINGS) or source == "jsonl":
        return DataForm.TEXT
    wrong = f"{path.name!r} ends as no data file does that can be read"
    fix = "Name a .jsonl, .json (each also with .gz) or .parquet file, or set data.source to jsonl for JSON lines"
    raise UnknownForm(wrong, fix)


def looks_like_data_file(path: str) -> bool:
    """Whether a name ends as those of data files do."""
    return path.lower().endswith((*_FOLDER_ENDINGS, ".gz", ".txt", ".zip"))


def data_files(folder: Path) -> list[Path]:
    """The data files of a directory laid out as on the hub, sorted; hidden files are left out."""
    found = [path for depth in range(_DEEPEST) for path in folder.glob("*/" * depth + "*")]
    return sorted(
        path
        for path in found
        if path.name.lower().endswith(_FOLDER_ENDINGS) and not path.name.startswith((".", "_")) and path.is_file()
    )


def chosen_split(splits: list[str], path: Path | str, wanted: str | None = None) -> str:
    """``wanted``, which is ``data.split``; if unset, ``train``, or the only one there is.

    Raises:
        UnknownForm: no split can be chosen; the message names those that there are.
    """
    if wanted is not None and wanted not in splits:
        have = ", ".join(sorted(splits)) or "none"
        raise UnknownForm(f"{str(path)!r} has no split {wanted!r} (it has: {have})", "Set data.split to one of them")
    if wanted is not None:
        return wanted
    if "train" in splits:
        return "train"
    if len(splits) == 1:
        return splits[0]
    named = ", ".join(sorted(splits)) or "none"
    wrong = f"{str(path)!r} has the splits {named}, and none of them is train"
    raise UnknownForm(wrong, "Set data.split to the one to train on")


def wrong_prompt(prompt: object) -> str:
    """What is wrong with a prompt as a row holds it; empty if nothing is."""
    if isinstance(prompt, str) and prompt:
        return ""
    if isinstance(prompt, list) and prompt and all(isinstance(turn, dict) and "role" in turn for turn in prompt):
        return ""
    return f"holds {repr(prompt)[:60]}, expected text or a list of chat messages"


def wrong_answer(answer: object) -> str:
    """What is wrong with an answer that text is to be compared with; empty if nothing is."""
    if isinstance(answer, _ANSWER_KINDS) and not isinstance(answer, bool):
        return ""
    what = "null" if answer is None else f"{repr(answer)[:60]} (a {type(answer).__name__})"
    return f"holds {what}, expected text or a number"
