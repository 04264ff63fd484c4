"""The server answers browsers of this machine that know the token, and nobody else; it can be read, not written."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from typer.testing import CliRunner

from configs.limits import DEFAULT_LIMITS, Limits
from supervisors.cli.app import app
from supervisors.cli.console.feed import Feed
from supervisors.cli.console.http_text import BadRequest, parse
from supervisors.cli.console.run_files import RunFiles
from supervisors.cli.console.server import ConsoleServer
from tests.supervisors.cli.console.recorded_run import STEPS, record, row, write_lines

PATIENCE_S = 20.0


@dataclass
class Browser:
    """It speaks to a server, with the cookie that it was given."""

    server: ConsoleServer
    feed: Feed
    cookie: str = ""
    place: str = "/"

    @asynccontextmanager
    async def connection(self, words: bytes) -> AsyncIterator[asyncio.StreamReader]:
        url = urlsplit(self.server.url)
        reader, writer = await asyncio.open_connection(url.hostname, url.port)
        try:
            writer.write(words)
            async with asyncio.timeout(PATIENCE_S):
                yield reader
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    @asynccontextmanager
    async def open_feed(self) -> AsyncIterator[asyncio.StreamReader]:
        async with self.connection(self.request(f"{self.place}feed")) as reader:
            assert b"text/event-stream" in await reader.readuntil(b"\r\n\r\n")
            yield reader

    async def ask(self, path: str, **more: str) -> tuple[int, dict[str, str], str]:
        """Status, headers and body; ``more`` overrides method, host and cookie."""
        async with self.connection(self.request(path, **more)) as reader:
            head, _, body = (await reader.read()).decode().partition("\r\n\r\n")
        first, *lines = head.split("\r\n")
        return int(first.split()[1]), dict(line.split(": ", 1) for line in lines), body

    def request(self, path: str, method: str = "GET", host: str = "127.0.0.1:1", cookie: str | None = None) -> bytes:
        known = self.cookie if cookie is None else cookie
        return f"{method} {path} HTTP/1.1\r\nHost: {host}\r\nCookie: a=b; {known}\r\n\r\n".encode()

    async def enter(self) -> None:
        """Use the token as a person does who opens the printed address."""
        url = urlsplit(self.server.url)
        status, headers, page = await self.ask(f"{url.path}?{url.query}")
        assert status == 200
        self.cookie = headers["Set-Cookie"].split(";")[0]
        found = re.search(r"url=(/v/[^\"]+/)", page)
        assert found is not None
        self.place = found[1]


@asynccontextmanager
async def browser(run_dir: Path, limits: Limits = DEFAULT_LIMITS) -> AsyncIterator[Browser]:
    feed = Feed(RunFiles(run_dir, limits), limits)
    server = ConsoleServer(feed, limits)
    await server.start("127.0.0.1", 0)
    try:
        yield Browser(server, feed)
    finally:
        await server.stop()


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return record(tmp_path / "demo", state="running")


async def test_the_token_opens_the_page_and_a_cookie_what_belongs_to_it(run_dir: Path) -> None:
    async with browser(run_dir) as user:
        await user.enter()
        status, headers, page = await user.ask(user.place)
        assert status == 200 and "<title>Headrace</title>" in page
        assert (
            "default-src 'self'" in headers["Content-Security-Policy"] and headers["Referrer-Policy"] == "no-referrer"
        )
        assert (await user.ask(f"{user.place}app.js"))[1]["Content-Type"].startswith("text/javascript")
        data = json.loads((await user.ask(f"{user.place}data"))[2])
        assert data["head"]["job"] == "demo" and len(data["rows"]["rows"]) == STEPS
        samples = json.loads((await user.ask(f"{user.place}samples?step=11"))[2])
        assert [sample["chosen"] for sample in samples] == ["random", "dropped"]
        assert json.loads((await user.ask(f"{user.place}samples?step=5"))[2]) == []


async def test_the_cookie_cannot_be_read_by_scripts_nor_sent_by_other_sites_or_to_other_ports(run_dir: Path) -> None:
    async with browser(run_dir) as user:
        url = urlsplit(user.server.url)
        _, headers, _ = await user.ask(f"/?{url.query}")
        cookie = headers["Set-Cookie"]
        assert "HttpOnly" in cookie and "SameSite=Strict" in cookie
        assert re.search(r"Path=/v/[\w-]{12}/", cookie), "a path that no other port of this host is asked for"
        assert url.query.split("=")[1] not in cookie


@pytest.mark.parametrize(
    "path", ["/", "/?token=", "/?token=guess", "/v/x/data", "{place}data", "{place}feed", "{place}"]
)
async def test_whoever_has_no_token_gets_nothing_of_the_run(run_dir: Path, path: str) -> None:
    async with browser(run_dir) as user:
        await user.enter()
        for cookie in ("", "headrace-console=guess"):
            status, _, body = await user.ask(path.format(place=user.place), cookie=cookie)
            assert status == 403 and "headrace console printed" in body and "demo" not in body


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:1", "127.0.0.1.evil.example", "10.0.0.1", "", "[::2]:1"]
)
async def test_a_name_that_is_not_this_machine_is_refused(run_dir: Path, host: str) -> None:
    """A page elsewhere can have its name resolve to 127.0.0.1, and would then be of the console's origin."""
    async with browser(run_dir) as user:
        await user.enter()
        assert (await user.ask(f"{user.place}data", host=host))[0] == 421


