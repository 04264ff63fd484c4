"""``headrace keys`` for a server of models, and what ``headrace serve`` refuses before anything begins."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from actors.tinker.errors import Problem
from actors.tinker.keys import TenantKeys
from supervisors.cli.app import app
from tests.certificates import make_authority


def keys(directory: Path, *words: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["keys", str(directory), *words])
    return result.exit_code, result.stdout.strip(), result.stderr


def test_a_key_is_printed_and_revoked_by_what_is_said_of_it(tmp_path: Path) -> None:
    server = TenantKeys.of_directory(tmp_path)
    code, key, said = keys(tmp_path, "--tenant", "alice", "--days", "7")
    assert code == 0
    assert server.tenant(key) == "alice"
    assert keys(tmp_path, "--revoke", said.split()[-1])[0] == 0
    with pytest.raises(Problem, match="was revoked"):
        server.tenant(key)
    _, again, _ = keys(tmp_path, "--tenant", "alice")
    code, _, said = keys(tmp_path, "--revoke", "alice")
    assert (code, said) == (0, "void: all keys so far of alice\n")
    with pytest.raises(Problem, match="was revoked"):
        server.tenant(again)


def test_keys_that_cannot_be_made_are_refused_in_a_sentence(tmp_path: Path) -> None:
    code, _, said = keys(tmp_path, "--tenant", "alice")
    assert code == 2
    assert f"{tmp_path} holds no tinker.key: name the --dir of headrace serve" in said
    assert list(tmp_path.iterdir()) == [], "no server there ever had such keys"
    TenantKeys.of_directory(tmp_path)
    for words, says in (
        (("--tenant", "Alice B"), "is no name of a tenant"),
        (("--revoke", "nothing at all"), "is no key, no id of a key such as alice-3f9a1c2b, and no name of a tenant"),
        (("--tenant", "alice", "--revoke", "alice"), "use one of both"),
        (("--days", "3"), "use one of both"),
        (("--revoke", "alice", "--days", "3"), "use one of both"),
        (("--tenant", "alice", "--allow", "a=b"), "use one of both"),
        (("--tenant", "alice", "--days", "0"), "Usage: headrace keys"),
    ):
        code, _, said = keys(tmp_path, *words)
        assert code == 2
        assert says in said


def test_a_server_that_others_could_overhear_does_not_begin(tmp_path: Path) -> None:
    pytest.importorskip("tinker")
    authority, certificate, key = make_authority(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "vocab_size": 9, "max_position_embeddings": 32}')
    (tmp_path / "tenants.yaml").write_text("tenants: [{name: alice, models: 0}]")
    for words, says in (
        (("--listen", "0.0.0.0:0"), "host: 0.0.0.0 can be reached from other machines, and there is no TLS"),
        (("--listen", "0.0.0.0:0"), "pass --tls and --tls-key; or listen at 127.0.0.1"),
        (("--tenant", "Alice B"), "--tenant: 'Alice B' is no name of a tenant. Use 1 to 32 of a-z, 0-9 and _"),
        (("--listen", "8900"), "--listen 8900: is no address to listen at: expected HOST:PORT"),
        (("--tls", str(certificate)), "tls_key: is missing"),
        (("--tls", str(tmp_path / "none.pem"), "--tls-key", str(key)), "none.pem is no file"),
        (("--tls", str(authority), "--tls-key", str(key)), "the key belongs to another certificate"),
        (("--tenants", str(tmp_path / "tenants.yaml")), "tenants.yaml:1: tenants.0.models: 0 is not allowed"),
    ):
        model = f"base={tmp_path}"
        result = CliRunner().invoke(app, ["serve", "--model", model, "--dir", str(tmp_path / "served"), *words])
        assert result.exit_code == 2
        assert says in result.stderr
        assert not (tmp_path / "served").exists()
