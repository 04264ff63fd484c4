"""A real Slurm of this machine, for as long as a test module needs one: munged, slurmctld, and a slurmd for each node.

    SlurmCluster(directory, nodes) ─▶ start ─▶ its slurm.conf in SLURM_CONF ─▶ sbatch and all others find it ─▶ stop

It needs root and Debian's packages slurmctld, slurmd, slurm-client and munge; nothing of /etc is touched, and neither
systemd nor cgroups are needed. Several slurmd of one host pass for several nodes. Partitions: ``spot``, whose jobs
those of ``high`` preempt with a notice of ``GRACE_S``; ``closed``, for the account ``others`` alone; ``brief``, of a
minute.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Final

import pytest

from tests.free_ports import free_ports

GRACE_S: Final = 8
_PROGRAMS: Final = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scancel", "scontrol", "srun")
_PATIENCE_S: Final = 60
_CONF: Final = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={at}/munge.socket
CryptoType=crypto/munge
CredType=cred/munge
StateSaveLocation={at}/state
SlurmdSpoolDir={at}/spool-%n
SlurmctldPidFile={at}/slurmctld.pid
SlurmdPidFile={at}/slurmd-%n.pid
SlurmctldLogFile={at}/slurmctld.log
SlurmdLogFile={at}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,sched_min_interval=100000,preempt_send_user_signal
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
EnforcePartLimits=ALL
KillWait=2
MessageTimeout=5
NodeName=n[1-{nodes}] NodeHostname={host} NodeAddr=127.0.0.1 Port={first}-{last} CPUs=2 RealMemory=1000 State=UNKNOWN
PartitionName=spot Nodes=ALL Default=YES PriorityTier=1 GraceTime={grace}
PartitionName=brief Nodes=ALL PriorityTier=1 MaxTime=1
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF
PartitionName=closed Nodes=ALL AllowAccounts=others
"""


def need_slurm() -> None:
    """Skip the test where there is no Slurm; ``HEADRACE_REQUIRE_SLURM=1`` makes that a failure."""
    missing = [program for program in _PROGRAMS if shutil.which(program) is None]
    if not missing and os.geteuid() == 0:
        return
    why = f"Slurm's {', '.join(missing)} are not installed" if missing else "a Slurm of one machine needs root"
    if os.environ.get("HEADRACE_REQUIRE_SLURM") == "1":
        pytest.fail(why)
    pytest.skip(f"{why}; HEADRACE_REQUIRE_SLURM=1 makes this a failure")


