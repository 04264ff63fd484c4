"""Plays lives of a run against the wandb that PYTHONPATH leads to, offline, and prints what its files then hold.

python played_wandb.py DIRECTORY     ─▶ {"version", "runs": {id: [[step, {column: value}], …]}, "notes": [text, …]}
"""

from __future__ import annotations

import json
import os
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[4]


def records_of(file: Path) -> list[Any]:
    """All records of an offline file, once another process of the library has written the last."""
    until = time.monotonic() + 30
    while not (found := list(_records(file))) or found[-1].WhichOneof("record_type") != "exit":
        assert time.monotonic() < until, file
        time.sleep(0.02)
    return found


def rows_in(records: list[Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows that the records hold, each with its step."""
    for record in records:
        if record.WhichOneof("record_type") == "history":
            items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            yield int(items.pop("_step", record.history.step.num)), items


def _records(file: Path) -> Iterator[Any]:
    """What is there so far, in LevelDB's log format: blocks of 32 KB, each record a protobuf message in parts."""
    from wandb.proto import wandb_internal_pb2  # pyright: ignore[reportMissingImports]

    data, at, whole = file.read_bytes(), 7, b""  # a head of seven bytes
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or its last part
            yield wandb_internal_pb2.Record.FromString(whole)
            whole = b""


def main(directory: Path) -> None:
    os.environ |= {"WANDB_MODE": "offline", "HOME": str(directory), "WANDB_SILENT": "true"}
    sys.path.append(str(ROOT))  # behind the wandb under test
    from actors.metrics.sinks.sink import SinkSetup
    from actors.metrics.sinks.wandb_run import WandbSink
    from actors.protocol.metrics import ShownTurn
    from configs.limits import Limits
    from configs.schema import MetricsConfig
    from tests.actors.metrics.made_samples import shown

    run_dir = directory / "run"
    run_dir.mkdir()
    (run_dir / "job.yaml").write_text("steps: 7\ntrainer: {lr: 0.1}\n")

    def begin(job: str, where: Path) -> WandbSink:
        config = MetricsConfig(wandb_project="p", wandb_entity="team", wandb_tags=["a", "b"])
        return WandbSink(SinkSetup.of(job, where, config, Limits()))

    def live(steps: range, reward: float) -> None:
        sink = begin("j", run_dir)
        with (run_dir / "metrics.jsonl").open("a") as rows, (run_dir / "eval.jsonl").open("a") as evaluations:
            for step in steps:
                row: dict[str, Any] = {"step": step, "reward_mean": reward, "kl": None}
                rows.write(json.dumps(row) + "\n")
                sink.write(step, row)
                if step % 2:
                    evaluated = {"version": step + 1, "pass_at_k": {"1": reward}}
                    evaluations.write(json.dumps(evaluated) + "\n")
                    sink.evaluation(evaluated)
                sink.samples(step, [shown(step, ShownTurn("model", "4", 1), ShownTurn("tool", "4.0", 3, name="sum"))])
        sink.close()

    live(range(4), 0.25)
    began = int(time.time())
    while int(time.time()) == began:  # the directories of lives are named by the second
        time.sleep(0.05)
    live(range(4, 6), 0.25)
    for name, key, last in (("metrics.jsonl", "step", 1), ("eval.jsonl", "version", 2)):  # back to step 2
        lines = [line for line in (run_dir / name).read_text().splitlines() if json.loads(line)[key] <= last]
        (run_dir / name).write_text("".join(f"{line}\n" for line in lines))
    (run_dir / "wandb_id").rename(run_dir / "wandb_id_of_the_first")
    live(range(2, 4), 0.75)
    first, second = ((run_dir / name).read_text() for name in ("wandb_id_of_the_first", "wandb_id"))

    others = [begin(name, directory / name) for name in ("a", "b") if not (directory / name).mkdir()]
    for number, sink in enumerate(others):
        sink.write(0, {"step": 0, "reward_mean": float(number)})
    for sink in others:
        sink.close()

    runs: dict[str, list[Any]] = {"first": [], "second": [], "a": [], "b": []}
    names = {first: "first", second: "second"} | {(directory / n / "wandb_id").read_text(): n for n in ("a", "b")}
    facts: dict[str, list[Any]] = {name: [] for name in runs}
    for file in sorted(directory.glob("*/wandb/offline-run-*/run-*.wandb"), key=lambda file: file.parent.name):
        name = names[file.stem.removeprefix("run-")]
        records = records_of(file)
        runs[name] += list(rows_in(records))
        run = next(record.run for record in records if record.WhichOneof("record_type") == "run")
        config = {item.key: item.value_json for item in run.config.update}
        facts[name].append(
            {"project": run.project, "entity": run.entity, "name": run.display_name, "tags": sorted(run.tags),
             "notes": run.notes, "steps": config.get("steps")}
        )  # fmt: skip
    import wandb

    print("\n" + json.dumps({"version": wandb.__version__, "runs": runs, "facts": facts}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
