"""Unmodified programs of other people against ``headrace serve``: recipes of the cookbook, and an older client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import mean

import pytest

pytest.importorskip("tinker")

from tests.supervisors.serving.arithmetic_model import make_arithmetic_model
from tests.supervisors.serving.recipe_environment import Program, environment
from tests.supervisors.serving.served_process import ServedProcess
from tests.tiny_checkpoint import make_tiny_checkpoint

pytestmark = [pytest.mark.long, pytest.mark.timeout(1500)]

COOKBOOK = ("tinker-cookbook==0.6.1", "tinker==0.38.0")
IMPORTED_BY_IT = (
    *("blobfile", "chz", "cloudpickle", "lxml", "math-verify", "pycryptodomex", "pylatexenc", "termcolor", "tiktoken"),
)
CHAT = "Qwen/Qwen3-8B-Base"
"""Name of a tiny model: recipes know by it how chats are written, and find its tokenizer in a folder of that name."""
SUMS = "sums/taught-a-little"
RECIPE_S = 600


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where recipes run: their models' files are there, by the names that they use."""
    folder = tmp_path_factory.mktemp("recipes")
    make_tiny_checkpoint(folder / CHAT)
    make_arithmetic_model(folder / SUMS, steps=200)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServedProcess]:
    served = ServedProcess({name: folder / name for name in (CHAT, SUMS)}, folder / "served")
    yield served
    assert served.end() == 0


@pytest.fixture(scope="module")
def cookbook(folder: Path) -> Path:
    return environment(folder / "cookbook", *COOKBOOK, *IMPORTED_BY_IT)


def recipe(python: Path, folder: Path, server: ServedProcess, name: str, **settings: object) -> Program:
    words = [f"{key}={value}" for key, value in settings.items()]
    return Program(python, ["-m", f"tinker_cookbook.recipes.{name}", *words], folder, server.variables)


def column(log: Path, name: str) -> list[float]:
    """What a recipe has written of its steps so far."""
    file = log / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [row[name] for row in rows if name in row]


def conversations(count: int) -> str:
    said = ["red is a color", "two and two is four", "the sea is deep", "birds sing"]
    rows = [
        {"messages": [{"role": "user", "content": f"say {n % 4}"}, {"role": "assistant", "content": said[n % 4]}]}
        for n in range(count)
    ]
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_reinforcement_of_arithmetic_raises_its_reward(cookbook: Path, folder: Path, server: ServedProcess) -> None:
    """The last five batches against the first two, which a batch of 256 answers differs from by 0.01 by chance."""
    log = folder / "math_rl"
    recipe(
        cookbook, folder, server, "math_rl.train", env="arithmetic", model_name=SUMS, renderer_name="role_colon",
        loss_fn="importance_sampling", group_size=8, groups_per_batch=32, learning_rate=2e-3, max_steps=16,
        save_every=0, eval_every=0, log_path=log,
    ).wait(RECIPE_S)  # fmt: skip
    rewards = column(log, "env/all/reward/total")
    assert len(rewards) == 16
    assert mean(rewards[-5:]) > mean(rewards[:2]) + 0.025, rewards


def test_a_chat_of_a_file_is_learned(cookbook: Path, folder: Path, server: ServedProcess) -> None:
    (folder / "conversations.jsonl").write_text(conversations(96))
    log = folder / "chat_sl"
    recipe(
        cookbook, folder, server, "chat_sl.train", dataset="conversations.jsonl", model_name=CHAT, batch_size=8,
        renderer_name="role_colon", learning_rate=1e-2, save_every=0, eval_every=0, log_path=log,
    ).wait(RECIPE_S)  # fmt: skip
    losses = column(log, "train_mean_nll")
    assert len(losses) == 12
    assert mean(losses[-3:]) < 0.8 * mean(losses[:3]), losses


def test_a_loop_of_its_own_goes_on_after_it_and_the_server_were_killed(
    cookbook: Path, folder: Path, server: ServedProcess
) -> None:
    data = folder / "HuggingFaceH4" / "no_robots"
    data.mkdir(parents=True)
    (data / "train.jsonl").write_text(conversations(240))
    log = folder / "sl_loop"
    settings = {"model_name": CHAT, "batch_size": 8, "learning_rate": 1e-2, "save_every": 4, "log_path": log}

    first = recipe(cookbook, folder, server, "sl_loop", **settings)
    first.wait_until(lambda: len(column(log, "train_mean_nll")) > 9, RECIPE_S)
    first.kill()
    server.kill()
    before = column(log, "train_mean_nll")
    server.begin()

    second = recipe(cookbook, folder, server, "sl_loop", **settings)
    second.wait_until(lambda: len(column(log, "train_mean_nll")) > len(before) + 3, RECIPE_S)
    server.kill()  # the recipe sees a pause
    server.begin()
    second.wait(RECIPE_S)
    steps = [int(step) for step in column(log, "step")]
    resumed = steps[len(before)]
    assert resumed % 4 == 0 and 0 < resumed <= steps[len(before) - 1] + 1, "from the newest state that it has saved"
    assert steps[len(before) :] == list(range(resumed, 30))
    losses = column(log, "train_mean_nll")
    assert mean(losses[-3:]) < 0.7 * mean(losses[:3]), losses


@pytest.mark.parametrize("release", ["0.25.0", "0.38.0"])
def test_a_program_for_the_client_runs_with_its_oldest_and_its_newest_release(
    release: str, folder: Path, server: ServedProcess
) -> None:
    python = environment(folder / release, f"tinker=={release}")
    program = Program(python, [str(Path(__file__).with_name("client_story.py")), CHAT], folder, server.variables)
    program.wait(RECIPE_S)
    assert f"tinker {release}" in program.said()
