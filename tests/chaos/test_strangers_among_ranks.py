"""Another user of the machine greets every port that ranks open while they meet, as a rank would: none opens one."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from actors.trainer.backend import BackendSpec, LossSpec
from actors.trainer.backends.fsdp.fsdp_backend import FsdpBackend
from actors.trainer.backends.fsdp.orders import nothing
from configs.limits import Limits
from tests.rank_processes import RankProcesses
from tests.tiny_checkpoint import make_tiny_checkpoint

ATTACKER = 4711
START_S = 60.0
"""Limit of the meeting: where the stranger is taken for a rank, nobody else comes until then."""
GREETINGS = [struct.pack("<q", number) for number in range(4)]
"""What a rank of gloo says first to another one: a small number."""


def greet_ports(ports: int, heard: int) -> None:
    """Connect to each port that is told through the pipe ``ports``, and say to ``heard`` what came back."""
    os.setgroups([])
    os.setgid(ATTACKER)
    os.setuid(ATTACKER)
    while told := os.read(ports, 2):
        (port,) = struct.unpack("<H", told)
        for greeting in GREETINGS:
            end = socket.create_connection(("127.0.0.1", port), timeout=5)
            end.sendall(greeting)
            os.write(heard, b"connected ")
            threading.Thread(target=lambda end=end: os.write(heard, end.recv(1024)), daemon=True).start()


@contextmanager
def attacked(pids: list[int]) -> Iterator[list[bytes]]:
    """While the context lasts, each port at which ``pids`` listen is greeted by another user; what that user got."""
    ports, tell = os.pipe()
    hear, heard = os.pipe()
    got: list[bytes] = []
    child = os.fork()
    if child == 0:
        try:
            os.close(tell)
            greet_ports(ports, heard)
        finally:
            os._exit(0)
    os.close(heard)
    over = threading.Event()

    def look() -> None:
        known = set[int]()
        while not over.wait(0.002):
            for pid in pids:
                for at in psutil.Process(pid).net_connections("tcp"):
                    if at.status == "LISTEN" and at.laddr.port not in known:
                        known.add(at.laddr.port)
                        os.write(tell, struct.pack("<H", at.laddr.port))

    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield got
    finally:
        over.set()
        looking.join()
        time.sleep(0.2)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(tell)
        os.close(ports)
        with os.fdopen(hear, "rb") as said:
            got.append(said.read())


@pytest.mark.cluster
@pytest.mark.timeout(180)
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_another_user_cannot_take_a_ranks_place_nor_hold_up_the_meeting(tmp_path: Path) -> None:
    model = make_tiny_checkpoint(tmp_path)
    processes = RankProcesses("fsdp", 2)

    async def meet_and_train() -> None:
        ranks = FsdpBackend(processes.followers(), Limits(train_step_timeout_s=START_S, ready_timeout_s=START_S))
        await ranks.start(BackendSpec(model_path=model, dtype="float32", device="cpu", threads=1))
        await ranks.accumulate(nothing(), LossSpec())
        await ranks.close()

    try:
        with attacked([os.getpid(), processes.processes[0].pid]) as got:
            asyncio.run(meet_and_train())
        assert got == [b""]
    finally:
        processes.close()
