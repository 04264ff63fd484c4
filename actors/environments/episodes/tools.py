"""Tools that the model may call: Python functions and MCP servers, each call bounded in time and output.

    call {name, arguments as JSON} ─▶ arguments checked ─▶ the tool, tool_s at most ─▶ text, cut ─▶ {"role": "tool", …}

Every failure that the model can cause becomes text that it reads: an unknown tool, arguments that do not fit, an error
that the tool raises, a call that takes too long, an output that floods. When a server dies, the machine may be at
fault: the episode is begun again, and what the model has said already is not sampled again. If a server dies then, too,
the model reads of it, so that it gains nothing by breaking a tool.
"""

from __future__ import annotations

import inspect
import json
import math
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, Protocol, cast

from pydantic import TypeAdapter, ValidationError, validate_call
from pydantic.errors import PydanticUserError

from actors.environments.episodes.errors import EnvironmentRefused, ToolServerDied, ToolTimedOut
from actors.environments.episodes.interface import ChatMessage, settled
from actors.environments.episodes.mcp_server import MCP, McpServer
from actors.environments.scoring.scorers import load_function
from actors.host.allowed_code import why_not_allowed
from actors.host.user_code import described
from configs.limits import DEFAULT_LIMITS


class Tool(Protocol):
    """Answers calls of the model."""

    name: str
    schema: dict[str, Any]
    """Description in the form of the chat API: ``{"type": "function", "function": {…}}``."""

    def call(self, arguments: dict[str, Any], timeout_s: float) -> str:
        """Call the tool; returns the text that the model is to read.

        Raises:
            ToolTimedOut: the call takes longer than ``timeout_s``.
            ToolServerDied: the tool's server has ended.
            Exception: anything else that goes wrong in the tool; the model reads of it.
        """
        ...


class FunctionTool:
    """A tool that is a Python function: its type hints are the schema, its docstring says what it is for."""

    def __init__(self, function: Callable[..., Any], key: str) -> None:
        """Raises EnvironmentRefused: its arguments are by position only, or of types that JSON cannot express."""
        self.name = function.__name__
        try:
            parameters = TypeAdapter(cast(Any, function)).json_schema()
            self._function = validate_call(function)
        except PydanticUserError as error:
            raise EnvironmentRefused(f"{key}: no schema can be made of the tool {self.name}: {error}") from error
        parameters = {"type": "object", "properties": {}, **parameters}
        if "prefixItems" in parameters or parameters["type"] != "object":
            wrong = f"{key}: the tool {self.name} takes arguments by position only"
            raise EnvironmentRefused(f"{wrong}; the model names each of them")
        description = inspect.getdoc(function) or ""
        told = {"name": self.name, "description": description, "parameters": parameters}
        self.schema = {"type": "function", "function": told}

    def call(self, arguments: dict[str, Any], timeout_s: float) -> str:
        with _alarm(timeout_s):
            returned = settled(self._function(**arguments))
        return returned if isinstance(returned, str) else json.dumps(returned, default=str)


@contextmanager
def _alarm(timeout_s: float) -> Iterator[None]:
    """Interrupt the block after ``timeout_s``; works in the main thread only."""

    def ring(_: int, __: FrameType | None) -> None:
        raise ToolTimedOut

    former = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, timeout_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, former)


class Tools:
    """Holds the tools that ``environment.tools`` names; ``opened`` makes the toolbox of one episode."""

    def __init__(self, named: Sequence[str], tool_s: float) -> None:
        """Raises EnvironmentRefused, RewardRefused: a tool cannot be imported, or no schema can be made of it."""
        self._tool_s = tool_s
        for name in named:  # functions, too, but servers are started by their commands
            if wrong := why_not_allowed(name):
                raise EnvironmentRefused(f"environment.tools: {wrong}")
        self._commands = [name.removeprefix(MCP).strip() for name in named if name.startswith(MCP)]
        places = [(f"environment.tools.{i}", name) for i, name in enumerate(named) if not name.startswith(MCP)]
        self._functions = [FunctionTool(load_function(name, key), key) for key, name in places]

    def opened(self, methods: Sequence[Callable[..., Any]] = (), *, again: bool = False) -> Toolbox:
        """Toolbox of these tools, ``methods`` of the environment, and the tools of servers, which are started now.

        Raises:
            EnvironmentRefused: two tools have one name, or a server cannot be started or has no tools.
        """
        of_environment = [FunctionTool(method, "tools of the environment") for method in methods]
        servers: list[McpServer] = []
        try:
            for command in self._commands:
                servers.append(McpServer(command, DEFAULT_LIMITS.tool_server_start_s))  # noqa: PERF401 (closed below)
            served = [tool for server in servers for tool in server.tools]
            return Toolbox([*self._functions, *of_environment, *served], servers, self._tool_s, again=again)
        except BaseException:
            for server in servers:
                server.close()
            raise


