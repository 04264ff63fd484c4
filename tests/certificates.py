"""Certificates for tests: an authority of one's own, and what it has signed."""

from __future__ import annotations

import subprocess
from pathlib import Path

_NEW = ["openssl", "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]


def make_authority(directory: Path) -> tuple[Path, Path, Path]:
    """An authority's certificate, and the certificate and key of 127.0.0.1 that it has signed."""
    names = ("authority.pem", "authority.key", "server.pem", "server.key")
    authority, authority_key, certificate, key = (directory / name for name in names)
    _run(
        "-x509", "-nodes", "-subj", "/CN=authority", "-days", "2", "-keyout", str(authority_key), "-out", str(authority)
    )
    _run(
        *("-x509", "-nodes", "-subj", "/CN=server", "-days", "2", "-keyout", str(key), "-out", str(certificate)),
        *("-CA", str(authority), "-CAkey", str(authority_key), "-addext", "subjectAltName=IP:127.0.0.1"),
        *("-addext", "basicConstraints=critical,CA:FALSE"),
    )
    return authority, certificate, key


def with_password(directory: Path) -> tuple[Path, Path]:
    """A certificate, and its key under a password."""
    certificate, key = directory / "locked.pem", directory / "locked.key"
    _run("-x509", "-passout", "pass:word", "-subj", "/CN=server", "-keyout", str(key), "-out", str(certificate))
    return certificate, key


def _run(*words: str) -> None:
    subprocess.run([*_NEW, *words], check=True, capture_output=True, timeout=30)
