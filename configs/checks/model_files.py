"""Checks of a model directory without loading it: whether its files are complete, and of a form that can be trained.

    MODEL_DIR ─ config.json · adapter_config.json · generation_config.json · tokenizer files ─▶ read, they are small
              └ weights ─▶ first bytes, headers and sizes only

Invariants
- Nothing heavy is imported or read: a check of a model of 200 shards takes milliseconds.
- A model that is refused here can never be trained; problems that only transformers can find come up in the processes.
"""

from __future__ import annotations

import json
import struct
import zipfile
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, cast

Problem = tuple[str, str]
"""(what is wrong with the model, what to do about it)."""

_LFS: Final = b"version https://git-lfs"
_JSON_FILES: Final = ("config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json",
                      "model.safetensors.index.json", "pytorch_model.bin.index.json")  # fmt: skip
_WEIGHTS: Final = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin",
                   "pytorch_model.bin.index.json")  # fmt: skip
"""Files that from_pretrained looks for, in its order."""
_TOKENIZERS: Final = ("tokenizer.json", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json",
                      "vocab.txt", "tekken.json", "*.tiktoken", "*.model")  # fmt: skip
_WRAPPERS: Final = {
    "_orig_mod": ("torch.compile", "model._orig_mod.save_pretrained(DIRECTORY)"),
    "_fsdp_wrapped_module": ("FSDP", "save_model() of a transformers Trainer, or the full state dict of FSDP"),
    "_checkpoint_wrapped_module": ("activation checkpointing", "the model before it was wrapped"),
    "_forward_module": ("Lightning Fabric", "the module inside, with save_pretrained(DIRECTORY)"),
    "base_layer": ("PEFT", "model.merge_and_unload().save_pretrained(DIRECTORY)"),
    "base_model": ("PEFT", "model.merge_and_unload().save_pretrained(DIRECTORY)"),
    "pretrained_model": ("a value head of TRL", "model.pretrained_model.save_pretrained(DIRECTORY)"),
    "module": ("DataParallel or DeepSpeed", "model.module.save_pretrained(DIRECTORY)"),
}  # fmt: skip
"""What wrappers of a model put into the names of its tensors → (the wrapper, what to save instead)."""
_HEADER_BYTES_MAX: Final = 100_000_000
"""Longest header that the safetensors library accepts itself."""
_DOWNLOAD: Final = "Download the model again, or name another directory"


def problem_of(directory: Path, name: str, *, weights: bool) -> Problem | None:
    """The first thing that is wrong with the model in ``directory``, which the job file calls ``name``; None: nothing.

    Args:
        weights: whether the weights will be loaded; simulated engines and trainers read only the tokenizer.
    """
    try:
        return next(_problems(directory, name, weights=weights), None)
    except OSError as error:
        return f"{name!r} cannot be read: {error.strerror or error} ({error.filename or directory})", _DOWNLOAD


def scorer_weights_problem(directory: Path, name: str) -> Problem | None:
    """What is wrong with the weights of a reward model, which are read from safetensors alone; None: nothing."""
    found = next((plain for plain in _WEIGHTS if (directory / plain).is_file()), "")
    if found.startswith("pytorch_model"):
        return (
            f"{name!r} has its weights in {found} alone, a pickle; those of a reward model are read from safetensors",
            "Load it with transformers and save it again (save_pretrained writes safetensors)",
        )
    return next(_bad_weights(directory, name), None)


def _problems(directory: Path, name: str, *, weights: bool) -> Iterator[Problem]:
    for file in sorted(directory.iterdir()):
        if file.is_file() and _begins(file, _LFS):
            yield (
                f"{name!r} is a git checkout without its large files: {file.name} is a git-lfs pointer",
                "Run `git lfs pull` there, or download the model with `hf download`",
            )
    if (directory / "adapter_config.json").is_file():
        yield (
            f"{name!r} is a LoRA adapter (it has an adapter_config.json), expected a whole model",
            "Make a whole model of it with `headrace merge`, and name that",
        )
    for file in (directory / plain for plain in _JSON_FILES):
        if file.is_file() and (wrong := _no_map(file)):
            yield f"{name!r} holds a {file.name} that {wrong}", f"Mend {file.name}, or download it again"
    if not (directory / "config.json").is_file():
        return  # not a transformers model; other checks report that
    yield from _bad_form(_read_map(directory / "config.json"), name)
    if not any(next(directory.glob(pattern), None) for pattern in _TOKENIZERS):
        yield (
            f"{name!r} has no tokenizer: no tokenizer.json, nor a slow tokenizer's files",
            "Save the model's tokenizer beside it (AutoTokenizer.from_pretrained(…).save_pretrained(DIRECTORY))",
        )
    if weights:
        yield from _bad_weights(directory, name)


