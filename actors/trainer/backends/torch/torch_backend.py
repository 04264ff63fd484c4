"""The torch backend: one process, one device, any Hugging Face causal LM.

    accumulate   forward ─ token losses ─ backward ─▶ gradient sums (flat, float32), on several threads (``replicas``)
    step         sums / weight ─ clip ─ optimizer (float32 master) ─▶ weights in the model's dtype

With a critic both happen to two models (``trained_model``), policy first; while the critic warms up, the policy's
gradients are not computed, and neither its weights nor its optimizer change. With an adapter (``trained_adapter``) the
policy's weights are the adapter's.

All calls run on one thread of the backend's own: the event loop stays free, and calls keep their order.
On disk: ``weights.safetensors`` (float32 master and the optimizer's state, flat), ``critic.safetensors`` and
``backend.json``.
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
from actors.trainer.backend import (
    AdamStep,
    BackendSpec,
    Learned,
    LedRanks,
    LocalBackend,
    LossSpec,
    MemoryUse,
    MicroBatch,
    MicroBatchStats,
    StepResult,
    StoredBytes,
)
from actors.trainer.backends.segment_file import VersionWriter, write_segment
from actors.trainer.backends.torch.critic import CriticReplica, load_critic
from actors.trainer.backends.torch.exported_files import as_it_was, copy_tokenizer
from actors.trainer.backends.torch.frozen import frozen_reference
from actors.trainer.backends.torch.parkable_state import ParkableState
from actors.trainer.backends.torch.replicas import Replicas
from actors.trainer.backends.torch.trained_adapter import TrainedAdapter, check_described
from actors.trainer.backends.torch.trained_model import BackendModels, TrainedModel
from actors.trainer.errors import BackendClosed, CheckpointCorrupt, StateParked
from actors.trainer.parking import SUMS, TRAINED, Place, StatePart, StoredPart
from actors.weights.memory import SegmentWriter

R = TypeVar("R")

STATE_FILE = "backend.json"
TENSOR_FILE = "weights.safetensors"
CRITIC_FILE = "critic.safetensors"
SHARDED_KIND = "fsdp"
"""Kind of backend whose checkpoints are read as well."""
CRITIC_PARTS = "critic"
"""Directory, within a checkpoint of the sharded backend, of the critic's files."""

_GIVE_BACK_EVERY_STEPS = 50
"""Steps between returns of freed memory, which otherwise stays for the next step (``host_memory``), however large."""


def check_critic(directory: Path, *, trained: bool) -> None:
    """Check that the checkpoint holds a critic, if one is ``trained``.

    Raises:
        CheckpointCorrupt: it holds none.
    """
    if trained and not (directory / CRITIC_FILE).exists() and not [*(directory / CRITIC_PARTS).glob("*")]:
        raise CheckpointCorrupt(
            f"{directory}: holds no critic, and the job trains one (algorithm.name); resume with the job as it was, or "
            "begin a new run"
        )


class TorchBackend(LocalBackend):
    """Implements ``TrainBackend``; see there for the promises."""

    kind = "torch"

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._segments = VersionWriter()
        self._core: _Core | None = None
        self._steps = 0
        """Steps of this process."""

    async def start(self, spec: BackendSpec, *, checkpoint_step: int = 0) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="train")
        self._core = await self._run(_Core, spec)

    async def score(self, batch: MicroBatch, *, temperature: float, reference: bool) -> np.ndarray:
        return await self._run(self._open.score, batch, temperature, reference)

    async def values(self, batch: MicroBatch) -> np.ndarray:
        return await self._run(self._open.values, batch)

    async def accumulate(self, batch: MicroBatch, loss: LossSpec) -> MicroBatchStats:
        self._segments.make_room()
        return await self._run(self._open.accumulate, batch, loss)

    async def learn(self, batch: MicroBatch, loss: LossSpec, *, backward: bool = True) -> Learned:
        self._segments.make_room()
        return await self._run(self._open.learn, batch, loss, backward)

    async def drop_sums(self) -> None:
        await self._run(self._open.drop_sums)

    async def use_recompute(self, way: str) -> None:
        await self._run(self._open.use_recompute, way)

    async def measure(self, batch: MicroBatch, loss: LossSpec) -> MemoryUse:
        return await self._run(self._open.measure, batch, loss)

    async def step(self, *, weight: float, adam: AdamStep | None = None) -> StepResult:
        result = await self._run(self._open.step, weight, adam)
        self._steps += 1
        if self._steps % _GIVE_BACK_EVERY_STEPS == 0:
            await self._run(give_back_freed_memory)
        return result

    async def export_segment(self, path: Path, *, job: str, policy_version: int, chunk_bytes: int) -> Manifest:
        manifest = await self._run(self._open.export_segment, path, job, policy_version, chunk_bytes, self._segments)
        self._segments.published(path, manifest.total_bytes)
        return manifest

    def stored_bytes(self) -> StoredBytes:
        return self._state.stored_bytes()

    async def save(self, directory: Path) -> None:
        await self._run(self._open.save, directory)

    async def load(self, directory: Path, *, optimizer: bool = True) -> None:
        await self._run(self._open.load, directory, optimizer)

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

    async def copy_out(self, places: Mapping[str, Place], chunk_bytes: int) -> dict[str, tuple[bytes, ...]]:
        memory = {name: place.memory for name, place in places.items()}
        return await self._run(self._open.copy_out, memory, chunk_bytes)

    async def release(self) -> None:
        await self._run(self._open.bundle.release)

    async def restore(self, stored: Mapping[str, StoredPart]) -> None:
        await self._run(self._state.restore, stored)

    async def forget_place(self, memory: memoryview) -> None:
        if self._state.pins_memory:  # else nothing is pinned, and the thread may hang in a call
            await self._run(self._state.bundle.forget_place, memory)

    async def close(self, *, keep: bool = True) -> None:
        if self._thread is not None:
            pinned = self._core is not None and self._core.pins_memory
            if self._core is not None and pinned:
                self._thread.submit(self._core.let_go)
            self._thread.shutdown(wait=False, cancel_futures=not pinned)
        if self._core is not None:
            self._core.close()
        self._segments.end()
        self._thread = self._core = None

    @property
    def _open(self) -> _Core:
        """The core, whose state is not parked."""
        if self._state.bundle.released:
            raise StateParked("the torch backend was called while its state is parked; restore it first")
        return self._state

    @property
    def _state(self) -> _Core:
        """The core, whether its state is parked or not."""
        if self._core is None:
            raise BackendClosed("the torch backend was called before start or after close")
        return self._core

    async def _run(self, function: Callable[..., R], *args: Any) -> R:
        if self._thread is None:
            raise BackendClosed("the torch backend was called before start or after close")
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)


