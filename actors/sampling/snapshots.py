"""The snapshots that a sampler knows: what each directory holds, and the tensors of those used of late.

    directory ─ adapter_config.json ─▶ AdapterSpec, tensors in the engine's dtype ─▶ memory, within a bound of bytes
              └ config.json alone   ─▶ a whole model, which the engine reads itself

Invariants
- A directory is read once, and believed not to change; its tensors are read again once they have left the memory.
- Tensors are numbers: an adapter with an infinite weight is refused.
- The names of the tensors say which layers have an adapter, not the configuration, which may hold patterns.
"""

from __future__ import annotations

import asyncio
import enum
import itertools
import math
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
from safetensors import SafetensorError, deserialize, safe_open

from actors.models.adapter import CONFIG_FILE, TENSOR_FILE, AdapterSpec, base_identity, layer_of
from actors.sampling.errors import EngineLost, SnapshotUnusable
from configs.limits import Limits
from configs.model_files import ModelFileBroken, read_model_file

RunBlocking = Callable[..., Awaitable[Any]]
"""Runs a function that reads files, with its arguments, off the loop."""
_UNSERVED: Final = (
    "use_dora", "use_qalora", "bias", "lora_bias", "fan_in_fan_out", "modules_to_save", "rank_pattern", "alpha_pattern",
    "layer_replication", "trainable_token_indices",
)  # fmt: skip
"""Keys of PEFT that would change what an adapter computes, unless they have one of the values of ``_OFF``."""
_OFF: Final = (None, False, "none", [], {})
_WORDS: Final = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16, "F64": np.float64}


class SnapshotKind(enum.Enum):
    """What a snapshot is."""

    BASE = "the base model"
    ADAPTER = "an adapter of it"
    MODEL = "a whole model"


@dataclass(eq=False, slots=True)
class Snapshot:
    """Names one snapshot. ``version``: the sampler's own number for it."""

    version: int
    kind: SnapshotKind
    path: Path
    refusal: str = ""
    """Reason why the engine cannot serve it; empty as long as none is known."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """Holds an adapter's tensors, and torch's name of the dtype of each (bfloat16 travels as uint16)."""

    spec: AdapterSpec
    tensors: Mapping[str, np.ndarray]
    dtypes: Mapping[str, str]

    @property
    def size_bytes(self) -> int:
        return sum(array.nbytes for array in self.tensors.values())


class Snapshots:
    """Knows the snapshots of one base model, in the directory ``base``; ``dtype``: the engine's."""

    def __init__(self, base: Path, dtype: str, limits: Limits, run_blocking: RunBlocking) -> None:
        self._dtype, self._limits, self._run_blocking = dtype, limits, run_blocking
        self.base = Snapshot(0, SnapshotKind.BASE, base)
        self._versions = itertools.count(1)
        self._known: OrderedDict[str, Snapshot] = OrderedDict()
        self._memory: OrderedDict[int, Adapter] = OrderedDict()
        self.held_bytes = 0
        """Bytes of tensors in memory."""
        self._reading = asyncio.Lock()

    async def opened(self, directory: str | None) -> Snapshot:
        """The snapshot in ``directory``, read if it was not known; None: the base model.

        Raises:
            SnapshotUnusable: there is none, it is damaged or not of a kind that is served, or the engine refused it.
            EngineLost: the disk did not answer in time.
        """
        snapshot = self.base if directory is None else self._known.get(directory)
        if snapshot is None or self._lacks(snapshot):
            assert directory is not None
            try:
                async with asyncio.timeout(self._limits.sampling_load_s), self._reading:  # many may ask for a new one
                    if (snapshot := self._known.get(directory)) is None:
                        snapshot = await self._open(directory)
                    elif self._lacks(snapshot):  # read now, so that no engine waits for the disk
                        await self.adapter(snapshot)
            except TimeoutError as error:
                raise EngineLost(f"snapshot {directory} was not read in time; ask again") from error
        if directory is not None:
            self._known.move_to_end(directory)
        if snapshot.refusal:
            raise SnapshotUnusable(snapshot.refusal)
        return snapshot

    def _lacks(self, snapshot: Snapshot) -> bool:
        """Whether the snapshot's tensors are not in memory, and are wanted there."""
        is_wanted = snapshot.kind is SnapshotKind.ADAPTER and not snapshot.refusal
        return is_wanted and snapshot.version not in self._memory

    async def _open(self, directory: str) -> Snapshot:
        path = Path(directory)
        kind = await self._run_blocking(_kind_in, path)
        snapshot = Snapshot(next(self._versions), kind, path)
        if kind is SnapshotKind.ADAPTER:
            await self.adapter(snapshot)
        self._known[directory] = snapshot
        if len(self._known) > self._limits.sampling_snapshots:
            self._forget(self._known.popitem(last=False)[1].version)
        return snapshot

    async def adapter(self, snapshot: Snapshot) -> Adapter:
        """The tensors of a snapshot that is an adapter, from memory if they are there.

        Raises:
            SnapshotUnusable: the directory holds no adapter of the base model any more.
        """
        if (kept := self._memory.get(snapshot.version)) is None:
            kept = cast("Adapter", await self._run_blocking(self._read, snapshot.path))
            self._forget(snapshot.version)  # it may have been read by another one meanwhile
            self._memory[snapshot.version] = kept
            self.held_bytes += kept.size_bytes
        self._memory.move_to_end(snapshot.version)
        while self.held_bytes > self._limits.sampling_memory_bytes:
            self._forget(next(iter(self._memory)))
        return kept

    def _forget(self, version: int) -> None:
        if (gone := self._memory.pop(version, None)) is not None:
            self.held_bytes -= gone.size_bytes

    def _read(self, directory: Path) -> Adapter:
        try:
            adapter, base = read_adapter(directory, self._dtype)
            is_foreign = base and base != self._identity
        except (ModelFileBroken, SafetensorError, OSError, ValueError, KeyError, TypeError, MemoryError) as error:
            raise SnapshotUnusable(f"snapshot {directory} cannot be read as an adapter: {error!r}") from error
        if is_foreign:
            raise SnapshotUnusable(
                f"snapshot {directory} is an adapter of the model with xxh3 {base}; {self.base.path}, which is served, "
                f"has {self._identity}"
            )
        return adapter

    @cached_property
    def _identity(self) -> str:
        return base_identity(self.base.path)


