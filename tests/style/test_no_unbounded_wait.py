"""No await on another actor, process, queue, event, future, lock or socket without a limit from ``configs/limits.py``.

``waits.py`` beside this file says what a wait is and what bounds it. The few places where waiting for ever is right are
listed here, each with its reason; an entry that fits nothing any more fails as well.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Final

import pytest

from tests.style.waits import Wait, parse, unbounded

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ["configs", "transport", "actors", "supervisors"]

EPISODES: Final = "actors/environments/episodes"
Place = tuple[str, str, str]
"""File, function, what is waited for."""

ALLOWED: Final[dict[str, list[Place]]] = {
    "an actor waits in its own mailbox for as long as it lives; the cell's life is its task group": [
        ("actors/core/kernel/cell.py", "Cell._live", "asyncio.TaskGroup()"),
        ("actors/core/kernel/cell.py", "Cell._serve", "mailbox.wait()"),
        ("actors/core/kernel/cell.py", "Cell._run_beside", "self.mailbox.wait()"),
        ("actors/core/kernel/mailbox.py", "Mailbox.wait", "self._signal"),
        ("actors/ranker/ranker.py", "Ranker._work", "self._news.wait()"),
        ("actors/sampling/sampler.py", "SnapshotSampler._advance", "self._news.wait()"),
    ],
    "the sampler's task answers each call, at the latest when it ends; whoever asks has a limit of its own": [
        ("actors/sampling/sampler.py", "SnapshotSampler.sample", "call.answer"),
    ],
    "a server of models serves until somebody ends it, or its log fails": [
        ("actors/serving/model_server.py", "ModelServer._end_with_the_log", "self._server.failed.wait()"),
    ],
    "the thread of an actor waits for its next call, and for the end of its life": [
        ("actors/core/kernel/blocking.py", "_serve_one", "jobs.get()"),
    ],
    "ranks of a group meet, and pass rows on, within the limit of their exchanges": [
        ("actors/ranks/streams.py", "meet", "listener.accept()"),
        ("actors/trainer/backends/fsdp/world.py", "World._pass", "work.wait()"),
    ],
    "a pipe is made in no time, and a fork waits for that": [
        ("supervisors/api/held_process.py", "", "_making.acquire()"),
    ],
    "it looks twice a second": [
        ("supervisors/api/held_run.py", "end_with_holder", "select.select([0], [], [], _LOOK_S)"),
    ],
    "it waits for limits.parked_process_s at most": [
        ("supervisors/machine/membership/tenancy.py", "ProcessEnds.park",
         "select.select([self.orders], [], [], wait_s)"),
    ],
    "it waits for limits.ready_timeout_s at most, or not at all": [
        (f"{EPISODES}/verifiers_call.py", "VerifiersDriver._start", "select.select([of], [], [], timeout_s)"),
        (f"{EPISODES}/verifiers_call.py", "VerifiersDriver._start", "of.readline()"),
        (f"{EPISODES}/verifiers_call.py", "VerifiersDriver.lives", "os.waitpid(self._guard, os.WNOHANG)"),
    ],
    "a guard that was told to end kills its group and ends; the kernel alone can delay it": [
        (f"{EPISODES}/verifiers_call.py", "VerifiersDriver._start", "os.waitpid(guard, 0)"),
    ],
    "the zygote gives it limits.ready_timeout_s to begin, and an episode hangs up when its time is over": [
        (f"{EPISODES}/verifiers_server.py", "main", "sys.stdin.readline()"),
        (f"{EPISODES}/verifiers_server.py", "serve", "client.wait_for_server_startup()"),
        (f"{EPISODES}/verifiers_server.py", "serve", "await asyncio.start_unix_server(episode, address, limit=_LINE)"),
        (f"{EPISODES}/verifiers_server.py", "serve", "asyncio.start_unix_server(episode, address, limit=_LINE)"),
        (f"{EPISODES}/verifiers_server.py", "serve.episode", "reader.readline()"),
        (f"{EPISODES}/verifiers_server.py", "serve.episode", "running"),
        (f"{EPISODES}/verifiers_server.py", "serve.episode", "writer.drain()"),
    ],
    "an event that a signal sets: an operator may come or not": [
        ("supervisors/machine/processes/child.py", "_until_end.obey", "terminated.wait()"),
        ("supervisors/head/head_process.py", "lead", "interrupted.wait()"),
        ("supervisors/cli/console/command.py", "_serve", "stopped.wait()"),
        ("supervisors/jobs/job_run.py", "JobRun._until_interrupted", "interrupted.wait()"),
        ("supervisors/head/machine_process.py", "MachineProcess._forward", "interrupted.wait()"),
        ("supervisors/preparation/abandonable.py", "Abandonable._abandon_when", "interrupted.wait()"),
        ("supervisors/head/head_process.py", "run_jobs.obey", "interrupted.wait()"),
        ("supervisors/machine/membership/node.py", "NodeProcess.wait", "stopped.wait()"),
        ("supervisors/machine/membership/node.py", "NodeProcess.wait", "stop"),
    ],
    "whoever follows a life waits as long as it lasts: the failure detector ends a process, supervision an actor": [
        ("actors/core/system.py", "ActorSystem.wait_stopped", "timeout_s"),
        ("actors/core/system.py", "ActorSystem.wait_stopped", "asyncio.shield(cell.ended)"),
        ("supervisors/machine/processes/child.py", "_until_end", "verdict"),
        ("supervisors/jobs/job_tree.py", "JobTree.failed", "ended.wait()"),
        ("supervisors/head/machine_process.py", "MachineProcess._one_life", "asyncio.shield(head.exited)"),
        ("supervisors/head/machine_process.py", "MachineProcess._forward", "self.keeper.became_ready.wait()"),
        ("supervisors/machine/node_agent.py", "NodeAgent._follow", "asyncio.shield(managed.process.exited)"),
        ("supervisors/machine/processes/process.py", "ChildProcess._wait_in_thread", "self._popen.wait()"),
        ("supervisors/api/held_process.py", "_follow", "popen.wait()"),
    ],
    "an episode's process is killed at the end of the episode's time, whatever it waits for": [
        ("actors/environments/episodes/interface.py", "_awaited", "value"),
        ("actors/environments/episodes/openenv.py", "OpenEnv._ask", "self._socket.recv()"),
    ],
    "it waits as long as the tool's time allows, which the caller hands in": [
        ("actors/environments/episodes/mcp_server.py", "McpServer._line",
         "select.select([self._process.stdout], [], [], left_s)"),
    ],
    "the environment worker's own death ends it, and with it what it waits for": [
        ("actors/environments/episodes/zygote.py", "main", "first.readline()"),
        ("actors/host/helper_process.py", "HelperProcess.line", "self._stdout.readline()"),
    ],
    "the exit has been seen, or only looked for: it returns at once": [
        ("actors/environments/episodes/zygote.py", "Zygote._reap", "os.waitpid(child.guard, os.WNOHANG)"),
        ("actors/host/parent_death.py", "_has_ended", "os.waitpid(ended.si_pid, 0)"),
        ("supervisors/machine/processes/process.py", "ChildProcess._on_exit", "self._popen.wait()"),
    ],
    "a job takes as long as its steps; its supervisors, the stall report and its operator look after it": [
        ("actors/jobs/job.py", "Job.wait_over", "timeout_s"),
        ("actors/jobs/job.py", "Job.wait_over", "self._over.wait()"),
        ("supervisors/head/head.py", "Head.interrupt_jobs", "task"),
        ("supervisors/head/head_process.py", "run_jobs.run_one", "asyncio.shield(task)"),
        ("supervisors/sharing/admission.py", "Admission.admit", "waiting"),
        ("supervisors/jobs/job_run.py", "JobRun.wait", "finished.wait()"),
        ("supervisors/jobs/job_run.py", "JobRun.wait", "self._ended.wait()"),
        ("supervisors/nemesis/fault_schedule.py", "FaultSchedule._trigger", "self._moved.wait()"),
        ("supervisors/providers/job_provider.py", "JobProvider._begin", "self._running.wait()"),
        ("supervisors/providers/job_provider.py", "JobProvider._follow", "self._running.wait()"),
    ],
    "machines are asked for and ended within limits of the provider's own, where it is written": [
        ("supervisors/providers/job_provider.py", "JobProvider.open",
         "self._open.enter_async_context(self._providing(join))"),
        ("supervisors/providers/job_provider.py", "JobProvider.close", "self._open.aclose()"),
        ("supervisors/providers/job_provider.py", "JobProviders.providing", "closes"),
    ],
    "a watcher waits for what happens next; its stream ends with the job, and with the watcher": [
        ("actors/control/watches.py", "WatchStream.changed", "self._changed.wait()"),
        ("supervisors/head/operations.py", "Operations.watch", "queue.get()"),
    ],
    "the code that is called has its own limits, where it is written; it cannot be told here which it is": [
        ("actors/core/kernel/cell.py", "Cell._run", "method(message)"),
        ("actors/core/kernel/stream_table.py", "StreamTable.produce", "items"),
        ("actors/core/kernel/stream_table.py", "StreamTable.produce", "cast(Any, items).aclose()"),
        ("actors/environments/scoring/scorer_pool.py", "ScorerPool.start", "self._exchanges"),
        ("actors/environments/scoring/scorer_pool.py", "ScorerPool._exchange", "over"),
        ("actors/core/patience.py", "ask_patiently", "renew()"),
        ("actors/gateway/http.py", "Http.guard", "handler(request)"),
        ("actors/gateway/service.py", "_on.recorded", "handler(request)"),
        ("actors/tinker/routes.py", "Routes.guard", "handler(request)"),
        ("actors/trainer/learning/reference.py", "ReferenceScores._note", "self._score(pad(part))"),
        ("actors/trainer/updates.py", "StepUpdates._fitting", "work()"),
        ("actors/trainer/learning/step_estimates.py", "StepEstimates._values", "self._expected(pad(part))"),
        ("actors/train_service/slice_queue.py", "SliceQueue._grant", "waiting.prepare()"),
        ("supervisors/preparation/abandonable.py", "Abandonable.run", "task"),
        ("supervisors/jobs/role_processes.py", "RoleProcesses._child.start", "self._service()"),
        ("supervisors/machine/machine.py", "LocalMachine.run_blocking", "asyncio.to_thread(function, *args, **kwargs)"),
        ("supervisors/pool/node_workers.py", "NodeWorkers._later.run", "work"),
        ("supervisors/pool/replica_moves.py", "ReplicaMoves._move", "self._restart()"),
        ("supervisors/nemesis/nemesis.py", "Nemesis._heal", "heal()"),
        ("supervisors/simulation/faults/nemesis.py", "Nemesis._heal", "heal()"),
        ("supervisors/simulation/faults/operator.py", "_answer", "work"),
        ("supervisors/simulation/cluster/paced.py", "slowly", "work"),
    ],
    "a program waits for its run, or for what that tells next, as long as it likes: its user can interrupt it": [
        ("supervisors/api/start.py", "run_job", "run.wait()"),
        ("supervisors/api/run.py", "Run.result", "asyncio.shield(asyncio.wrap_future(self._process.ended))"),
        ("supervisors/api/run.py", "Run.result", "asyncio.wrap_future(submit(self._until_over()))"),
        ("supervisors/api/events.py", "Events.__anext__", "asyncio.shield(asyncio.wrap_future(self._begin()))"),
        ("supervisors/api/events.py", "_next_of", "anext(source, None)"),
    ],
    "it waits for limits.held_end_s at most": [
        ("supervisors/api/run.py", "Run.__aexit__", "asyncio.to_thread(self.close)"),
    ],
    "whoever asked has a deadline, and its handler is cancelled there; every call has limits of its own": [
        ("actors/train_service/service.py", "TrainService.attach", "asyncio.shield(bundle.attached)"),
        ("actors/train_service/service.py", "TrainService.call", "asyncio.shield(answer)"),
        ("actors/train_service/service.py", "TrainService.detach", "asyncio.shield(bundle.ending)"),
        ("actors/ranks/rank.py", "Rank.order", "asyncio.shield(self._done)"),
    ],
    "a child's start has a deadline, and every question that is asked meanwhile has one": [
        ("supervisors/jobs/group_adoption.py", "GroupAdoption.find", "asyncio.shield(self._found[leader])"),
    ],
    "every call of the group has a limit, and the next one waits for it": [
        ("actors/ranks/shared.py", "SharedGroup.call", "self._turn"),
        ("actors/ranks/shared.py", "SharedGroup.call", "told"),
    ],
    "each of the tasks asks with a deadline": [
        ("actors/ranks/group.py", "GroupFollowers._of_all", "asyncio.TaskGroup()"),
    ],
    "a pause of the backoff, whose policy bounds it": [
        ("supervisors/tree/recovery.py", "Rounds._recover", "self._sleep(recovery.delay_s)"),
    ],
    "the call of an earlier life ends at its own limits, and what it had is let go of within service_move_timeout_s": [
        ("actors/train_service/service.py", "TrainService._retire", "asyncio.shield(task)"),
    ],
    "whoever asked has a deadline, and its handler is cancelled there; every exchange in front of it has limits": [
        ("actors/environments/scoring/scorer_pool.py", "ScorerPool._exchange", "free.get()"),
    ],
    "it is one of the two methods named in the line before, whose commands of Slurm have cluster_answer_s each": [
        ("supervisors/providers/slurm.py", "SlurmProvider._sweep", "work()"),
    ],
    "the table of requests ends every question at its deadline, which was armed three lines before": [
        ("actors/core/kernel/questions.py", "Questions.ask", "future"),
    ],
    "it is Supervisor._stopped, begun by a plain function: its waits have stop_timeout_s and the child's shutdown_s": [
        ("supervisors/tree/recovery.py", "Rounds._recover", "map(self._stop, stopped)"),
        ("supervisors/tree/recovery.py", "Rounds._recover", "self._stop(child)"),
        ("supervisors/tree/supervisor.py", "Supervisor.shutdown", "self._stop(child)"),
        ("supervisors/tree/supervisor.py", "Supervisor.remove_child", "self._stop(child, cause)"),
        ("supervisors/tree/supervisor.py", "Supervisor._became_ready", "self._stop(child)"),
    ],
    "a timer of the stream ends it when nothing has come for its window's time-out": [
        ("actors/core/kernel/streams.py", "Stream._wait", "self.future"),
    ],
    "it has just been killed, and is our child: the kernel lets it go, or neither of us": [
        ("actors/host/parent_death.py", "_guard", "os.waitpid(leader, 0)"),
        ("actors/host/parent_death.py", "_kill_adopted", "os.waitpid(pid, 0)"),
    ],
    "the caller holds the limit: worker and trainer give each call to their engine one (engine_step_s, _bounded)": [
        ("actors/rollout/engines/server/transfer.py", "off_loop",
         "asyncio.get_running_loop().run_in_executor(None, function, *arguments)"),
        ("actors/rollout/engines/torch/torch_engine.py", "TorchEngine._run",
         "asyncio.get_running_loop().run_in_executor(self._thread, function, *args)"),
        ("actors/rollout/engines/vllm/engine.py", "VllmEngine._run",
         "asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)"),
        ("actors/rollout/engines/vllm/leader.py", "LeadingEngine._built", "own"),
        ("actors/rollout/engines/vllm/leader.py", "_or_refusal", "own"),
        ("actors/trainer/backends/torch/torch_backend.py", "TorchBackend._run",
         "asyncio.get_running_loop().run_in_executor(self._thread, function, *args)"),
        ("actors/trainer/backends/fsdp/fsdp_backend.py", "FsdpBackend._run",
         "asyncio.wrap_future(self._own)"),
    ],
    "a stream lasts as long as its sequence; a step asks the server when all are silent for limits.server_answer_s": [
        ("actors/rollout/engines/server/client.py", "ServerClient.generate", "answer.content"),
    ],
    "an order of a leader's, who waits no longer than its limit and ends the group; ranks' exchanges have a limit": [
        ("actors/trainer/backends/fsdp/follower.py", "FsdpFollower.serve",
         "asyncio.get_running_loop().run_in_executor(self._thread, self._obey, decoded)"),
        ("actors/trainer/backends/fsdp/follower.py", "FsdpFollower.close",
         "asyncio.get_running_loop().run_in_executor(self._thread, core.close)"),
    ],
    "a move of a service's state: Residency._move ends it at limits.service_move_timeout_s": [
        ("actors/train_service/residency.py", "Residency._move", "asyncio.shield(task)"),
        ("actors/train_service/residency.py", "Residency._find", "self._run_blocking(is_intact, copy)"),
        *(
            ("actors/train_service/stored_bundles.py", f"StoredBundles.{name}",
             f"self._run_blocking(self._files.{call})")
            for name, call in (
                ("open", "open"), ("close", "close"), ("forget", "forget, copy"),
                ("_make", "make, tier, job, size_bytes"),
                ("_write", "commit, manifest, tier, files"), ("_replaced", "withdraw, old"), ("_drop", "remove, file"),
                ("_moved", "moved, copy, tier"), ("_moved", "forget, copy"),
            )
        ),
    ],
    "the control server bounds every request by its deadline": [
        ("supervisors/head/operations.py", "Operations._read", "self._reading"),
        ("supervisors/head/operations.py", "Operations._read",
         "asyncio.to_thread(read, *args, self._head.limits.control_read_bytes)"),
        ("supervisors/head/operations.py", "Operations.submit",
         "asyncio.to_thread(job_from_mapping, job, 'the submitted job')"),
    ],
    "it is asked not to block (LOCK_NB)": [
        ("actors/reward_training/train.py", "_take", "fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)"),
        ("actors/train_service/parked_files.py", "ParkedFiles.open",
         "fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)"),
        ("actors/weights/segments.py", "hold", "fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)"),
        ("actors/weights/segments.py", "_is_held", "fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)"),
        ("actors/ranks/meeting_place.py", "make_meeting_place", "fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)"),
        ("actors/ranks/meeting_place.py", "_remove_left_behind", "fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)"),
        ("supervisors/machine/run_directory.py", "RunLock.take",
         "fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)"),
        ("supervisors/simulation/runner.py", "directory", "fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)"),
        ("supervisors/simulation/runner.py", "_remove_if_abandoned",
         "fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)"),
    ],
    "a sample waits while others are drawn, each of them for limits.tinker_operation_s at most": [
        ("actors/tinker/sample_desk.py", "SampleDesk._draw", "self._room"),
    ],
    "as many seeds as were asked for, in front of whoever asked": [
        ("supervisors/simulation/seeds.py", "_run_part", "process.communicate()"),
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def found() -> list[Wait]:
    files = [*sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py")), ROOT / "main.py"]
    return unbounded(parse(ROOT, files))


def test_every_wait_has_a_limit_or_a_reason(found):
    allowed = {place for places in ALLOWED.values() for place in places}
    left = [str(wait) for wait in found if wait.key not in allowed]
    assert not left, (
        "put it inside asyncio.timeout(limit from configs/limits.py), or say in ALLOWED why for ever is right:\n"
        + "\n".join(left)
    )


def test_what_is_allowed_is_still_there(found):
    listed = {place for places in ALLOWED.values() for place in places if (ROOT / place[0]).exists()}
    stale = listed - {wait.key for wait in found}
    assert not stale, f"these fit nothing any more; take them out of ALLOWED: {sorted(stale)}"


WITHOUT_LIMIT = {
    "a queue": "async def f(queue):\n    await queue.get()",
    "an event": "async def f(self):\n    await self._done.wait()",
    "a future": "async def f(future):\n    await future",
    "a shielded future": "async def f(self):\n    return await asyncio.shield(self.ended)",
    "a lock": "async def f(self):\n    async with self._lock:\n        pass",
    "a socket": "async def f(reader):\n    return await reader.readexactly(4)",
    "items of others": "async def f(feed):\n    async for item in feed:\n        pass",
    "a task group of others": "async def f():\n    async with asyncio.TaskGroup() as group:\n"
    "        group.create_task(other())",
    "one of several": "async def f(a):\n    await asyncio.gather(*(one for one in a))",
    "a task that waits": "async def f(event):\n    task = asyncio.create_task(event.wait())",
    "a thread": "async def f():\n    await asyncio.to_thread(work)",
    "a limit that is none": "async def f(queue):\n    async with asyncio.timeout(None):\n        await queue.get()",
    "a limit that may be none": "async def f(queue, timeout_s: float | None = None):\n"
    "    async with asyncio.timeout(timeout_s):\n        await queue.get()",
    "a limit of its own": "async def f(queue):\n    async with asyncio.timeout(5.0):\n        await queue.get()",
    "a limit as a default": "def f(timeout_s: float = 5.0):\n    pass",
    "a limit of the file": "async def f(queue):\n    async with asyncio.timeout(LIMIT_S):\n        await queue.get()",
    "a limit that ends before": "async def f(queue, limit_s):\n    async with asyncio.timeout(limit_s):\n        pass\n"
    "    await queue.get()",
    "a coroutine that is awaited without one": "async def _g(queue):\n    await queue.get()\n"
    "async def f(queue):\n    await _g(queue)",
    "a thread's end": "def f(thread):\n    thread.join()",
    "a process's end": "def f(process):\n    process.wait()",
    "a process's words": "def f(process):\n    process.communicate()",
    "a command": "def f():\n    subprocess.run(['true'])",
    "a pipe": "def f(connection):\n    connection.recv()",
    "a pool's result": "def f(pool):\n    pool.submit(work).result()",
}

WITH_LIMIT = {
    "inside a timeout": "async def f(self, queue):\n    async with asyncio.timeout(self.limits.ask_timeout_s):\n"
    "        await queue.get()",
    "a timeout with a name": "async def f(self, queue):\n    deadline = asyncio.timeout(self.limits.stop_timeout_s)\n"
    "    async with deadline:\n        await queue.get()",
    "a lock behind a timeout": "async def f(self):\n"
    "    async with asyncio.timeout(self.limits.stop_timeout_s), self._lock:\n        pass",
    "our own coroutine": "async def g():\n    pass\nasync def f():\n    await g()",
    "a group of our own": "async def g():\n    pass\nasync def f():\n    async with asyncio.TaskGroup() as group:\n"
    "        group.create_task(g())",
    "a coroutine that is always awaited with one": "async def _g(queue):\n    await queue.get()\n"
    "async def f(self, queue):\n    async with asyncio.timeout(self.limits.stop_timeout_s):\n        await _g(queue)",
    "what the kernel bounds": "class A:\n    async def on_stop(self):\n        await self._task",
    "a sleep": "async def f():\n    await asyncio.sleep(1.0)",
    "a stream with a limit": "async def f(self, ref):\n"
    "    async with ref.stream(Q(), I, timeout_s=self.limits.pull_timeout_s) as items:\n"
    "        async for item in items:\n            pass",
    "a thread's end with a limit": "def f(self, thread):\n    thread.join(timeout=self.limits.close_timeout_s)",
    "a text": "def f(words):\n    return ', '.join(words)",
    "a map": "def f(known):\n    return known.get('a')",
}


@pytest.mark.parametrize("code", WITHOUT_LIMIT.values(), ids=WITHOUT_LIMIT)
def test_a_wait_without_a_limit_is_found(code):
    assert unbounded({"a.py": ast.parse(code)})


@pytest.mark.parametrize("code", WITH_LIMIT.values(), ids=WITH_LIMIT)
def test_a_wait_with_a_limit_is_left_in_peace(code):
    assert not unbounded({"a.py": ast.parse(code)})
