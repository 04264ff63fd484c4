"""In a simulation, product code cannot look at real clocks, draw true randomness or start threads."""

from __future__ import annotations

import random
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import pytest

from transport.address import new_peer
from transport.sim.guards import GUARDED, NotDeterministic, guarded

TRESPASSES = [
    ("import time\ntime.time()", "time.time is called by actors.trespasser, line 2"),
    ("import time\n\ntime.monotonic()", "time.monotonic is called by actors.trespasser, line 3"),
    ("import random\nrandom.random()", "random.random is called by"),
    ("import uuid\nuuid.uuid4()", "uuid.uuid4 is called by"),
    ("import os\nos.urandom(4)", "os.urandom is called by"),
    ("import secrets\nsecrets.token_hex(4)", "secrets.token_hex is called by actors.trespasser, line 2"),
    ("import random\nrandom.SystemRandom().randrange(9)", "SystemRandom.getrandbits is called by actors.trespasser"),
    ("import random\nrandom.Random().random()", "Random.seed is called by actors.trespasser, line 2"),
    ("import numpy as np\nnp.random.default_rng()", "default_rng is called by actors.trespasser, line 2"),
    ("import socket\nsocket.socket()", "socket.__init__ is called by"),
    ("import threading\nthreading.Thread(target=print).start()", "Thread.start is called by"),
    ("import subprocess\nsubprocess.Popen(['true'])", "Popen.__init__ is called by"),
    ("import subprocess\nsubprocess.run(['true'])", "Popen.__init__ is called by"),
]


def trespass(code: str, module: str = "actors.trespasser") -> None:
    names: dict[str, Any] = {"__name__": module}
    exec(compile(code, module, "exec"), names)


@pytest.mark.parametrize(("code", "said"), TRESPASSES)
def test_what_brings_the_real_world_in_is_an_error_that_names_it_and_who_called(code: str, said: str) -> None:
    with guarded() as breaches, pytest.raises(NotDeterministic, match=said):
        trespass(code)
    assert said in breaches[0]


@pytest.mark.parametrize(
    ("imported", "call"),
    [("time", "monotonic()"), ("secrets", "token_hex(4)"), ("secrets", "randbits(4)"), ("random", "random()")],
)
def test_a_function_that_a_module_has_imported_by_its_name_is_no_way_round(
    imported: str, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("actors.trespasser")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    name = call.partition("(")[0]
    exec(f"from {imported} import {name}\ndef trespass(): return {call}", vars(module))
    with guarded(), pytest.raises(NotDeterministic, match=rf"{imported}\.{name} is called by actors\.trespasser"):
        module.trespass()
    module.trespass()


def test_a_peer_s_true_incarnation_is_not_to_be_had() -> None:
    with guarded(), pytest.raises(NotDeterministic, match=r"secrets\.randbits is called by transport\.address"):
        new_peer("x")


def test_seeded_streams_and_other_people_s_code_are_left_alone() -> None:
    with guarded() as breaches:
        trespass("import random\nrandom.Random(7).random()")
        trespass("import random\nrandom.Random(x=7).random()")
        trespass("import numpy as np\nnp.random.default_rng(7)")
        trespass("import time\ntime.time()", module="somebodys.library")
        assert time.time() > 0
    assert breaches == []


def test_a_thread_that_was_there_before_is_no_part_of_the_simulation() -> None:
    with ThreadPoolExecutor(1) as others:
        others.submit(int).result()  # its thread is there before
        with guarded() as breaches:
            others.submit(trespass, "import time\ntime.monotonic()").result()
    assert breaches == []


def test_everything_is_as_before_afterwards() -> None:
    before = [getattr(owner, name) for owner, name, _ in GUARDED]
    with pytest.raises(RuntimeError), guarded():
        raise RuntimeError
    assert [getattr(owner, name) for owner, name, _ in GUARDED] == before
    trespass("import time\ntime.time()")
    assert {time, random, threading.Thread, socket.socket, subprocess.Popen} <= {owner for owner, _, _ in GUARDED}
