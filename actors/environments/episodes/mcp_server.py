"""A tool server that speaks MCP over its standard streams: started for one episode, asked line by line.

    start ─ initialize ─▶ ◀─ its protocol ─ initialized ─▶ tools/list ─▶ ◀─ tools      then, for each call
    tools/call ─▶ ◀─ content | error                 requests have numbers; all but the answer to ours is ignored

This is all of the protocol that a tool needs: one JSON object a line. What the server writes to its standard error goes
to the episode's log. The server is in the episode's process group, or becomes a child of the episode's guard, and ends
with the episode.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shlex
import subprocess
import time
from collections.abc import Mapping
from typing import Any, Final, cast

from actors.environments.episodes.errors import EnvironmentRefused, ToolFailed, ToolServerDied, ToolTimedOut
from configs.limits import DEFAULT_LIMITS

MCP: Final = "mcp:"
"""Prefix of the names of such tool servers in a job file."""
_VERSION: Final = "2025-06-18"
_READ_BYTES: Final = 1 << 16


class McpTool:
    """Calls one tool of a server."""

    def __init__(self, server: McpServer, told: Mapping[str, Any]) -> None:
        self.name = str(told["name"])
        parameters = told.get("inputSchema") or {"type": "object", "properties": {}}
        function = {"name": self.name, "description": told.get("description") or "", "parameters": parameters}
        self.schema = {"type": "function", "function": function}
        self._server = server

    def call(self, arguments: dict[str, Any], timeout_s: float) -> str:
        """See ``tools.Tool``."""
        result = self._server.ask("tools/call", {"name": self.name, "arguments": arguments}, timeout_s)
        parts = cast("list[dict[str, Any]]", result.get("content") or [])
        text = "\n".join(str(part["text"]) for part in parts if part.get("type") == "text")
        if not text and (structured := result.get("structuredContent")) is not None:
            text = json.dumps(structured)
        if result.get("isError"):
            raise ToolFailed(text or "the tool says no more")
        return text


class McpServer:
    """Runs one server, started from the words of ``command``."""

    def __init__(self, command: str, start_s: float) -> None:
        """Raises EnvironmentRefused: it cannot be started, does not answer within ``start_s``, or has no tools."""
        self._command = command
        self._number = 0
        self._unread = b""
        try:
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(shlex.split(command), stdin=pipe, stdout=pipe, bufsize=0)
        except (OSError, ValueError, IndexError) as error:
            raise EnvironmentRefused(f"the tool server {MCP} {command} cannot be started: {error}") from error
        try:
            client = {"name": "headrace", "version": "1"}
            opening = {"protocolVersion": _VERSION, "capabilities": {}, "clientInfo": client}
            self.ask("initialize", opening, start_s)
            self._send({"jsonrpc": "2.0", "method": "notifications/initialized"})
            self.tools = [McpTool(self, told) for told in self._listed(start_s)]
        except (ToolServerDied, ToolFailed, ToolTimedOut) as error:
            self.close()
            raise EnvironmentRefused(f"the tool server {MCP} {command} does not get ready: {error}") from error
        if not self.tools:
            self.close()
            raise EnvironmentRefused(f"the tool server {MCP} {command} has no tools")

    def _listed(self, timeout_s: float) -> list[dict[str, Any]]:
        tools: list[dict[str, Any]] = []
        cursor: str | None = None
        while len(tools) <= DEFAULT_LIMITS.tools_of_server:
            page = self.ask("tools/list", {"cursor": cursor} if cursor else {}, timeout_s)
            tools += cast("list[dict[str, Any]]", page.get("tools") or [])
            if not (cursor := page.get("nextCursor")):
                return tools
        raise ToolFailed(f"it has more than {DEFAULT_LIMITS.tools_of_server} tools")

    def ask(self, method: str, params: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Send a request; returns the result that the server answers with.

        Raises:
            ToolTimedOut: no answer within ``timeout_s``; one that comes later is ignored.
            ToolServerDied: the server has ended.
            ToolFailed: the server answered with an error, or with too much.
        """
        self._number += 1
        self._send({"jsonrpc": "2.0", "id": self._number, "method": method, "params": params})
        ends_s = time.monotonic() + timeout_s
        while True:
            answer = self._line(ends_s)
            if answer.get("id") != self._number or "method" in answer:
                continue
            if (error := answer.get("error")) is not None:
                raise ToolFailed(str(cast("dict[str, Any]", error).get("message") or error))
            return cast("dict[str, Any]", answer.get("result") or {})

    def _send(self, said: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(said).encode() + b"\n")
        except OSError as error:
            raise self._dead() from error

    def _line(self, ends_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        floods = False
        while b"\n" not in self._unread:
            left_s = ends_s - time.monotonic()
            if left_s <= 0 or not select.select([self._process.stdout], [], [], left_s)[0]:
                raise ToolTimedOut("no answer in time")
            part = os.read(self._process.stdout.fileno(), _READ_BYTES)
            if not part:
                raise self._dead()
            floods = floods or len(self._unread) > DEFAULT_LIMITS.tool_answer_bytes
            self._unread = part if floods else self._unread + part
        line, _, self._unread = self._unread.partition(b"\n")
        if floods:
            raise ToolFailed(f"it answered with more than {DEFAULT_LIMITS.tool_answer_bytes} bytes")
        try:
            said: Any = json.loads(line)
        except ValueError:
            return {}  # something that the server has printed
        return cast("dict[str, Any]", said) if isinstance(said, dict) else {}

    def _dead(self) -> ToolServerDied:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=DEFAULT_LIMITS.close_timeout_s)
        return ToolServerDied(f"the tool server {self._command!r} has ended with code {self._process.returncode}")

    def close(self) -> None:
        """Kill the server, which is no longer needed."""
        self._process.kill()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with contextlib.suppress(OSError):
                stream.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=DEFAULT_LIMITS.close_timeout_s)
