"""Hosts that are namespaces of this machine, at a switch of their own, with cables that tests cut and slow down.

    host "head"   eth0 10.77.0.1 ──veth──┐
    host "one"    eth0 10.77.0.2 ──veth──┤ switch (a namespace with a bridge)        cut: the port leaves the bridge
    host "two"    eth0 10.77.0.3 ──tap───┘    └ a delay line holds frames back, tbf bounds what goes in a second

Invariants
- Nothing has a name outside: each namespace is held by a process and is gone with it, devices included. Whatever runs
  in a host is killed by the kernel when the test's process ends, however it ends (``setpriv --pdeathsig``). So two test
  runs never meet, and none leaves anything.
- A host has a network, a host name, an /etc/hosts and a /dev/shm of its own; files and process ids are the machine's.
- A host's own name leads to 127.0.1.1 there, as Debian's installer writes it, and nowhere from the others.
- TCP slows down as it does on most machines, by ``cubic``, unless another way is named.
- There is no way out of the switch: traffic is between the hosts only.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

_WAIT_S: Final = 20.0
"""Seconds for a command of the system: longer only on a machine that is stuck."""
_DIES_WITH_US: Final = ("setpriv", "--pdeathsig", "KILL", "--")
_TOOLS: Final = ("ip", "tc", "bridge", "nsenter", "unshare", "setpriv", "mount")
_SHARED_MEMORY_BYTES: Final = 1 << 30
_BURST_BYTES: Final = 128 << 10
"""What a bounded link lets through at once: two of the largest frames that the kernel hands over."""
USUAL_CONGESTION: Final = "cubic"
"""What Linux takes by itself, whatever this machine has been set to."""
_QUEUE_MS: Final = 100
"""What a bounded link holds at most, in time: what is more is dropped, and TCP slows down."""


def why_not() -> str:
    """Why there can be no hosts here; empty: there can."""
    if sys.platform != "linux":
        return "hosts are network namespaces, which Linux alone has"
    if os.geteuid() != 0:
        return "hosts are network namespaces, which root alone can make"
    if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        return f"hosts need the commands {', '.join(missing)} (iproute2, util-linux)"
    try:
        with contextlib.ExitStack() as ends, _Namespace(ends, "probe") as probe:
            probe.run("ip", "link", "add", "br0", "type", "bridge")
            probe.run("ip", "link", "add", "name", "a", "type", "veth", "peer", "name", "b")
    except (OSError, subprocess.SubprocessError, AssertionError) as error:
        return f"this system does not let us make hosts: {error}"
    return ""


@dataclass(frozen=True)
class Cable:
    """How a host is connected. Without anything: as fast as the machine."""

    delay_s: float = 0.0
    """Time that each frame takes, one way."""
    rate: str = ""
    """What goes through in each direction, as ``tc`` writes it: ``100mbit``."""
    loss: float = 0.0
    """Share of frames that get lost, in each direction."""


class _Namespace:
    """Namespaces that a sleeping process holds. Leaving the context ends it."""

    def __init__(self, ends: contextlib.ExitStack, name: str) -> None:
        self.name = name
        self._ends = ends
        unshare = ("unshare", "--net", "--uts", "--mount", "--propagation", "private", "--")
        said, self._alive = os.pipe()
        self._holder = subprocess.Popen(
            [*unshare, *_DIES_WITH_US, "sh", "-c", "echo; exec sleep infinity"],
            stdout=self._alive,
            stdin=subprocess.DEVNULL,
        )
        ends.callback(self.close)
        os.close(self._alive)
        with os.fdopen(said) as line:
            assert line.readline(), f"no namespace for {name}"
        self.run("hostname", name)
        self.run("ip", "link", "set", "lo", "up")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        return self._holder.pid

    @property
    def enter(self) -> list[str]:
        """Words before a command that is to run here."""
        return ["nsenter", "--target", str(self.pid), "--net", "--uts", "--mount", "--", *_DIES_WITH_US]

    def run(self, *command: str) -> str:
        """Run a command here to its end; what it said.

        Raises:
            AssertionError: it failed.
        """
        done = subprocess.run([*self.enter, *command], capture_output=True, text=True, timeout=_WAIT_S, check=False)
        assert done.returncode == 0, f"{self.name}: {' '.join(command)}: {done.stderr.strip()}"
        return done.stdout

    def close(self) -> None:
        """Idempotent."""
        self._holder.kill()
        self._holder.wait(timeout=_WAIT_S)


class Host(_Namespace):
    """A machine of its own, as far as a process can tell: ``run`` and ``start`` run commands on it."""

    address: str = ""
    """Its address in the network that it was made in."""

    def use_own_memory(self) -> None:
        """A shared memory of its own, for 1 GiB."""
        self.run("mount", "-t", "tmpfs", "-o", f"size={_SHARED_MEMORY_BYTES},mode=1777", "shm", "/dev/shm")  # noqa: S108

    def start(self, *command: str) -> subprocess.Popen[bytes]:
        """Start a command here, whose output may be read; it ends with the network at the latest."""
        return _started(self._ends, [*self.enter, *command])


class Network:
    """A switch, and hosts at it. Use it as a context: at its end everything is gone."""

    def __init__(self, directory: Path, prefix: str = "10.77.0", congestion: str = USUAL_CONGESTION) -> None:
        """``congestion``: which of its ways to slow down the hosts' TCP takes."""
        self._ends = contextlib.ExitStack()
        self._directory = directory
        self._prefix, self._congestion = prefix, congestion
        self._ports: dict[str, str] = {}
        """Ports of the switch by the hosts' names."""
        self._rates: dict[str, str] = {}
        self._switch = _Namespace(self._ends, "switch")
        self._switch.run("ip", "link", "add", "br0", "type", "bridge")
        self._switch.run("ip", "link", "set", "br0", "up")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.close()

    def host(self, name: str, cable: Cable | None = None) -> Host:
        """One more host, connected by ``cable``."""
        host = Host(self._ends, name)
        host.use_own_memory()
        names = self._directory / f"{name}.hosts"
        names.write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}\n")
        host.run("mount", "--bind", str(names), "/etc/hosts")
        host.address = self.connect(host, cable or Cable(), "eth0")
        return host

    def connect(self, host: Host, cable: Cable, device: str) -> str:
        """Plug ``host`` in, by its interface ``device``; returns its address there."""
        number = len(self._ports) + 1
        port, address = f"port{number}", f"{self._prefix}.{number}"
        self._ports[host.name] = port
        if cable.delay_s or cable.loss:
            self._delay(host, cable, device, port)
        else:
            words = ("link", "add", "name", port, "type", "veth", "peer", "name", device, "netns", str(host.pid))
            self._switch.run("ip", *words)
        host.run("ip", "address", "add", f"{address}/24", "dev", device)
        host.run("ip", "link", "set", device, "up")
        route = (f"{self._prefix}.0/24", "dev", device, "proto", "kernel", "scope", "link", "src", address)
        host.run("ip", "route", "replace", *route, "congctl", self._congestion)
        self._switch.run("ip", "link", "set", port, "master", "br0", "up")
        self._rates[host.name] = cable.rate
        for end in (self._switch, host):
            self._bound(end, port if end is self._switch else device, cable.rate)
        return address

    def _bound(self, end: _Namespace, device: str, rate: str) -> None:
        """What leaves ``device`` obeys ``rate``; empty: it goes as it comes."""
        if rate:
            bound = ("root", "tbf", "rate", rate, "burst", str(_BURST_BYTES), "latency", f"{_QUEUE_MS}ms")
            end.run("tc", "qdisc", "replace", "dev", device, *bound)

    def _delay(self, host: Host, cable: Cable, device: str, port: str) -> None:
        line = Path(__file__).with_name("delay_line.py")
        ends = (str(host.pid), device, str(self._switch.pid), port)
        words = [*_DIES_WITH_US, sys.executable, "-P", str(line), *ends, str(cable.delay_s), str(cable.loss)]
        process = _started(self._ends, words)
        assert process.stdout is not None, "asked for"
        assert process.stdout.readline() == b"ready\n", f"no delay line for {host.name}"

    def cut(self, host: Host) -> None:
        """Nothing comes or goes any more, and neither side is told: as with a cable that breaks behind a switch."""
        self._switch.run("ip", "link", "set", self._ports[host.name], "nomaster")

    def heal(self, host: Host) -> None:
        self._switch.run("ip", "link", "set", self._ports[host.name], "master", "br0")

    def silence(self, host: Host, *, towards: bool) -> None:
        """Half of the cable breaks: what goes ``towards`` the host is lost, else what it sends; the rest arrives."""
        end, device = (self._switch, self._ports[host.name]) if towards else (host, "eth0")
        end.run("tc", "qdisc", "replace", "dev", device, "root", "blackhole")

    def unsilence(self, host: Host, *, towards: bool) -> None:
        """It is whole again."""
        end, device = (self._switch, self._ports[host.name]) if towards else (host, "eth0")
        end.run("tc", "qdisc", "delete", "dev", device, "root")
        self._bound(end, device, self._rates[host.name])

    def isolate(self, *hosts: Host) -> None:
        """From now on these cannot reach each other, but everybody else."""
        for host in hosts:
            self._switch.run("bridge", "link", "set", "dev", self._ports[host.name], "isolated", "on")

    def bytes_to(self, host: Host) -> int:
        """What has gone to ``host`` so far, by its port at the switch."""
        return int(self._counters(host)[8])

    def bytes_from(self, host: Host) -> int:
        """What has come from ``host`` so far."""
        return int(self._counters(host)[0])

    def _counters(self, host: Host) -> list[str]:
        lines = (line.strip().partition(":") for line in self._switch.run("cat", "/proc/net/dev").splitlines())
        return next(counters.split() for device, _, counters in lines if device == self._ports[host.name])


def _started(ends: contextlib.ExitStack, words: list[str]) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    ends.callback(_end, process)
    return process


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait(timeout=_WAIT_S)
    if process.stdout is not None:
        process.stdout.close()
