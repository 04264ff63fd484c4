"""A run at Weights & Biases. The library is an extra; it needs the user's own log-in, or ``WANDB_MODE=offline``.

Invariants
- The id of the W&B run is kept in the run directory, so that a resumed run goes on in the same one.
- Where there is no such id, the rows of earlier lives are given first. Going back to a checkpoint sets the id aside:
  W&B takes no row of a step that is not above the last, so the run goes on in a new W&B run, which has all its rows.
- Jobs of one process have W&B runs of their own, and the output of the process belongs to none of them.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import Any, Final

import yaml
from packaging.version import Version

from actors.metrics.samples import columns
from actors.metrics.sinks.sink import EvalRow, Row, SinkSetup, SinkUnavailable, evaluation_columns
from actors.protocol.metrics import ShownSample
from configs.run_files import JOB_FILE, WANDB_ID

OLDEST: Final = "0.20.1"
"""Oldest release that is known to work: several runs in one process came with it. The extra asks for no older one."""


class WandbSink:
    """Feeds a Weights & Biases run."""

    def __init__(self, setup: SinkSetup) -> None:
        wandb = self._wandb = _library()
        self._next_table_s = 0.0
        self._table_s = setup.limits.samples_table_s
        stored = setup.run_dir / WANDB_ID
        known, new = stored.read_text("utf-8").strip() if stored.exists() else None, secrets.token_hex(4)
        config = setup.config
        again = f"goes on from step {setup.first_step}; the rows before it are repeated from metrics.jsonl"
        self._run: Any = wandb.init(
            project=config.wandb_project,
            entity=config.wandb_entity,
            name=config.wandb_name or setup.job,
            notes=again if known is None and setup.first_step else None,
            tags=config.wandb_tags,
            config=_settings(setup.run_dir),
            dir=str(setup.run_dir),
            id=known or new,
            resume="allow",
            reinit="create_new",
            settings={"console": "off"},
        )
        self._run.define_metric("eval/*", step_metric="eval/version")
        if known is None:
            setup.repeat(self)
            stored.write_text(new, "utf-8")  # last: a repetition that was cut short is done anew

    def write(self, step: int, row: Row) -> None:
        """Log the row, which W&B keeps open until the next: what is logged meanwhile takes no step of its own."""
        self._run.log({name: value for name, value in row.items() if value is not None}, step=step)

    def evaluation(self, row: EvalRow) -> None:
        """Log the figures together with the last row. Their axis is the version, since W&B takes no older steps."""
        self._run.log(evaluation_columns(row), commit=False)

    def samples(self, step: int, rows: Sequence[ShownSample]) -> None:
        """Log a table together with the last row, at most once in ``limits.samples_table_s``."""
        if monotonic() < self._next_table_s or not rows:
            return
        self._next_table_s = monotonic() + self._table_s
        flat = [columns(row) for row in rows]
        table = self._wandb.Table(columns=list(flat[0]), data=[list(row.values()) for row in flat])
        self._run.log({"samples": table}, commit=False)

    def observe(self, process: str, gauges: Mapping[str, float]) -> None:
        """Leave the gauges out, as TensorBoardSink does."""

    def close(self) -> None:
        self._run.finish()


def _library() -> Any:
    """The module ``wandb``.

    Raises:
        SinkUnavailable: it is not installed, or too old.
    """
    try:
        import wandb  # pyright: ignore[reportMissingImports] - an optional extra
    except ImportError as error:
        raise SinkUnavailable(
            "metrics.wandb_project is set, but wandb is not installed: pip install 'headrace[wandb]', or unset it"
        ) from error
    if Version(found := getattr(wandb, "__version__", OLDEST)) < Version(OLDEST):
        what = f"wandb {found} is installed, and at least {OLDEST} is needed"
        raise SinkUnavailable(f"metrics.wandb_project: {what}; pip install -U 'headrace[wandb]', or unset it")
    return wandb


def _settings(run_dir: Path) -> dict[str, Any]:
    """The resolved job file of the run; empty if it has none, as in tests."""
    file = run_dir / JOB_FILE
    return yaml.safe_load(file.read_text("utf-8")) if file.exists() else {}
