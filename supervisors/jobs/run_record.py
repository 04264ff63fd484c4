"""What a run began with, kept in its directory: a resumed run is held against it before anything starts.

    begin ─▶ RUN_DIR/began_with.json: the resolved job, and what its data looked like
    resume ─▶ differences: keys of the job that may not change ─▶ refused, with old and new value
                           data, place of the model ─▶ said: later prompts come from what is there now

``job.yaml`` itself is the operator's to edit, and holds what the newest resume has set. Runs of before have no record,
and are not held against one.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, cast

from configs.schema import JobConfig

RECORD: Final = "began_with.json"
RESUME_MAY_SET: Final = (
    "steps", "rollout.workers", "checkpoint.", "metrics.", "limits.", "cluster.",
    "trainer.service", "trainer.priority", "trainer.share", "trainer.project",
    "trainer.backend", "trainer.ranks", "trainer.replicas", "trainer.offload",
)  # fmt: skip
"""Keys that may differ after a resume; any other would make it another run than the journal tells of. A backend says
which others' checkpoints it reads."""
_PLACES: Final = re.compile(r"model\.path|data\.path|data\.mix\.\d+\.path")
"""Keys that may be edited in job.yaml, since a model and data may be moved; what has become of them is said."""
_ENDS_BYTES: Final = 4 << 20
"""Bytes of a data file, at its begin and at its end, that are hashed: most edits that keep its size are seen."""


def may_change(key: str) -> bool:
    """Whether a resumed run may have another value for the dotted ``key``."""
    return any(key == may or (may.endswith(".") and key.startswith(may)) for may in RESUME_MAY_SET)


def write_record(run_dir: Path, job: JobConfig) -> None:
    """Note what the run begins with. Raises OSError."""
    record = {"job": job.model_dump(mode="json"), "data": _looks(job)}
    partial = run_dir / f".{RECORD}.partial"
    partial.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    partial.replace(run_dir / RECORD)


def changed_keys(run_dir: Path, job: JobConfig) -> list[tuple[str, Any, Any]]:
    """(key, value that the run began with, value now) of each that may not change; a key unknown then has none."""
    record = _read(run_dir)
    before, now = dict(_flat(record.get("job"))), dict(_flat(job.model_dump(mode="json")))
    known = [key for key in now if key in before and not may_change(key) and not _PLACES.fullmatch(key)]
    return [(key, before[key], now[key]) for key in known if before[key] != now[key]]


def data_news(run_dir: Path, job: JobConfig) -> str:
    """What to say of data that has changed since the run began; empty: it has not, or nobody knows."""
    before, now = _read(run_dir).get("data"), _looks(job)
    if not isinstance(before, dict) or now is None or before == now:
        return ""
    if not job.data.mix:
        return _news("data.path", job.data.path, cast("Mapping[str, Any]", before), now)
    then = cast("Mapping[str, Any]", before)
    return "; ".join(
        _news(f"{job.data.key_of(name)}.path", source.path, then[name], now[name])
        for name, source in job.data.sources.items()
        if then.get(name) != now[name] and isinstance(then.get(name), dict) and now[name] is not None
    )


def _news(key: str, path: str | None, before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    then, size = before.get("bytes"), now["bytes"]
    size = f"{then} bytes then, {size} now" if then != size else f"{size} bytes, as then"
    return (
        f"{key}: {path} has changed since the run began ({size}): steps to come take their prompts from "
        "what is there now"
    )


def _looks(job: JobConfig) -> dict[str, Any] | None:
    """What the data look like; of several sources, each by its name."""
    looks = {name: _looks_of(source.path) for name, source in job.data.sources.items()}
    return looks if job.data.mix else looks[""]


def model_news(run_dir: Path, job: JobConfig) -> str:
    """What to say of a model that lies elsewhere now; empty: it lies where it was."""
    before = dict(_flat(_read(run_dir).get("job"))).get("model.path", job.model.path)
    if before == job.model.path:
        return ""
    return f"model.path was {before} and is {job.model.path}: it is taken for the same model, in another place"


def _read(run_dir: Path) -> dict[str, Any]:
    """The record, empty if there is none or it cannot be read: it only guards against mistakes."""
    try:
        found: object = json.loads((run_dir / RECORD).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}


def _flat(values: object, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Sections become dotted keys, in lists too; maps without keys of ours, such as task_args, too."""
    if not isinstance(values, dict):
        return
    for name, value in cast("dict[str, Any]", values).items():
        items = cast("list[object]", value) if isinstance(value, list) else []
        if isinstance(value, dict) and value:
            yield from _flat(cast("dict[str, Any]", value), f"{prefix}{name}.")
        elif items and all(isinstance(item, dict) for item in items):
            yield f"{prefix}{name}", f"{len(items)} of them"
            yield from _flat({str(i): item for i, item in enumerate(items)}, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _looks_of(path: str | None) -> dict[str, Any] | None:
    """Size and hash of a data file; of a directory, of the list of its files. None if there is none."""
    if path is None:
        return None
    try:
        return _looks_of_directory(Path(path)) if Path(path).is_dir() else _looks_of_file(Path(path))
    except OSError:
        return None


def _looks_of_file(path: Path) -> dict[str, Any]:
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        digest.update(file.read(_ENDS_BYTES))
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _ENDS_BYTES))
        digest.update(file.read(_ENDS_BYTES))
    return {"bytes": size, "hash": digest.hexdigest()}


def _looks_of_directory(path: Path) -> dict[str, Any]:
    files = sorted((str(file.relative_to(path)), file.stat().st_size) for file in path.rglob("*") if file.is_file())
    digest = hashlib.blake2b(json.dumps(files).encode(), digest_size=16)
    return {"bytes": sum(size for _, size in files), "hash": digest.hexdigest()}
