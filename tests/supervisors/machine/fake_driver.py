"""An ``nvidia-smi`` that shows what a test wants, and a driver's directory, on a machine that has neither."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def uuid_of(number: int) -> str:
    """The id of the GPU with that number."""
    return f"GPU-{number:08d}-aaaa-bbbb-cccc-000000000000"


def instance_of(number: int, part: int) -> str:
    """The id of a MIG instance of it."""
    return f"MIG-{number:08d}-{part:04d}-bbbb-cccc-000000000000"


def fake_nvidia_smi(directory: Path, gpus: Sequence[int], *, code: int = 0, pause_s: float = 0.0) -> str:
    """Write one into ``directory`` and return a PATH that begins with it; ``gpus``: of each, how many parts it has."""
    directory.mkdir(parents=True, exist_ok=True)
    lines: list[str] = []
    for number, parts in enumerate(gpus):
        lines.append(f"GPU {number}: NVIDIA H100 80GB HBM3 (UUID: {uuid_of(number)})")
        lines += [f"  MIG 1g.10gb     Device  {part}: (UUID: {instance_of(number, part)})" for part in range(parts)]
    shown = "\n".join(lines)
    script = directory / "nvidia-smi"
    script.write_text(f"#!/bin/sh\nsleep {pause_s:g}\ncat <<'SHOWN'\n{shown}\nSHOWN\nexit {code}\n")
    script.chmod(0o755)
    return f"{directory}:/usr/bin:/bin"


def fake_driver(directory: Path, count: int) -> Path:
    """The directory that the kernel's driver would have for so many GPUs."""
    for number in range(count):
        gpu = directory / f"0000:{number + 1:02x}:00.0"
        gpu.mkdir(parents=True)
        (gpu / "information").write_text(f"Model: \t\t NVIDIA H100\nGPU UUID: \t {uuid_of(number)}\n")
    return directory
