"""What the schema cannot see of ``model.adapter``: what computes no adapter."""

from __future__ import annotations

from pathlib import Path

from configs.adapter_schema import AdapterConfig
from configs.model_files import matrices
from configs.schema import JobConfig

Found = tuple[str, str, str]
"""(field, what is wrong, what to do)."""


def check_adapter(job: JobConfig) -> list[Found]:
    """Problems of a job that trains an adapter."""
    if job.model.adapter is None:
        return []
    found: list[Found] = []
    for field, kind in (("trainer.backend", job.trainer.backend), ("rollout.engine", job.rollout.engine)):
        if kind == "simulated":
            found.append((field, "simulated, which has no adapters, and model.adapter is set", "Set it to torch"))
    if job.rollout.engine == "vllm" and job.rollout.in_flight == "keep":
        wrong = "keep, but vLLM binds a sequence to one version of an adapter, so running ones must be prefilled anew"
        found.append(("rollout.in_flight", wrong, "Set it to recompute, or rollout.engine to torch"))
    return [*found, *_check_targets(job, job.model.adapter)]


def _check_targets(job: JobConfig, adapter: AdapterConfig) -> list[Found]:
    """By the names in the files, where they are on this machine; which layers are linear is known once it is loaded."""
    names = matrices(Path(job.model.path).expanduser()) if job.model.source == "hf" and job.model.path else []
    if adapter.targets == "all-linear" or not names:
        return []
    kinds = list(dict.fromkeys(name.rpartition(".")[2] for name in names))
    return [
        ("model.adapter.targets", f"{target!r} names no layer of {job.model.path!r}", f"It has {', '.join(kinds)}")
        for target in adapter.targets
        if not any(f".{name}".endswith(f".{target}") for name in names)
    ]
