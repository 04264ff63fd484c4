"""The option ``--serve FILE``: which models a head serves to programs that use the client ``tinker``.

--serve FILE ─▶ load_serving ─▶ ServingConfig ─▶ one of the head's services trains them, or the head does not begin
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from configs.errors import ConfigError
from supervisors.cli.command import EXIT_BAD_CONFIG, fail

if TYPE_CHECKING:
    from configs.services import ServicesConfig
    from configs.serving import ServingConfig


def served_by(file: Path, services: ServicesConfig | None) -> ServingConfig:
    """The serving file of a head that has ``services``.

    Raises:
        ConfigError: it is wrong, or there is no service that trains its models.
    """
    from configs.serving import load_serving, service_for

    require_client()
    serving = load_serving(file)
    if services is None:
        wrong = "is given, and no service that trains its models"
        raise ConfigError.of("--serve", "", wrong, "Add --services FILE")
    service_for(serving, services)
    check_tls(serving)
    return serving


def check_tls(serving: ServingConfig) -> None:
    """Raises ConfigError: the certificate and its key cannot be used."""
    from actors.host.https import server_tls

    try:
        server_tls(serving.tls_certificate, serving.tls_key)
    except OSError as error:
        raise ConfigError.of("serving", "tls_certificate, tls_key", str(error), "Name two PEM files") from error


def require_client() -> None:
    """End the command where the client's message types are not installed."""
    try:
        import tinker as _client  # pyright: ignore[reportMissingImports] - an optional extra  # noqa: F401
    except ImportError:
        fail("serving models needs the client's message types: pip install 'headrace[tinker]'", EXIT_BAD_CONFIG)
