"""A clean process that has imported the user's code, and forks one child for each episode: in milliseconds.

    in   the job as JSON, on a line                                      once
    out  {"ready": true} | {"broken": sentence}                          once
    in   {"start": EpisodeOrder} | {"kill": key}
    out  {"ended": key, "code": exit code, "said": the child's line or null}     once for each start

Invariants
- It runs none of the user's code but imports: it has one thread, and every child starts from the same state.
- A child's line is read here, bounded; what the child prints goes to the episode's own file. The child's guard ends
  with the zygote, and the group with its guard (``parent_death.py``), so nothing outlives the environment worker.
- ``ended`` is sent when nothing of the episode's group is left.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import selectors
import signal
import sys
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from actors.environments.episodes.child import Driver, EpisodeOrder, RowOf, live
from actors.environments.scoring.examples import Examples, source_of
from actors.host.parent_death import die_with_parent
from actors.host.standard_streams import open_standard_streams
from actors.host.user_code import described
from configs.schema import JobConfig
from configs.task_schema import DataConfig

_READ_BYTES: Final = 1 << 16
_BLOCKED: Final = (signal.SIGTERM, signal.SIGCHLD)
"""Signals that must not reach a child before its guard waits for them."""
_NO_PROCESS: Final = json.dumps({"failed": "the machine has no room for a process", "kind": "infrastructure"})


@dataclass
class _Child:
    key: str
    guard: int
    """Process id of the guard, whose exit code is the child's."""
    result: int
    """Descriptor of the pipe for the child's line."""
    said: bytes = b""


class Zygote:
    """Serves one environment worker."""

    def __init__(self, job: JobConfig, driver: Driver, row_of: RowOf, requests: int, replies: int) -> None:
        self._job = job
        self._driver = driver
        self._row_of = row_of
        self._requests = requests
        self._replies = replies
        self._unread = b""
        self._children: dict[int, _Child] = {}
        """Running children, by the descriptor of their pipe."""
        self._selector = selectors.DefaultSelector()
        self._selector.register(requests, selectors.EVENT_READ)
        self._wakes, self._woken = os.pipe()
        os.set_blocking(self._wakes, False)
        os.set_blocking(self._woken, False)
        self._selector.register(self._wakes, selectors.EVENT_READ)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._woken, warn_on_full_buffer=False)

    def serve(self) -> None:
        """Serve until the input ends (the worker is gone, or wants no more) or the driver can drive no more."""
        while self._driver.lives():
            for key, _ in self._selector.select():
                if key.fd == self._requests:
                    if not self._read_requests():
                        return
                elif key.fd == self._wakes:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wakes, _READ_BYTES)
                elif (child := self._children.get(key.fd)) is not None:
                    self._read_result(child)
            self._reap()

    def _read_requests(self) -> bool:
        part = os.read(self._requests, _READ_BYTES)
        *lines, self._unread = (self._unread + part).split(b"\n")
        for line in lines:
            request = msgspec.json.decode(line)
            if "start" in request:
                self._start(msgspec.convert(request["start"], EpisodeOrder))
            else:
                self._kill(request["kill"])
        return bool(part)

    def _start(self, order: EpisodeOrder) -> None:
        reads, writes = os.pipe()
        signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)
        guard = _forked()
        if guard == 0:
            self._forget(reads)
            live(self._job, self._driver, self._row_of, order, writes)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _BLOCKED)
        os.close(writes)
        if guard < 0:
            os.close(reads)
            self._reply({"ended": order.key, "code": os.EX_OSERR, "said": _NO_PROCESS})
            return
        os.set_blocking(reads, False)
        self._children[reads] = _Child(order.key, guard, reads)
        self._selector.register(reads, selectors.EVENT_READ)

    def _forget(self, reads: int) -> None:
        """In a child: close everything that belongs to the zygote."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._selector.close()
        for number in (self._requests, self._replies, self._wakes, self._woken, reads, *self._children):
            os.close(number)

    def _kill(self, key: str) -> None:
        for child in self._children.values():
            if child.key == key:
                os.kill(child.guard, signal.SIGTERM)  # not reaped yet: the process id is still its own

    def _read_result(self, child: _Child) -> None:
        try:
            part = os.read(child.result, _READ_BYTES)
        except BlockingIOError:
            return
        if not part:
            self._selector.unregister(child.result)
        elif len(child.said) <= self._job.limits.episode_result_bytes:
            child.said += part

    def _reap(self) -> None:
        for number, child in list(self._children.items()):
            ended, status = os.waitpid(child.guard, os.WNOHANG)
            if not ended:
                continue
            with contextlib.suppress(KeyError):
                self._read_result(child)
                self._selector.unregister(number)
            os.close(number)
            del self._children[number]
            line, end, _ = child.said.partition(b"\n")
            said = line.decode("utf-8", "replace") if end else None
            self._reply({"ended": child.key, "code": os.waitstatus_to_exitcode(status), "said": said})

    def _reply(self, value: dict[str, Any]) -> None:
        line = json.dumps(value).encode() + b"\n"
        while line:
            line = line[os.write(self._replies, line) :]


def _forked() -> int:
    """As ``os.fork``, or -1 if there is no memory or there are too many processes, which may pass."""
    try:
        return os.fork()
    except OSError:
        return -1


def main() -> None:
    """Serve until the worker ends; every child that was forked ends with this process."""
    die_with_parent(os.getppid())
    requests, replies = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)  # what an import prints goes to the log, not between the lines
    open_standard_streams(unbreakable=True)
    with os.fdopen(os.dup(requests), "rb", buffering=0) as first:
        job = JobConfig.model_validate_json(first.readline())
    try:
        driver, row_of = _loaded(job)
    except (Exception, SystemExit) as error:  # noqa: BLE001 (user code: whatever it raises is reported)
        os.write(replies, json.dumps({"broken": described(error)}).encode() + b"\n")
        return
    gc.collect()
    gc.freeze()  # what is here now stays shared with every child: the collector does not touch it
    os.write(replies, b'{"ready": true}\n')
    Zygote(job, driver, row_of, requests, replies).serve()


def _loaded(job: JobConfig) -> tuple[Driver, RowOf]:
    from actors.environments.episodes.kinds import make_driver
    from actors.environments.prompts.sources import open_all_sources

    examples = Examples(open_all_sources(job))

    def row_of(context: bytes) -> tuple[dict[str, Any], DataConfig]:
        example = examples.of(context)
        row = {**example.extra, "prompt": example.prompt, "answer": example.answer, "index": example.index}
        return row, job.all_sources.get(source_of(context), job.data)

    return make_driver(job), row_of


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # no thread or exit function of an imported module delays the end
