"""Checks of ``rollout.servers``: what a worker that speaks to a server cannot do."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from configs.errors import Found
from configs.model_files import ModelFileBroken, has_experts
from configs.schema import JobConfig

_FIELD: Final = "rollout.servers"
_ADDRESS: Final = re.compile(r"https?://[^/\s@]+/?")
_WARMEST: Final = 2.0
"""Highest temperature that vLLM's HTTP interface takes."""


def _has_experts(job: JobConfig) -> bool:
    if job.model.source == "tiny" and not job.model.path:
        return job.model.experts > 0
    try:
        return has_experts(Path(job.model.path or "").expanduser())
    except ModelFileBroken:
        return False  # told elsewhere


def check_servers(job: JobConfig) -> list[Found]:
    """Problems of a job whose workers speak to servers. What a server can is asked when the job starts."""
    servers, workers = job.rollout.servers, job.rollout.workers
    found: list[Found] = []
    if bad := [server for server in servers if not _ADDRESS.fullmatch(server)]:
        wrong = f"{bad[0]!r} is no address of a server: expected http:// or https://, a host and a port, and no more"
        fix = "Write it as http://127.0.0.1:8000; a key goes into VLLM_API_KEY in the environment"
        found.append((_FIELD, wrong, fix))
    if len(servers) > workers:
        wrong = f"{len(servers)} addresses, but rollout.workers is {workers}: each has a worker of its own"
        found.append((_FIELD, wrong, f"Set rollout.workers to {len(servers)}, or more for workers with an engine"))
    named = [server.rstrip("/") for server in servers]
    if twice := sorted({server for server in named if named.count(server) > 1}):
        wrong = f"{twice[0]} is there twice: two workers would give it weights in turn"
        found.append((_FIELD, wrong, "Name each server once; several engines on a machine listen at several ports"))
    if servers and job.model.adapter is not None:
        wrong = "workers would have to give servers adapters (model.adapter), which is not built"
        found.append((_FIELD, wrong, "Leave it out, or model.adapter"))
    if servers and job.rollout.engine == "simulated":
        wrong = "simulated, with rollout.servers, whose tokens are real"
        found.append(("rollout.engine", wrong, "Set it to torch or vllm, or remove rollout.servers"))
    if servers and _has_experts(job):
        wrong = (
            "a mixture of experts would be loaded into servers, which vLLM has been seen to do wrongly; not tried yet"
        )
        found.append((_FIELD, wrong, "Remove it, or take a model without experts"))
    if servers and job.rollout.tensor_parallel > 1:
        wrong = (
            f"{job.rollout.tensor_parallel}, with rollout.servers: how a server shards its model is said where it is"
        )
        wrong += " started"
        found.append(("rollout.tensor_parallel", wrong, "Set it to 1, and --tensor-parallel-size of vllm serve"))
    temperatures = {"rollout.temperature": job.rollout.temperature}
    if job.eval is not None:
        temperatures["eval.temperature"] = job.eval.temperature
    for field, temperature in temperatures.items():
        if servers and temperature > _WARMEST:
            found.append((field, f"{temperature:g}, and the servers of {_FIELD} take at most 2", "Lower it"))
    return found
