"""What the other tests stand on: hosts reach each other as their cables say, and nothing is left of them."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.namespaces.network import Cable, Host, Network

pytestmark = pytest.mark.cluster

_SERVE = """
import socket
listener = socket.create_server(("0.0.0.0", 9000))
print(flush=True)
while True:
    taken, _ = listener.accept()
    while taken.recv(1 << 20):
        pass
    taken.sendall(b"all")
    taken.close()
"""
_SEND = """
import socket, sys, time
begun = time.monotonic()
link = socket.create_connection((sys.argv[1], 9000), timeout=1)
connected = time.monotonic() - begun
link.settimeout(20)
for _ in range(int(sys.argv[2])):
    link.sendall(bytes(1 << 20))
link.shutdown(socket.SHUT_WR)
assert link.recv(9) == b"all"
print(connected, time.monotonic() - begun)
"""


def serve(host: Host) -> None:
    """Take what is sent to ``host``; ends with it."""
    server = host.start(sys.executable, "-c", _SERVE)
    assert server.stdout is not None
    server.stdout.readline()


def send(host: Host, to: Host, megabytes: int) -> tuple[float, float]:
    """Seconds to connect, and for all of it.

    Raises:
        AssertionError: it cannot.
    """
    connect_s, all_s = host.run(sys.executable, "-c", _SEND, to.address, str(megabytes)).split()
    return float(connect_s), float(all_s)


def test_hosts_reach_each_other_unless_cut_and_two_that_are_isolated_reach_the_others(network: Network) -> None:
    one, two, three = (network.host(name) for name in ("one", "two", "three"))
    serve(one)
    for host in (two, three):
        send(host, one, 1)
    network.cut(two)
    with pytest.raises(AssertionError, match="time"):
        send(two, one, 1)
    network.heal(two)
    before = network.bytes_to(one)
    send(two, one, 1)
    assert 1 << 20 < network.bytes_to(one) - before < 2 << 20
    network.isolate(one, two)
    with pytest.raises(AssertionError, match="time"):
        send(two, one, 1)
    send(three, one, 1)
    assert {host.run("hostname").strip() for host in (one, two)} == {"one", "two"}


def test_a_cable_holds_back_and_bounds_what_goes_through(network: Network) -> None:
    """40 ms to connect, at least, are two ways of 20; 4 MiB at 100 Mbit/s are a third of a second."""
    near, far = network.host("near"), network.host("far", Cable(delay_s=0.02, rate="100mbit"))
    serve(near)
    connect_s, all_s = send(far, near, 4)
    assert connect_s >= 0.04
    assert 0.3 < all_s < 5.0


def test_nothing_is_left_when_the_process_of_the_test_is_killed(tmp_path: Path) -> None:
    """Neither the namespaces' holders nor what runs in them."""
    script = (
        "import sys, time; from pathlib import Path; from benchmarks.namespaces.network import *\n"
        "network = Network(Path(sys.argv[1])); host = network.host('one', Cable(delay_s=0.01))\n"
        "started = host.start('sh', '-c', 'echo; exec sleep 600'); started.stdout.readline()\n"
        "print(host.pid, started.pid, flush=True); time.sleep(600)"
    )
    root = Path(__file__).resolve().parents[2]
    test = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, cwd=root)
    assert test.stdout is not None
    pids = [int(pid) for pid in test.stdout.readline().split()]
    assert len(pids) == 2
    test.kill()
    test.wait(timeout=20)
    test.stdout.close()
    until_s = time.monotonic() + 20
    while any(_runs(pid) for pid in pids):
        assert time.monotonic() < until_s, "they live on"
        time.sleep(0.02)


def _runs(pid: int) -> bool:
    """Whether that process is there; one that nobody has waited for is over."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
