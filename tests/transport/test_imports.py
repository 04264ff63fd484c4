"""The transport starts fast and drags nothing heavy in."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CODE = """
import time
started = time.process_time()
import transport.zmq_transport, transport.faults, transport.sim.network, transport.codec, transport.envelope
took_s = time.process_time() - started
import sys
print(took_s, [name for name in ("torch", "vllm", "transformers", "pandas") if name in sys.modules])
"""


def test_the_transport_imports_in_under_a_second_and_without_torch() -> None:
    best = min(
        (
            subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, cwd=ROOT, check=True).stdout
            for _ in range(2)
        ),
        key=lambda line: float(line.split()[0]),
    )
    took_s, _, heavy = best.partition(" ")
    assert float(took_s) < 1.0
    assert heavy.strip() == "[]"


def test_only_one_file_touches_zmq() -> None:
    files = [path for path in (ROOT / "transport").rglob("*.py") if "import zmq" in path.read_text()]
    assert [path.name for path in files] == ["zmq_socket.py"]
