"""A remote scorer on this machine, in a thread: it answers as a test says, and keeps what it was asked."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = tuple[int, bytes] | tuple[int, bytes, dict[str, str]]
Question = dict[str, Any]


def rewards(*values: object) -> Reply:
    """A reply as it should be."""
    return 200, json.dumps({"rewards": list(values)}).encode()


class Asked:
    """Holds where the server is, and the questions and headers that it got."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.questions: list[Question] = []
        self.headers: list[dict[str, str]] = []


@contextmanager
def scorer_server(answer: Callable[[Question], Reply]) -> Iterator[Asked]:
    """Serve at a free port until left."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.questions.append(question)
            asked.headers.append(dict(self.headers))
            status, body, *headers = answer(question)
            try:
                self.send_response(status)
                for name, value in (headers[0] if headers else {}).items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)
            except (BrokenPipeError, ConnectionResetError):
                return  # whoever asked has gone

        def log_message(self, *_: object, **__: object) -> None:
            """Tests print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    asked = Asked(f"http://127.0.0.1:{server.server_address[1]}/get_reward")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
