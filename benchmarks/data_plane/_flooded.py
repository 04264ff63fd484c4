"""The head that `bench flood` floods, in a process of its own.

    python -m benchmarks.data_plane._flooded DIRECTORY KEYS

Prints its address, then serves until its standard input ends.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from actors.core.senders import SenderKind
from actors.protocol.who_may_send import WHO_MAY_SEND
from benchmarks._processes import on_uvloop, until_input_ends
from supervisors.head.head import Head


async def _serve(directory: Path, keys: Path) -> None:
    WHO_MAY_SEND["core.look"] = frozenset([SenderKind.AGENT])  # the friend's question
    head = Head(run_root=directory, listen="tcp://127.0.0.1:*", keys=keys)
    await head.start()
    print(msgspec.json.encode(head.system.address("agent")).decode(), flush=True)
    await until_input_ends()
    await head.stop()


if __name__ == "__main__":
    on_uvloop(_serve(Path(sys.argv[1]), Path(sys.argv[2])))
