"""Where step rows go besides metrics.jsonl: TensorBoard, Weights & Biases, Prometheus.

Each kind imports its library when it is made, since most processes need none of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import Any, Protocol, cast

import yaml

from actors.metrics.groups import tag
from actors.metrics.samples import columns
from actors.protocol.metrics import ShownSample
from configs.limits import DEFAULT_LIMITS
from configs.schema import MetricsConfig
from transport.errors import HeadraceError

Row = Mapping[str, float | int | str | None]
"""A step's columns; None: a mean of nothing, which no chart shows as a number."""


EvalRow = Mapping[str, float | int | dict[str, float | None] | None]
"""A line of eval.jsonl."""


class SinkUnavailable(HeadraceError):
    """A sink that the job asks for cannot be had (configuration); the text says why and what to do."""

    permanent = True


class Sink(Protocol):
    """It takes one row a step. It may block for file or network writes: it is called on the actor's thread."""

    def write(self, step: int, row: Row) -> None: ...
    def evaluation(self, row: EvalRow) -> None: ...
    def samples(self, step: int, rows: Sequence[ShownSample]) -> None: ...
    def observe(self, process: str, gauges: Mapping[str, float]) -> None: ...  # on the loop: must not block
    def close(self) -> None: ...


class TensorBoardSink:
    """It writes event files that ``tensorboard --logdir RUN_DIR`` shows: columns in groups, and the job as text."""

    def __init__(self, directory: Path, job_file: Path) -> None:
        from tensorboardX import FileWriter
        from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue] - generated

        self._summary: Any = Summary
        self._writer: Any = FileWriter(str(directory), flush_secs=5)
        if job_file.exists():
            from tensorboardX.summary import text

            self._writer.add_summary(text("job", _indented(job_file.read_text("utf-8"))), 0)

    def write(self, step: int, row: Row) -> None:
        """One event holds the whole row: an event for each key costs the head more than a step's commit."""
        values = [
            self._summary.Value(tag=tag(name), simple_value=value)
            for name, value in row.items()
            if isinstance(value, int | float) and name != "step"
        ]
        self._writer.add_summary(self._summary(value=values), step)

    def evaluation(self, row: EvalRow) -> None:
        """Show its figures at the number of steps that have made the version."""
        flat = evaluation_columns(row)
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in flat.items()]
        self._writer.add_summary(self._summary(value=values), int(flat["eval/version"]))

    def samples(self, step: int, rows: Sequence[ShownSample]) -> None:
        """Leave them out: samples.jsonl has them."""

    def observe(self, process: str, gauges: Mapping[str, float]) -> None:
        """What is of no step has no place in its charts; events.jsonl has it."""

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """It feeds a Weights & Biases run. Needs the optional extra ``wandb`` and the user's own log-in.

    The run's id there is kept in the run directory, so that a resumed run goes on in the same one.
    """

    def __init__(self, config: MetricsConfig, job: str, directory: Path) -> None:
        try:
            import wandb  # pyright: ignore[reportMissingImports] - an optional extra
        except ImportError as error:
            raise SinkUnavailable(
                "metrics.wandb_project is set, but wandb is not installed: pip install 'headrace[wandb]', or unset it"
            ) from error
        self._wandb: Any = wandb
        self._next_table_s = 0.0
        stored = directory / "wandb_id"
        if not stored.exists():
            stored.write_text(wandb.util.generate_id())
        self._run: Any = wandb.init(
            project=config.wandb_project,
            entity=config.wandb_entity,
            name=config.wandb_name or job,
            tags=config.wandb_tags,
            config=_settings(directory),
            dir=str(directory),
            id=stored.read_text().strip(),
            resume="allow",
        )

    def write(self, step: int, row: Row) -> None:
        self._run.log({name: value for name, value in row.items() if value is not None}, step=step)

    def evaluation(self, row: EvalRow) -> None:
        """Its axis is the version: steps after that may have been logged by now, and steps never go back there."""
        self._run.define_metric("eval/*", step_metric="eval/version")
        self._run.log(evaluation_columns(row), commit=False)

    def samples(self, step: int, rows: Sequence[ShownSample]) -> None:
        """A table, with the next row that is logged; not more often than ``limits.samples_table_s``."""
        if monotonic() < self._next_table_s or not rows:
            return
        self._next_table_s = monotonic() + DEFAULT_LIMITS.samples_table_s
        flat = [columns(row) for row in rows]
        table = self._wandb.Table(columns=list(flat[0]), data=[list(row.values()) for row in flat])
        self._run.log({"samples": table}, commit=False)

    def observe(self, process: str, gauges: Mapping[str, float]) -> None:
        """Leave it out, as TensorBoard does."""

    def close(self) -> None:
        self._run.finish()


