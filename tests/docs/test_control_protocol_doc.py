"""The control protocol's page says what the code does, and its two clients run against a real server."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import get_type_hints

import pytest

from actors.control import protocol, verbs
from actors.control.errors import ERROR_TYPES
from actors.control.keys import allow_client, allow_read_only, load_control_keys, make_client
from actors.control.server import ControlServer
from actors.control.socket import for_this_machine, open_control_socket
from configs.limits import DEFAULT_LIMITS
from tests.actors.control.control_fakes import FakeBackend
from transport.zmq.security import generate_keys, write_keys

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docs" / "examples"
PAGE = (ROOT / "docs" / "control_protocol.md").read_text(encoding="utf-8")
NPM_PACKAGES = ("zeromq@6", "@msgpack/msgpack@3")


@pytest.mark.parametrize("name", ["control_client.py", "control_client.mjs"])
def test_the_page_holds_the_example_files_word_for_word(name: str) -> None:
    assert (EXAMPLES / name).read_text(encoding="utf-8").rstrip("\n") in PAGE


def test_the_page_names_the_version_every_verb_and_every_argument() -> None:
    assert f"version {protocol.VERSION}" in PAGE.splitlines()[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", _section("Verbs"), re.MULTILINE))
    assert list(rows) == list(verbs.VERBS)
    for op, kind in verbs.VERBS.items():
        assert set(re.findall(r"`(\w+)\??`", rows[op])) == set(kind.__struct_fields__), op


def test_the_page_says_which_verbs_change_something() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \|.*\| (yes|no) \|$", _section("Verbs"), re.MULTILINE))
    assert {op: said == "yes" for op, said in rows.items()} == {op: kind.writes for op, kind in verbs.VERBS.items()}


def test_the_page_names_every_error_type_and_every_request_key() -> None:
    assert set(re.findall(r"^\| `(\w+)`", _section("Errors"), re.MULTILINE)) == set(ERROR_TYPES)
    keys = set(re.findall(r"^\| `(\w+)`", _section("Request and reply"), re.MULTILINE))
    assert keys == set(get_type_hints(protocol.Request))


def _section(title: str) -> str:
    return PAGE.split(f"## {title}\n")[1].split("\n## ")[0]


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


@pytest.fixture
async def server(backend: FakeBackend, tmp_path: Path) -> AsyncIterator[ControlServer]:
    server = ControlServer(
        backend, open_control_socket(f"ipc://{tmp_path}/c.sock", DEFAULT_LIMITS), limits=DEFAULT_LIMITS
    )
    await server.start()
    yield server
    await server.stop()


async def _run(*command: str, keys: Path | None = None) -> tuple[int, list[str], str]:
    process = await asyncio.create_subprocess_exec(
        *command,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | ({"HEADRACE_CONTROL_KEYS": str(keys)} if keys else {}),
    )
    async with asyncio.timeout(60):
        out, err = await process.communicate()
    return process.returncode or 0, out.decode().splitlines(), err.decode()


@pytest.fixture
async def keyed(backend: FakeBackend, tmp_path: Path) -> AsyncIterator[ControlServer]:
    """A server on all interfaces; ``alice`` and ``bob`` beside it are the keys of an operator and of a reader."""
    write_keys(generate_keys(), tmp_path / "control")
    allow_client(tmp_path / "control", "alice", make_client(tmp_path / "alice").public)
    allow_read_only(tmp_path / "control", "bob", make_client(tmp_path / "bob").public)
    keys = load_control_keys(tmp_path / "control")
    open_socket = open_control_socket("tcp://0.0.0.0:*", DEFAULT_LIMITS, keys=keys)
    server = ControlServer(backend, open_socket, limits=DEFAULT_LIMITS)
    await server.start()
    yield server
    await server.stop()


async def _tour_with_keys(server: ControlServer, backend: FakeBackend, home: Path, *client: str) -> None:
    endpoint = for_this_machine(server.endpoint)
    code, out, err = await _run(*client, endpoint, "scale", '{"workers": 2}', keys=home / "alice")
    assert (code, json.loads(out[0])["workers"]) == (0, 2), err
    code, out, err = await _run(*client, endpoint, keys=home / "bob")
    assert (code, json.loads(out[0])["jobs"][0]["job"]) == (0, "demo"), err
    code, _, err = await _run(*client, endpoint, "scale", '{"workers": 9}', keys=home / "bob")
    assert (code, "read_only" in err) == (1, True), err
    assert backend.calls == [("scale", 2)]


async def _tour(server: ControlServer, backend: FakeBackend, *client: str) -> None:
    """The same acts, whatever the language."""
    code, out, err = await _run(*client, server.endpoint)
    assert code == 0, err
    seen = json.loads(out[0])
    assert seen["jobs"][0]["job"] == "demo"
    assert {row["name"] for row in seen["tree"]} == {"scheduler.demo", "rollout-0"}
    code, out, err = await _run(*client, server.endpoint, "scale", '{"workers": 4}')
    assert (code, json.loads(out[0])["workers"]) == (0, 4)
    assert backend.calls == [("scale", 4)]
    code, _, err = await _run(*client, server.endpoint, "scael")
    assert code == 1
    assert "unknown_op" in err
    assert "scale" in err
    for step in range(200):  # three windows' worth: it ends only if the client grants credit
        backend.events.put_nowait({"kind": "step", "step": step})
    backend.events.put_nowait(None)
    code, out, err = await _run(*client, server.endpoint, "watch")
    assert code == 0, err
    assert [json.loads(line)["step"] for line in out] == list(range(200))


async def test_the_python_client_does_what_ctl_does(server: ControlServer, backend: FakeBackend) -> None:
    await _tour(server, backend, sys.executable, str(EXAMPLES / "control_client.py"))


async def test_the_python_client_has_keys(keyed: ControlServer, backend: FakeBackend, tmp_path: Path) -> None:
    await _tour_with_keys(keyed, backend, tmp_path, sys.executable, str(EXAMPLES / "control_client.py"))


async def test_the_javascript_client_has_keys(keyed: ControlServer, backend: FakeBackend, tmp_path: Path) -> None:
    await _tour_with_keys(keyed, backend, tmp_path, "node", str(_javascript_client()))


def test_the_python_client_uses_nothing_of_ours() -> None:
    imports = re.findall(r"^(?:import|from) (\w+)", (EXAMPLES / "control_client.py").read_text(), re.MULTILINE)
    assert set(imports) == {"itertools", "json", "os", "pathlib", "sys", "msgpack", "zmq"}


async def test_the_javascript_client_does_what_ctl_does(server: ControlServer, backend: FakeBackend) -> None:
    await _tour(server, backend, "node", str(_javascript_client()))


def _javascript_client() -> Path:
    """The example beside its npm packages, which are installed once and kept under build/."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("node and npm are not installed")
    home = ROOT / "build" / "control_client_js"
    if not (home / "node_modules" / "zeromq").is_dir() or not (home / "node_modules" / "@msgpack").is_dir():
        home.mkdir(parents=True, exist_ok=True)
        (home / "package.json").write_text('{"private": true}\n')
        command = ["npm", "install", "--no-audit", "--no-fund", "--silent", *NPM_PACKAGES]
        try:
            done = subprocess.run(command, cwd=home, capture_output=True, text=True, timeout=90, check=False)
        except subprocess.TimeoutExpired:
            pytest.skip("npm took more than 90 s: is a registry reachable?")
        if done.returncode != 0:
            pytest.skip(f"npm could not install {' '.join(NPM_PACKAGES)}: {done.stderr.strip()[-300:]}")
    copy = home / "control_client.mjs"
    shutil.copyfile(EXAMPLES / "control_client.mjs", copy)
    return copy
