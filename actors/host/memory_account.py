"""The memory of this machine and process in numbers: what is available, what the process takes, and took at most.

Available is what the machine has left, or less where a control group limits this process (a container, a Slurm job).
Pages of files that nobody has changed count as available: the system gives them up when memory is asked for. On CUDA
what torch's allocator keeps for later use counts as free.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, Self

import psutil

_GROUPS: Final = Path("/proc/self/cgroup")
_MOUNT: Final = Path("/sys/fs/cgroup")
_FILES: Final = {
    True: ("memory.max", "memory.current", "inactive_file"),
    False: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""Limit, use, and the entry of ``memory.stat`` that counts unused pages of files: of version 2, and of version 1."""


def available_bytes() -> int:
    """Bytes that this process can still get, shared with whatever else runs within the same limits."""
    return min([psutil.virtual_memory().available, *_left_in_groups(_GROUPS, _MOUNT)])


def free_bytes(device: str) -> int:
    """Bytes that are free on ``device``, a name of torch's, for this process."""
    if device == "cpu":
        return available_bytes()
    import torch

    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + kept


def _left_in_groups(groups: Path, mount: Path) -> list[int]:
    """Bytes that each limited control group leaves, from the process's own up to the root of the mount."""
    left: list[int] = []
    try:
        lines = groups.read_text().splitlines()
    except OSError:
        return left
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = mount / "memory" if controllers else mount
        place = root / path.lstrip("/")
        within = [group for group in (place, *place.parents) if group.is_relative_to(root)]
        left += [found for group in within if (found := _left_in(group, unified=not controllers)) is not None]
    return left


def _left_in(group: Path, *, unified: bool) -> int | None:
    limit_file, use_file, entry = _FILES[unified]
    try:
        limit, used = (group / limit_file).read_text().strip(), int((group / use_file).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    return None if limit == "max" else max(0, int(limit) - used + int(stat.get(entry, 0)))


def resident_bytes() -> int:
    """Bytes of memory that this process takes now."""
    return psutil.Process().memory_info().rss


def set_peak_back() -> bool:
    """Let ``peak_bytes`` count from now on; False where the system cannot, so that it counts from the start."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def peak_bytes() -> int:
    """Bytes of memory that this process took at most; where the system does not tell, those that it takes now."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return resident_bytes()
    peaks = [int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:")]
    return peaks[0] if peaks else resident_bytes()


class MemoryMeter:
    """Measures what is taken within a ``with`` block, by this process on one device. ``peak_bytes``: the result."""

    def __init__(self, device: str) -> None:
        self._device = device
        self.peak_bytes = 0

    def __enter__(self) -> Self:
        if self._device == "cpu":
            set_peak_back()
            self._before = resident_bytes()
        else:
            import torch

            torch.cuda.reset_peak_memory_stats(self._device)
            self._before = torch.cuda.memory_allocated(self._device)
        return self

    def __exit__(self, *error: object) -> None:
        peak = peak_bytes()
        if self._device != "cpu":
            import torch

            peak = torch.cuda.max_memory_allocated(self._device)
        self.peak_bytes = max(0, peak - self._before)
