"""Decides whether a training service can serve a job at all, and with which spec; a refusal says why not.

    AttachBundle ─▶ same machine ─▶ kind, device, threads, dtype agree ─▶ has not ended the service again and again
                 ─▶ fits the budget ─▶ Agreed

Conditions that may change, such as memory that other jobs use now, are not checked here.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import msgspec

from actors.protocol.training import AttachBundle
from actors.train_service.notes import Notes
from actors.train_service.sizes import in_words, replicas_of, state_bytes, state_dtype
from actors.trainer.backend import BackendSpec
from actors.trainer.errors import ServiceRefuses
from actors.trainer.setup import resolve_device
from actors.weights.segments import host_id
from configs.limits import Limits
from configs.services import ServiceConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreed:
    """Says with which spec a job is served."""

    spec: BackendSpec
    state_bytes: int
    """Bytes of the job's trained state, 0 if its model's files do not tell."""


class Admission:
    """Admits jobs to one service, or refuses them."""

    def __init__(self, config: ServiceConfig, notes: Notes, limits: Limits) -> None:
        self._config = config
        self._notes = notes
        self._limits = limits

    def agree(self, message: AttachBundle) -> Agreed:
        """Decide how the job is served. Reads the headers of the model's files.

        Raises:
            ServiceRefuses: this service can never serve the job.
        """
        config, job = self._config, message.job
        spec = _decoded(message)
        if message.host != host_id():
            raise ServiceRefuses(
                f"job {job}: its trainer runs on {message.host}, and the service {config.name} on {host_id()}; they "
                "exchange files, so both must run on one machine"
            )
        self._agrees(job, "trainer.backend", message.backend, config.backend)
        self._agrees(job, "trainer.ranks", message.ranks, config.ranks)
        if spec.threads:
            self._agrees(job, "trainer.threads", spec.threads, config.threads)
        if config.dtype is not None:
            self._agrees(job, "model.dtype", spec.dtype, config.dtype)
        device = resolve_device(config.device, config.backend)
        if spec.device != "auto":
            self._agrees(job, "trainer.device", spec.device, device)
        if self._notes.is_refused(job):
            raise ServiceRefuses(
                f"job {job}: the service {config.name} has died {self._limits.service_deaths_max} times in a row while "
                "it computed for this job; run it without trainer.service, and see why in the service's log"
            )
        threads = config.threads or max(1, len(os.sched_getaffinity(0)) // config.ranks)
        replicas = replicas_of(spec.model_path, backend=config.backend, device=device, threads=threads)
        models = [spec.model_path, *([] if spec.critic is None else [spec.critic.model_path])]
        what = " with the critic ".join(map(str, models))
        adapters = spec.adapter, None  # a critic has none
        dtype = state_dtype(config.backend, spec.dtype)
        needed = sum(
            state_bytes(path, dtype=dtype, replicas=replicas, adapter=adapter, optimizer=spec.optimizer)
            for path, adapter in zip(models, adapters, strict=False)
        )
        if needed > config.memory_bytes:
            raise ServiceRefuses(
                f"job {job}: model.path {what} needs {in_words(needed)} for weights, optimizer and "
                f"gradients, and the service {config.name} has memory_bytes: {in_words(config.memory_bytes)}; give it "
                "more, or choose another service"
            )
        agreed = replace(spec, device=device, threads=threads, replicas=replicas, parkable=True)
        return Agreed(spec=agreed, state_bytes=needed)

    def _agrees(self, job: str, field: str, theirs: object, ours: object) -> None:
        if theirs != ours:
            raise ServiceRefuses(
                f"job {job}: {field} is {theirs}, and the service {self._config.name} computes with {ours}; write "
                "that, or choose another service"
            )


def _decoded(message: AttachBundle) -> BackendSpec:
    try:
        return BackendSpec.from_json(message.spec)
    except (msgspec.DecodeError, TypeError) as error:
        raise ServiceRefuses(
            f"job {message.job}: its trainer's spec cannot be read ({error}); trainer and service are of two versions: "
            "start the head again"
        ) from error
