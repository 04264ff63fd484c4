"""What engines compute of prompts, live, against the least that there is: groups, and a system prompt before them all.

    the job ─┬─ groups   prompts that have nothing in common, three siblings each
             └─ system   the same behind a system prompt of 200 tokens

    of_unshared = prefilled / (prefilled + prefix hits)    what every sibling by itself would compute is 1
    ratio       = prefilled / distinct tokens              each worker computes a common beginning, for each version

The figures are columns of metrics.jsonl, of the steps after the first: ``prefilled_tokens``, ``prefix_hit_tokens``,
``distinct_prefix_tokens``. Above all stand those of the run with the system prompt. Engines, trainer, processes and
links are the real ones; a step is short, since only tokens are counted and no time is measured.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks._command import Result, add_check_option, add_job_options, command_line, measured, show_and_check
from benchmarks._jobs import hardware, prepare_job, run_headrace, use_cores
from benchmarks._processes import ROOT
from benchmarks.peers.long_tail import write_rows
from configs.loader import load_job

SYSTEM_TOKENS: Final = 200
GOAL_OF_UNSHARED: Final = 0.36
"""Most that groups of three may compute of what their siblings would each by itself: a third, and what comes apart."""
GOAL_RATIO: Final = 1.1
"""Most that may be computed behind a system prompt, of the distinct tokens."""
_NONE: Final = ("prompts_lost", "samples_trained_twice")
_SENTENCE: Final = "You are careful: read each line twice, think, and answer with capital letters only. "


def system_prompt(tokens: int = SYSTEM_TOKENS) -> str:
    """So many characters, each of which is a token of the model that is made here."""
    return (_SENTENCE * (1 + tokens // len(_SENTENCE)))[:tokens]


def figures(rows: Sequence[dict[str, Any]]) -> Result:
    """The means of these steps."""

    def mean(name: str) -> float:
        return statistics.fmean(float(row[name]) for row in rows)

    prefilled, distinct = mean("prefilled_tokens"), mean("distinct_prefix_tokens")
    unshared = prefilled + mean("prefix_hit_tokens")
    return {
        "prefilled_tokens": round(prefilled),
        "distinct_tokens": round(distinct),
        "unshared_tokens": round(unshared),
        "of_unshared": round(prefilled / unshared, 3),
        "ratio": round(prefilled / distinct, 3),
    }


def judged(groups: Result, system: Result) -> Result:
    """Both runs side by side, and goals that were not met, in sentences."""
    missed = list[str]()
    if groups["of_unshared"] > GOAL_OF_UNSHARED:
        missed.append(f"groups: {groups['of_unshared']} of what nothing shared is, the goal is {GOAL_OF_UNSHARED}")
    if system["ratio"] > GOAL_RATIO:
        missed.append(f"system: {system['ratio']} of the distinct tokens, the goal is {GOAL_RATIO}")
    for name, run in (("groups", groups), ("system", system)):
        missed += [f"{name}: {key} is {run[key]}" for key in _NONE if run[key]]
    return {"runs": {"groups": groups, "system": system}, "missed": missed, **system}


def measure(options: argparse.Namespace, directory: Path) -> Result:
    """Prepare, then one run of each. The model is made before there is a system prompt, which would be one token."""
    use_cores(options.cores)
    result: Result = {"benchmark": "prefix", "hardware": hardware()}
    write_rows(directory / "rows.jsonl")
    overrides = [f"data.path={directory / 'rows.jsonl'}", *(options.set or [])]
    job_file = prepare_job(options.job, overrides, directory, options.model)
    settings = {"groups": list[str](), "system": [f'data.template="{system_prompt()}{{prompt}}"']}
    found: dict[str, Result] = {}
    for name, more in settings.items():
        print(name, file=sys.stderr)
        run = run_headrace(job_file, (options.keep or directory) / name, [f"steps={options.steps}", *more])
        found[name] = figures(run.rows[1:])
        found[name] = {key: run.summary[key] for key in _NONE} | found[name]
    job = load_job(job_file)
    groups = f"{job.algorithm.prompts_per_step} prompts x {job.algorithm.group_size}"
    result |= {"job": f"{groups}, {job.rollout.workers} workers, {job.rollout.engine} engine", "steps": options.steps}
    return result | judged(found["groups"], found["system"])


def parse(args: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = command_line("prefix", __doc__)
    add_job_options(parser, ROOT / "benchmarks" / "jobs" / "prefix.yaml")
    parser.add_argument("--steps", type=int, default=5, help="the first one does not count")
    parser.add_argument("--keep", type=Path, help="leave the run directories here, for headrace plot")
    add_check_option(parser)
    options = parser.parse_args(args)
    if options.steps < 2:
        parser.error(f"--steps is {options.steps}: expected 2 or more, as the first one does not count")
    return options


def main(args: list[str]) -> int:
    """Count and print; with ``--check`` hold the figures against their goals."""
    options = parse(args)
    return show_and_check(measured(measure, options), options, _print_table)


def _print_table(result: Result) -> None:
    print(f"{result['job']}; {result['steps']} steps; tokens a step")
    for name, run in result["runs"].items():
        print(
            f"  {name:<7} prefilled {run['prefilled_tokens']:>7}  distinct {run['distinct_tokens']:>7}"
            f"  ratio {run['ratio']:.3f}  of {run['unshared_tokens']:>7} without sharing {run['of_unshared']:.1%}"
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
