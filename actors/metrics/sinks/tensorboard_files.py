"""TensorBoard's event files. A life of the run that goes back says so, and readers forget what was undone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from actors.host.import_guard import import_tensorboard_without_torch
from actors.metrics.sinks.sink import EvalRow, Row, SinkSetup, evaluation_columns
from actors.protocol.metrics import ShownSample
from configs.run_files import JOB_FILE, TENSORBOARD


class TensorBoardSink:
    """Writes event files that ``tensorboard --logdir RUN_DIR`` shows: columns in groups, and the job as text."""

    def __init__(self, setup: SinkSetup) -> None:
        import_tensorboard_without_torch()
        from tensorboardX import FileWriter
        from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue] - generated

        directory = setup.run_dir / TENSORBOARD
        lives = len(list(directory.glob("*tfevents*")))
        self._summary: Any = Summary
        # The suffix keeps the files of two lives that begin in one second apart, and in order.
        self._writer: Any = FileWriter(str(directory), flush_secs=5, filename_suffix=f".{lives:04}")
        if lives:
            self._begin_again(setup)
        else:
            setup.repeat(self)
        if (job_file := setup.run_dir / JOB_FILE).exists():
            from tensorboardX.summary import text

            self._writer.add_summary(text("job", _indented(job_file.read_text("utf-8"))), 0)

    def _begin_again(self, setup: SinkSetup) -> None:
        """Undo what earlier files have from ``first_step`` on: readers forget it when they meet this mark."""
        from tensorboardX.proto import event_pb2

        proto: Any = event_pb2  # generated
        begins = proto.Event(session_log=proto.SessionLog(status=proto.SessionLog.START))
        self._writer.add_event(begins, setup.first_step)
        if setup.first_step in setup.evaluations:  # it still holds
            self.evaluation(setup.evaluations[setup.first_step])

    def write(self, step: int, row: Row) -> None:
        """Write the row as one event: an event for each key costs the head more than a step's commit."""
        values = [
            self._summary.Value(tag=tag(name), simple_value=value)
            for name, value in row.items()
            if isinstance(value, int | float) and name != "step"
        ]
        self._writer.add_summary(self._summary(value=values), step)

    def evaluation(self, row: EvalRow) -> None:
        """Show the figures at the version that was evaluated, which is a number of steps."""
        flat = evaluation_columns(row)
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in flat.items()]
        self._writer.add_summary(self._summary(value=values), int(flat["eval/version"]))

    def samples(self, step: int, rows: Sequence[ShownSample]) -> None:
        """Leave them out: samples.jsonl has them."""

    def observe(self, process: str, gauges: Mapping[str, float]) -> None:
        """Leave the gauges out: the charts are by step, and events.jsonl has them."""

    def close(self) -> None:
        self._writer.close()


def _indented(text: str) -> str:
    """``text`` as Markdown shows code."""
    return "".join(f"    {line}\n" for line in text.splitlines())


# ------------------------------------------------------------ TensorBoard's groups

_GROUPS: Final[tuple[tuple[str, tuple[str, ...]], ...]] = (
    ("learning", (
        "loss", "reward_", "source_", "degenerate_", "grad_norm", "learning_rate", "update_skipped", "clip_", "kl",
        "entropy", "engine_mismatch", "stale_mismatch", "micro_batch", "expert_", "trainer_reward", "value_",
        "explained_", "shaped_", "critic_", "correction_", "recompute",
    )),
    ("time", ("seconds", "rollout_idle", "trainer_idle", "trainer_seconds", "seed_s", "seeding_")),
    ("prefill", ("prefilled_", "prefix_", "distinct_prefix_", "preemptions")),
    ("shared_training", ("service_wait", "switch_", "compute_", "slowdown")),
    ("weights", ("publish_", "weights_", "pull_", "load_")),
    ("length_ranking", ("length_",)),
    ("cost", ("cost",)),
    ("faults", (
        "restarts", "samples_migrated", "rows_ignored", "grants_ignored", "prompts_lost", "samples_trained_twice",
        "detect_", "reassign_", "trainer_to_progress", "head_to_progress",
    )),
)  # fmt: skip
"""Groups, one for each section of the columns' reference, with the beginnings of their columns; all other columns are
in the group ``progress``."""


def tag(column: str) -> str:
    """The name under which TensorBoard shows ``column``, such as ``learning/loss``."""
    group = next((name for name, beginnings in _GROUPS if column.startswith(beginnings)), "progress")
    return f"{group}/{column}"
