"""``headrace samples RUN_DIR``: what the policy was asked, what it answered, and what that was worth.

RUN_DIR/samples.jsonl (``actors/metrics/samples.py``) ─▶ the samples of one step, as text or JSON

All of it is a model's text, so nothing of it reaches the terminal as it is (``terminal_text.py``).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console

from actors.core.terminal_text import harmless
from supervisors.cli.command import EXIT_BAD_CONFIG, EXIT_FAILED, Json, fail, wrong

_NAMES: Final = {"ended": "ended", "cut": "cut at max_tokens"}


def samples(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Of a run, over or not.")],
    step: Annotated[
        int | None, typer.Option(help="Of this step, or the last one before it. Default: the newest.")
    ] = None,
    json_: Json = False,
) -> None:
    """Print some samples of a step: the best, the worst, some at random; prompt, response, reward, cut or ended."""
    from actors.metrics.samples import read_samples
    from configs.errors import ConfigError

    try:
        found = read_samples(run_dir / "samples.jsonl")
        rows = _of_step(run_dir, found, step)
    except ConfigError as error:
        fail(str(error), EXIT_BAD_CONFIG)
    except OSError as error:
        fail(f"{type(error).__name__}: {error}", EXIT_FAILED)
    if json_:
        print(json.dumps(rows), flush=True)
    else:
        _print(Console(highlight=False), rows)


def _of_step(run_dir: Path, found: list[dict[str, Any]], step: int | None) -> list[dict[str, Any]]:
    """The samples of the newest step that is not after ``step``.

    Raises:
        ConfigError: it is no run directory, or has none of them.
    """
    from actors.metrics.samples import of_step

    where = f"headrace samples {run_dir}"
    if not (run_dir / "job.yaml").is_file():
        raise wrong(where, "is no run directory: it has no job.yaml", "Name the directory that the run printed")
    if not found:
        fix = "Wait until its first step is committed; metrics.samples: false in its job file leaves them out"
        raise wrong(where, "has no samples yet", fix)
    rows = of_step(found, step)
    if not rows:
        raise wrong(where, f"has no samples of step {step} or before", f"The first are of step {found[0]['step']}")
    return rows


def _print(console: Console, rows: list[dict[str, Any]]) -> None:
    for row in rows:
        reward = "–" if row["reward"] is None else f"{row['reward']:.3f}"
        named = {name.removeprefix("reward_"): value for name, value in row.items() if name.startswith("reward_")}
        if row["reward"] is not None and named:
            reward += f" ({', '.join(f'{name} {value:.3f}' for name, value in named.items())})"
        source = f" of {row['source']}" if row.get("source") else ""
        head = (
            f"── step {row['step']}, prompt {row['prompt']}{source}, sibling {row['sibling']}: {row['chosen']}, "
            f"reward {reward}, {row['tokens']} tokens, {_NAMES.get(row['finish'], row['finish'])}"
        )
        console.print(harmless(head), style="bold", markup=False, soft_wrap=True)
        parts = [("prompt", row["prompt_text"]), ("response", row["response"]), ("answer", row["answer"])]
        if row["reason"]:
            parts.append(("dropped", row["reason"]))
        for name, text in parts:
            console.print(f"{name}:", style="dim", markup=False)
            console.print(harmless(str(text)), markup=False, soft_wrap=True)
        console.print()