class SlurmCluster:
    """See the module's docstring."""

    def __init__(self, directory: Path, nodes: int) -> None:
        self.directory, self.nodes = directory, [f"n{number}" for number in range(1, nodes + 1)]
        self._conf = directory / "slurm.conf"
        self._environment = {**os.environ, "SLURM_CONF": str(self._conf)}

    def start(self) -> None:
        at, count, port = self.directory, len(self.nodes), free_ports(len(self.nodes) + 1)
        (at / "state").mkdir(parents=True)
        at.chmod(0o755)  # munged looks at it
        text = _CONF.format(at=at, host=socket.gethostname().split(".")[0], port=port, first=port + 1,
                            last=port + count, nodes=count, grace=GRACE_S)  # fmt: skip
        self._conf.write_text(text)
        if not subprocess.check_output(["slurmd", "-V"], text=True).startswith("slurm-wlm 22."):
            (at / "cgroup.conf").write_text("CgroupPlugin=disabled\n")  # newer ones want cgroups unless they are told
        key, seed = at / "munge.key", at / "munge.seed"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        self._daemon("munged", "--force", "--key-file", str(key), "--socket", str(at / "munge.socket"), "--pid-file",
                     str(at / "munged.pid"), "--log-file", str(at / "munged.log"), "--seed-file", str(seed),
                     "--num-threads", "2")  # fmt: skip
        self._daemon("slurmctld", "-i")
        for node in self.nodes:
            (at / f"spool-{node}").mkdir()
            self._daemon("slurmd", "-N", node)
        self.until("all nodes idle", lambda: self.idle() == count)

    def start_controller(self) -> None:
        """Again, with what it has written down."""
        self._daemon("slurmctld")
        self.until("all nodes", lambda: self._states().count("alloc") + self.idle() == len(self.nodes))

    def kill_controller(self) -> None:
        """Once it has written down which jobs run: what it has not, it forgets."""
        begun = self.command("squeue", "-h", "-t", "running", "-o", "%S").split()
        newest_s = max(datetime.fromisoformat(at).timestamp() for at in begun)
        kept = self.directory / "state" / "job_state"
        self.until("the controller's state", lambda: kept.stat().st_mtime > newest_s + 1)
        os.kill(self._pid("slurmctld"), signal.SIGKILL)

    def stop(self) -> None:
        with suppress(subprocess.SubprocessError):
            self.command("scancel", "--me", "--hurry", check=False)
            self.until("no job", lambda: not self.jobs())
        for daemon in (*(f"slurmd-{node}" for node in self.nodes), "slurmctld", "munged"):
            with suppress(OSError, ValueError):
                os.kill(self._pid(daemon), signal.SIGTERM)

    def command(self, *words: str, stdin: str = "", check: bool = True) -> str:
        """What a command of Slurm's says."""
        done = subprocess.run(
            words, input=stdin, env=self._environment, capture_output=True, text=True, timeout=_PATIENCE_S, check=False
        )
        assert not check or done.returncode == 0, done.stderr
        return done.stdout.strip()

    def jobs(self) -> dict[str, str]:
        """Name of each job that is not over → its state."""
        rows = [row.split() for row in self.command("squeue", "-h", "-o", "%j %T").splitlines()]
        return {row[0]: row[1] for row in rows}

    def all_jobs(self) -> dict[str, str]:
        """The same with those that are over."""
        rows = [row.split() for row in self.command("squeue", "-h", "-t", "all", "-o", "%j %T").splitlines()]
        return {row[0]: row[1] for row in rows}

    def id_of(self, name: str) -> str:
        return self.command("squeue", "-h", "--name", name, "-o", "%i").split()[0]

    def node_of(self, name: str) -> str:
        return self.command("squeue", "-h", "--name", name, "-o", "%N").split()[0]

    def idle(self) -> int:
        """Number of nodes that are free, and answer."""
        return self._states().count("idle")

    def _states(self) -> list[str]:
        return self.command("sinfo", "-h", "-N", "-p", "spot", "-o", "%t", check=False).split()

    def take_down(self, node: str) -> None:
        """Its slurmd lives, so it comes back by itself (ReturnToService)."""
        self.command("scontrol", "update", f"NodeName={node}", "State=down", "Reason=test")

    def occupy(self, name: str, nodes: int, partition: str = "high") -> None:
        """A job of somebody else's, which does nothing."""
        self.command("sbatch", "-p", partition, "-N", str(nodes), "--exclusive", "-J", name, "-o", "/dev/null",
                     stdin="#!/bin/bash\nexec sleep 600\n")  # fmt: skip

    def until(self, what: str, holds: Callable[[], object], patience_s: float = _PATIENCE_S) -> None:
        deadline_s = time.monotonic() + patience_s
        while not holds():
            assert time.monotonic() < deadline_s, f"waited for {what}: {self.all_jobs()}"
            time.sleep(0.1)

    def _daemon(self, *words: str) -> None:
        said = subprocess.run(
            words, env=self._environment, capture_output=True, text=True, timeout=_PATIENCE_S, check=False
        )
        assert said.returncode == 0, f"{words[0]}: {said.stderr}"

    def _pid(self, daemon: str) -> int:
        return int((self.directory / f"{daemon}.pid").read_text())


@contextmanager
def slurm_cluster(directory: Path, nodes: int) -> Iterator[SlurmCluster]:
    """One that this process and those that it starts use."""
    need_slurm()
    cluster, before = SlurmCluster(directory, nodes), os.environ.get("SLURM_CONF")
    os.environ["SLURM_CONF"] = str(directory / "slurm.conf")
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
        if before is None:
            del os.environ["SLURM_CONF"]
        else:
            os.environ["SLURM_CONF"] = before
