"""The little of HTTP that the console speaks, as pure functions: a request's head in, an answer's head out.

    GET /v/<view>/data HTTP/1.1 … ─▶ Request(path, query, host, cookie)        status, kind, body ─▶ bytes

Invariants
- Only GET. A body is never read: each answer closes its connection.
- A Host header that does not name this machine is refused, so that no foreign DNS name leads a browser here.
- Each answer forbids all that a page of ours does not need: other origins, frames, inline code, caches, referrers.
"""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from typing import Final
from urllib.parse import parse_qs, urlsplit

from transport.endpoints import names_loopback

COOKIE: Final = "headrace-console"
_POLICY: Final = "default-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
_ALWAYS: Final = {
    "Connection": "close",
    "Cache-Control": "no-store",
    "Content-Security-Policy": _POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class BadRequest(Exception):
    """The request is refused with a status and a sentence."""

    def __init__(self, status: HTTPStatus, why: str) -> None:
        super().__init__(why)
        self.status = status
        self.why = why


@dataclass(frozen=True, slots=True)
class Request:
    path: str
    query: dict[str, str]
    cookie: str
    """The secret that the browser was given; empty if it has none."""


def parse(head: bytes) -> Request:
    """A request from its head.

    Raises:
        BadRequest: ``head`` is no request, or one that the console does not answer.
    """
    first, *lines = head.decode("latin-1").split("\r\n")
    words = first.split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        raise BadRequest(HTTPStatus.BAD_REQUEST, "this is no HTTP/1.1 request")
    if words[0] != "GET":
        raise BadRequest(HTTPStatus.METHOD_NOT_ALLOWED, "the console can be read, and nothing else: use GET")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if not names_loopback(headers.get("host", "")):
        raise BadRequest(HTTPStatus.MISDIRECTED_REQUEST, "open the address that the command printed, on this machine")
    try:
        url = urlsplit(words[1])
        query = {name: values[-1] for name, values in parse_qs(url.query, max_num_fields=8).items()}
        cookies = SimpleCookie(headers.get("cookie", ""))
    except (ValueError, CookieError) as error:
        raise BadRequest(HTTPStatus.BAD_REQUEST, "its address or its cookie cannot be read") from error
    return Request(url.path, query, cookies[COOKIE].value if COOKIE in cookies else "")


def head_of(status: HTTPStatus, kind: str, size: int | None, more: dict[str, str] | None = None) -> bytes:
    """The head of an answer; without a size it is a stream that lasts as long as its connection."""
    headers = {"Content-Type": kind, **_ALWAYS, **(more or {})}
    if size is not None:
        headers["Content-Length"] = str(size)
    lines = [f"HTTP/1.1 {status.value} {status.phrase}", *(f"{name}: {value}" for name, value in headers.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def entrance(view: str, secret: str) -> tuple[bytes, dict[str, str]]:
    """The page that a token opens, and its headers: they give the secret to the browser and lead on to the console.

    A redirect would not do: a browser that was led here by another program would not send the cookie along. The cookie
    belongs to a path that nobody else knows, since browsers give cookies of a host to each of its ports.
    """
    onward = f'<meta http-equiv="refresh" content="0; url=/v/{view}/">'
    page = f'<!doctype html><meta charset="utf-8"><title>Headrace</title>{onward}'
    return page.encode(), {"Set-Cookie": f"{COOKIE}={secret}; Path=/v/{view}/; HttpOnly; SameSite=Strict"}
