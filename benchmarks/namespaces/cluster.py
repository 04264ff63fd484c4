"""A run over several hosts, set up as the guide says: a pair of keys for each, the run here, its nodes there.

keys/head ◀─ allow ─▶ keys/one, keys/two        keys/control ◀─ operator ─ keys/alice
host head: headrace run, nodes at tcp://0.0.0.0:7001, control at tcp://0.0.0.0:7000
host one, host two: headrace node --join tcp://<address of head>:7001?key=…
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks._processes import ROOT
from benchmarks.namespaces.network import Cable, Host, Network
from supervisors.testing.run_under_test import HeadraceRun
from transport.zmq.security import load_keys

NODES_PORT: Final = 7001
CONTROL_PORT: Final = 7000


def headrace(*arguments: str, through: Sequence[str] = ()) -> str:
    """Run a command to its end; what it printed."""
    words = [*through, sys.executable, "-P", "-m", "main", *arguments]
    if through:  # the working directory is the host's
        words = [*through, "env", f"PYTHONPATH={ROOT}", *words[len(through) :]]
    done = subprocess.run(words, capture_output=True, text=True, timeout=90, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


class ClusterOfHosts:
    """A head and its nodes, each on a host of ``network`` that has its name.

    Args:
        job: where its ``cluster`` says nothing else, it waits for the nodes, and its workers are there.
        nodes: the nodes' names, each with further arguments of ``headrace node``.
        cables: how hosts are connected, by name; without one: as fast as it goes.
    """

    def __init__(
        self,
        directory: Path,
        network: Network,
        job: Mapping[str, Any],
        *,
        nodes: Mapping[str, Sequence[str]],
        cables: Mapping[str, Cable] | None = None,
        name: str = "run",
    ) -> None:
        self.network = network
        self.hosts: dict[str, Host] = {host: network.host(host, (cables or {}).get(host)) for host in ("head", *nodes)}
        self._keys = directory / f"{name}-keys"
        self._make_keys(list(nodes))
        head = self.hosts["head"]
        place = {"nodes": len(nodes), "place_rollout": "remote", "listen": f"tcp://0.0.0.0:{NODES_PORT}"}
        place |= job.get("cluster", {})
        words = ["--keys", str(self._keys / "head"), "--control", f"tcp://0.0.0.0:{CONTROL_PORT}"]
        words += ["--control-keys", str(self._keys / "control")]
        self.run = HeadraceRun(directory / name, {**job, "cluster": place}, arguments=words, through=head.enter)
        join = f"tcp://{head.address}:{NODES_PORT}?key={load_keys(self._keys / 'head').public_hex}"
        for node, arguments in nodes.items():
            own = ("--keys", str(self._keys / node), *arguments)
            self.run.add_node(node, join, *own, slots=2, through=self.hosts[node].enter)

    def _make_keys(self, nodes: list[str]) -> None:
        public = {name: headrace("keys", str(self._keys / name)) for name in ("head", *nodes)}
        for node in nodes:
            headrace("keys", str(self._keys / "head"), "--allow", f"{node}={public[node]}")
            headrace("keys", str(self._keys / node), "--allow", f"head={public['head']}")
        headrace("keys", str(self._keys / "control"), "--operator", str(self._keys / "alice"))

    def ctl(self, host: str, *arguments: str) -> Any:
        """What ``headrace ctl`` says on ``host``, over the network, with an operator's keys."""
        key = load_keys(self._keys / "control").public_hex
        at = f"tcp://{self.hosts['head'].address}:{CONTROL_PORT}?key={key}"
        words = ("ctl", "--control", at, "--keys", str(self._keys / "alice"), "--timeout", "20", "--json", *arguments)
        return json.loads(headrace(*words, through=self.hosts[host].enter).splitlines()[-1])

    def workers(self) -> dict[str, str]:
        """The rollout workers that the scheduler has, each with its node, by the run's events."""
        there: dict[str, str] = {}
        for row in self.run.events():
            if row["event"] == "worker_registered":
                there[row["worker"]] = row["node"]
            elif row["event"] == "worker_down":
                there.pop(row["worker"], None)
        return there

    def linked(self, one: str, two: str) -> bool:
        """Whether processes of these two hosts are connected."""
        said = self.hosts[one].run("ss", "-tnH", "state", "established", "dst", self.hosts[two].address)
        return bool(said.strip())
