"""``headrace samples RUN_DIR``: what the policy was asked, what it answered, and what that was worth.

RUN_DIR/samples.jsonl (``actors/metrics/samples.py``) ─▶ some of the samples, as text or JSON

Text is shortened in its middle, JSON is not. The text comes from a model or an environment, so control characters in it
never reach the terminal (``terminal_text.py``).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Console

from actors.core.strict_json import strict_json
from actors.core.terminal_text import harmless, shortened
from configs.run_files import JOB_FILE, SAMPLES
from supervisors.cli.command import EXIT_BAD_CONFIG, EXIT_FAILED, Json, fail, wrong

if TYPE_CHECKING:
    from actors.metrics.samples import Choice

_PROMPTS_NAMED: Final = 10
"""Most prompts that an error message names."""


def samples(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Of a run, over or not.")],
    step: Annotated[
        int | None, typer.Option(help="Of this step, or the last one before it. Default: the newest.")
    ] = None,
    best: Annotated[bool, typer.Option("--best", help="Those with a reward, the highest first.")] = False,
    worst: Annotated[bool, typer.Option("--worst", help="Those with a reward, the lowest first.")] = False,
    random: Annotated[bool, typer.Option("--random", help="Those that the run has drawn at random.")] = False,
    count: Annotated[int | None, typer.Option(min=1, help="At most so many. Default: all that there are.")] = None,
    prompt: Annotated[
        int | None, typer.Option(help="Of this prompt, by its number; without --step in all steps.")
    ] = None,
    json_: Json = False,
) -> None:
    """Print some samples of a step: the best, the worst, some at random; prompt, turns, reward, cut or ended."""
    from actors.metrics.samples import read_samples
    from configs.errors import ConfigError

    wanted: dict[Choice, bool] = {"best": best, "worst": worst, "random": random}
    chosen: list[Choice] = [choice for choice, given in wanted.items() if given]
    if len(chosen) > 1:
        together = ", ".join(f"--{choice}" for choice in chosen)
        fail(f"{together}: expected one of them; leave the others out", EXIT_BAD_CONFIG)
    try:
        found = read_samples(run_dir / SAMPLES)
        rows = _picked(run_dir, found, step, prompt, chosen[0] if chosen else None, count)
    except ConfigError as error:
        fail(str(error), EXIT_BAD_CONFIG)
    except OSError as error:
        fail(f"{type(error).__name__}: {error}", EXIT_FAILED)
    if json_:
        print(strict_json(rows), flush=True)
    else:
        _print(Console(highlight=False), rows)


def _picked(
    run_dir: Path,
    found: list[dict[str, Any]],
    step: int | None,
    prompt: int | None,
    choice: Choice | None,
    count: int | None,
) -> list[dict[str, Any]]:
    """The samples to print, chosen by ``actors.metrics.samples.picked``.

    Raises:
        ConfigError: ``run_dir`` is no run directory, or has no such samples.
    """
    from actors.metrics.samples import picked

    where = f"headrace samples {run_dir}"
    if not (run_dir / JOB_FILE).is_file():
        raise wrong(where, "is no run directory: it has no job.yaml", "Name the directory that the run printed")
    if not found:
        fix = "Wait until its first step is committed; metrics.samples: false in its job file leaves them out"
        raise wrong(where, "has no samples yet", fix)
    rows = picked(found, step=step, prompt=prompt, choice=choice, count=count)
    kept = sorted({row["prompt"] for row in found})
    if prompt is not None and prompt not in kept:
        others = " and others" if len(kept) > _PROMPTS_NAMED else ""
        fix = f"It has some of {', '.join(map(str, kept[:_PROMPTS_NAMED]))}{others}; a run keeps few of each step"
        raise wrong(where, f"has no samples of prompt {prompt}", fix)
    if not rows and choice is not None and picked(found, step=step, prompt=prompt):
        raise wrong(where, f"has no samples for --{choice} in that step", "Leave it out, or name another --step")
    if not rows:
        raise wrong(where, f"has no samples of step {step} or before", f"The first are of step {found[0]['step']}")
    return rows


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _print(console: Console, rows: list[dict[str, Any]]) -> None:
    from actors.metrics.samples import titled
    from actors.protocol.endings import BOUNDS
    from configs.limits import DEFAULT_LIMITS

    ends = {"cut": "cut at max_tokens", **BOUNDS}  # ``cut`` is in files of older versions
    chars = DEFAULT_LIMITS.sample_shown_chars
    for row in rows:
        reward = _figure(row["reward"])
        if row["reward"] is not None and row["reward_parts"]:
            reward += f" ({', '.join(f'{name} {_figure(value)}' for name, value in row['reward_parts'].items())})"
        source = f" of {row['source']}" if row.get("source") else ""
        head = (
            f"── step {row['step']}, prompt {row['prompt']}{source}, sibling {row['sibling']}: {row['chosen']}, "
            f"reward {reward}, {row['tokens']} tokens, {ends.get(row['finish'], row['finish'])}"
        )
        console.print(harmless(head), style="bold", markup=False, soft_wrap=True)
        prompt, answer = (shortened(row[key], chars) for key in ("prompt_text", "answer"))
        parts = [("prompt", prompt), *titled(row["turns"], chars), ("answer", answer)]
        if row["reason"]:
            parts.append(("dropped", row["reason"]))
        for name, text in parts:
            console.print(harmless(f"{name}:"), style="dim", markup=False)
            console.print(harmless(text), markup=False, soft_wrap=True)
        console.print()
