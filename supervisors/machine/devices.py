"""Which devices a machine has, found without torch: importing it takes seconds, and a context takes device memory.

    CUDA_VISIBLE_DEVICES ──────▶ the devices in it, up to the first that is not there: CUDA reads it so
    nvidia-smi -L ─────────────▶ every GPU by its number, or, where one is divided (MIG), its instances by their ids
    /proc/driver/nvidia/gpus ──▶ every GPU by its number, where nvidia-smi says nothing
    none of these ─────────────▶ none
                                  └─ --devices ─▶ some of them, or none

Invariants
- A device is called what ``CUDA_VISIBLE_DEVICES`` calls it: a number, or an id such as ``GPU-…`` or ``MIG-…``.
- Numbers go by the bus, as nvidia-smi shows them, and processes are told so; those in a ``CUDA_VISIBLE_DEVICES`` that
  was there before keep their meaning.
- Where no devices are known, no process's environment is changed: torch finds there what it finds without Headrace.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog

from configs.limits import DEFAULT_LIMITS
from supervisors.tree.errors import NoSuchDevices

log = structlog.get_logger("headrace.devices")

VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
ORDER: Final = "CUDA_DEVICE_ORDER"
BY_BUS: Final = "PCI_BUS_ID"
NONE: Final = "none"
"""Value of ``--devices`` for a machine that is to lend none."""

_DRIVER: Final = Path("/proc/driver/nvidia/gpus")
_DRIVER_FILES: Final = (Path("/dev/nvidiactl"), Path("/dev/dxg"))
_FORMS: Final = "a number of devices from 1, or their ids with commas (0,2; a single one: 2,), or none"
_ID: Final = re.compile(r"^(\d{1,4}|(GPU|MIG)-[0-9A-Za-z/-]{1,80})$")


@dataclass(frozen=True)
class Devices:
    """The devices that a machine has for its processes. The default: none are known."""

    ids: tuple[str, ...] = ()
    is_told: bool = False
    """True if they were chosen (``--devices``): no process of the machine is to see any other."""
    by_bus: bool = False
    """True if their numbers go by the bus, which CUDA has to be told."""

    def environment(self, own: Sequence[str] | None) -> dict[str, str]:
        """Variables of a process that has the devices ``own``; None: it sees all that the machine has."""
        if own is None and not self.is_told:
            return {}
        order = {ORDER: BY_BUS} if self.by_bus else {}
        return {VISIBLE: ",".join(self.ids if own is None else own)} | order

    def lacks(self, wanted: Sequence[str] | None) -> str:
        """Words for the ``wanted`` devices that it does not have; empty: it has them all."""
        strange = [device for device in wanted or () if device not in self.ids]
        has = f"its machine has {', '.join(self.ids)}" if self.ids else "its machine has none"
        return f"the devices {', '.join(strange)}, but {has}" if strange else ""


NO_DEVICES: Final = Devices()


@dataclass(frozen=True)
class _Gpu:
    """A GPU of the machine. Lists of GPUs are in the order of the bus, by which they are numbered."""

    uuid: str
    instances: tuple[str, ...] = ()
    """Ids of its MIG instances; empty: it is not divided."""


def find_devices(option: str | None, environ: Mapping[str, str] = os.environ, driver: Path = _DRIVER) -> Devices:
    """The devices of this machine that ``option`` (``--devices``) asks for; None: all. Blocks for a second.

    Raises:
        NoSuchDevices: the machine does not have them, or ``option`` is malformed.
    """
    if option is not None:
        _check_form(option)
    if option == NONE:
        return Devices(is_told=True)
    visible = environ.get(VISIBLE)
    gpus = _from_nvidia_smi(environ)
    if gpus is None:
        gpus = _from_driver(driver)
    ids = _all(gpus or []) if visible is None else _visible(visible, gpus)
    by_bus = visible is None and ORDER not in environ
    if option is None:
        return Devices(ids, by_bus=by_bus and bool(ids))
    where = f"{VISIBLE} names" if visible is not None else "this machine has"
    return Devices(_chosen(option, ids, gpus or [], where), is_told=True, by_bus=by_bus)


def is_device_id(text: str) -> bool:
    """Whether ``text`` has the form of a device's number or id; the ids that a node offers are checked by it."""
    return _ID.match(text) is not None


# ------------------------------------------------------------ what is there


