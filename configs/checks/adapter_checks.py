"""Checks of ``model.adapter``: whether trainer and engine can compute it, and whether the model has its targets."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from configs.adapter_schema import ALL_LINEAR, AdapterConfig
from configs.checks.model_checks import model_directory
from configs.errors import Found
from configs.model_files import HEAD, TINY_LAYERS, ModelFileBroken, has_experts, matrices, names_experts
from configs.schema import JobConfig

_TARGETS: Final = "model.adapter.targets"
_EXPERTS: Final = ("experts.gate_up_proj", "experts.down_proj")
"""Weights that most families' experts have."""


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
    directory = model_directory(job.model.path or "-", job.model.revision or "main")
    experts = _has_experts(job, directory)
    if experts:
        found += _check_experts(job, job.model.adapter)
    if job.model.adapter.quantization != "none":
        found += _check_quantization(job, experts=experts)
    return [*found, *_check_targets(job, job.model.adapter, directory, experts=experts)]


def _check_experts(job: JobConfig, adapter: AdapterConfig) -> list[Found]:
    """What computes no adapter of experts, or none beside them."""
    if job.rollout.engine == "vllm" and job.rollout.device == "cpu":
        wrong = "vllm, whose build for CPUs cannot compute a mixture of experts with adapters, of whatever layers"
        return [("rollout.engine", wrong, "Set it to torch, or leave model.adapter out")]
    targets = [] if adapter.targets == ALL_LINEAR else [target for target in adapter.targets if names_experts(target)]
    if not targets:
        return []
    found: list[Found] = []
    wrong = f"{targets[0]!r} names weights of experts"
    if job.rollout.engine == "vllm":
        found.append(
            (
                _TARGETS,
                f"{wrong}, and vLLM is given adapters of linear layers only",
                "Name other layers, or set rollout.engine to torch",
            )
        )
    if job.trainer.expert_parallel:
        found.append(
            (
                _TARGETS,
                f"{wrong}, which have no adapter where trainer.expert_parallel keeps them at their ranks",
                "Name other layers, or unset trainer.expert_parallel",
            )
        )
    return found


def _check_quantization(job: JobConfig, *, experts: bool) -> list[Found]:
    """What cannot compute with a model in 4 bits."""
    field, trainer = "model.adapter.quantization", job.trainer
    refused = [
        (trainer.backend == "fsdp", "trainer.backend is fsdp, which shards weights in model.dtype", "Set it to torch"),
        (trainer.compile, "trainer.compile compiles layers as they are written", "Unset it"),
        (experts, "the weights of the model's experts, which are most of it, are no linear layers", "Leave it out"),
    ]
    return [(field, f"nf4, and {wrong}", fix) for is_so, wrong, fix in refused if is_so]


def _check_targets(job: JobConfig, adapter: AdapterConfig, directory: Path, *, experts: bool) -> list[Found]:
    """Look for the targets in a local model's files; which layers are linear shows once the model is loaded."""
    if adapter.targets == ALL_LINEAR or not (names := _layers(job, directory, experts=experts)):
        return []
    # embeddings and norms, which cannot have an adapter, stand outside the model's numbered blocks; so does the head
    inner = [name for name in names if any(part.isdecimal() for part in name.split("."))] or names
    kinds = list(dict.fromkeys(name.rpartition(".")[2] for name in inner if not (experts and _is_experts(name))))
    return [
        (
            _TARGETS,
            f"{target!r} names no layer of {job.model.path or 'the tiny model'!r}",
            f"It has {', '.join([*kinds, HEAD, *(_EXPERTS if experts else ())])}",
        )
        for target in adapter.targets
        if not any(f".{name}".endswith(f".{target}") for name in (*names, HEAD, ALL_LINEAR))
        and not (experts and names_experts(target))
    ]


def _layers(job: JobConfig, directory: Path, *, experts: bool) -> list[str]:
    """Names of the model's matrices; empty if its files are not here yet."""
    if _is_tiny(job, directory):
        return [f"layers.{name}" for name in TINY_LAYERS if not (experts and name.startswith("mlp."))]
    return matrices(directory)


def _has_experts(job: JobConfig, directory: Path) -> bool:
    """Whether the model is seen to have experts; one that is not here yet is asked when it is loaded."""
    if _is_tiny(job, directory):
        return job.model.experts > 0
    try:
        return has_experts(directory)
    except ModelFileBroken:
        return False


def _is_tiny(job: JobConfig, directory: Path) -> bool:
    return job.model.source == "tiny" and not (directory / "config.json").is_file()


def _is_experts(name: str) -> bool:
    """Whether a matrix of the files is one expert's; once loaded, those of a layer are one tensor."""
    return ".experts." in name
