"""Where the gateway listens, its keys, and what it does when the address is not to be had."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import subprocess
from pathlib import Path

import aiohttp
import pytest

from actors.core.errors import StartFailed
from actors.gateway.listening import VARIABLE, open_listeners
from actors.gateway.service import CannotListen, tls_context
from actors.protocol.episodes import EpisodeName
from actors.protocol.session_keys import BadKey, SessionKeys, admin_key
from configs.checks.environment_checks import check_gateway
from configs.episode_schema import GatewayConfig
from tests.actors.gateway.gateway_world import NAME, gateway_world
from tests.smallest_job import smallest_job
from transport.own_address import own_address

EPISODES = {"environment": {"kind": "python", "path": "a:B"}, "reward": {}}


def make_certificate(directory: Path) -> tuple[Path, Path]:
    certificate, key = directory / "cert.pem", directory / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", str(key), "-out", str(certificate), "-days", "2", "-subj", "/CN=localhost"]
    subprocess.run([*command, "-addext", "subjectAltName=DNS:localhost"], check=True, capture_output=True, timeout=30)
    return certificate, key


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.9.9.9"])
def test_this_machine_may_be_listened_to_without_tls(host: str) -> None:
    assert tls_context(GatewayConfig(host=host)) is None


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "gpu.lab"])
def test_others_may_not_reach_it_without_tls(host: str) -> None:
    with pytest.raises(CannotListen, match=r"gateway.host: .* no TLS.*public_url"):
        tls_context(GatewayConfig(host=host))
    assert [field for field, *_ in check_gateway(smallest_job(gateway={"host": host}, **EPISODES))] == ["gateway.host"]
    assert check_gateway(smallest_job(gateway={"host": host})) == []  # it has no episodes, and so no gateway


@pytest.mark.parametrize(
    ("gateway", "field"),
    [
        ({"public_url": "https://lab.example/v1"}, "gateway.port"),
        ({"public_url": "lab.example/v1", "port": 7443}, "gateway.public_url"),
        ({"public_url": "https://lab.example", "port": 7443}, "gateway.public_url"),
    ],
)
def test_behind_a_proxy_the_port_and_the_base_url_must_be_told(gateway: dict, field: str) -> None:
    assert [where for where, *_ in check_gateway(smallest_job(gateway=gateway, **EPISODES))] == [field]
    right = {"public_url": "https://lab.example/v1", "port": 7443}
    assert check_gateway(smallest_job(gateway=right, **EPISODES)) == []


def test_a_certificate_without_its_key_or_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.pem").write_text("nothing")
    a = str(tmp_path / "a.pem")
    with pytest.raises(CannotListen, match=r"gateway.tls_key: is missing"):
        tls_context(GatewayConfig(tls_certificate=a))
    with pytest.raises(CannotListen, match=r"gateway.tls_key: .*b.pem is no file"):
        tls_context(GatewayConfig(tls_certificate=a, tls_key=str(tmp_path / "b.pem")))
    with pytest.raises(CannotListen, match=r"gateway.tls_certificate .*a.pem"):
        tls_context(GatewayConfig(tls_certificate=a, tls_key=a))


async def test_with_a_certificate_it_speaks_tls(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    tls = {"host": "127.0.0.1", "tls_certificate": str(certificate), "tls_key": str(key)}
    async with gateway_world(tmp_path / "run", gateway=tls) as world:
        world.begin()
        url = world.url.replace("127.0.0.1", "localhost")
        assert url.startswith("https://")
        trusted = ssl.create_default_context(cafile=str(certificate))
        async with aiohttp.ClientSession() as session:
            headers = {"Authorization": f"Bearer {world.key()}"}
            async with session.get(url + "/models", headers=headers, ssl=trusted) as answer:
                assert answer.status == 200


async def test_at_all_interfaces_it_tells_an_address_that_others_can_call(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    tls = {"host": "0.0.0.0", "tls_certificate": str(certificate), "tls_key": str(key)}
    async with gateway_world(tmp_path / "run", gateway=tls) as world:
        assert world.url.startswith(f"https://{own_address()}:")
        assert "0.0.0.0" not in world.url


async def test_a_port_that_is_taken_is_named_and_one_of_an_earlier_life_is_left_to_who_has_it(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        (tmp_path / "gateway.endpoint").write_text(f"http://127.0.0.1:{port}/v1\n")
        async with gateway_world(tmp_path) as world:
            assert f":{port}/" not in world.url
            assert world.scheduler.moves == 1  # agents of the earlier life may be talking to somebody else
            await world.restart_gateway()
            await world.restart_scheduler()
            assert world.scheduler.moves == 0
            assert (tmp_path / "gateway.endpoint").read_text() == world.url + "\n"
        with pytest.raises(StartFailed):
            async with gateway_world(tmp_path / "b", gateway={"port": port}):
                pass


async def test_it_listens_at_sockets_that_it_inherits_and_tells_that_it_has_moved_before_it_can_be_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        (tmp_path / "gateway.endpoint").write_text(f"http://127.0.0.1:{other.getsockname()[1]}/v1\n")
        held = open_listeners(GatewayConfig(), tmp_path)
        assert held.moved and not (tmp_path / "gateway.endpoint").exists()
        for moves in (1, 0):  # the second life has the address of the first
            numbers, told = held.for_child(tmp_path)
            monkeypatch.setenv(*next(iter(told.items())))
            monkeypatch.setenv(VARIABLE, told[VARIABLE].replace(str(numbers[0]), str(os.dup(numbers[0])), 1))
            async with gateway_world(tmp_path) as world:
                assert (world.url, world.scheduler.moves) == (f"http://127.0.0.1:{held.port}/v1", moves)
                world.begin()
                reply = await world.agent().chat.completions.create(
                    model="m", messages=[{"role": "user", "content": "x"}]
                )
                assert reply.choices
        held.close()


async def test_behind_a_proxy_it_tells_the_public_url(tmp_path: Path) -> None:
    async with gateway_world(tmp_path, gateway={"public_url": "https://lab.example/agents/v1"}) as world:
        assert (tmp_path / "gateway.endpoint").read_text() == "https://lab.example/agents/v1\n"
        assert world.url == "https://lab.example/agents/v1"


def test_the_admin_key_is_made_once_by_whoever_comes_first_and_read_by_nobody_else(tmp_path: Path) -> None:
    async def main() -> set[str]:
        return set(await asyncio.gather(*(asyncio.to_thread(admin_key, tmp_path) for _ in range(8))))

    (key,) = asyncio.run(main())
    assert os.listdir(tmp_path) == ["gateway.key"]
    assert (tmp_path / "gateway.key").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "gateway.key").read_text() == key + "\n" and len(key) > 40
    (tmp_path / "gateway.key").write_text("x\n")
    with pytest.raises(BadKey, match="remove it"):
        admin_key(tmp_path)


@pytest.mark.parametrize("job", ["j", "a-b.c-7", "hr-j-1"])
def test_a_session_key_names_its_episode_and_no_other(job: str) -> None:
    keys = SessionKeys("hr-admin-x", job)
    key = keys.sign(NAME)
    assert key.startswith(f"hr-{job}-3-7-1-1-")
    assert keys.read(key) == NAME
    for other in (key.replace("-3-7-", "-3-8-"), key[:-1] + "g", key.upper(), key + "0", "hr-" + key):
        with pytest.raises(BadKey):
            keys.read(other)
    assert keys.sign(EpisodeName(3, 7, 1, 2)) != key
    assert not keys.is_admin(key) and keys.is_admin("hr-admin-x")
