"""A spot trace replayed on real processes: machines come, are given notice, and are killed, while one job trains.

    trace ─ kept in part, sped up, every second machine with notice ─▶ provider ``local``: a process a machine
    the job ─┬─ on the reserved machine alone ─▶ tokens/s, cost a token
             └─ with the spot machines, for ``--seconds`` ─▶ the same, Ctrl-C, and what every checker says of the record

What is lost or trained twice comes from the checkers over journal, events and rows, and from the job's own count.
Costs are of the prices in the job file, from the moment when the job's own processes are up to the last step.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from benchmarks._command import Result, add_check_option, add_job_options, command_line, measured, show_and_check
from benchmarks._harm import HarmedRun, Row, with_vocabulary
from benchmarks._jobs import BenchmarkFailed, hardware, job_text, prepare_job, use_cores
from benchmarks._processes import ROOT
from benchmarks.papers.traces import between, kept, nodes_max, nodes_mean, write_trace
from configs.limits import DEFAULT_LIMITS
from configs.loader import load_job
from supervisors.providers.trace_files import read_trace
from supervisors.providers.traces import Trace, in_order

GOALS: Final = {"samples_lost": 0, "samples_twice": 0, "violations": 0, "cost_per_token_ratio": 1.0}
"""None of these may be exceeded; the last is of the cost a token with spot machines to that without."""
_LOOK_S: Final = 0.5


def trace_of(options: argparse.Namespace) -> Trace:
    """What is replayed: ``--seconds`` of it, some of its machines, every second one with notice."""
    whole = kept(read_trace(options.trace), options.part, options.seed).faster(options.speed)
    part = between(whole, 0.0, options.seconds)
    warned = part.with_notice(options.notice_s)
    deaf = set(sorted({event.node for event in part.events})[1::2])
    events = [event for event in warned.events if event.what != "notice" or event.node not in deaf]
    return replace(part, events=in_order(events))


class Stretch:
    """One run of the job, from its first step to Ctrl-C."""

    def __init__(self, job_file: Path, run_dir: Path, settings: Sequence[str]) -> None:
        self.run = HarmedRun(run_dir, job_file, settings=settings)

    def last(self, seconds: float) -> Result:
        """For so long after its first step; then the end, and what has come of it."""
        run = self.run
        run.wait_for_step(0, timeout_s=DEFAULT_LIMITS.run_finish_s)
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s and not run.over:
            time.sleep(_LOOK_S)
        summary = run.end()
        report = run.report()
        events, rows = run.events(), run.rows()
        counted = [row for row in rows if row["step"] > 0]
        if not counted:
            raise BenchmarkFailed(f"no step after the first one in {seconds:g} s\n{run.last_words()}")
        tokens, spent = sum(row["tokens_trained"] for row in counted), sum(row["cost"] for row in counted)
        took_s = sum(row["seconds"] for row in counted)
        return machines(events) | moved(events) | {
            "seconds": round(took_s, 1),
            "steps": len(rows),
            "tokens": tokens,
            "tokens_per_second": round(tokens / took_s, 1),
            "cost": round(spent, 5),
            "cost_per_million_tokens": round(1e6 * spent / tokens, 4),
            "samples_migrated": rows[-1]["samples_migrated"],
            "samples_lost": summary["prompts_lost"],
            "samples_twice": summary["samples_trained_twice"],
            "violations": len(report.violations),
            "counted": report.counted,
        }  # fmt: skip


def machines(events: Sequence[Row]) -> Result:
    """Spot machines, by what the head has seen of them."""
    names = {kind: [row["node"] for row in events if row["event"] == kind] for kind in ("node_joined", "node_left")}
    noticed = {row["node"] for row in events if row["event"] == "node_draining"}
    return {
        "machines_joined": len(names["node_joined"]),
        "machines_left": len(names["node_left"]),
        "machines_noticed": len(noticed),
        "machines_killed": len(set(names["node_left"]) - noticed),
    }


def moved(events: Sequence[Row]) -> Result:
    """Samples by how they came to another worker."""

    def samples(event: str, **fields: Any) -> int:
        rows = (row for row in events if row["event"] == event)
        return sum(int(row["samples"]) for row in rows if all(row[key] == value for key, value in fields.items()))

    return {
        "samples_held_at_notice": samples("worker_draining"),
        "samples_taken_back": samples("samples_taken_back"),
        "samples_returned": samples("samples_returned"),
        "samples_balanced": samples("samples_balanced"),
    }


def missed(result: Result) -> list[str]:
    """Goals that were not met, in sentences."""
    return [f"{name}: {result[name]}, the goal is {goal}" for name, goal in GOALS.items() if result[name] > goal]


def measure(options: argparse.Namespace, directory: Path) -> Result:
    """Both runs, one after the other."""
    use_cores(options.cores)
    result: Result = {"benchmark": "spot", "hardware": hardware()}
    trace = trace_of(options)
    write_trace(trace, directory / "trace.csv")
    wanted = [*(options.set or []), f"provider.trace={directory / 'trace.csv'}"]
    job_file = prepare_job(options.job, wanted, directory, options.model)
    job = load_job(job_file)
    if not {"reserved", "spot"} <= job.cluster.prices.keys():
        raise BenchmarkFailed(f"cluster.prices: {dict(job.cluster.prices)} names no price for reserved and for spot")
    settings = with_vocabulary(job_file) if job.rollout.engine == "simulated" else []
    alone = stretch(
        job_file, directory / "alone", [*settings, "provider.kind=none", "provider.trace=null"], options.alone_s
    )
    spot = stretch(job_file, directory / "spot", settings, options.seconds)
    result |= spot | {"reserved_only": {name: alone[name] for name in _COMPARED}}
    ratio = spot["cost_per_million_tokens"] / alone["cost_per_million_tokens"]
    result |= {
        "cost_per_token_ratio": round(ratio, 3),
        "throughput_ratio": round(spot["tokens_per_second"] / alone["tokens_per_second"], 3),
        "trace": f"{options.trace.name} x {options.speed:g}, {options.part:g} of its machines, seed {options.seed}: "
        f"{nodes_max(trace)} at most, {nodes_mean(trace):.1f} on average",
        "prices": dict(job.cluster.prices),
        "job": f"{job_text(job)}; {job.rollout.engine} engine, {job.sync.mode}, {job.scheduling.policy}",
    }
    result["missed"] = missed(result)
    return result


_COMPARED: Final = ("seconds", "steps", "tokens", "tokens_per_second", "cost", "cost_per_million_tokens")


def stretch(job_file: Path, run_dir: Path, settings: Sequence[str], seconds: float) -> Result:
    """One run, ended in any case."""
    print(f"{run_dir.name}: {seconds:g} s", file=sys.stderr)
    part = Stretch(job_file, run_dir, settings)
    try:
        return part.last(seconds)
    except AssertionError as error:
        raise BenchmarkFailed(str(error)) from error
    finally:
        part.run.close()


def parse(args: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = command_line("spot", __doc__)
    add_job_options(parser, ROOT / "benchmarks" / "jobs" / "spot.yaml")
    parser.add_argument("--seconds", type=float, default=600.0, help="of the replay")
    parser.add_argument("--alone-s", type=float, default=60.0, help="of the run on the reserved machine alone")
    parser.add_argument("--trace", type=Path, default=ROOT / "configs" / "traces" / "bamboo_g4dn.csv")
    parser.add_argument("--speed", type=float, default=60.0, help="the trace runs this much faster than recorded")
    parser.add_argument("--part", type=float, default=0.15, help="of the trace's machines that are taken")
    parser.add_argument("--notice-s", type=float, default=5.0, help="before the end of every second machine")
    parser.add_argument("--seed", type=int, default=0, help="which machines are taken")
    add_check_option(parser)
    return parser.parse_args(args)


def main(args: list[str]) -> int:
    """Measure and print; with ``--check`` hold the figures against their goals."""
    options = parse(args)
    return show_and_check(measured(measure, options), options, _print_table)


def _print_table(result: Result) -> None:
    print(f"{result['job']}; {result['hardware']['class']}; {result['trace']}")
    for name in ("machines_joined", "machines_noticed", "machines_killed", "samples_migrated", *_COMPARED):
        print(f"  {name:<26} {result[name]:>12}")
    for name, goal in GOALS.items():
        print(f"  {name:<26} {result[name]:>12}  goal: at most {goal}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
