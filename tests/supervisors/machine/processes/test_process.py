"""Real child processes, on both loops."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import uvloop

from actors.host.bounded_file import trim
from supervisors.machine.processes.process import Child, ChildProcess, Launch, exit_cause, launch
from supervisors.machine.processes.process_log import last_lines, open_log
from supervisors.tree.restart_budget import ExitCause

READY = "print('ready', flush=True)\n"
SLEEP = "import time\n" + READY + "time.sleep(60)\n"
STUBBORN = "import signal,time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + READY + "time.sleep(60)\n"
WITH_GRANDCHILD = (
    "import subprocess,sys,time\n"
    "p=subprocess.Popen([sys.executable,'-c','import time;time.sleep(60)'])\n"
    "print('ready',p.pid,flush=True)\ntime.sleep(60)\n"
)


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request):
    """Run a coroutine function on the loop of the parameter."""
    factory = asyncio.new_event_loop if request.param == "asyncio" else uvloop.new_event_loop

    def runner(coroutine):
        with asyncio.Runner(loop_factory=factory) as runner:
            return runner.run(coroutine)

    return runner


def _python(code: str, log: Path, stdin: bytes = b"") -> ChildProcess:
    return launch(Launch([sys.executable, "-c", code], log, stdin=stdin))


async def _ready(log: Path) -> str:
    async with asyncio.timeout(10):
        while not (lines := last_lines(log, 1)):
            await asyncio.sleep(0.005)
    return lines[0]


def test_the_exit_of_a_killed_child_is_seen_within_a_fraction_of_a_second(run, tmp_path):
    async def scenario():
        child = _python(SLEEP, tmp_path / "a.log")
        await _ready(tmp_path / "a.log")
        at_s = time.monotonic()
        os.kill(child.pid, signal.SIGKILL)
        end = await child.wait(5)
        return end, time.monotonic() - at_s

    end, seen_s = run(scenario())
    assert (end.code, end.cause) == (-9, ExitCause.KILLED)
    assert seen_s < 0.3


def test_a_child_gets_its_spec_as_stdin_whatever_its_size(run, tmp_path):
    async def scenario():
        code = "import sys; print(len(sys.stdin.buffer.read()))"
        child = _python(code, tmp_path / "a.log", stdin=b"x" * 1_000_000)
        return await child.wait(10)

    assert run(scenario()).cause is ExitCause.COMPLETED
    assert last_lines(tmp_path / "a.log", 5) == ("1000000",)


def test_a_stop_is_orderly_and_a_stubborn_child_is_killed_after_the_deadline(run, tmp_path):
    async def scenario():
        meek, stubborn = _python(SLEEP, tmp_path / "m.log"), _python(STUBBORN, tmp_path / "s.log")
        await _ready(tmp_path / "m.log")
        await _ready(tmp_path / "s.log")
        return await meek.stop(5), await stubborn.stop(0.1)

    meek, stubborn = run(scenario())
    assert (meek.code, meek.cause) == (-15, ExitCause.STOPPED)
    assert (stubborn.code, stubborn.cause) == (-9, ExitCause.STOPPED)


def test_a_killed_process_that_the_kernel_does_not_let_go_is_given_up(run):
    """As one that is stuck in a driver: its exit is never seen."""

    class Held(Child):
        def send_signal(self, number):
            pass

        def _signal_group(self, number):
            pass

    async def scenario():
        child = Held(1, asyncio.get_running_loop())
        child.kill()
        return await child.gone(0.01), child.running

    end, running = run(scenario())
    assert (end.cause, end.code, running) == (ExitCause.KILLED, -9, False)


def test_the_whole_group_ends_with_its_leader(run, tmp_path):
    async def scenario():
        child = _python(WITH_GRANDCHILD, tmp_path / "a.log")
        grandchild = psutil.Process(int((await _ready(tmp_path / "a.log")).split()[1]))
        child.send_signal(signal.SIGKILL)
        await child.wait(5)
        return await asyncio.to_thread(_gone, grandchild)

    assert run(scenario())


def test_fifty_children_are_all_reaped(run, tmp_path):
    async def scenario():
        children = [launch(Launch(["/bin/false"], tmp_path / f"{i}.log")) for i in range(50)]
        return [(await child.wait(10)).code for child in children]

    assert run(scenario()) == [1] * 50
    assert not [p for p in psutil.Process().children() if p.status() == psutil.STATUS_ZOMBIE]


def test_a_missing_executable_is_an_error_at_once(run, tmp_path):
    async def scenario():
        launch(Launch(["/no/such/file"], tmp_path / "a.log"))

    with pytest.raises(OSError):
        run(scenario())


def test_kill_9_of_the_parent_leaves_no_orphan(tmp_path):
    """A parent process launches a child that binds its fate to it; the parent is killed without notice."""
    child_code = "from actors.host.parent_death import die_with_parent; die_with_parent()\n" + SLEEP
    parent_code = (
        "import asyncio,sys\nfrom pathlib import Path\n"
        "from supervisors.machine.processes.process import Launch,launch\n"
        "async def go():\n"
        f"    child=launch(Launch([sys.executable,'-c',{child_code!r}],Path({str(tmp_path / 'a.log')!r})))\n"
        "    print(child.pid,flush=True)\n    await asyncio.sleep(60)\n"
        "asyncio.run(go())\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", parent_code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    asyncio.run(_ready(tmp_path / "a.log"))
    parent.kill()
    parent.communicate(timeout=5)
    assert _gone(child)


def test_a_child_whose_parent_died_before_it_could_bind_itself_ends():
    code = "from actors.host.parent_death import die_with_parent; die_with_parent(1 << 30); print('survived')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=20, check=False)
    assert (done.returncode, done.stdout) == (-9, b"")


@pytest.mark.parametrize(
    ("ending", "code"),
    [("sys.exit(3)", 3), ("os.kill(os.getpid(), 11)", 139), ("os.kill(os.getppid(), 15); time.sleep(60)", 137)],
)
def test_the_guard_of_a_group_ends_as_its_leader_did(ending: str, code: int) -> None:
    """And passes over that the leader was stopped for a while; told to end, it kills the leader."""
    pause = "os.kill(os.getpid(), 19)"
    lead = "import os,sys,time\nfrom actors.host.parent_death import lead_group\nlead_group(os.getppid())\n"
    guard = subprocess.Popen([sys.executable, "-c", f"{lead}{pause}\n{ending}"])
    leader = None
    while leader is None or leader.status() != psutil.STATUS_STOPPED:
        leader = next(iter(psutil.Process(guard.pid).children()), None)
    assert guard.poll() is None
    leader.resume()
    assert guard.wait(timeout=20) == code


@pytest.mark.parametrize(
    ("code", "asked", "cause"),
    [
        (0, None, ExitCause.COMPLETED),
        (0, ExitCause.STOPPED, ExitCause.STOPPED),
        (0, ExitCause.PREEMPTED, ExitCause.PREEMPTED),
        (143, None, ExitCause.PREEMPTED),
        (-15, None, ExitCause.PREEMPTED),
        (75, None, ExitCause.PREEMPTED),
        (-9, None, ExitCause.KILLED),
        (-signal.SIGSEGV, None, ExitCause.CRASHED),
        (-signal.SIGABRT, None, ExitCause.CRASHED),
        (-signal.SIGBUS, None, ExitCause.CRASHED),
        (-signal.SIGFPE, None, ExitCause.CRASHED),
        (-signal.SIGILL, None, ExitCause.CRASHED),
        (-signal.SIGHUP, None, ExitCause.KILLED),
        (-signal.SIGINT, None, ExitCause.KILLED),
        (1, None, ExitCause.CRASHED),
    ],
)
def test_exit_codes_map_to_causes(code, asked, cause):
    assert exit_cause(code, asked=asked) is cause


def test_a_log_is_trimmed_to_its_newest_half(tmp_path):
    path = tmp_path / "logs" / "a.log"
    log = open_log(path)
    for i in range(1000):
        os.write(log, b"line %04d\n" % i)
    assert trim(path, 5000)
    os.write(log, b"after\n")
    os.close(log)
    assert path.read_bytes() == b"after\n"
    kept = Path(f"{path}.1").read_bytes()
    assert len(kept) == 2500 and kept.endswith(b"line 0999\n")
    assert not trim(path, 5000)
    assert last_lines(tmp_path / "none", 3) == ()


def _gone(process: psutil.Process) -> bool:
    try:
        process.wait(timeout=5)
    except psutil.TimeoutExpired:
        return False
    return True