class PrometheusSink:
    """It serves gauges ``headrace_<key>`` with a label ``job``, on http://127.0.0.1:PORT/metrics."""

    def __init__(self, port: int, job: str) -> None:
        from prometheus_client import CollectorRegistry, start_http_server

        self._registry = CollectorRegistry()
        self._gauges: dict[str, Any] = {}
        self._job = job
        try:
            self._server, self._thread = start_http_server(port, addr="127.0.0.1", registry=self._registry)
        except OSError as error:
            raise SinkUnavailable(
                f"metrics.prometheus_port: {port} cannot be opened ({error}); choose another"
            ) from error

    @property
    def port(self) -> int:
        """The port in use, also where 0 was asked for."""
        return self._server.server_port

    def write(self, step: int, row: Row) -> None:
        for name, value in row.items():
            if not isinstance(value, str):
                gauge = self._gauge(f"headrace_{name}", f"{name} of the newest step", job=self._job)
                gauge.set(math.nan if value is None else value)  # else it would show that of an older step

    def evaluation(self, row: EvalRow) -> None:
        for name, value in evaluation_columns(row).items():
            text = f"{name} of the newest evaluation"
            self._gauge(f"headrace_{name.replace('/', '_')}", text, job=self._job).set(value)

    def samples(self, step: int, rows: Sequence[ShownSample]) -> None:
        """Leave them out: they are no gauges."""

    def observe(self, process: str, gauges: Mapping[str, float]) -> None:
        """``headrace_process_<name>`` with a label ``process``."""
        for name, value in gauges.items():
            text = f"{name} of a process, lately"
            self._gauge(f"headrace_process_{name}", text, job=self._job, process=process).set(value)

    def _gauge(self, name: str, text: str, **labels: str) -> Any:
        from prometheus_client import Gauge

        if name not in self._gauges:
            self._gauges[name] = Gauge(name, text, list(labels), registry=self._registry)
        return self._gauges[name].labels(**labels)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=DEFAULT_LIMITS.close_timeout_s)


def evaluation_columns(row: EvalRow) -> dict[str, float]:
    """The numbers of a row of eval.jsonl under the names that charts show, such as ``eval/pass_at_4``."""
    passes = cast("dict[str, float | None]", row["pass_at_k"])
    named = {name: value for name, value in row.items() if name != "pass_at_k"}
    named |= {f"pass_at_{k}": value for k, value in passes.items()}
    return {f"eval/{name}": value for name, value in named.items() if isinstance(value, int | float)}


def _indented(text: str) -> str:
    """As Markdown shows code."""
    return "".join(f"    {line}\n" for line in text.splitlines())


def _settings(run_dir: Path) -> dict[str, Any]:
    """The resolved job file of the run; empty if it has none, as in tests."""
    file = run_dir / "job.yaml"
    return yaml.safe_load(file.read_text("utf-8")) if file.exists() else {}


def make_sinks(config: MetricsConfig, job: str, run_dir: Path) -> list[Sink]:
    """The sinks that the job asks for.

    Raises:
        SinkUnavailable.
    """
    sinks: list[Sink] = []
    try:
        if config.tensorboard:
            sinks.append(TensorBoardSink(run_dir / "tensorboard", run_dir / "job.yaml"))
        if config.wandb_project is not None:
            sinks.append(WandbSink(config, job, run_dir))
        if config.prometheus_port is not None:
            sinks.append(PrometheusSink(config.prometheus_port, job))
    except Exception:
        for sink in sinks:
            sink.close()
        raise
    return sinks
