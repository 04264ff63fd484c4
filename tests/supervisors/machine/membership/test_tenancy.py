"""A process that stays when its work is over: what it holds of its launcher's, and what it sees of other work."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from supervisors.machine.processes.process import Child, Launch, launch

CHILD = """
import os, sys
from pathlib import Path
from supervisors.machine.membership import tenancy
from supervisors.machine.processes import exit_note
exit_note.take_pipe()
ends = tenancy.take_pipes()
sys.stdin.buffer.read()
while (order := ends.park(0, 60.0)) is not None:
    tenancy.redirect_output(Path(order.log_path))
    print(order.spec.decode(), flush=True)
"""


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="counts open files as Linux shows them")
def test_of_a_process_that_has_stayed_and_ended_its_launcher_keeps_no_open_file(tmp_path: Path) -> None:
    def order(text: bytes, log: str) -> Launch:
        return Launch([sys.executable, "-c", CHILD], tmp_path / log, text, may_stay=True)

    async def main() -> None:
        before = len(os.listdir("/proc/self/fd"))
        child: Child | None = launch(order(b"", "first"))
        await child.wait(20.0)
        child = child.serve(order(b"other work", "second"))
        assert child is not None
        await child.wait(20.0)
        child.dismiss()
        await child.reaped()
        assert len(os.listdir("/proc/self/fd")) == before
        assert (tmp_path / "second").read_text() == "other work\n"

    asyncio.run(main())
