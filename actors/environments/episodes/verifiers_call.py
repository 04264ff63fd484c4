"""Environments of the library ``verifiers``, which run unchanged in the interpreter that has the library.

    zygote ── order ──▶ guard ──▶ verifiers_server.py in environment.interpreter: the environment, its own server
       │ forks                        ▲        │ its harness's programs ── HTTP, the episode's key ──▶ gateway
       └──▶ an episode's process ─────┘ a connection: task, where the model is ─▶ reward or errors

- The rows of the data are the tasks: their columns are the fields of the environment's task.
- The server is started before the first fork. Its guard ends it, and all that it has started, with the zygote. If the
  server dies, the zygote ends, and the next one begins with a new server.
- An episode whose process is killed hangs up, so its run is cancelled.
- An error of the environment gives no result; an episode ended by a budget has the reward 0, as with agents.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from actors.environments.episodes.agent_call import budget_that_ended
from actors.environments.episodes.child import Driver
from actors.environments.episodes.endpoint import Endpoint
from actors.environments.episodes.errors import (
    BudgetSpent,
    EnvironmentBroken,
    EnvironmentRefused,
    GatewayAway,
    ToolServerDied,
)
from actors.environments.episodes.interface import Outcome, as_metrics, as_reward
from actors.host.allowed_code import allowed_here, why_not_allowed
from actors.host.parent_death import lead_group
from configs.checks.episode_code import VERIFIERS_INSTALL
from configs.python_path import OUR_FOLDER, python_path
from configs.schema import JobConfig
from configs.task_schema import DataConfig

_SERVER: Final = Path(__file__).with_name("verifiers_server.py")
_READ_BYTES: Final = 1 << 16
_AWAY: Final = frozenset([502, 503, 504])
"""HTTP statuses that the library reports when it has not reached the model."""
_MAKE_ONE: Final = f"make one ({VERIFIERS_INSTALL}), and name DIR/bin/python"


class VerifiersDriver(Driver):
    """Drives episodes of one environment, whose server it starts. Raises EnvironmentRefused if it cannot start it."""

    def __init__(self, job: JobConfig) -> None:
        environment = job.environment
        options = dict(environment.options)
        self._client = _client(options.pop("client", {}), job)
        self._sampling = {"temperature": job.rollout.temperature}
        if environment.turn_tokens is not None:
            self._sampling["max_tokens"] = environment.turn_tokens
        self._interpreter = _interpreter(environment.interpreter)
        self._path = environment.path or ""
        self._address = _new_address()
        roles = {
            "max_turns": environment.turns_max,
            "max_output_tokens": job.rollout.max_tokens,
        }
        bounds = {"timeout": {"episode": environment.episode_s}}
        options = bounds | options
        order = {"path": self._path, "options": options, "roles": roles, "address": self._address}
        order["allowed"] = allowed_here()  # its library imports by what it reads in options: decided there
        self._guard = self._start(json.dumps(order).encode() + b"\n", job.limits.ready_timeout_s)

    def _start(self, order: bytes, timeout_s: float) -> int:
        """Start the server and wait until it serves; returns the process id of its guard."""
        asks, orders = os.pipe()
        replies, says = os.pipe()
        zygote = os.getpid()
        guard = os.fork()
        if guard == 0:
            os.dup2(asks, 0)
            os.dup2(says, 1)
            os.closerange(3, max(asks, orders, replies, says) + 1)
            self._become_the_server(zygote)
        os.close(asks)
        os.close(says)
        with os.fdopen(orders, "wb") as to, os.fdopen(replies, "rb", buffering=0) as of:
            try:
                to.write(order)
                to.flush()
            except BrokenPipeError:
                pass  # the server says why, or nothing
            line = of.readline() if select.select([of], [], [], timeout_s)[0] else b""
        said = json.loads(line or b"{}")
        if "ready" not in said:
            os.kill(guard, signal.SIGTERM)
            os.waitpid(guard, 0)  # nobody else does, and the dead guard would still count as a child
            raise EnvironmentRefused(self._why_not(said))
        return guard

    def _become_the_server(self, zygote: int) -> None:
        try:
            lead_group(zygote)
            directory = str(Path(self._interpreter).parent)
            path = os.pathsep.join(filter(None, [directory, os.environ.get("PATH")]))  # server starts ``uv`` and itself
            code = [
                one for one in python_path().split(os.pathsep) if one != OUR_FOLDER
            ]  # which the environment must not see
            variables = {**os.environ, "PATH": path, "PYTHONPATH": os.pathsep.join(code)}
            os.execve(self._interpreter, [self._interpreter, "-P", str(_SERVER)], variables)  # noqa: S606 (no shell)
        except OSError as error:
            os.write(1, json.dumps({"broken": str(error), "what": "library"}).encode() + b"\n")
        os._exit(os.EX_OSERR)

    def _why_not(self, said: Mapping[str, Any]) -> str:
        if said.get("what") == "library":
            wrong = f"environment.interpreter: {self._interpreter} cannot load verifiers ({said['broken']})"
            return f"{wrong}; {_MAKE_ONE}"
        why = said.get("broken") or "it said nothing within limits.ready_timeout_s, or ended; see the zygote's log"
        wrong = f"environment.path: {self._path!r} is no environment that {self._interpreter} can serve: {why}"
        return f"{wrong}; install its package there, or name a module of the working directory; see environment.options"

    def lives(self) -> bool:
        return os.waitpid(self._guard, os.WNOHANG) == (0, 0)

    def trial(self) -> None:
        """Try nothing: the server serves already."""

    def drive(self, row: Mapping[str, Any], endpoint: Endpoint, *, data: DataConfig, again: bool) -> Outcome:
        """Run one episode to its end.

        Raises:
            BudgetSpent: the episode's time is over.
            ToolServerDied, GatewayAway, SessionOver: infrastructure.
            EnvironmentBroken: the environment failed; the message is the environment's.
        """
        base_url = endpoint.base_url
        client = {**self._client, "headers": {"Authorization": f"Bearer {endpoint.api_key}"}}
        if client["type"] == "eval":  # its own key would come before that header
            client["base_url"] = f"{base_url.removesuffix('/v1')}/s/{endpoint.api_key}/v1"
        else:
            client["base_url"] = base_url
        task = {name: value for name, value in row.items() if name != "index" and value is not None}
        task.setdefault("idx", row.get("index"))
        question = {"task_data": task, "client": client, "model": endpoint.model, "sampling": self._sampling}
        return _outcome(self._asked(question, endpoint.left_s))

    def _asked(self, question: Mapping[str, Any], left_s: float) -> dict[str, Any]:
        with socket.socket(socket.AF_UNIX) as server:
            server.settimeout(max(0.0, left_s))
            parts: list[bytes] = []
            try:
                server.connect(self._address)
                server.sendall(json.dumps(question).encode() + b"\n")
                while part := server.recv(_READ_BYTES):
                    parts.append(part)
            except TimeoutError:
                raise BudgetSpent("time") from None
            except OSError as error:
                raise ToolServerDied(f"the environment server of verifiers has gone: {error}") from error
        if not parts:
            raise ToolServerDied("the environment server of verifiers has hung up")
        return json.loads(b"".join(parts))


def _outcome(said: Mapping[str, Any]) -> Outcome:
    if said["ok"] and said["reward"] is not None:
        metrics = as_metrics(said["metrics"], "the environment")
        return Outcome(as_reward(said["reward"], "the environment"), metrics=metrics)
    why = "; ".join(error["text"] for error in said["errors"]) or "it names no error"
    if any(error["status"] in _AWAY for error in said["errors"]):
        raise GatewayAway(f"the environment could not reach the gateway: {why}")
    return Outcome(0.0, budget_that_ended(EnvironmentBroken(f"the environment has no result: {why}")))


def _client(given: Any, job: JobConfig) -> dict[str, Any]:
    """The library's client configuration, made of ``environment.options.client``."""
    if not isinstance(given, dict) or (kind := given.get("type", "eval")) not in ("eval", "train"):
        raise EnvironmentRefused(
            f"environment.options.client is {given!r}; expected a map with type: eval (chat) or type: train (token ids)"
        )
    client = {**given, "type": kind}
    if kind == "train" and not client.get("renderer_model_name"):
        if job.model.path is None:
            raise EnvironmentRefused(
                "environment.options.client.renderer_model_name is missing, and model.path is, too: name the directory "
                "of the model's tokenizer, or leave client out"
            )
        client["renderer_model_name"] = str(Path(job.model.path).resolve())
    return client


def _new_address() -> str:
    """A socket name that is no file on Linux, so that none is left; the server lets only this user in."""
    if sys.platform == "linux":
        return f"\0headrace-verifiers-{secrets.token_hex(16)}"
    return str(Path(tempfile.mkdtemp(prefix="headrace-")) / "episodes")


def _interpreter(named: str | None) -> str:
    found = shutil.which(named) if named else sys.executable
    if found is None:
        wrong = f"environment.interpreter: {named!r} is no program that can be run"
        raise EnvironmentRefused(f"{wrong}; {_MAKE_ONE}")
    if named and (wrong := why_not_allowed(named)):
        raise EnvironmentRefused(f"environment.interpreter: {wrong}")
    return str(Path(found).absolute())