class Toolbox:
    """Holds the tools of one episode, and counts what they are used for."""

    def __init__(
        self, tools: Sequence[Tool], servers: Sequence[McpServer], tool_s: float, *, again: bool = False
    ) -> None:
        """``again``: the episode has been begun before. Raises EnvironmentRefused: two tools have one name."""
        self._tools = {tool.name: tool for tool in tools}
        if len(self._tools) < len(tools):
            name = Counter(tool.name for tool in tools).most_common(1)[0][0]
            wrong = f"environment.tools: two tools are called {name!r}"
            raise EnvironmentRefused(f"{wrong}; the model could not tell them apart")
        self._servers = servers
        self._tool_s = tool_s
        self._again = again
        self._calls = self._errors = 0

    @property
    def schemas(self) -> list[dict[str, Any]]:
        return [tool.schema for tool in self._tools.values()]

    @property
    def metrics(self) -> dict[str, float]:
        """How often the model has called tools, and how often in vain; empty if there are none."""
        return {"tool_calls": float(self._calls), "tool_errors": float(self._errors)} if self._tools else {}

    def answer(self, call: Mapping[str, Any], left_s: float = math.inf) -> ChatMessage:
        """What the model reads in answer to its ``call``, in the words of the chat API.

        Raises:
            ToolServerDied: a server has ended, for the first time in this episode.
        """
        asked = cast("Mapping[str, Any]", call.get("function") or {})
        name, text = str(asked.get("name") or ""), asked.get("arguments")
        self._calls += 1
        began_s = time.monotonic()
        said, failed = self._said(name, text, max(0.001, min(self._tool_s, left_s)))
        self._errors += failed
        print(f"tool {name!r} took {time.monotonic() - began_s:.3f} s{', in vain' if failed else ''}", flush=True)
        return {"role": "tool", "tool_call_id": call.get("id") or "", "name": name, "content": _cut(said)}

    def _said(self, name: str, text: Any, timeout_s: float) -> tuple[str, bool]:
        """What the model reads of a call, and whether that is an error."""
        if not name:
            form = 'a JSON object with "name" and "arguments"'
            return f"Error: the call cannot be read: expected {form}, or the form of your instructions.", True
        if (tool := self._tools.get(name)) is None:
            return f"Error: there is no tool {name!r}. There are: {', '.join(self._tools) or 'none'}.", True
        try:
            arguments: Any = json.loads(text) if isinstance(text, str) else text or {}
        except (ValueError, RecursionError) as error:
            return f"Error: the arguments of {name} are no JSON: {error}.", True
        if not isinstance(arguments, dict):
            return f"Error: the arguments of {name} must be a JSON object.", True
        try:
            return tool.call(cast("dict[str, Any]", arguments), timeout_s), False
        except ToolTimedOut:
            return f"Error: {name} took longer than {timeout_s:g} s and was stopped.", True
        except ValidationError as error:
            return f"Error: the arguments of {name} do not fit: {_problems(error)}.", True
        except ToolServerDied as error:
            if not self._again:
                raise
            return f"Error: {error}.", True
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001 (a tool may run a model's own code)
            return f"Error: {described(error)}.", True

    def close(self) -> None:
        """End the servers; those that do not go are killed with the episode's group."""
        for server in self._servers:
            server.close()


def _problems(error: ValidationError) -> str:
    return "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors(include_url=False))


def _cut(text: str) -> str:
    longest = DEFAULT_LIMITS.tool_output_chars
    if len(text) <= longest:
        return text
    half = longest // 2
    return f"{text[:half]}\n… {len(text) - 2 * half} characters left out …\n{text[-half:]}"
