"""What a server of HTTP speaks TLS with: each wrong file is named, and nobody is asked at the terminal."""

from __future__ import annotations

from pathlib import Path

import pytest

from actors.host.https import server_tls, server_url
from tests.certificates import make_authority, with_password
from transport.own_address import own_address


def test_files_that_are_no_certificate_and_its_key_are_named(tmp_path: Path) -> None:
    authority, certificate, key = make_authority(tmp_path)
    assert server_tls(str(certificate), str(key)) is not None
    assert server_tls(None, None) is None
    (tmp_path / "nothing.pem").write_text("nothing")
    locked = with_password(tmp_path)
    for one, other, says in (
        (tmp_path / "missing.pem", key, "No such file or directory: .*missing.pem"),
        (tmp_path, key, "Is a directory"),
        (tmp_path / "nothing.pem", key, "nothing.pem and .*server.key cannot be used"),
        (authority, key, "the key belongs to another certificate"),
        (*locked, "in PEM and without a password"),
    ):
        with pytest.raises(OSError, match=says):
            server_tls(str(one), str(other))


def test_a_url_is_one_that_others_can_call(tmp_path: Path) -> None:
    _, certificate, key = make_authority(tmp_path)
    tls = server_tls(str(certificate), str(key))
    assert server_url(None, "127.0.0.1", 8900) == "http://127.0.0.1:8900"
    assert server_url(tls, "::1", 8900) == "https://[::1]:8900"
    assert server_url(tls, "0.0.0.0", 8900) == f"https://{own_address()}:8900"
