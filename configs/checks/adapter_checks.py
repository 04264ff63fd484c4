"""What the schema cannot see of ``model.adapter``: what computes no adapter."""

from __future__ import annotations

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
    return found