def build(ranks: LedRanks) -> TorchBackend:
    """A backend, which computes alone whatever the ranks are."""
    return TorchBackend()


class _Core(BackendModels[TrainedModel]):
    """Does all work with torch, on the backend's thread."""

    def __init__(self, spec: BackendSpec) -> None:
        torch.set_num_threads(spec.threads if spec.threads > 0 else len(os.sched_getaffinity(0)))
        torch.manual_seed(spec.seed)
        adapter = None if spec.adapter is None else TrainedAdapter(spec.model_path, spec.adapter)
        policy = TrainedModel(Replicas(spec) if adapter is None else adapter.replicas(spec), spec)
        critic: TrainedModel | None = None
        if spec.critic is not None:
            load = partial(load_critic, spec, spec.critic)
            critic = TrainedModel(Replicas(spec, load, CriticReplica), spec)
        reference = frozen_reference(spec) if spec.needs_reference and adapter is None else None
        super().__init__(spec, policy, critic, adapter, reference)
        self.bundle = ParkableState({name: (model.parameters, model.optimizer) for name, model in self._models.items()})
        self._warm_up()

    @property
    def _models(self) -> dict[str, TrainedModel]:
        """Trained models, by the prefix of their blocks' names."""
        return {"": self.policy} | ({} if self.critic is None else {"critic.": self.critic})

    def _warm_up(self) -> None:
        """Make one small forward and backward pass: thread pools and kernels are set up before the first timed step."""
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

    # ------------------------------------------------------------ computing

    def accumulate(self, batch: MicroBatch, loss: LossSpec) -> MicroBatchStats:
        self.bundle.changed(SUMS)
        return super().accumulate(batch, loss)

    def learn(self, batch: MicroBatch, loss: LossSpec, backward: bool) -> Learned:
        self.check_learn()
        if backward:
            self.bundle.changed(SUMS)
        return super().learn(batch, loss, backward)

    def drop_sums(self) -> None:
        super().drop_sums()
        self.bundle.changed(SUMS, sums_are_zero=True)

    def step(self, weight: float, adam: AdamStep | None = None) -> StepResult:
        result = super().step(weight, adam)
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
        """Unpin memory, and free what torch does not know of; on the backend's thread, after its last call."""
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
        return write_segment(
            path,
            self.policy.parameters.bytes_on_host(),
            job=job,
            policy_version=policy_version,
            chunk_bytes=chunk_bytes,
            tensors=self.policy.parameters.entries,
            writer=writer,
            adapter_of="" if self.adapter is None else self.adapter.base,
        )

    def stored_bytes(self) -> StoredBytes:
        segment = self.policy.parameters.total_bytes
        state = sum(model.state_bytes for model in self._models.values())
        return StoredBytes(segment=segment, checkpoint=state + segment)

    def save(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.policy.save(directory / TENSOR_FILE)
        if self.critic is not None:
            self.critic.save(directory / CRITIC_FILE)
        state: dict[str, object] = {"format": 1, "kind": TorchBackend.kind, "steps": self.steps}
        if self.adapter is not None:
            state |= self.adapter.described()
        (directory / STATE_FILE).write_text(json.dumps(state, indent=2) + "\n")

    def load(self, directory: Path, optimizer: bool) -> None:
        try:
            state = json.loads((directory / STATE_FILE).read_text())
        except (OSError, ValueError) as error:
            raise CheckpointCorrupt(f"{directory}: {error}; resume from another checkpoint") from error
        check_described(state, self.adapter, directory)
        check_critic(directory, trained=self.critic is not None)
        if state.get("kind") == SHARDED_KIND:
            self.policy.load_parts(directory, self._spec.model_path, int(state.get("optimizer_steps", state["steps"])))
        else:
            self.policy.load(directory / TENSOR_FILE, self._spec.model_path)
        if self.critic is not None and self._spec.critic is not None:
            path = self._spec.critic.model_path
            if state.get("kind") == SHARDED_KIND:
                self.critic.load_parts(directory / CRITIC_PARTS, path, int(state.get("critic_steps", 0)))
            else:
                self.critic.load(directory / CRITIC_FILE, path)
        self.steps = int(state["steps"])
        if not optimizer:
            self.forget_optimizer()
        self.bundle.changed(TRAINED)
        self.bundle.changed(SUMS, sums_are_zero=True)

    def export_checkpoint(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        if self.adapter is not None:
            self.adapter.export(directory, self.policy.replicas.model, self.policy.parameters.by_name())
            return
        model = self.policy.replicas.model
        with as_it_was(model):
            model.save_pretrained(directory, safe_serialization=True)  # type: ignore[operator]
        copy_tokenizer(self._spec.model_path, directory)