def _kind_in(directory: Path) -> SnapshotKind:
    """Raises SnapshotUnusable if nothing in ``directory`` can be served."""
    try:
        if (directory / CONFIG_FILE).is_file():
            return SnapshotKind.ADAPTER
        if (directory / "config.json").is_file():
            return SnapshotKind.MODEL
    except (OSError, ValueError):  # a name that no file can have
        pass
    raise SnapshotUnusable(
        f"snapshot is {str(directory)!r}: expected a directory with {CONFIG_FILE} and {TENSOR_FILE}, or a whole model"
    )


def read_adapter(directory: Path, dtype: str) -> tuple[Adapter, str]:
    """The adapter in ``directory``, its tensors as ``dtype``; and the identity of its base model, if the file says it.

    Raises:
        ModelFileBroken, SafetensorError, OSError, ValueError, KeyError, TypeError: a file is missing, damaged, or asks
            for what is not served.
    """
    config = read_model_file(directory, CONFIG_FILE)
    if config.get("peft_type") != "LORA":
        raise ValueError(f"{CONFIG_FILE} has peft_type {config.get('peft_type')!r}: expected LORA")
    for key in _UNSERVED:
        if config.get(key) not in _OFF:
            raise ValueError(f"{CONFIG_FILE} has {key} {config[key]!r}, which is not served: expected {key} to be off")
    file = directory / TENSOR_FILE
    with safe_open(file, framework="numpy") as opened:
        metadata = cast("dict[str, str] | None", opened.metadata()) or {}
    tensors = {str(name): _as_dtype(str(name), entry, dtype) for name, entry in deserialize(file.read_bytes())}
    adapter = Adapter(_spec(config, [*tensors]), tensors, dict.fromkeys(tensors, dtype))
    return adapter, str(metadata.get("base", ""))


def _spec(config: Mapping[str, Any], names: list[str]) -> AdapterSpec:
    rank, alpha = int(config["r"]), float(config["lora_alpha"])
    if rank < 1 or not math.isfinite(alpha):
        raise ValueError(f"{CONFIG_FILE} has r {rank} and lora_alpha {alpha}: expected at least 1, and a finite number")
    if config.get("use_rslora"):  # Kalajdzievski 2023: alpha / sqrt(r) in place of alpha / r
        alpha *= math.sqrt(rank)
    if parameters := config.get("target_parameters"):  # of experts, whose places do not say which weight is meant
        modules = list[str](config.get("target_modules") or [])
        targets = (*modules, *(str(one).removesuffix(".weight") for one in parameters))
    else:
        targets = tuple(sorted({layer_of(name) for name in names}))
    if not targets:
        raise ValueError(f"{TENSOR_FILE} holds no tensors")
    return AdapterSpec(rank=rank, alpha=alpha, targets=targets)


def _as_dtype(name: str, entry: Mapping[str, Any], dtype: str) -> np.ndarray:
    """A tensor of a safetensors file as ``dtype``; bfloat16 as uint16."""
    if entry["dtype"] not in _WORDS:
        raise ValueError(f"{name} is {entry['dtype']}: expected one of {', '.join(_WORDS)}")
    words = np.frombuffer(entry["data"], _WORDS[entry["dtype"]]).reshape(entry["shape"])
    if entry["dtype"] == "BF16":
        wide = (words.astype(np.uint32) << 16).view(np.float32)
    else:
        with np.errstate(over="ignore"):
            wide = words.astype(np.float32)
    if dtype == "float16":
        with np.errstate(over="ignore"):
            wide = wide.astype(np.float16)
    if not np.isfinite(wide).all():
        raise ValueError(f"{name} holds a weight that is not finite in {dtype}")
    if dtype != "bfloat16":
        return wide
    if entry["dtype"] == "BF16":
        return words
    bits = wide.view(np.uint32)
    return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)  # to the nearest, ties to even
