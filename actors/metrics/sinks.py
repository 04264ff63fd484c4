"""Where a step's metrics go besides the file: TensorBoard always, W&B and Prometheus when the job asks for them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from configs.schema import JobConfig

Row = Mapping[str, float | int | str]


class StepSink(Protocol):
    """Takes one row a step."""

    def write(self, row: Row) -> None: ...
    def close(self) -> None: ...


def open_sinks(job: JobConfig, run_dir: Path) -> list[StepSink]:
    """The sinks that ``job.metrics`` asks for."""
    sinks: list[StepSink] = []
    if job.metrics.tensorboard:
        sinks.append(TensorBoardSink(run_dir / "tensorboard"))
    if job.metrics.wandb_project is not None:
        sinks.append(WandbSink(job))
    if job.metrics.prometheus_port is not None:
        sinks.append(PrometheusSink(job.name, job.metrics.prometheus_port))
    return sinks


def numbers(row: Row) -> dict[str, float]:
    """The numeric columns, without the step itself."""
    return {key: float(value) for key, value in row.items() if key != "step" and isinstance(value, int | float)}


class TensorBoardSink:
    """TensorBoard event files, without torch."""

    def __init__(self, directory: Path) -> None:
        from tensorboardX import SummaryWriter  # noqa: PLC0415 (half a second to import)

        self._writer: Any = SummaryWriter(str(directory), flush_secs=5)

    def write(self, row: Row) -> None:
        for key, value in numbers(row).items():
            self._writer.add_scalar(key, value, int(row["step"]))

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """Weights & Biases, for who has installed the extra ``wandb``."""

    def __init__(self, job: JobConfig) -> None:
        import wandb  # noqa: PLC0415  # pyright: ignore[reportMissingImports]

        self._run: Any = wandb.init(  # pyright: ignore[reportUnknownMemberType]
            project=job.metrics.wandb_project, name=job.name, config=job.model_dump(mode="json")
        )

    def write(self, row: Row) -> None:
        self._run.log(numbers(row), step=int(row["step"]))

    def close(self) -> None:
        self._run.finish()


class PrometheusSink:
    """A scrape endpoint on the loopback interface with one gauge a metric."""

    def __init__(self, job: str, port: int) -> None:
        from prometheus_client import CollectorRegistry, start_http_server  # noqa: PLC0415 (only when configured)

        self._registry = CollectorRegistry()
        self._job = job
        self._gauges: dict[str, Any] = {}
        self._server, self._thread = start_http_server(port, addr="127.0.0.1", registry=self._registry)
        self.port = int(self._server.server_port)

    def write(self, row: Row) -> None:
        from prometheus_client import Gauge  # noqa: PLC0415 (as above)

        for key, value in {**numbers(row), "step": float(row["step"])}.items():
            if key not in self._gauges:
                self._gauges[key] = Gauge(f"headrace_{key}", key.replace("_", " "), ["job"], registry=self._registry)
            self._gauges[key].labels(job=self._job).set(value)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=1.0)
