"""Keys of tenants: signed, several at once, for a time, and void as soon as they are revoked."""

from __future__ import annotations

import pytest

from actors.tinker import keys as module
from actors.tinker.errors import Problem
from actors.tinker.keys import TenantKeys
from tests.actors.tinker.http_world import HttpWorld


def refused(keys: TenantKeys, key: str) -> str:
    with pytest.raises(Problem) as problem:
        keys.tenant(key)
    assert problem.value.status == 401
    return str(problem.value)


def test_a_key_is_its_tenants_and_nobody_makes_one(tmp_path):
    keys = TenantKeys.of_directory(tmp_path)
    key = keys.sign("alice")
    assert key.startswith("tml-")
    assert TenantKeys.of_directory(tmp_path).tenant(key) == "alice"
    assert TenantKeys.of_directory(tmp_path).sign("alice") == key, "it is the same at each start"
    _, tenant, one, expires, signature = key.split("-")
    for wrong in (
        "",
        "tml-",
        key[4:],
        key[:-1],
        key + "0",
        f"{key}\n",
        f"tml-bob-{one}-{expires}-{signature}",
        f"tml-{tenant}-00000000-{expires}-{signature}",
        f"tml-{tenant}-{one}-ffffffff-{signature}",
        f"tml-{tenant}-{signature}",
        f"tml--{one}-{expires}-{signature}",
        "tml-ålice-0",
        "tml-a-b",
    ):
        assert "none of this server's" in refused(keys, wrong)
    with pytest.raises(ValueError, match="no name of a tenant"):
        keys.sign("../alice")


def test_keys_of_one_tenant_are_alive_side_by_side_and_one_is_revoked_alone(tmp_path):
    keys = TenantKeys.of_directory(tmp_path)
    server = TenantKeys.of_directory(tmp_path)
    first, second, others = keys.new("alice"), keys.new("alice"), keys.new("bob")
    assert len({first, second, keys.sign("alice")}) == 3
    assert keys.revoke(first) == "alice-" + first.split("-")[2]
    assert "was revoked" in refused(server, first)
    assert server.tenant(second) == server.tenant(keys.sign("alice")) == "alice"
    assert keys.revoke("alice-" + second.split("-")[2])
    assert "was revoked" in refused(server, second)
    assert server.tenant(others) == "bob"


def test_all_keys_of_a_tenant_are_revoked_and_those_made_later_are_good(tmp_path):
    keys, server = TenantKeys.of_directory(tmp_path), TenantKeys.of_directory(tmp_path)
    before = [keys.sign("alice"), keys.new("alice"), keys.new("alice", days=1)]
    others = keys.new("bob")
    keys.revoke("alice")
    assert all("was revoked" in refused(server, key) for key in before)
    assert server.tenant(others) == "bob"
    later = [keys.sign("alice"), keys.new("alice")]
    assert [server.tenant(key) for key in later] == ["alice", "alice"]
    keys.revoke("alice")
    assert all("was revoked" in refused(server, key) for key in (*before, *later))


def test_the_key_that_is_shown_at_a_start_is_another_one_once_it_was_revoked(tmp_path):
    keys = TenantKeys.of_directory(tmp_path)
    shown = keys.sign("alice")
    keys.revoke(shown)
    again = TenantKeys.of_directory(tmp_path).sign("alice")
    assert again != shown
    assert keys.tenant(again) == "alice"


def test_a_key_for_some_days_is_void_after_them(tmp_path, monkeypatch):
    keys, now_s = TenantKeys.of_directory(tmp_path), 1_800_000_000.0
    monkeypatch.setattr(module, "time_of_day_s", lambda: now_s)
    key, for_ever = keys.new("alice", days=7), keys.new("alice")
    now_s += 7 * 86400 - 1
    assert keys.tenant(key) == "alice"
    now_s += 1
    assert "is over" in refused(keys, key)
    assert keys.tenant(for_ever) == "alice"


def test_what_is_no_key_and_no_tenant_is_not_revoked(tmp_path):
    keys = TenantKeys.of_directory(tmp_path)
    for wrong in ("", "Alice", "alice-", "alice-xyz", "alice-123", "a b", "tml-alice-1-2-3", "alice\nbob", "../alice"):
        with pytest.raises(ValueError, match="is no key"):
            keys.revoke(wrong)
    assert not (tmp_path / "tinker.revoked").exists()


def test_what_was_void_stays_void_while_the_file_cannot_be_read(tmp_path):
    keys = TenantKeys.of_directory(tmp_path)
    key = keys.new("alice")
    keys.revoke(key)
    (tmp_path / "tinker.revoked").unlink()
    (tmp_path / "tinker.revoked").mkdir()  # reading it is an error, also for root
    assert "was revoked" in refused(keys, key)
    with pytest.raises(OSError, match=r"tinker\.revoked"):
        TenantKeys.of_directory(tmp_path)


async def test_a_running_server_refuses_a_revoked_key_at_its_next_request_and_tells_of_it(tmp_path):
    async with HttpWorld(tmp_path) as world:
        key = TenantKeys.of_directory(tmp_path).new("alice")
        async with world.client() as client:

            async def asked(key: str) -> tuple[int, str]:
                async with client.post("create_session", json={}, headers={"X-API-Key": key}) as response:
                    return response.status, await response.text()

            assert (await asked(key))[0] != 401
            TenantKeys.of_directory(tmp_path).revoke(key)
            status, said = await asked(key)
            assert status == 401
            assert "was revoked" in said
            assert (await asked(world.key()))[0] != 401
            assert world.server.service.events.keys_refused == 1
