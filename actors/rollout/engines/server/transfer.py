"""Gives a server a version: it maps the file in which the version lies already, or reloads a copy in files.

    mapped     pause ─ start_weight_update ─ update_weights {path, tensors} ─ finish_weight_update {label} ─ resume
    reloaded   pause ─ collective_rpc reload_weights {directory} ─ update_weight_version {label} ─ resume

Invariants
- The server computes nothing while its weights change, and is resumed whatever happens.
- A version that was pulled lies in this machine's shared memory, and the server maps that file: no byte is copied on
  the way. Other tensors are written to a file of their own there, which is removed when they are loaded.
- An update that another life of the worker left open is closed first.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from actors.rollout.engine import WeightTensors
from actors.rollout.engines.server.client import ServerClient
from actors.rollout.engines.vllm.weights import as_torch
from actors.rollout.errors import EngineError, ServerGone, ServerRefuses
from actors.weights.manifest import SegmentViews, layout
from actors.weights.segments import segment_directory

T = TypeVar("T")


class Transfer:
    """Loads versions into one server. ``load_s``: longest time of one order, so of one version."""

    def __init__(self, client: ServerClient, *, maps: bool, load_s: float) -> None:
        self._client, self._maps, self._load_s = client, maps, load_s

    async def load(self, tensors: WeightTensors, dtypes: Mapping[str, str], label: str) -> None:
        """Have the server serve ``tensors`` under ``label``.

        Raises:
            ServerGone: it went meanwhile.
            EngineError: it refuses them; what it serves now is unknown.
        """
        await self._order("/pause?mode=keep&clear_cache=false")
        try:
            if self._maps:
                await self._by_mapping(tensors, dtypes, label)
            else:
                await self._by_files(tensors, dtypes, label)
        except ServerRefuses as error:
            raise EngineError(f"{error}. Its log says more; what it serves now is unknown") from error
        finally:
            with contextlib.suppress(ServerGone, ServerRefuses):
                await self._order("/resume")

    async def _by_mapping(self, tensors: WeightTensors, dtypes: Mapping[str, str], label: str) -> None:
        with _scratch() as scratch:
            if isinstance(tensors, SegmentViews) and tensors.path.exists():
                path, entries = tensors.path, tensors.entries
            else:
                entries, size = layout([(name, dtypes[name], array.shape) for name, array in tensors.items()])
                path = scratch / "version"
                await off_loop(_write, path, tensors, {e.name: e.offset_bytes for e in entries}, size)
            await self._start()
            named = [[e.name, e.dtype, list(e.shape), e.offset_bytes] for e in entries]
            await self._order("/update_weights", {"update_info": {"path": str(path), "tensors": named}})
            await self._order("/finish_weight_update", {"weight_version": label})

    async def _start(self) -> None:
        try:
            await self._order("/start_weight_update")
        except ServerRefuses:  # an earlier life began one, and was killed
            await self._order("/finish_weight_update")
            await self._order("/start_weight_update")

    async def _by_files(self, tensors: WeightTensors, dtypes: Mapping[str, str], label: str) -> None:
        with _scratch() as scratch:
            await off_loop(_write_safetensors, scratch / "model.safetensors", tensors, dtypes)
            reload = {"method": "reload_weights", "kwargs": {"weights_path": str(scratch)}}
            await self._order("/collective_rpc", reload)
        await self._order("/update_weight_version", {"new_version": label})

    async def _order(self, path: str, body: Mapping[str, Any] | None = None) -> None:
        await self._client.post(path, body, timeout_s=self._load_s)


async def off_loop(function: Callable[..., T], *arguments: object) -> T:
    """Run what blocks in a thread."""
    return await asyncio.get_running_loop().run_in_executor(None, function, *arguments)


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    """A directory in shared memory that only our user can enter, for as long as a load takes."""
    directory = Path(tempfile.mkdtemp(prefix="headrace-server-", dir=segment_directory()))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _write(path: Path, tensors: WeightTensors, offsets: Mapping[str, int], size: int) -> None:
    with path.open("wb") as file:
        file.truncate(size)
        for name, array in tensors.items():
            file.seek(offsets[name])
            file.write(np.ascontiguousarray(array).data)


def _write_safetensors(path: Path, tensors: WeightTensors, dtypes: Mapping[str, str]) -> None:
    from safetensors.torch import save_file

    save_file({name: as_torch(array, dtypes[name]) for name, array in tensors.items()}, path)
