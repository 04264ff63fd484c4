"""A slow cable between two network namespaces: a process that holds each frame back for a time.

    host's eth0 (tap) ── read ──▶ [due, frame] … ── due ──▶ write ── switch's port (tap)      and the same way back

``tc``'s netem does that where the kernel has it; this needs /dev/net/tun alone, so the tests are the same everywhere.
Frames keep their virtio header (IFF_VNET_HDR), so the kernel hands over up to 64 KiB of a TCP stream at once and leaves
cutting and checksums to nobody: 100 Mbit/s are some hundred frames a second, not eight thousand. A line that loses some
takes them packet by packet, as they would be lost.

    python delay_line.py PID_A NAME_A PID_B NAME_B DELAY_S LOSS        prints "ready", ends when it is killed
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import random
import select
import struct
import sys
import time
from collections import deque
from pathlib import Path
from typing import Final

_CLONE_NEWNET: Final = 0x40000000
_TUNSETIFF: Final = 0x400454CA
_TUNSETOFFLOAD: Final = 0x400454D0
_TAP_PLAIN_VNET: Final = 0x0002 | 0x1000 | 0x4000  # IFF_TAP, IFF_NO_PI, IFF_VNET_HDR
_OFFLOADS: Final = 0x01 | 0x02 | 0x04  # TUN_F_CSUM, TUN_F_TSO4, TUN_F_TSO6
_FRAME_BYTES_MAX: Final = 1 << 17
_FRAMES_HELD_MAX: Final = 8192
"""More are dropped, as a router's buffer does: a second of 100 Mbit/s even in frames of 1500 bytes."""
_LOOK_S: Final = 1.0
"""Seconds after which it looks at its queues though nothing has come."""


def open_tap(pid: int, name: str, offloads: int) -> int:
    """A TAP device called ``name`` in the network namespace of the process ``pid``, where this thread stays.

    Raises:
        OSError: the system does not let us.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    with Path(f"/proc/{pid}/ns/net").open() as namespace:
        if libc.setns(namespace.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter the network of process {pid}")
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _TAP_PLAIN_VNET))
    fcntl.ioctl(tap, _TUNSETOFFLOAD, offloads)
    return tap


class Way:
    """One direction: frames that wait until they are due at ``out``."""

    def __init__(self, source: int, out: int, delay_s: float, loss: float) -> None:
        self._source, self._out = source, out
        self._delay_s, self._loss = delay_s, loss
        self._draws = random.Random(0)
        self._held: deque[tuple[float, bytes]] = deque()

    def take(self, now_s: float) -> None:
        """Read what has come."""
        while True:
            try:
                frame = os.read(self._source, _FRAME_BYTES_MAX)
            except BlockingIOError:
                return
            except OSError:  # the device is down
                return
            if len(self._held) < _FRAMES_HELD_MAX and self._draws.random() >= self._loss:
                self._held.append((now_s + self._delay_s, frame))

    def give(self, now_s: float) -> float:
        """Write what is due; returns how long the next one has to wait."""
        while self._held and self._held[0][0] <= now_s:
            try:
                os.write(self._out, self._held.popleft()[1])
            except OSError:  # the device is down, or full: lost, as on any wire
                continue
        return self._held[0][0] - now_s if self._held else _LOOK_S


def main(pid_a: int, name_a: str, pid_b: int, name_b: str, delay_s: float, loss: float) -> None:
    offloads = 0 if loss else _OFFLOADS
    a, b = open_tap(pid_a, name_a, offloads), open_tap(pid_b, name_b, offloads)
    ways = {a: Way(a, b, delay_s, loss), b: Way(b, a, delay_s, loss)}
    print("ready", flush=True)
    wait_s = _LOOK_S
    while True:
        readable, _, _ = select.select([a, b], [], [], max(0.0, wait_s))
        now_s = time.monotonic()
        for tap in readable:
            ways[tap].take(now_s)
        wait_s = min(way.give(time.monotonic()) for way in ways.values())


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4], float(sys.argv[5]), float(sys.argv[6]))
