"""Where the gateway may listen: on this machine, or to others with TLS."""

from __future__ import annotations

import ipaddress
from pathlib import Path

from configs.episode_schema import GatewayConfig
from configs.schema import JobConfig

Found = tuple[str, str, str]
"""(field, what is wrong, what to do)."""


def check_gateway(job: JobConfig) -> list[Found]:
    """Problems of ``gateway``, where the job has one."""
    return [*why_not_listen(job.gateway), *_check_public_url(job.gateway)] if job.has_episodes else []


def _check_public_url(gateway: GatewayConfig) -> list[Found]:
    url = gateway.public_url
    if url is None:
        return []
    if not url.startswith(("http://", "https://")) or not url.endswith("/v1"):
        return [("gateway.public_url", f"{url} is no base URL of agents", "Write it as https://HOST/v1")]
    if not gateway.port:
        wrong = "is 0, any free port, and a proxy (gateway.public_url) has to find each life of the gateway"
        return [("gateway.port", wrong, "Set the port that the proxy passes on to")]
    return []


def why_not_listen(gateway: GatewayConfig) -> list[Found]:
    """What forbids to listen as it says."""
    certificate, key = gateway.tls_certificate, gateway.tls_key
    if (certificate is None) != (key is None):
        field, other = ("gateway.tls_key", "tls_certificate") if key is None else ("gateway.tls_certificate", "tls_key")
        return [(field, f"is missing, and gateway.{other} is set", "Set both, or neither")]
    if certificate is None and not is_loopback(gateway.host):
        wrong = f"{gateway.host} can be reached from other machines, and there is no TLS: keys would go in the clear"
        fix = "Set gateway.tls_certificate and gateway.tls_key, or listen at 127.0.0.1 behind a reverse proxy"
        return [("gateway.host", wrong, f"{fix} and set gateway.public_url")]
    names = {"gateway.tls_certificate": certificate, "gateway.tls_key": key}
    return [
        (field, f"{path} is no file", "Name a PEM file")
        for field, path in names.items()
        if path is not None and not Path(path).expanduser().is_file()
    ]


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach ``host``."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
