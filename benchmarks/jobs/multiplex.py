"""What sharing a trainer saves and costs, live: two synchronous jobs on one training service, and with a trainer each.

    the jobs ─┬─ alone    one after the other: what each comes to by itself
              ├─ own      side by side, a trainer each
              └─ shared   side by side, one training service for both

    window                 from when both have done their first steps until one of them has done its last
    step time of a job     from its first to its last version in the window, over their number
    slowdown               step time shared / own
    told_slowdown          step time shared / the same without the waits and switches that the service tells of: as
                           slowdown, but blind to what other users of the machine did between the runs
    trainer_seconds_saved  1 - (seconds of trainers a step, shared / own), both jobs' steps in the window together
    switches               steps in which the service moved the job's state to where it computes, as it says itself

The service has memory for the state of one job, unless ``--room both``: whenever the other one's turn comes, state is
parked and brought back, as on a device that is full. A trainer is a process that holds trained state and computes: the
service's own, or that of a job without one. All is real: engines, trainers, processes, ledger and weights. In all
three ways each job must come to the same samples, losses and checkpoint.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from actors.train_service.sizes import state_bytes
from actors.trainer.setup import resolve_replicas
from benchmarks._command import Result, add_check_option, add_job_options, command_line, measured, show_and_check
from benchmarks._harm import percentile
from benchmarks._jobs import hardware, job_text, model_of, prepare_job, run_headrace, use_cores
from benchmarks._processes import ROOT
from benchmarks.jobs._shared_runs import JobWindow, PairRun, Window, came_to, run_pair
from configs.errors import ConfigError
from configs.loader import dump_job, load_job
from configs.schema import JobConfig
from supervisors.testing.run_under_test import RunRecord

SERVICE: Final = "train-0"
JOBS: Final = ("first", "second")
ROOMS: Final = {"one": 1.5, "both": 2.5}
"""Memory of the service, in states of one job."""
GOAL_SAVED, GOAL_SLOWDOWN = 0.25, 1.15
_HOST_STATES: Final = 4
"""Memory for parked states, in states: each job's, and its next while the last one is kept."""
_MIB: Final = 1 << 20


def write_jobs(job_file: Path, directory: Path, settings: Sequence[str], *, service: str | None) -> list[Path]:
    """A file for each of the jobs: they differ in their seed, and so in prompts and samples."""
    directory.mkdir(parents=True, exist_ok=True)
    files: list[Path] = []
    for number, name in enumerate(JOBS):
        seed = load_job(job_file).seed + number
        served = [f"trainer.service={service}"] if service is not None else []
        job = load_job(job_file, [*settings, f"name={name}", f"seed={seed}", *served])
        files.append(directory / f"{name}.yaml")
        files[-1].write_text(dump_job(job), encoding="utf-8")
    return files


def services_for(job: JobConfig, model: Path, room: str) -> dict[str, Any]:
    """A services file for two such jobs. Its memory holds the state of one of them, or of both.

    Raises:
        ConfigError: the job leaves its threads to the machine, which would give a service other ones.
    """
    if job.sync.mode != "sync" or not job.trainer.threads or job.trainer.backend != "torch":
        what = "is not a synchronous job of a torch trainer with explicit threads"
        raise ConfigError.of("bench multiplex", "job", what, "Set sync.mode: sync and trainer.threads: 1")
    threads = job.trainer.threads
    each = state_bytes(model, dtype=job.model.dtype, replicas=resolve_replicas(threads, model))
    service = {
        "name": SERVICE,
        "device": job.trainer.device,
        "threads": threads,
        "memory_bytes": int(ROOMS[room] * each),
        "host_bytes": _HOST_STATES * each + 64 * _MIB,
    }
    return {"services": [service]}


def compared(own: Window, shared: Window) -> Result:
    """What sharing saves and costs, job by job."""
    jobs = {name: _job_row(own.jobs[name], job) for name, job in shared.jobs.items()}
    switches = [row["switch_s"] for job in shared.jobs.values() for row in job.rows if row["switch_s"] > 0]
    return {
        "jobs": jobs,
        "trainer_seconds_saved": round(1.0 - shared.trainer_s_a_step / own.trainer_s_a_step, 3),
        "slowdown_max": max(job["slowdown"] for job in jobs.values()),
        "switch_p50_s": round(percentile(switches, 0.50), 4) if switches else None,
        "switch_p99_s": round(percentile(switches, 0.99), 4) if switches else None,
        "switches": len(switches),
        "trainer_s_a_step": {
            way: round(window.trainer_s_a_step, 4) for way, window in (("own", own), ("shared", shared))
        },
        "trainers": {
            way: round(window.trainers_s / window.seconds, 2) for way, window in (("own", own), ("shared", shared))
        },
        "bubble": round(shared.bubble, 3),
        "window_s": {"own": round(own.seconds, 1), "shared": round(shared.seconds, 1)},
    }


