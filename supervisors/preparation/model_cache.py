"""Keeps models that runs have made in the user's cache: making one takes long, and equal orders give equal models.

    key ─▶ CACHE/headrace/models/KEY/ ── copied ──▶ the run's own directory
              ▲ copied, and renamed when complete
    a model that was just made

Invariants
- The key is a hash of all that determines a model: the job's model and data sections and its seed, the data's files by
  size and time, the source code that makes it, and the versions of the libraries that this code uses. For a reward
  model: how and on which data it is trained, and every byte of the model that it is made from.
- An entry is complete: it is copied under another name and then renamed.
- Directories belong to this user, and nobody else can write them. A directory that is not ours is not used, and neither
  is a cache that cannot be read or written: the cache saves time, and no run fails without it.
- There are at most ``model_cache_entries`` entries; those that were used longest ago are removed first.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import structlog

from configs.checks.source_lookup import source_file
from configs.limits import DEFAULT_LIMITS
from configs.model_files import tiny_positions
from configs.reward_training import ANSWERS
from configs.schema import JobConfig
from configs.task_schema import Reward

_LIBRARIES: Final = ("torch", "transformers", "tokenizers", "safetensors", "reasoning-gym", "datasets")
_ROOT: Final = Path(__file__).resolve().parents[2]
_MAKERS: Final = (
    "supervisors/preparation/tiny_model.py",
    "supervisors/preparation/tiny_chat.py",
    "actors/environments/prompts/sources.py",
    "configs/data_mix.py",
)
"""Files whose code determines a tiny model."""
_REWARD_MAKERS: Final = "actors/reward_training"
"""Package whose code determines a reward model."""
_REWARD_READERS: Final = (
    "actors/environments/scoring/reward_text.py",
    "actors/environments/prompts/sources.py",
    "configs/data_mix.py",
)
"""Other files that determine the text that a reward model reads, and the rows that pairs are made from."""
_NOT_THE_MODEL: Final = frozenset({"path", "revision", "source", "dtype"})
"""Keys of the model section that say where it lies and how it is used."""

log = structlog.get_logger("headrace.job")


def cache_key(job: JobConfig) -> str:
    """Hash of everything that determines the tiny model of ``job``."""
    ingredients: dict[str, Any] = {
        "seed": job.seed,
        "model": job.model.model_dump(mode="json", exclude=set(_NOT_THE_MODEL)),
        "data": job.data.model_dump(mode="json"),
        "files": [stamp for source in job.data.sources.values() for stamp in _stamps(source.path)],
        "positions": tiny_positions(job),
    }
    if job.has_episodes:
        environment = job.environment
        ingredients["environment"] = environment.model_dump(mode="json", include={"kind", "path", "options"})
        ingredients["games"] = [*_stamps(source_file(environment.path) if environment.path else None)]
    return _key(ingredients, _MAKERS)


def reward_model_key(job: JobConfig, reward: Reward, backbone: Path) -> str:
    """Hash of everything that determines the reward model that ``reward.train`` asks for, made from ``backbone``."""
    train = reward.train
    assert train is not None, "only a model that is trained has a key"
    made = train.preferences == ANSWERS
    ingredients: dict[str, Any] = {
        "seed": job.seed,
        "train": train.model_dump(mode="json", exclude={"preferences", "model"}),
        "reads": [reward.max_tokens, reward.device],
        "preferences": job.data.model_dump(mode="json") if made else None,
        "files": [
            stamp
            for path in ([source.path for source in job.data.sources.values()] if made else [train.preferences])
            for stamp in _stamps(path)
        ],
        "backbone": {file.name: _digest(file) for file in sorted(backbone.iterdir()) if file.is_file()},
    }
    makers = (path.relative_to(_ROOT).as_posix() for path in sorted((_ROOT / _REWARD_MAKERS).glob("*.py")))
    return _key(ingredients, (*makers, *_REWARD_READERS))


def _key(ingredients: dict[str, Any], makers: Iterable[str]) -> str:
    whole = ingredients | {
        "makers": [hashlib.sha256((_ROOT / name).read_bytes()).hexdigest() for name in makers],
        "libraries": {name: _version(name) for name in _LIBRARIES},
    }
    return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()[:32]


def _digest(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _stamps(path: str | None) -> Iterable[tuple[str, int, int]]:
    """Name, size and time of each file at ``path``."""
    if path is None:
        return
    top = Path(path).resolve()
    for file in sorted(top.rglob("*")) if top.is_dir() else [top]:
        found = file.stat()
        yield str(file), found.st_size, found.st_mtime_ns


def _version(library: str) -> str:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return ""


class ModelCache:
    """The cache keeps made models in a directory. Its methods block: they copy small files on a local disk."""

    def __init__(self, directory: Path | None, entries_max: int = DEFAULT_LIMITS.model_cache_entries) -> None:
        self._directory = directory
        self._entries_max = entries_max

    @classmethod
    def of_user(cls) -> ModelCache:
        """The user's: ``$HEADRACE_CACHE/models``, else ``headrace/models`` in ``$XDG_CACHE_HOME`` or ``~/.cache``.

        A user without a home directory gets a cache that keeps nothing.
        """
        if own := os.environ.get("HEADRACE_CACHE"):
            return cls(Path(own) / "models")
        base = Path(os.environ.get("XDG_CACHE_HOME", ""))
        try:
            if not base.is_absolute():  # the XDG specification: a relative path is to be ignored
                base = Path.home() / ".cache"
        except RuntimeError:  # no HOME, and no entry for this user
            return cls(None)
        return cls(base / "headrace" / "models")

    def take(self, key: str, directory: Path) -> bool:
        """Copy the entry to ``directory``, which does not exist; False if there is none that can be used."""
        if self._directory is None:
            return False
        entry = self._directory / key
        try:
            if not (_is_ours(self._directory) and _is_ours(entry) and (entry / "config.json").is_file()):
                return False
            shutil.copytree(entry, directory, copy_function=shutil.copyfile)
            os.utime(entry)
        except OSError as error:
            log.info("a model is not taken from the cache", entry=str(entry), error=repr(error))
            shutil.rmtree(directory, ignore_errors=True)
            return False
        return True

    def keep(self, key: str, directory: Path) -> bool:
        """Add the model in ``directory``; False if that is not possible."""
        if self._directory is None:
            return False
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not _is_ours(self._directory):
                return False
            partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=self._directory))  # mkdtemp: for this user only
            try:
                shutil.copytree(directory, partial, copy_function=shutil.copyfile, dirs_exist_ok=True)
                partial.chmod(stat.S_IRWXU)  # copytree has copied the mode of ``directory``
                partial.rename(self._directory / key)  # fails where another run was first, with an equal model
            finally:
                shutil.rmtree(partial, ignore_errors=True)
            self._forget_oldest()
        except OSError as error:
            log.info("a model is not kept in the cache", directory=str(self._directory), error=repr(error))
            return False
        return True

    def _forget_oldest(self) -> None:
        assert self._directory is not None
        entries = [entry for entry in self._directory.iterdir() if not entry.name.startswith(".")]
        entries.sort(key=lambda entry: entry.stat().st_mtime, reverse=True)
        for entry in entries[self._entries_max :]:
            shutil.rmtree(entry, ignore_errors=True)


def _is_ours(directory: Path) -> bool:
    """Whether ``directory`` is a real directory of this user, no link, that nobody else can write."""
    try:
        found = directory.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022
