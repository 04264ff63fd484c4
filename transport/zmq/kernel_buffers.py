"""How much of a bulk message the kernel takes in one go.

    chunk ─▶ send ─▶ kernel's send buffer ─▶ wire        all of it fits: one call, and the I/O thread is done with it
                  └▶ a part, sleep, a part, sleep …      it does not: a wake-up for each third that has gone

The kernel grows a connection's buffer to 4 MiB with its bookkeeping, in which a chunk of 4 MiB does not quite fit. What
is asked for by name is granted twice over (socket(7), SO_SNDBUF) and is not tuned any more. So it is asked for only
where the system grants enough, and where it would not have let the buffer grow beyond that by itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

_NET: Final = Path("/proc/sys/net")


def send_buffer_bytes(chunk_bytes: int, net: Path = _NET) -> int | None:
    """Size to ask for, so that ``chunk_bytes`` fit; None: leave it to the system, as where there is no such file."""
    try:
        granted_at_most_bytes = int((net / "core/wmem_max").read_text())
        tuned_at_most_bytes = int((net / "ipv4/tcp_wmem").read_text().split()[2])
    except (OSError, ValueError, IndexError):
        return None
    fits = granted_at_most_bytes >= chunk_bytes and 2 * chunk_bytes >= tuned_at_most_bytes
    return chunk_bytes if fits else None