def _job_row(own: JobWindow, shared: JobWindow) -> Result:
    lost_s = shared.mean("service_wait_s") + shared.mean("switch_s")
    row: Result = {
        "own_step_s": round(own.step_s, 4),
        "shared_step_s": round(shared.step_s, 4),
        "slowdown": round(shared.step_s / own.step_s, 3),
        "told_slowdown": round(shared.step_s / (shared.step_s - lost_s), 3),
        "steps": shared.steps,
    }
    return row | {key: round(shared.mean(key), 4) for key in ("service_wait_s", "switch_s", "compute_s")}


def kept(alone: dict[str, tuple[Any, ...]], runs: Sequence[PairRun]) -> Result:
    """Whether every run came to what each job comes to alone, and what was lost, or trained twice."""
    differ = sorted(
        {
            f"{name}: {what}"
            for run in runs
            for name, job in run.jobs.items()
            for what, ours, theirs in zip(
                ("samples", "losses", "checkpoint"), came_to(job, run.summaries[name]), alone[name], strict=True
            )
            if ours != theirs
        }
    )
    summaries = [summary for run in runs for summary in run.summaries.values()]
    return {
        "bit_identical": not differ,
        "differ": differ,
        "lost": sum(summary["prompts_lost"] for summary in summaries),
        "twice": sum(summary["samples_trained_twice"] for summary in summaries),
    }


def missed(result: Result) -> list[str]:
    """Goals that were not met, in sentences."""
    found: list[str] = []
    if result["trainer_seconds_saved"] < GOAL_SAVED:
        found.append(f"trainer_seconds_saved: {result['trainer_seconds_saved']}, the goal is {GOAL_SAVED}")
    if result["slowdown_max"] > GOAL_SLOWDOWN:
        found.append(f"slowdown_max: {result['slowdown_max']}, the goal is {GOAL_SLOWDOWN}")
    found += [f"{what} differ from the job alone" for what in result["differ"]]
    return found + [f"{name} is {result[name]}" for name in ("lost", "twice") if result[name]]


def measure(options: argparse.Namespace, directory: Path) -> Result:
    """Each job alone, then the pair, with a trainer each and with one for both in turns."""
    use_cores(options.cores)
    result: Result = {"benchmark": "multiplex", "hardware": hardware()}
    job_file = prepare_job(options.job, options.set or [], directory, options.model)
    settings, into = [f"steps={options.steps}"], options.keep or directory
    separate = write_jobs(job_file, directory / "own", settings, service=None)
    served = write_jobs(job_file, directory / "shared", settings, service=SERVICE)
    job = load_job(separate[0])
    services = services_for(job, model_of(job_file), options.room)
    alone: dict[str, tuple[Any, ...]] = {}
    for name, file in zip(JOBS, separate, strict=True):
        print(f"{name} alone", file=sys.stderr)
        run = run_headrace(file, into / f"alone-{name}", [])
        alone[name] = came_to(RunRecord(into / f"alone-{name}"), run.summary)
    own, shared, runs = Window(), Window(), list[PairRun]()
    for repeat in range(options.repeats):
        for way, window, files, offered in (("own", own, separate, None), ("shared", shared, served, services)):
            print(f"{repeat}: both, {way}", file=sys.stderr)
            runs.append(run_pair(into / f"{way}-{repeat}", files, offered))
            window.add(runs[-1], options.skip)
    result |= compared(own, shared) | kept(alone, runs)
    result |= {"steps": options.steps, "repeats": options.repeats, "room": options.room}
    result |= {"job": f"{job_text(job)}; twice", "memory_bytes": services["services"][0]["memory_bytes"]}
    return result | {"missed": missed(result)}


def parse(args: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = command_line("multiplex", __doc__)
    add_job_options(parser, ROOT / "benchmarks" / "jobs" / "multiplex.yaml")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--skip", type=int, default=5, help="first steps that do not count")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--room", choices=tuple(ROOMS), default="one", help="whose state the service's memory holds")
    parser.add_argument("--keep", type=Path, help="leave the run directories here, for headrace plot")
    add_check_option(parser)
    return parser.parse_args(args)


def main(args: list[str]) -> int:
    """Measure and print; with ``--check`` hold the figures against their goals."""
    options = parse(args)
    return show_and_check(measured(measure, options), options, _print_table)


def _print_table(result: Result) -> None:
    print(f"{result['job']}; room for {result['room']}; {result['hardware']['class']}")
    for name, job in result["jobs"].items():
        print(
            f"  {name:<8} a step {job['own_step_s']:.3f} s with its own trainer, {job['shared_step_s']:.3f} s shared"
            f" ({job['slowdown']:.2f}; told {job['told_slowdown']:.2f}): waits {job['service_wait_s']:.3f},"
            f" switches {job['switch_s']:.3f}, computes {job['compute_s']:.3f} s"
        )
    saved, spent = result["trainer_seconds_saved"], result["trainer_s_a_step"]
    print(f"  trainer seconds a step {spent['own']:.3f}, shared {spent['shared']:.3f}: {saved:.0%} saved")
    if result["switches"]:
        print(f"  {result['switches']} switches, p50 {result['switch_p50_s']} s, p99 {result['switch_p99_s']} s")
    same = "the same" if result["bit_identical"] else f"not the same: {', '.join(result['differ'])}"
    print(f"  samples, losses and checkpoints {same}; {result['lost']} lost, {result['twice']} twice")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