@pytest.mark.parametrize("host", ["localhost:9000", "127.0.0.1", "[::1]:8642"])
async def test_this_machine_may_have_any_port_so_that_a_tunnel_works(run_dir: Path, host: str) -> None:
    async with browser(run_dir) as user:
        await user.enter()
        assert (await user.ask(f"{user.place}data", host=host))[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH", "CONNECT"])
async def test_it_can_be_read_and_nothing_else(run_dir: Path, method: str) -> None:
    async with browser(run_dir) as user:
        await user.enter()
        status, headers, _ = await user.ask(f"{user.place}data", method=method)
        assert status == 405 and headers["Allow"] == "GET"


async def test_paths_that_are_not_there_are_not_looked_for_on_the_disk(run_dir: Path) -> None:
    async with browser(run_dir) as user:
        await user.enter()
        for name in ("../server.py", "nothing", "%2e%2e/server.py", "page/app.js", "samples/"):
            assert (await user.ask(user.place + name))[0] == 404
        for step in ("", "x", "-1", "1" * 30, "²"):
            assert (await user.ask(f"{user.place}samples?step={step.encode().decode('latin-1')}"))[0] == 400


async def test_what_is_no_request_is_answered_or_hung_up_on(run_dir: Path) -> None:
    async with browser(run_dir, Limits(console_request_bytes=512, console_timeout_s=0.2)) as user:
        for words in (
            b"nonsense\r\n\r\n",
            b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 5000,
            b"GET / HT",
            b"\x00\xff\r\n\r\n",
        ):
            async with user.connection(words) as reader:
                with suppress(ConnectionResetError):
                    answer = await reader.read()
                    assert answer == b"" or answer.startswith(b"HTTP/1.1 4")


def test_a_head_that_cannot_be_parsed_is_refused() -> None:
    for head in (b"GET http://[x/ HTTP/1.1\r\nHost: 127.0.0.1", b"GET /", b"", b"GET / FTP/1\r\nHost: 127.0.0.1"):
        with pytest.raises(BadRequest):
            parse(head)


async def test_no_more_clients_than_the_limit(run_dir: Path) -> None:
    async with browser(run_dir, Limits(console_clients=2)) as user:
        await user.enter()
        async with user.open_feed(), AsyncExitStack() as first:
            await first.enter_async_context(user.open_feed())
            status, _, body = await user.ask(f"{user.place}data")
            assert status == 503 and "close one" in body
            await first.aclose()
            async with asyncio.timeout(PATIENCE_S):
                while (await user.ask(f"{user.place}data"))[0] == 503:
                    user.feed.changed("rows")  # the server learns of it with its next write
                    await asyncio.sleep(0.01)


async def next_event(reader: asyncio.StreamReader) -> tuple[str, Any]:
    async with asyncio.timeout(PATIENCE_S):
        name, data = (await reader.readuntil(b"\n\n")).decode().strip().split("\n")
    return name.removeprefix("event: "), json.loads(data.removeprefix("data: "))


async def test_the_feed_gives_everything_then_what_changes_and_says_that_it_lives(run_dir: Path) -> None:
    async with browser(run_dir, Limits(console_alive_s=0.2)) as user:
        await user.enter()
        async with user.open_feed() as reader:
            first = [await next_event(reader) for _ in range(9)]
            assert {name for name, _ in first} == {
                "head",
                "rows",
                "evaluations",
                "lanes",
                "workers",
                "devices",
                "samples",
                "stalls",
                "events",
            }
            write_lines(run_dir / "metrics.jsonl", [row(STEPS)])
            assert user.feed.files is not None
            user.feed.changed(*user.feed.files.look())
            name, data = await next_event(reader)
            assert name == "rows" and not data["reset"] and data["rows"][0][0] == STEPS
            assert (await next_event(reader))[0] == "head"
            assert await next_event(reader) == ("alive", None)


# ------------------------------------------------------------ the command


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["{tmp}"], "is no run directory: it has no job.yaml"),
        (["{tmp}/nothing"], "is no directory, and no endpoint"),
        (["{run}", "--listen", "0.0.0.0:8642"], "ssh -L 8642:127.0.0.1:8642 HOST"),
        (["{run}", "--listen", "example.org:0"], "other machines could connect"),
        (["{run}", "--listen", "8642"], "expected HOST:PORT"),
        (["{run}", "--listen", "127.0.0.1:99999"], "expected HOST:PORT"),
        (["{run}", "--keys", "{tmp}/none"], "none"),
    ],
)
def test_what_cannot_be_shown_is_a_sentence(run_dir: Path, arguments: list[str], sentence: str) -> None:
    words = [word.format(tmp=run_dir.parent, run=run_dir) for word in arguments]
    result = CliRunner().invoke(app, ["console", *words])
    assert result.exit_code == 2 and sentence in result.stderr, result.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_prints_its_address_and_ends_cleanly(run_dir: Path, number: int) -> None:
    root = Path(__file__).parents[4]
    with subprocess.Popen(
        [sys.executable, str(root / "main.py"), "console", str(run_dir)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=root,
    ) as process:  # fmt: skip
        assert process.stdout is not None and process.stderr is not None
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/\?token=[\w-]{32}\n", process.stdout.readline())
        process.send_signal(number)
        assert process.wait(PATIENCE_S) == 0
        assert process.stderr.read() == ""
