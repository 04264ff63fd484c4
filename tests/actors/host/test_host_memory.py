"""What a step frees is there for the next one: no page of it comes from the system again."""

from __future__ import annotations

import subprocess
import sys

import pytest

STEPS = """
import resource, sys, threading
import numpy as np
from actors.host.host_memory import keep_freed_memory

if sys.argv[1] == "kept" and not keep_freed_memory(one_arena=True):
    sys.exit(77)

def step():
    for _ in range(8):
        del_me = [np.ones(250_000) for _ in range(8)]  # 16 MB in pieces of 2 MB, all freed at the end

def work():
    step()
    step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

thread = threading.Thread(target=work)
thread.start()
thread.join()
"""


def page_faults(how: str) -> int:
    """Of the third step in a process of its own."""
    done = subprocess.run([sys.executable, "-c", STEPS, how], capture_output=True, text=True, check=False)
    if done.returncode == 77:
        pytest.skip("no glibc: nothing to be set")
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_a_step_reuses_the_memory_of_the_one_before() -> None:
    assert page_faults("given back") > 1000, "else there is nothing to be won here"
    assert page_faults("kept") < 100


LARGE_STEP = """
import sys
import numpy as np
import psutil
from actors.host.host_memory import give_back_freed_memory, keep_freed_memory

if not keep_freed_memory(one_arena=True):
    sys.exit(77)
large = [np.ones(250_000) for _ in range(50)]
lasting = np.ones(100_000)  # behind it, so that the heap cannot simply shrink
del large
held = psutil.Process().memory_info().rss
assert give_back_freed_memory()
print(held - psutil.Process().memory_info().rss)
"""


def test_what_a_large_step_needed_goes_back_to_the_system_when_it_is_told_to() -> None:
    done = subprocess.run([sys.executable, "-c", LARGE_STEP], capture_output=True, text=True, check=False)
    if done.returncode == 77:
        pytest.skip("no glibc: nothing is kept")
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 80_000_000, "of 100 MB"
