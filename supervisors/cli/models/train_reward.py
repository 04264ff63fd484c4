"""``headrace train-reward``: a reward model from preferences.

PREFERENCES, --model ─▶ read ─▶ trained in this process ─▶ --out, a directory that reward.kind: model loads
                                  └ progress, held-out accuracy ─▶ stderr
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from actors.core.strict_json import strict_json
from actors.core.terminal_text import harmless
from configs.errors import ConfigError
from configs.run_files import MODEL_RECORD
from supervisors.cli.command import EXIT_BAD_CONFIG, EXIT_FAILED, EXIT_INTERRUPTED, Json, fail, finish

if TYPE_CHECKING:
    from actors.reward_training.training import Progress
    from configs.reward_training import RewardTraining


def train_reward(
    preferences: Annotated[
        Path, typer.Argument(metavar="PREFERENCES", help="A .jsonl or .parquet file: chosen, rejected, perhaps prompt.")
    ],
    model: Annotated[
        str, typer.Option(help="What it is made of: a language model or a classifier with one label; or a hub name.")
    ],
    out: Annotated[Path, typer.Option(help="Directory to write; it may not exist yet.")] = Path("reward-model"),
    epochs: Annotated[float | None, typer.Option(help="How often each pair is seen.", show_default="1.0")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps, in place of --epochs.")] = None,
    lr: Annotated[float | None, typer.Option(help="Highest learning rate.", show_default="1e-05")] = None,
    held_out: Annotated[
        float | None,
        typer.Option(help="Share of the prompts that is not trained on, and tells the accuracy.", show_default="0.05"),
    ] = None,
    batch_pairs: Annotated[int | None, typer.Option(help="Pairs of one optimizer step.", show_default="32")] = None,
    batch_tokens: Annotated[
        int | None,
        typer.Option(help="Tokens of one forward and backward pass, padding included.", show_default="16384"),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Longer texts lose their beginning. Default: as many as the model takes.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Fixes the head's first weights and the order of the pairs.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    json_: Json = False,
) -> None:
    """Train a reward model on preferences (Bradley-Terry), and say how many held-out pairs it ranks right."""
    from configs.reward_training import RewardTraining
    from configs.validation import validate

    given = {
        "preferences": str(preferences), "model": model, "epochs": epochs, "steps": steps, "lr": lr,
        "held_out": held_out, "batch_pairs": batch_pairs, "batch_tokens": batch_tokens,
    }  # fmt: skip
    named = {name: value for name, value in given.items() if value is not None}  # the others have the file's defaults
    try:
        how = validate(RewardTraining, named, lambda field: _named(field) if field else "headrace train-reward")
    except ConfigError as error:
        fail(str(error), EXIT_BAD_CONFIG)
    if device not in ("auto", "cpu", "cuda"):
        fail(f"--device {device}: expected auto, cpu or cuda", EXIT_BAD_CONFIG)
    if max_tokens is not None and max_tokens < 1:
        fail(f"--max-tokens {max_tokens}: expected a number above 0", EXIT_BAD_CONFIG)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        fail(f"--out {out}: something is there already; name another directory, or remove it", EXIT_BAD_CONFIG)
    result = _train(how, _directory(model), out, seed, device, max_tokens)
    if json_:
        print(strict_json(result), flush=True)
    else:
        print(f"{result['path']} ranks {result['accuracy_held_out']:.1%} of {result['pairs_held_out']} held-out pairs "
              f"right, after {result['steps']} steps and {result['seconds']} s. In a job:  "
              f"reward: {{kind: model, path: {result['path']}}}")  # fmt: skip


def _named(setting: str) -> str:
    """A setting as it is written on the command line."""
    return "PREFERENCES" if setting == "preferences" else f"--{setting.replace('_', '-')}"


def _directory(model: str) -> Path:
    """Directory of the model; one that is named on a hub is fetched."""
    from configs.hub_names import is_hub_name

    path = Path(model).expanduser()
    if path.exists():
        return path
    if not is_hub_name(model):
        fail(f"--model {model}: there is no such directory, and it is no hub name; name one", EXIT_BAD_CONFIG)
    from configs.limits import DEFAULT_LIMITS
    from supervisors.preparation.model_fetch import HubModel, fetch_model
    from supervisors.preparation.phase import to_nobody

    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / MODEL_RECORD
        wanted = HubModel("--model", model, "--model", None)
        return finish(lambda: fetch_model(wanted, record, Path(folder) / "log", DEFAULT_LIMITS, _say, to_nobody))


def _train(
    how: RewardTraining, model: Path, out: Path, seed: int, device: str, max_tokens: int | None
) -> dict[str, Any]:
    from actors.host.import_guard import hide_broken_optionals
    from actors.host.thread_pool import let_waiting_threads_rest

    let_waiting_threads_rest()
    hide_broken_optionals()
    from actors.reward_training.errors import CannotTrain, RewardTrainingError
    from actors.reward_training.preferences import read_preferences
    from transport.errors import HeadraceError

    try:
        pairs = read_preferences(Path(how.preferences).expanduser(), "PREFERENCES")
        from actors.reward_training.train import TrainingOrder, train_reward_model  # with torch, once there are pairs

        order = TrainingOrder(model, out.absolute(), how, seed, device, max_tokens)
        return train_reward_model(order, pairs, named=_named, say=_say, tell=_Teller())
    except CannotTrain as error:
        fail(str(error), EXIT_BAD_CONFIG)
    except RewardTrainingError as error:
        fail(str(error), EXIT_FAILED)
    except KeyboardInterrupt:
        fail("interrupted: nothing is written", EXIT_INTERRUPTED)
    except (HeadraceError, OSError) as error:
        fail(f"{type(error).__name__}: {error}", EXIT_FAILED)


def _say(text: str) -> None:
    print(harmless(text), file=sys.stderr, flush=True)


class _Teller:
    """Reports a training on stderr: each measured accuracy, and now and then a step in between."""

    def __init__(self) -> None:
        self._told_s = time.monotonic()

    def __call__(self, progress: Progress) -> None:
        from configs.limits import DEFAULT_LIMITS

        now_s = time.monotonic()
        if progress.accuracy is None and now_s - self._told_s < DEFAULT_LIMITS.model_progress_s:
            return
        self._told_s = now_s
        accuracy = "" if progress.accuracy is None else f"  held-out accuracy {progress.accuracy:.3f}"
        _say(f"{progress.step} of {progress.steps} steps  loss {progress.loss:.4f}{accuracy}")
