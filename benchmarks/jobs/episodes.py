"""Whether a policy learns a game of several turns: held-out avg@8 before and after, and with shuffled rewards.

    configs/episodes.yaml, its model made once ─┬─ seed 0, 1, 2 ─▶ headrace run, evaluated at its start and its end
                                                └─ control ──────▶ the same, but siblings have each other's rewards

The game is the guessing game of that preset, with numbers that are not equally likely: nobody says so, and it can be
found out. Held-out games are rows of their own, with the same numbers as often. The learned policy must be better in
each seed, by more than chance between two evaluations; the control must not have learned it.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, Final

from benchmarks._command import Result, add_check_option, add_job_options, command_line, measured, show_and_check
from benchmarks._jobs import hardware, prepare_job, run_headrace, use_cores
from benchmarks._processes import ROOT

RISE_MIN: Final = 0.05
"""Rise of avg@8 that each seed must show."""
CONTROL_SHARE: Final = 0.5
"""Part of the mean rise that the control may show at most."""
SAMPLES: Final = 8
_NUMBERS: Final = (6,) * 8 + (3,) * 4 + (1, 2, 4, 5, 7, 8)
"""Numbers of the held-out games, and of each of the equal parts that the games to train on consist of."""
_PARTS: Final = 4
_SHUFFLED: Final = "algorithm.advantage=benchmarks.jobs._shuffled:advantage"


def measure(options: argparse.Namespace, directory: Path) -> Result:
    """Prepare, run each seed and the control, compare."""
    use_cores(options.cores)
    result: Result = {"hardware": hardware()}
    print("preparing the model", file=sys.stderr)
    sets = [*overrides(directory), *(options.set or []), f"steps={options.steps}"]
    job_file = prepare_job(options.job, sets, directory, options.model)
    runs = {f"seed {seed}": [f"seed={seed}"] for seed in range(options.seeds)} | {"control": ["seed=0", _SHUFFLED]}
    ends = {name: _evaluated(name, job_file, directory, extra) for name, extra in runs.items()}
    control = ends.pop("control")
    result |= {
        "avg_at_8_first": [first for first, _ in ends.values()],
        "avg_at_8_last": [last for _, last in ends.values()],
        "control_first": control[0],
        "control_last": control[1],
        "steps": options.steps,
        "seeds": options.seeds,
    }
    return result | {"missed": missed(result)}


def overrides(directory: Path) -> list[str]:
    """What the job is given besides its file: games to train on, and others to be measured on."""
    directory.mkdir(parents=True, exist_ok=True)
    games = [_game(number) for number in range(len(_NUMBERS) * (_PARTS + 1))]
    files = {"train": games[len(_NUMBERS) :], "held_out": games[: len(_NUMBERS)]}
    for name, rows in files.items():
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    held_out = {"source": "jsonl", "path": str(directory / "held_out.jsonl")}
    evaluation = {"data": held_out, "every": 1_000_000, "samples": SAMPLES}  # so at the start and the end alone
    return [f"data.path={json.dumps(str(directory / 'train.jsonl'))}", f"eval={json.dumps(evaluation)}"]


def _game(number: int) -> dict[str, Any]:
    return {"prompt": "Guess my number.", "answer": str(_NUMBERS[number % len(_NUMBERS)]), "game": number}


def _evaluated(name: str, job_file: Path, directory: Path, sets: list[str]) -> tuple[float, float]:
    """Held-out avg@8 before the first step and after the last."""
    print(name, file=sys.stderr, flush=True)
    ends = run_headrace(job_file, directory / name.replace(" ", "-"), sets).summary["eval"]
    first, last = (round(float(ends[which]["avg_at_k"]), 4) for which in ("first", "last"))
    print(f"  avg@8 {first} → {last}", file=sys.stderr, flush=True)
    return first, last


def missed(result: Result) -> list[str]:
    """Goals that were not reached, in sentences."""
    rises = [last - first for first, last in zip(result["avg_at_8_first"], result["avg_at_8_last"], strict=True)]
    found = [f"seed {i} rose by {rise:.3f}, goal {RISE_MIN}" for i, rise in enumerate(rises) if rise < RISE_MIN]
    control, most = result["control_last"] - result["control_first"], CONTROL_SHARE * sum(rises) / len(rises)
    if control > most:
        found.append(f"the control rose by {control:.3f}, goal at most {most:.3f}")
    return found


def main(args: list[str]) -> int:
    """Measure and print; with ``--check``, 1 if a goal is missed."""
    parser = command_line("episodes", __doc__)
    add_job_options(parser, ROOT / "configs" / "episodes.yaml")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=3)
    add_check_option(parser)
    options = parser.parse_args(args)
    return show_and_check(measured(measure, options), options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
