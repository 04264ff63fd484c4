"""An environment on an OpenEnv server: one WebSocket per session, and one session per episode.

    {"type": "reset", "data": {…}}       ─▶ {"type": "observation", "data": {"observation", "reward", "done"}}
    {"type": "step", "data": {FIELD: the model's text}} ─▶ the same      {"type": "error", "data": {"message", "code"}}

The model's text is one field of the action, and the model reads one field of the observation or, if none is named, all
of it as JSON. We speak the server's protocol ourselves, since its library pins versions that clash with ours.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, cast

from actors.environments.episodes.errors import EnvironmentBroken, EnvironmentRefused, ToolServerDied
from configs.limits import DEFAULT_LIMITS

_FULL = "CAPACITY_REACHED"


class OpenEnv:
    """An ``OpenEnv`` holds one session with the server, and plays one episode in it.

    ``action``: field of the action that takes the model's text. ``observation``: field that the model reads; empty: all
    of it. ``reset``: columns of the row that go along with the reset, such as ``seed``.
    """

    def __init__(self, url: str, action: str = "message", observation: str = "", reset: Sequence[str] = ()) -> None:
        """Raises EnvironmentRefused: ``environment.url`` is no OpenEnv server; ToolServerDied: nobody answers there."""
        if not url.startswith(("http://", "https://", "ws://", "wss://")):
            raise EnvironmentRefused(f"environment.url is {url!r}; name the server as http://host:port")
        self._url = f"ws{url.removeprefix('http').removeprefix('ws').rstrip('/')}/ws"
        self._action, self._observation, self._columns = action, observation, reset
        self._open = ExitStack()
        self._socket = self._connected()

    def _connected(self) -> Any:
        from websockets.exceptions import InvalidHandshake, InvalidURI
        from websockets.sync.client import connect

        try:
            opening = connect(
                self._url, open_timeout=DEFAULT_LIMITS.connect_timeout_s, max_size=DEFAULT_LIMITS.tool_answer_bytes
            )
            return self._open.enter_context(opening)
        except (InvalidHandshake, InvalidURI) as error:
            raise EnvironmentRefused(f"environment.url: {self._url} is no OpenEnv server: {error}") from error
        except (OSError, TimeoutError) as error:
            raise ToolServerDied(f"environment.url: nobody answers at {self._url}: {error}") from error

    def reset(self, row: dict[str, Any]) -> str:
        pause_s = DEFAULT_LIMITS.backoff_first_s
        wanted = {"type": "reset", "data": {name: row[name] for name in self._columns}}
        while (answer := self._ask(wanted)) is None:  # full: wait until other sessions end, at most the episode's time
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, DEFAULT_LIMITS.backoff_max_s)
            self._socket = self._connected()
        return self._text(answer)

    def step(self, answer: str) -> tuple[str, float, bool]:
        told = self._ask({"type": "step", "data": {self._action: answer}})
        if told is None:
            raise ToolServerDied("the OpenEnv server has ended the session")
        return self._text(told) or "…", float(told.get("reward") or 0.0), bool(told.get("done"))

    def _ask(self, question: dict[str, Any]) -> dict[str, Any] | None:
        """The answer; None: the server has no room for another session.

        Raises:
            ToolServerDied: the server has hung up.
            EnvironmentBroken: the server refuses the question; the message quotes its own.
        """
        from websockets.exceptions import ConnectionClosed

        try:
            self._socket.send(json.dumps(question))
            said = cast("dict[str, Any]", json.loads(self._socket.recv()))
        except (ConnectionClosed, OSError) as error:
            raise ToolServerDied(f"the OpenEnv server at {self._url} has hung up: {error}") from error
        data = cast("dict[str, Any]", said.get("data") or {})
        if said.get("type") != "error":
            return data
        if data.get("code") == _FULL:
            self._open.close()
            return None
        raise EnvironmentBroken(f"the OpenEnv server refuses {question['type']}: {data.get('message')}")

    def _text(self, told: dict[str, Any]) -> str:
        observation = cast("dict[str, Any]", told.get("observation") or {})
        if not self._observation:
            return json.dumps({name: value for name, value in observation.items() if name not in ("done", "reward")})
        if self._observation not in observation:
            there = ", ".join(sorted(observation))
            raise EnvironmentBroken(f"environment.options.observation: {self._observation!r} is not among {there}")
        return str(observation[self._observation])

    def close(self) -> None:
        self._open.close()
