"""``headrace simulate``: run one seed and show its events, run many and show failures, or check a paper's claims.

A file that names a study is handed to benchmarks/papers; any other file is a scenario, and run here.
"""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from actors.core.strict_json import strict_json
from configs.errors import ConfigError
from configs.presets import file_or_preset, scenario_names
from supervisors.cli.bench import papers
from supervisors.cli.command import EXIT_BAD_CONFIG, EXIT_FAILED, EXIT_FINISHED, Json, fail, wrong
from transport.errors import HeadraceError

_RANGE: Final = re.compile(r"(\d+)\.\.(\d+)")


def simulate(
    scenario: Annotated[
        Path,
        typer.Argument(metavar="SCENARIO.yaml", help="Jobs and faults, or a study of a paper."),
    ],
    seed: Annotated[int | None, typer.Option(min=0, help="Run this one; 0 if nothing is said.")] = None,
    seeds: Annotated[str | None, typer.Option(metavar="A..B", help="Run all from A to B, both included.")] = None,
    json_: Json = False,
    log: Annotated[bool, typer.Option("--log", help="With one seed: say all that happens, on stderr.")] = False,
    processes: Annotated[int, typer.Option(min=1, help="With --seeds: share them among so many processes.")] = 1,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Of a study: write result.json there, for headrace plot.")
    ] = None,
) -> None:
    """Run the whole system under virtual time, with faults that a seed fixes; exit code 1 if a promise was broken.

    Of a published result (configs/papers): simulate it, print each claim beside our number; exit code 0.
    """
    scenario = file_or_preset(scenario)
    try:
        if _is_study(scenario):
            if seeds is not None or log or processes > 1:
                raise wrong(
                    str(scenario), "is a study of a paper: one run without a log", "Give --seed, --json and --out only"
                )
            raise typer.Exit(papers(str(scenario)).simulate_paper(scenario, seed, out, json_=json_))
        if out is not None:
            raise wrong("--out", "is for studies, which have a result to draw", "Leave it out, or name a study")
        if seeds is None:
            raise typer.Exit(_one(scenario, seed or 0, json_=json_, log=log))
        if seed is not None or log:
            raise wrong("--seeds", "goes with neither --seed nor --log", "Leave one of them out")
        raise typer.Exit(_many(scenario, _range_of(seeds), processes, json_=json_))
    except ConfigError as error:
        fail(str(error), EXIT_BAD_CONFIG)
    except HeadraceError as error:
        fail(str(error), EXIT_FAILED)


def _is_study(path: Path) -> bool:
    """Whether the file has claims of a paper to check, and no jobs to run.

    Raises:
        ConfigError: it cannot be read or is no YAML.
    """
    from configs.loader import read_yaml

    holds = "jobs and faults, or a study and claims"
    values, _ = read_yaml(path, holds=holds, example="configs/chaos.yaml", presets=scenario_names)
    if "jobs" not in values and {"data", "rollout", "reward"} & values.keys():
        fix = f"Run `headrace run {path}`, or name a scenario: {', '.join(scenario_names())}"
        raise ConfigError.of(str(path), "", "this is a job, no scenario for simulation", fix)
    return "study" in values or "claims" in values


def _range_of(text: str) -> range:
    from supervisors.simulation.seeds import SEEDS_MAX

    match = _RANGE.fullmatch(text)
    first, last = (int(match[1]), int(match[2])) if match else (0, -1)
    if not first <= last < first + SEEDS_MAX:
        raise wrong(f"--seeds {text}", "is no range of seeds", f"Write --seeds 0..99, at most {SEEDS_MAX} seeds")
    return range(first, last + 1)


def _one(path: Path, seed: int, *, json_: bool, log: bool) -> int:
    from supervisors.simulation.runner import simulate as run
    from supervisors.simulation.seeds import load_whole, replay_command

    outcome = run(load_whole(path), seed, _tell if log else None)
    if outcome.report:
        _tell(outcome.report)
    for violation in outcome.violations:
        _tell(f"violation: {violation}")
    if outcome.violations:
        _tell(f"replay: {replay_command(path, seed)} --log")
    if json_:
        _show(
            {
                "seed": seed,
                "hash": outcome.hash,
                "violations": outcome.violations,
                "virtual_seconds": outcome.virtual_seconds,
                "seconds": round(outcome.seconds, 3),
                "events": outcome.events,
            }
        )
    else:
        for fault in outcome.faults:
            print(fault)
        print(
            f"seed {seed}: {len(outcome.violations)} violations, {len(outcome.faults)} faults, "
            f"{outcome.events} events in {outcome.virtual_seconds:.1f} virtual s and {outcome.seconds:.2f} s, "
            f"hash {outcome.hash}"
        )
    return EXIT_FAILED if outcome.violations else EXIT_FINISHED


def _many(path: Path, seeds: range, processes: int, *, json_: bool) -> int:
    from supervisors.simulation.runner import Outcome
    from supervisors.simulation.seeds import replay_command, run_seeds, run_seeds_in_processes

    def hear(outcome: Outcome) -> None:
        if outcome.violations:
            _tell(f"seed {outcome.seed}: {outcome.violations[0]}\n  replay: {replay_command(path, outcome.seed)}")

    if processes > 1:
        tally = asyncio.run(run_seeds_in_processes(path, seeds, processes))
    else:
        tally = run_seeds(path, seeds, hear)
    if json_:
        _show(tally.as_map())
    else:
        print(
            f"{tally.seeds} seeds: {tally.violations} violations in {len(tally.failing)} of them, {tally.seconds:.1f} s"
        )
    return EXIT_FAILED if tally.violations else EXIT_FINISHED


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _show(result: dict[str, Any]) -> None:
    print(strict_json(result), flush=True)
