"""Who may know of ZeroMQ."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_only_one_file_touches_zmq() -> None:
    files = [path for path in (ROOT / "transport").rglob("*.py") if "import zmq" in path.read_text()]
    assert [path.name for path in files] == ["zmq_socket.py"]
