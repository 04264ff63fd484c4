"""A gateway that a test plays: an OpenAI-style endpoint whose answers are a function of what it is asked.

It can be away for a while, cut answers off, spend budgets and send white space, as the real one may.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self, cast

Question = dict[str, Any]
Say = Callable[[Question], "str | Question | Refusal"]


class Refusal(Exception):
    """A test's answer that is an error."""

    def __init__(self, status: int, code: str = "", param: str = "") -> None:
        super().__init__(f"status {status} {code} {param}")
        self.status, self.code, self.param = status, code, param

    @property
    def body(self) -> bytes:
        error = {"message": f"played: {self.code}", "type": "played", "code": self.code, "param": self.param}
        return json.dumps({"error": error}).encode()


SPENT = Refusal(400, "budget_spent", "turns")


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """A child that is killed hangs up."""


class PlayedGateway:
    """``say`` gives the model's message, or its text, or a Refusal. ``with`` starts and stops it."""

    def __init__(self, say: Say, port: int = 0) -> None:
        self.asked: list[tuple[str, Question]] = []
        """Key and question of each request."""
        played = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                played.asked.append((self.headers["Authorization"].removeprefix("Bearer "), question))
                try:
                    said = say(question)
                except Refusal as refusal:
                    said = refusal
                if isinstance(said, Refusal):
                    self._send(said.status, said.body)
                    return
                answer = {"role": "assistant", "content": said} if isinstance(said, str) else said
                body = {"id": "1", "object": "chat.completion", "created": 0, "model": "m",
                        "choices": [{"index": 0, "finish_reason": "stop", "message": answer}]}  # fmt: skip
                self._send(200, b"  \n " + json.dumps(body).encode())

            def _send(self, status: int, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (the base names it so)
                """A test prints nothing."""

        self._server = _Server(("127.0.0.1", port), Handler)
        self._server.daemon_threads = True

    @property
    def port(self) -> int:
        return cast(int, self._server.server_address[1])

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
