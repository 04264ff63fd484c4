"""What a run began with, kept in its directory: a resumed run is compared with it before anything starts.

    begin ─▶ RUN_DIR/began_with.json: the resolved job, and what its data looked like
    resume ─▶ differences: keys of the job that may not change ─▶ refused, with old and new value
                           learning rates, where the user says so ─▶ noted in the record, with the step
                           data, place of the model ─▶ said: later prompts come from what is there now

``job.yaml`` itself is the operator's to edit, and holds what the newest resume has set. A run without a record, from an
older version, is not compared.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, cast

from actors.host.whole_file import write_whole
from configs.run_files import BEGAN_WITH
from configs.schema import JobConfig

RESUME_MAY_SET: Final = (
    "steps", "rollout.workers", "rollout.servers", "checkpoint.", "metrics.", "limits.", "cluster.",
    "trainer.service", "trainer.priority", "trainer.share", "trainer.project",
    "trainer.backend", "trainer.ranks", "trainer.replicas", "trainer.nodes", "trainer.context_ranks", "trainer.offload",
    "trainer.expert_parallel",
)  # fmt: skip
"""Keys that may differ after a resume; any other would make it another run than the journal tells of. A backend says
which others' checkpoints it reads."""
RESUME_MAY_SET_IF_SAID: Final = ("trainer.lr", "critic.lr")
"""Keys that a resume may set by an option, though not by an edit of job.yaml, which may be an oversight."""
_PLACES: Final = re.compile(r"model\.path|data\.path|data\.mix\.\d+\.path")
"""Keys that may be edited in job.yaml, since a model and data may be moved; people are told of a change."""
_ENDS_BYTES: Final = 4 << 20
"""Bytes of a data file, at its start and at its end, that are hashed: most edits that keep its size are seen."""


def may_change(key: str) -> bool:
    """Whether a resumed run may have another value for the dotted ``key``."""
    return any(key == may or (may.endswith(".") and key.startswith(may)) for may in RESUME_MAY_SET)


def note_changes(run_dir: Path, job: JobConfig, after_steps: int) -> str:
    """Note in the record which of ``RESUME_MAY_SET_IF_SAID`` are others from now on; returns what to say of it.

    Raises OSError.
    """
    record, now = _read(run_dir), dict(_flat(job.model_dump(mode="json")))
    before = _before(record)
    changed = [key for key in RESUME_MAY_SET_IF_SAID if key in before and before[key] != now[key]]
    if not changed:
        return ""
    noted = [{"key": key, "was": before[key], "is": now[key], "after_steps": after_steps} for key in changed]
    record["changes"] = [*_changes(record), *noted]
    write_whole(run_dir / BEGAN_WITH, json.dumps(record, indent=1) + "\n", lasting=True)
    said = (f"{key} was {before[key]:g} and is {now[key]:g}, for the steps after {after_steps}" for key in changed)
    return "; ".join(said)


def write_record(run_dir: Path, job: JobConfig) -> None:
    """Note what the run begins with. Raises OSError."""
    record = {"job": job.model_dump(mode="json"), "data": _looks(job)}
    write_whole(run_dir / BEGAN_WITH, json.dumps(record, indent=1) + "\n", lasting=True)


def changed_keys(run_dir: Path, job: JobConfig, said: Collection[str] = ()) -> list[tuple[str, Any, Any]]:
    """(key, value of the run so far, value now) of each that changed and may not; keys unknown then are left out.

    ``said``: keys that the user gave as options.
    """
    before, now = _before(_read(run_dir)), dict(_flat(job.model_dump(mode="json")))
    allowed = {key for key in RESUME_MAY_SET_IF_SAID if key in said}
    known = [key for key in now if key in before and not may_change(key) and not _PLACES.fullmatch(key)]
    known = [key for key in known if key not in allowed]
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
    """Size and hash of the data; of several sources, each by its name."""
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
        found: object = json.loads((run_dir / BEGAN_WITH).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}


def _before(record: Mapping[str, Any]) -> dict[str, Any]:
    """Values of the run so far: what it began with, and what resumes have changed since."""
    return dict(_flat(record.get("job"))) | {str(change["key"]): change.get("is") for change in _changes(record)}


def _changes(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    changes = record.get("changes")
    items = cast("list[object]", changes) if isinstance(changes, list) else []
    return [cast("dict[str, Any]", item) for item in items if isinstance(item, dict) and "key" in item]


def _flat(values: object, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Values by dotted keys: of sections, of sections in lists, and of maps with the user's keys, such as task_args."""
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