def _from_nvidia_smi(environ: Mapping[str, str]) -> list[_Gpu] | None:
    """The GPUs that nvidia-smi shows; None: it is not installed, or cannot reach the driver."""
    limit_s = DEFAULT_LIMITS.device_search_s
    try:
        shown = subprocess.run(
            ["nvidia-smi", "-L"], env=dict(environ), capture_output=True, timeout=limit_s, check=True, text=True
        ).stdout
    except FileNotFoundError:
        return None
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        log.warning("nvidia-smi does not say which devices there are", why=str(error))
        return None
    gpus: list[_Gpu] = []
    for line in shown.splitlines():
        if (found := re.search(r"^\s*(GPU|MIG)\b.*\(UUID:\s*([^)\s]+)\)", line)) is None:
            continue
        kind, uuid = found.groups()
        if kind == "GPU":
            gpus.append(_Gpu(uuid))
        elif gpus:
            gpus[-1] = _Gpu(gpus[-1].uuid, (*gpus[-1].instances, uuid))
    return gpus


def _from_driver(driver: Path) -> list[_Gpu] | None:
    """The GPUs that the kernel's driver shows, in a directory each, named by its place on the bus; None: no driver."""
    try:
        gpus = sorted(driver.iterdir())
    except OSError:
        return None
    found: list[_Gpu] = []
    for gpu in gpus:
        try:
            uuid = re.search(r"GPU UUID:\s*(\S+)", (gpu / "information").read_text("utf-8", errors="replace"))
        except OSError:
            continue
        found.append(_Gpu(uuid.group(1) if uuid is not None else ""))
    return found


def _all(gpus: Sequence[_Gpu]) -> tuple[str, ...]:
    return tuple(name for number, gpu in enumerate(gpus) for name in gpu.instances or (str(number),))


def _visible(variable: str, gpus: Sequence[_Gpu] | None) -> tuple[str, ...]:
    """The devices that ``variable`` names. If the GPUs are unknown, but a driver is there, the variable is believed."""
    if gpus is None and not any(path.exists() for path in _DRIVER_FILES):
        return ()
    found: list[str] = []
    for text in map(str.strip, variable.split(",")):
        named = text if gpus is None else _named(text, gpus)
        if named is None or not is_device_id(named):
            break
        found.append(named)
    return tuple(dict.fromkeys(found))


def _named(text: str, gpus: Sequence[_Gpu]) -> str | None:
    """The device that ``text`` names: by its number, its id, or a beginning of the id that no other device has."""
    if text.isdecimal():
        return str(int(text)) if int(text) < len(gpus) else None
    ids = [name for gpu in gpus for name in (gpu.uuid, *gpu.instances)]
    meant = [name for name in ids if text.startswith(("GPU-", "MIG-")) and name.startswith(text)]
    return meant[0] if len(meant) == 1 else None


# ------------------------------------------------------------ what is wanted


def _check_form(option: str) -> None:
    parts = _parts(option)
    is_number = option.isdecimal() and int(option) > 0
    is_list = bool(parts) and all(map(is_device_id, parts)) and (not option.isdecimal())
    if option != NONE and not is_number and not is_list:
        raise NoSuchDevices(f"--devices is {option!r}, expected {_FORMS}")
    if len(set(parts)) < len(parts):
        raise NoSuchDevices(f"--devices is {option!r}, and names one twice; expected {_FORMS}")


def _parts(option: str) -> list[str]:
    return [part.strip() for part in option.removesuffix(",").split(",")]


def _chosen(option: str, ids: tuple[str, ...], gpus: Sequence[_Gpu], where: str) -> tuple[str, ...]:
    """Those of ``ids`` that the option wants."""
    there = f"{where} {', '.join(ids)}" if ids else f"{where} none (nvidia-smi -L shows what there is)"
    if option.isdecimal():
        if int(option) > len(ids):
            fix = f"Ask for at most {len(ids)}" if ids else "Leave it out"
            raise NoSuchDevices(f"--devices is {option}, but {there}. {fix}")
        return ids[: int(option)]
    found: list[str] = []
    for text in _parts(option):
        same = text if text in ids else _named(text, gpus)
        if same not in ids:
            same = next((name for name in ids if name == _number_of(same, gpus)), None)
        if same is None:
            fix = "Name devices of these, or leave it out"
            raise NoSuchDevices(f"--devices names {text}, but {there}. {fix}")
        found.append(same)
    if len(set(found)) < len(found):
        raise NoSuchDevices(f"--devices is {option!r}, and names one twice; expected {_FORMS}")
    return tuple(found)


def _number_of(uuid: str | None, gpus: Sequence[_Gpu]) -> str | None:
    """The number of the GPU with that id."""
    return next((str(number) for number, gpu in enumerate(gpus) if gpu.uuid and gpu.uuid == uuid), None)
