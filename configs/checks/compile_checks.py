"""Checks of ``trainer.compile``: what it does not go with, and what it needs of this machine."""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path
from typing import Final

from configs.errors import Found
from configs.schema import JobConfig

_KEY: Final = "trainer.compile"
_OUT: Final = "Leave it out"


def check_compile(job: JobConfig, *, on_cpu: bool, has_triton: bool) -> list[Found]:
    """Problems of a job whose trainer compiles layers. ``on_cpu``: whether it trains there; the rest is looked up."""
    trainer = job.trainer
    if not trainer.compile or trainer.backend == "simulated":
        return []
    refused = {
        "trainer.backend is fsdp, whose ranks gather weights within the layers": trainer.backend == "fsdp",
        "trainer.service is set: torch compiles on one thread at a time, and a service has one for each job": (
            trainer.service is not None
        ),
        "trainer.attention is flex, which torch compiles by itself": trainer.attention == "flex",
        f"trainer.recompute is {trainer.recompute}; compiled layers compute cheap operations again by themselves, and "
        "go with none and whole": trainer.recompute not in ("none", "whole"),
        "trainer.micro_batch_tokens is auto, and on a CPU what a compiler takes would count as a micro-batch's": (
            on_cpu and trainer.micro_batch_tokens == "auto"
        ),
        "trainer.router_replay is set, which changes what routers do within the layers": trainer.router_replay,
        "algorithm.load_balancing is set, which reads what routers do within the layers": (
            job.algorithm.load_balancing is not None
        ),
    }
    found = [(_KEY, f"true, but {wrong}", f"{_OUT}, or the other") for wrong, holds in refused.items() if holds]
    if missing := _missing(on_cpu=on_cpu, has_triton=has_triton):
        found.append((_KEY, f"true, but this machine has no {missing[0]}", f"{missing[1]}, or leave it out"))
    return found


def _missing(*, on_cpu: bool, has_triton: bool) -> tuple[str, str] | None:
    """What torch would miss while it compiles, and what to do."""
    if not on_cpu and not has_triton:
        return "package triton", "Run pip install triton"
    compiler = os.environ.get("CXX", "g++") if on_cpu else os.environ.get("CC", "gcc")
    if shutil.which(compiler) is None and (on_cpu or shutil.which("clang") is None):
        return f"C++ compiler {compiler}" if on_cpu else f"C compiler {compiler}", "Install g++, or name one by CXX"
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        return "headers of Python (Python.h), which what is compiled includes", "Install python3-dev"
    return None
