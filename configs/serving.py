"""The serving file, typed: models that programs of other people train and sample, through one address.

    SERVING.yaml ─▶ load_serving ─┐
    headrace serve --model … ─────┴─▶ ServingConfig ─▶ the head: the model server, and samplers for each model
                                                       (supervisors/serving/serving.py)
    models:
      - {name: base, path: models/Qwen3-0.6B}
    directory: served

Invariants
- What clients own is in ``directory`` alone: with the same one, a server goes on where it ended.
- Models are trained by one of the head's training services, beside the jobs that share it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from configs.checks.environment_checks import without_tls
from configs.errors import ConfigError, Found
from configs.model_files import ModelFileBroken, positions, text_config
from configs.section import NonNegativeInt, PositiveInt, Section
from configs.services import ServiceConfig, ServiceName, ServicesConfig
from configs.tenants import TenantsConfig, tenants_problems
from configs.validation import load_file

DEFAULT_PORT = 8900
_LAST_PORT = 65535


class ServedModelConfig(Section):
    """A base model that clients may name."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9./][A-Za-z0-9_./-]{0,127}$")]
    """What clients call it, such as ``Qwen/Qwen3-8B``."""
    path: str
    """A Hugging Face directory."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """What it is computed in, where it is trained and where it is sampled."""


class ServingConfig(Section):
    """Models that are served to programs which use the client ``tinker``."""

    models: list[ServedModelConfig]
    """The base models, each with a name of its own."""
    directory: str = "served"
    """Where operations, states and snapshots are kept."""
    host: str = "127.0.0.1"
    """Address to listen at. Beyond the loopback interface it needs ``tls_certificate`` and ``tls_key``."""
    port: Annotated[int, Field(ge=0, le=_LAST_PORT)] = DEFAULT_PORT
    """0: any free port, another one in each life of the server."""
    tls_certificate: str | None = None
    """PEM file."""
    tls_key: str | None = None
    """PEM file."""
    prometheus_port: Annotated[int, Field(ge=0, le=_LAST_PORT)] | None = None
    """Serve gauges of what tenants use at this port of the loopback interface; 0: any free port."""
    quotas: TenantsConfig = TenantsConfig()
    """What tenants may use, as in a tenants file."""
    service: ServiceName | None = None
    """Training service that trains them; unset: the first one of the head."""
    samplers: PositiveInt = 1
    """Processes that sample, for each base model."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where samplers compute; ``auto``: CUDA where there is a device."""
    threads: NonNegativeInt = 1
    """Torch threads of each sampler; 0: all cores."""


def load_serving(path: str | Path) -> ServingConfig:
    """The serving file at ``path``.

    Raises:
        ConfigError: it cannot be read or does not fit; the message names line and field.
    """
    return load_file(
        ServingConfig, path, holds="serving keys", example="configs/shared/serving.yaml", check=problems_of
    )


def models_named(texts: Sequence[str]) -> list[ServedModelConfig]:
    """The models of ``[NAME=]DIR`` each; one without a name is called as its directory was written.

    Raises:
        ConfigError: a name cannot be used.
    """
    models: list[ServedModelConfig] = []
    for text in texts:
        name, mark, directory = text.partition("=")
        path = Path(directory if mark else name).expanduser()
        try:
            models.append(ServedModelConfig(name=name if mark else str(path.resolve()), path=str(path)))
        except ValueError as error:
            wrong = f"{name!r} is no name for a model: use letters, digits and . _ - /"
            raise ConfigError.of(f"--model {text}", "", wrong, "Name it, as NAME=DIR") from error
    return models


def address_of(text: str) -> tuple[str, int]:
    """The host and the port of ``HOST:PORT``.

    Raises:
        ConfigError: it is none.
    """
    host, _, port = text.rpartition(":")
    if not host or not (port.isascii() and port.isdecimal()) or int(port[:6]) > _LAST_PORT:
        wrong = "is no address to listen at: expected HOST:PORT, with a port of 0 to 65535"
        raise ConfigError.of(f"--listen {text}", "", wrong, "Write it as 127.0.0.1:8900, for one")
    return host.removeprefix("[").removesuffix("]"), int(port)


def problems_of(config: ServingConfig) -> list[Found]:
    """Problems that the types of single fields do not exclude, and models that cannot be served."""
    instead = "pass --tls and --tls-key; or listen at 127.0.0.1, where others come through a tunnel or a reverse proxy"
    found = without_tls(config.host, config.tls_certificate, config.tls_key, instead)
    found += [(f"quotas.{field}", wrong, fix) for field, wrong, fix in tenants_problems(config.quotas)]
    if not config.models:
        found.append(("models", "is empty", "Name a model to serve"))
    names = [model.name for model in config.models]
    for index, model in enumerate(config.models):
        if model.name in names[:index]:
            found.append((f"models.{index}.name", f"{model.name} is served already", "Give each a name of its own"))
        try:
            served_base(model)
        except ModelFileBroken as error:
            found.append((f"models.{index}.path", str(error), "Name a Hugging Face directory"))
    return found


def service_for(config: ServingConfig, services: ServicesConfig) -> ServiceConfig:
    """The training service for the served models.

    Raises:
        ConfigError: there is none of that name.
    """
    found = services.services[0] if config.service is None else services.service(config.service)
    if found is None:
        names = ", ".join(service.name for service in services.services)
        wrong = f"{config.service!r} is no service of this head"
        raise ConfigError.of("serving", "service", wrong, f"Use one of: {names}")
    return found


@dataclass(frozen=True, kw_only=True)
class ServedBase:
    """Describes a base model, as its files say."""

    path: Path
    vocabulary: int
    """Number of token ids."""
    context_tokens: int
    dtype: str = "float32"


def served_base(model: ServedModelConfig) -> ServedBase:
    """What the files of a served model say. Reads ``config.json``.

    Raises:
        ModelFileBroken: they do not say it, or are not there.
    """
    path = Path(model.path).expanduser()
    if not (path / "config.json").is_file():
        raise ModelFileBroken(f"{path} holds no config.json")
    vocabulary, limit = text_config(path).get("vocab_size"), positions(path)
    if not isinstance(vocabulary, int) or limit is None:
        raise ModelFileBroken(f"{path / 'config.json'} lacks vocab_size, or how many positions it has")
    return ServedBase(path=path.resolve(), vocabulary=vocabulary, context_tokens=limit.count, dtype=model.dtype)
