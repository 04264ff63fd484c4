"""The torch backend: one process, one device, any Hugging Face causal LM.

    accumulate   forward ─ token losses ─ backward ─▶ gradient sums (flat, float32), shared out (``replicas``)
    step         sums / weight ─ clip ─ AdamW (float32 master) ─▶ weights in the model's dtype

With a critic both happen to two models (``trained_model``), policy first; while the critic warms up, the policy's
gradients are not computed, and neither its weights nor its optimizer change. With an adapter (``trained_adapter``) the
policy's weights are the adapter's.

All of it runs on one thread of the backend's own: the event loop stays free, and calls happen in the order given.
On disk: ``weights.safetensors`` (float32 master and Adam's moments, flat), ``critic.safetensors`` and ``backend.json``.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from actors.host.host_memory import give_back_freed_memory
from actors.protocol.weights import Manifest
from actors.trainer.backend import BackendSpec, LossSpec, MicroBatch, MicroBatchStats, StepResult, StoredBytes
from actors.trainer.backends.segment_file import write_segment
from actors.trainer.backends.tokenizer_files import copy_tokenizer
from actors.trainer.backends.torch.bundle import Bundle
from actors.trainer.backends.torch.critic import CriticReplica, load_critic
from actors.trainer.backends.torch.frozen import frozen_reference
from actors.trainer.backends.torch.generation_defaults import as_it_was
from actors.trainer.backends.torch.replicas import Replicas, summed
from actors.trainer.backends.torch.trained_adapter import TrainedAdapter, check_described
from actors.trainer.backends.torch.trained_model import TrainedModel, step
from actors.trainer.errors import BackendClosed, CheckpointCorrupt, StateParked
from actors.trainer.parking import SUMS, TRAINED, StatePart, StoredPart
from actors.weights.memory import SegmentWriter

R = TypeVar("R")

STATE_FILE = "backend.json"
TENSOR_FILE = "weights.safetensors"
CRITIC_FILE = "critic.safetensors"
SHARDED_KIND = "fsdp"
"""Kind of backend whose checkpoints are read as well."""
CRITIC_PARTS = "critic"
"""Directory of such a checkpoint with the files of a critic, as those of the policy lie beside it."""

_GIVE_BACK_EVERY_STEPS = 50
"""Freed memory stays for the next step (``host_memory``); that of a step larger than most need not stay for ever."""


def check_critic(directory: Path, *, trained: bool) -> None:
    """Whether the checkpoint holds a critic, if one is ``trained``.

    Raises:
        CheckpointCorrupt: it was taken without one.
    """
    if trained and not (directory / CRITIC_FILE).exists() and not [*(directory / CRITIC_PARTS).glob("*")]:
        raise CheckpointCorrupt(
            f"{directory}: holds no critic, and the job trains one (algorithm.name); resume with the job as it was, or "
            "begin a new run"
        )


class TorchBackend:
    """Implements ``TrainBackend``; see there for the promises."""

    kind = "torch"

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._helper: ThreadPoolExecutor | None = None
        """Makes room for the next version while this one is trained on."""
        self._segments = SegmentWriter()
        self._next_segment: tuple[Path, int] | None = None
        self._core: _Core | None = None
        self._steps = 0
        """Steps of this process."""

    async def start(self, spec: BackendSpec) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="train")
        self._helper = ThreadPoolExecutor(max_workers=1, thread_name_prefix="segments")
        self._core = await self._run(_Core, spec)

    async def score(self, batch: MicroBatch, *, temperature: float, reference: bool) -> np.ndarray:
        return await self._run(self._open.score, batch, temperature, reference)

    async def values(self, batch: MicroBatch) -> np.ndarray:
        return await self._run(self._open.values, batch)

    async def accumulate(self, batch: MicroBatch, loss: LossSpec) -> MicroBatchStats:
        self._make_room()
        return await self._run(self._open.accumulate, batch, loss)

    async def step(self, *, weight: float) -> StepResult:
        result = await self._run(self._open.step, weight)
        self._steps += 1
        if self._steps % _GIVE_BACK_EVERY_STEPS == 0:
            await self._run(give_back_freed_memory)
        return result

    async def export_segment(self, path: Path, *, job: str, policy_version: int, chunk_bytes: int) -> Manifest:
        manifest = await self._run(self._open.export_segment, path, job, policy_version, chunk_bytes, self._segments)
        self._next_segment = path, manifest.total_bytes
        return manifest

    def _make_room(self) -> None:
        """For the next version, once we train again: just after a publication others need the machine to pull."""
        if self._next_segment is not None and self._helper is not None:
            self._helper.submit(self._segments.prepare, *self._next_segment)
            self._next_segment = None

    def stored_bytes(self) -> StoredBytes:
        return self._state.stored_bytes()

    async def save(self, directory: Path) -> None:
        await self._run(self._open.save, directory)

    async def load(self, directory: Path) -> None:
        await self._run(self._open.load, directory)

    async def export_checkpoint(self, directory: Path) -> None:
        await self._run(self._open.export_checkpoint, directory)

    # ------------------------------------------------------------ parking: implements ``Parkable``

    @property
    def steps(self) -> int:
        return self._state.steps

    @property
    def keeps_addresses(self) -> bool:
        return self._state.bundle.keeps_addresses

    def fingerprint(self) -> str:
        return self._state.bundle.fingerprint()

    def parts(self) -> tuple[StatePart, ...]:
        return self._state.bundle.parts()

    def resident_bytes(self) -> int:
        return self._state.bundle.resident_bytes()

    def released_bytes(self) -> int:
        return self._state.bundle.released_bytes()

    async def copy_out(self, places: Mapping[str, memoryview], chunk_bytes: int) -> dict[str, tuple[bytes, ...]]:
        return await self._run(self._open.copy_out, places, chunk_bytes)

    async def release(self) -> None:
        await self._run(self._open.bundle.release)

    async def restore(self, stored: Mapping[str, StoredPart]) -> None:
        await self._run(self._state.restore, stored)

    async def forget_place(self, memory: memoryview) -> None:
        if self._state.pins_memory:  # else it need not wait for a thread that may hang in a call
            await self._run(self._state.bundle.forget_place, memory)

    async def export_parked(
        self, trained: StoredPart, path: Path, *, job: str, policy_version: int, chunk_bytes: int
    ) -> Manifest:
        weights = trained.block("weights")
        return await self._run(
            self._state.write_segment, path, weights, job, policy_version, chunk_bytes, self._segments
        )

    async def close(self) -> None:
        if self._thread is not None:
            pinned = self._core is not None and self._core.pins_memory
            if self._core is not None and pinned:
                self._thread.submit(self._core.let_go)
            self._thread.shutdown(wait=False, cancel_futures=not pinned)
        if self._core is not None:
            self._core.close()
        if self._helper is not None:
            self._helper.submit(self._segments.close)
            self._helper.shutdown(wait=False)
        self._thread = self._helper = self._core = None

    @property
    def _open(self) -> _Core:
        """The core, with its state."""
        if self._state.bundle.released:
            raise StateParked("the torch backend was called while its state is parked; restore it first")
        return self._state

    @property
    def _state(self) -> _Core:
        """The core, its state parked or not."""
        if self._core is None:
            raise BackendClosed("the torch backend was called before start or after close")
        return self._core

    async def _run(self, function: Callable[..., R], *args: Any) -> R:
        if self._thread is None:
            raise BackendClosed("the torch backend was called before start or after close")
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)


class _Core:
    """Does everything that touches torch, on the backend's thread."""

    def __init__(self, spec: BackendSpec) -> None:
        torch.set_num_threads(spec.threads if spec.threads > 0 else len(os.sched_getaffinity(0)))
        torch.manual_seed(spec.seed)
        self._spec = spec
        self._adapter = None if spec.adapter is None else TrainedAdapter(spec.model_path, spec.adapter)
        self._policy = TrainedModel(Replicas(spec) if self._adapter is None else self._adapter.replicas(spec), spec)
        self._critic: TrainedModel | None = None
        if spec.critic is not None:
            load = partial(load_critic, spec, spec.critic)
            self._critic = TrainedModel(Replicas(spec, load, CriticReplica), spec)
        self._reference = frozen_reference(spec) if spec.needs_reference and self._adapter is None else None
        self.bundle = Bundle({name: (model.parameters, model.adam) for name, model in self._models.items()})
        self.steps = 0
        self._warm_up()

    @property
    def _models(self) -> dict[str, TrainedModel]:
        """What is trained, by the beginnings of its blocks' names."""
        return {"": self._policy} | ({} if self._critic is None else {"critic.": self._critic})

    def _warm_up(self) -> None:
        """One small forward and backward: thread pools and kernels are set up before the first step is timed."""
        shape = (2, 16)
        ones = np.ones(shape, np.float32)
        ids, lengths = np.zeros(shape, np.int32), np.full(2, 16, np.int32)
        where = np.arange(16) >= 8
        batch = MicroBatch(
            input_ids=ids,
            lengths=lengths,
            prompt_lengths=lengths // 2,
            behaviour_logprobs=-ones,
            advantages=ones,
            loss_weight=ones * where,
            old_values=ones,
            returns=ones,
        )
        self.accumulate(batch, LossSpec())
        for model in self._models.values():
            model.leave()
        self.bundle.changed(SUMS, sums_are_zero=True)

    # ------------------------------------------------------------ forward and backward

    def score(self, batch: MicroBatch, temperature: float, reference: bool) -> np.ndarray:
        if not reference:
            return self._policy.replicas.score(batch, temperature)
        if not self._spec.needs_reference:
            raise BackendClosed("no reference model was loaded; start the backend with needs_reference")
        if self._reference is None:
            return self._policy_without_adapter(batch, temperature)
        return self._reference.score(batch, temperature)

    def _policy_without_adapter(self, batch: MicroBatch, temperature: float) -> np.ndarray:
        assert self._adapter is not None, "a whole model has a reference of its own"
        with self._adapter.switch.off():
            return self._policy.replicas.score(batch, temperature)

    def values(self, batch: MicroBatch) -> np.ndarray:
        if self._critic is None:
            raise BackendClosed("no critic was loaded; start the backend with critic")
        return self._critic.replicas.score(batch, 1.0)

    def accumulate(self, batch: MicroBatch, loss: LossSpec) -> MicroBatchStats:
        self.bundle.changed(SUMS)
        learn = not self._spec.trains_critic_alone(self.steps)
        stats = self._policy.replicas.accumulate(batch, loss, learn=learn)
        return stats if self._critic is None else summed([stats, self._critic.replicas.accumulate(batch, loss)])

    # ------------------------------------------------------------ step

    def step(self, weight: float) -> StepResult:
        result = step(self._policy, self._critic, self._spec, self.steps, weight)
        self.steps += 1
        self.bundle.changed(TRAINED)
        self.bundle.changed(SUMS, sums_are_zero=True)
        return result

    def close(self) -> None:
        for model in self._models.values():
            model.replicas.close()

    @property
    def pins_memory(self) -> bool:
        return self._spec.device != "cpu"

    def let_go(self) -> None:
        """Unpin, and give memory back that torch does not know of; on the backend's thread, after its last call."""
        self.bundle.close()
        for model in self._models.values():
            model.parameters.close()

    # ------------------------------------------------------------ parking

    def copy_out(self, places: Mapping[str, memoryview], chunk_bytes: int) -> dict[str, tuple[bytes, ...]]:
        return self.bundle.copy_out(places, chunk_bytes, self.steps)

    def restore(self, stored: Mapping[str, StoredPart]) -> None:
        self.steps = self.bundle.restore(stored)

    # ------------------------------------------------------------ files

    def export_segment(
        self, path: Path, job: str, policy_version: int, chunk_bytes: int, writer: SegmentWriter
    ) -> Manifest:
        data = self._policy.parameters.bytes_on_host()
        return self.write_segment(path, data, job, policy_version, chunk_bytes, writer)

    def write_segment(
        self, path: Path, data: memoryview, job: str, policy_version: int, chunk_bytes: int, writer: SegmentWriter
    ) -> Manifest:
        return write_segment(
            path,
            data,
            job=job,
            policy_version=policy_version,
            chunk_bytes=chunk_bytes,
            tensors=self._policy.parameters.entries,
            writer=writer,
            adapter_of="" if self._adapter is None else self._adapter.base,
        )

    def stored_bytes(self) -> StoredBytes:
        segment = self._policy.parameters.total_bytes
        state = sum(model.state_bytes for model in self._models.values())
        return StoredBytes(segment=segment, checkpoint=state + segment)

    def save(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._policy.save(directory / TENSOR_FILE)
        if self._critic is not None:
            self._critic.save(directory / CRITIC_FILE)
        state: dict[str, object] = {"format": 1, "kind": TorchBackend.kind, "steps": self.steps}
        if self._adapter is not None:
            state |= self._adapter.described()
        (directory / STATE_FILE).write_text(json.dumps(state, indent=2) + "\n")

    def load(self, directory: Path) -> None:
        try:
            state = json.loads((directory / STATE_FILE).read_text())
        except (OSError, ValueError) as error:
            raise CheckpointCorrupt(f"{directory}: {error}; resume from another checkpoint") from error
        check_described(state, self._adapter, directory)
        check_critic(directory, trained=self._critic is not None)
        if state.get("kind") == SHARDED_KIND:
            self._policy.load_parts(directory, self._spec.model_path, int(state.get("optimizer_steps", state["steps"])))
        else:
            self._policy.load(directory / TENSOR_FILE, self._spec.model_path)
        if self._critic is not None and self._spec.critic is not None:
            path = self._spec.critic.model_path
            if state.get("kind") == SHARDED_KIND:
                self._critic.load_parts(directory / CRITIC_PARTS, path, int(state.get("critic_steps", 0)))
            else:
                self._critic.load(directory / CRITIC_FILE, path)
        self.steps = int(state["steps"])
        self.bundle.changed(TRAINED)
        self.bundle.changed(SUMS, sums_are_zero=True)

    def export_checkpoint(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        if self._adapter is not None:
            self._adapter.export(directory, self._policy.parameters.by_name())
            return
        model = self._policy.replicas.model
        with as_it_was(model):
            model.save_pretrained(directory, safe_serialization=True)  # type: ignore[operator]
        copy_tokenizer(self._spec.model_path, directory)
