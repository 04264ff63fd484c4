"""The gateway in a process of its own, as `bench gateway` measures it: says where it is, serves until its input ends.

python -m benchmarks.vllm._gateway ARGS       ARGS: RoleArgs as JSON
"""

from __future__ import annotations

import os
import sys

import msgspec

from actors.gateway.service import Gateway
from actors.roles import RoleArgs
from benchmarks._processes import on_uvloop, until_input_ends
from benchmarks.data_plane._echo import new_system


async def _serve(args: RoleArgs, said: int) -> None:
    gateway = Gateway(args)
    system = new_system("gateway")
    await system.start()
    await system.spawn("gateway", gateway)
    os.write(said, f"{gateway.base_url}\n".encode())
    await until_input_ends()
    await system.stop()


def main(args: str) -> None:
    """Serve one run."""
    said = os.dup(1)
    os.dup2(2, 1)  # libraries that print are not taken for us
    on_uvloop(_serve(msgspec.json.decode(args, type=RoleArgs), said))


if __name__ == "__main__":
    main(sys.argv[1])