def _bad_form(config: dict[str, Any], name: str) -> Iterator[Problem]:
    quantised = config.get("quantization_config")
    if isinstance(quantised, dict):
        method = cast("dict[str, Any]", quantised).get("quant_method", "of an unnamed method")
        yield (
            f"{name!r} is quantised ({method}, by quantization_config of config.json), and training needs real weights",
            "Name the model that it was made from, or dequantise it and save that",
        )
    kind = config.get("model_type")
    if isinstance(kind, str) and not _is_known(kind):
        code = " and brings code of its own (auto_map), which is never run" if config.get("auto_map") else ""
        yield (
            f"{name!r} has model_type {kind!r}, which this transformers does not know{code}",
            "Upgrade transformers if a newer one knows it, or name a model of a known architecture",
        )


def _is_known(model_type: str) -> bool:
    """Whether the installed transformers lists this type in its tables; True if no tables are found."""
    found = find_spec("transformers")
    where = Path(found.origin).parent / "models" / "auto" if found is not None and found.origin else Path("-")
    tables = [table for table in sorted(where.glob("*.py")) if "mapping" in table.stem or "configuration" in table.stem]
    return not tables or any(f'"{model_type}"' in table.read_text("utf-8", "replace") for table in tables)


# ------------------------------------------------------------ weights


def wrapper_of(names: Iterable[str]) -> Problem | None:
    """Which wrapper's names the tensors have, if one's: (continues after "its weights", what to do)."""
    for name in names:
        parts = name.split(".")
        for part, (wrapper, instead) in _WRAPPERS.items():
            if part in (parts if part.startswith("_") or part == "base_layer" else parts[:1]):
                wrong = f"have the names of {wrapper}, such as {name}, and a model's own names are without {part!r}"
                return wrong, f"Save {instead}, and name that"
    return None


def _bad_weights(directory: Path, name: str) -> Iterator[Problem]:
    first = next((directory / plain for plain in _WEIGHTS if (directory / plain).is_file()), None)
    if first is None:
        yield f"{name!r} has no weights: none of {', '.join(_WEIGHTS)} is there", _DOWNLOAD
        return
    files, tensors = [first], list[str]()
    if first.suffix == ".json":
        shards = _read_map(first).get("weight_map")
        if not isinstance(shards, dict) or not shards:
            yield f"{name!r} holds a {first.name} without a weight_map", _DOWNLOAD
            return
        tensors = list(cast("dict[str, Any]", shards))
        files = [directory / shard for shard in sorted({str(s) for s in cast("dict[str, Any]", shards).values()})]
    for file in files:
        if not file.is_file():
            yield f"{name!r} lacks {file.name}, which {first.name} names", _DOWNLOAD
        elif wrong := _cut_short(file) if file.suffix == ".safetensors" else _no_archive(file):
            yield f"{name!r} holds a {file.name} that {wrong}", _DOWNLOAD
        elif file.suffix == ".safetensors" and not tensors:
            tensors = list(_header(file)[1])
    if wrapped := wrapper_of(tensors):
        yield f"{name!r} cannot be loaded: its weights {wrapped[0]}", wrapped[1]


def _cut_short(file: Path) -> str:
    """What is wrong with a safetensors file, judged by its header and its size; empty if nothing is."""
    size = file.stat().st_size
    length, header = _header(file)
    if not length:
        return f"is no safetensors file, or cut short ({size} bytes)"
    ends = [entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__" and _has_offsets(entry)]
    expected = 8 + length + max(ends, default=0)
    if not header:
        return "is no safetensors file: its header cannot be read"
    return "" if size >= expected else f"is cut short: {size} of {expected} bytes are there"


def _header(file: Path) -> tuple[int, dict[str, Any]]:
    """The header of a safetensors file, and how many bytes it takes; 0 if it is none or not all of it is there."""
    with file.open("rb") as opened:
        begin = opened.read(8)
        length = struct.unpack("<Q", begin)[0] if len(begin) == 8 else 0
        there = max(file.stat().st_size - 8, 0)
        return (length, _as_map(opened.read(length))) if 0 < length <= min(_HEADER_BYTES_MAX, there) else (0, {})


def _has_offsets(entry: object) -> bool:
    offsets = cast("dict[str, Any]", entry).get("data_offsets") if isinstance(entry, dict) else None
    return isinstance(offsets, list) and [type(o) for o in cast("list[object]", offsets)] == [int, int]


def _no_archive(file: Path) -> str:
    """What is wrong with a torch file: a zip archive has its table at its end. Older formats are no zip, and pass."""
    cut = _begins(file, b"PK") and not zipfile.is_zipfile(file)
    return f"is cut short: {file.stat().st_size} bytes, and the table at its end is missing" if cut else ""


# ------------------------------------------------------------ reading


def _begins(file: Path, magic: bytes) -> bool:
    with file.open("rb") as opened:
        return opened.read(len(magic)) == magic


def _no_map(file: Path) -> str:
    try:
        content: object = json.loads(file.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        return f"is no JSON: {error}"
    return "" if isinstance(content, dict) else f"is no JSON object but {type(content).__name__}"


def _read_map(file: Path) -> dict[str, Any]:
    return _as_map(file.read_bytes())


def _as_map(content: bytes) -> dict[str, Any]:
    try:
        found: object = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}
