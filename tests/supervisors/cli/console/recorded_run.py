"""A small run as its directory tells of it: two workers, one of which dies and returns, a trouble, odd model text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from actors.metrics.trace import TraceFile
from actors.protocol.metrics import TraceSpan

START_S = 1_800_000_000.0
STEP_S = 2.0
STEPS = 12
SCRIPT = "<script>document.title = 'owned'</script><img src=x onerror=\"document.title = 'owned'\">"
"""A response that a page must show and not obey."""

EPISODE = [
    {"role": "model", "text": "sum(2, 2)", "tokens": 4, "name": "", "fresh": False},
    {"role": "tool", "text": "<b>4</b>", "tokens": 1, "name": "sum", "fresh": False},
    {"role": "model", "text": "It is 4.", "tokens": 3, "name": "", "fresh": False},
]


def row(step: int, **more: float | None) -> dict[str, Any]:
    return {
        "step": step, "seconds": STEP_S, "policy_version": step + 1, "reward_mean": 0.1 + step / 20, "reward_std": 0.2,
        "samples": 64, "samples_dropped": 0, "tokens_generated": 6400, "response_tokens_mean": 100.0,
        "response_tokens_max": 160, "truncated_fraction": 0.125, "loss": 0.01 * (-1) ** step, "kl": 0.001 * step,
        "entropy": 2.0 - step / 10, "grad_norm": 0.5, "degenerate_fraction": 0.25, "engine_mismatch": 1e-7,
        "rollout_idle_fraction": 0.25, "trainer_idle_fraction": 0.5, "staleness_max": 1, "restarts": 1,
        "prompts_lost": 0, "samples_trained_twice": 0, "samples_migrated": 3, "update_skipped": 0.0,
    } | more  # fmt: skip


def event(second: float, name: str, **fields: Any) -> dict[str, Any]:
    return {"time_s": START_S + second, "job": "demo", "event": name, **fields}


def sample(step: int, *, response: str | None = None, **more: Any) -> dict[str, Any]:
    text = f"answer of {step}" if response is None else response
    return {
        "step": step, "chosen": "best", "prompt": 7, "sibling": 1, "source": "", "row": 3, "reward": 0.5,
        "reward_parts": {}, "finish": "ended", "tokens": 4, "versions": [step, step], "reason": "",
        "prompt_text": "2+2=", "answer": "4",
        "turns": [{"role": "model", "text": text, "tokens": 4, "name": "", "fresh": False}],
    } | more  # fmt: skip


def events() -> list[dict[str, Any]]:
    found = [event(0.0, "job_state", state="running", reason="")]
    for worker in ("rollout-0", "rollout-1"):
        found.append(event(0.1, "worker_registered", worker=worker, node="head", slots=64, engine_start_s=1.5))
        found += [event(0.2 + STEP_S * v, "worker_version", worker=worker, version=v) for v in range(STEPS)]
    found += [
        event(9.0, "worker_down", worker="rollout-1", reason="exited", detail="signal 9"),
        event(9.1, "child_exited", child="rollout-1", cause="crashed", detail="it was killed by signal 9"),
        event(9.2, "child_restarting", child="rollout-1", cause="crashed", detail="in 0.5 s"),
        event(10.5, "worker_registered", worker="rollout-1", node="head", slots=64, engine_start_s=1.2),
        event(10.6, "worker_version", worker="rollout-1", version=5),
        *[event(11.0 + i, "samples_dropped", step=5 + i, samples=1, why="no_result: KeyError") for i in range(3)],
        event(14.0, "trouble", kind="samples_dropped", message="8 of 64 samples had no verdict: KeyError", count=1),
        event(20.0, "process_health", process="head.demo.trainer", oldest_wait_s=3.5, loop_lag_max_s=0.1),
    ]
    return sorted(found, key=lambda item: item["time_s"])


def write_lines(path: Path, items: list[dict[str, Any]]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(item) + "\n" for item in items)


def add_spans(trace: TraceFile, step: int) -> None:
    begin = START_S + STEP_S * step

    def span(name: str, start: float, end: float, **args: float | str) -> TraceSpan:
        return TraceSpan(name=name, start_s=begin + start, end_s=begin + end, args=args)

    made = {"version": step, "tokens": 1600, "running": 12, "queued": 20}
    for worker, late in (("rollout-0", 0.0), ("rollout-1", 0.2)):
        work = [span("generate", 0.0, 0.5, **made), span("generate", 0.5, 1.0 + late, **made)]
        trace.add(worker, [*work, span("idle", 1.0 + late, 2.0), span("pull", 1.9, 1.95)])
    trace.add("trainer", [span("wait", 0.0, 1.2, step=step, missing=32), span("train", 1.2, 1.8, step=step)])


def record(folder: Path, *, state: str = "finished", steps: int = STEPS) -> Path:
    """Write a run of ``steps`` steps that is in ``state``; returns its directory."""
    folder.mkdir(parents=True)
    (folder / "job.yaml").write_text(
        "name: demo\nsteps: 12\nmodel: {source: path, path: models/small}\ndata: {task: sums}\n"
        "algorithm: {name: grpo, group_size: 8}\nsync: {mode: async, max_staleness: 2}\nrollout: {engine: torch}\n"
    )
    write_lines(folder / "metrics.jsonl", [row(step) for step in range(steps)])
    last = [] if state == "running" else [event(25.0, "job_state", state=state, reason="")]
    write_lines(folder / "events.jsonl", events() + last)
    write_lines(
        folder / "samples.jsonl",
        [
            sample(0),
            sample(0, chosen="worst", reward=0.0),
            sample(11, chosen="random", response=SCRIPT, prompt_text="Say <b>this</b>:", finish="cut"),
            sample(11, chosen="dropped", reward=None, reason="no_result: KeyError: 'x' (rw.py:3)", turns=EPISODE),
        ],
    )
    trace = TraceFile(folder / "trace.json", "demo")
    for step in range(steps):
        add_spans(trace, step)
    trace.close()
    return folder
