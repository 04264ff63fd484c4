"""How a server of HTTP speaks TLS, and what its address is called."""

from __future__ import annotations

import ssl
from pathlib import Path

from transport.own_address import own_address


def server_tls(certificate: str | None, key: str | None) -> ssl.SSLContext | None:
    """What a server listens with that has the PEM files ``certificate`` and ``key``; None if it has none.

    Raises:
        OSError: one cannot be read, or they are no certificate and its key; the text says which.
    """
    if certificate is None or key is None:
        return None
    paths = [Path(file).expanduser() for file in (certificate, key)]
    for path in paths:
        path.read_bytes()  # the error of what follows names no file
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(*paths, password=lambda: "")  # without one it asks at the terminal
    except ssl.SSLError as error:
        why = "the key belongs to another certificate" if error.reason == "KEY_VALUES_MISMATCH" else str(error)
        needed = "expected a certificate and its key, in PEM and without a password"
        raise OSError(f"{paths[0]} and {paths[1]} cannot be used ({why}): {needed}") from error
    return context


def server_url(tls: ssl.SSLContext | None, host: str, port: int) -> str:
    """The URL of a server that listens at ``host``, as others reach it: with this machine's address where that is all
    interfaces.
    """
    everywhere = host in ("0.0.0.0", "::")  # noqa: S104 (compared, not listened at)
    shown = own_address(also_v6=host == "::") if everywhere else f"[{host}]" if ":" in host else host
    return f"{'https' if tls else 'http'}://{shown}:{port}"
