"""``headrace samples`` prints what a model wrote, and none of it can steer the terminal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from msgspec import structs
from typer.testing import CliRunner

from actors.metrics.samples import SamplesFile, read_samples
from actors.protocol.metrics import ShownSample, ShownTurn
from supervisors.cli.app import app


def sample(step: int, *, response: str | None = None, **changes: Any) -> ShownSample:
    text = f"answer of {step}" if response is None else response
    plain = ShownSample(
        step=step, chosen="best", prompt=7, sibling=1, source="", row=3, reward=0.5, reward_parts={}, finish="ended",
        tokens=4, versions=[step, step], reason="", prompt_text="2+2=", turns=[ShownTurn("model", text, 4)], answer="4",
    )  # fmt: skip
    return structs.replace(plain, **changes)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "job.yaml").write_text("")
    file = SamplesFile(tmp_path / "samples.jsonl", 1 << 20)
    file.add([sample(0), sample(0, chosen="worst", reward=0.0, finish="cut")])
    file.add([sample(3, response="\x1b]0;owned\x07[red]hi[/]")])
    file.add([sample(8, chosen="dropped", reward=None, reason="no_result: KeyError: 'x' (rw.py:1)")])
    return tmp_path


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["samples", *arguments])


def test_the_newest_step_is_shown_and_any_other_by_its_number(run_dir: Path) -> None:
    newest = invoke(str(run_dir)).stdout
    assert "step 8, prompt 7, sibling 1: dropped, reward –" in newest and "KeyError: 'x' (rw.py:1)" in newest
    first = invoke(str(run_dir), "--step", "0").stdout
    assert (
        "best, reward 0.500, 4 tokens, ended" in first and "worst, reward 0.000, 4 tokens, cut at max_tokens" in first
    )
    assert "answer of 0" in first and "answer of 3" not in first
    assert "step 3" in invoke(str(run_dir), "--step", "5").stdout, "the last one before it: not every step is kept"


def test_several_rewards_and_the_source_of_a_prompt_are_shown_beside_the_sum(run_dir: Path) -> None:
    lost: dict[str, Any] = {"reward": None, "reward_parts": {"right": None, "form": None}}
    parts: dict[str, Any] = {"source": "ours", "reward": 1.1, "reward_parts": {"right": 1.0, "form": 0.2}}
    SamplesFile(run_dir / "samples.jsonl", 1 << 20).add([sample(9, **parts), sample(9, chosen="dropped", **lost)])
    shown = invoke(str(run_dir)).stdout
    assert "prompt 7 of ours, sibling 1: best, reward 1.100 (right 1.000, form 0.200), 4 tokens" in shown
    assert "dropped, reward –, 4 tokens" in shown


def test_what_a_model_wrote_is_shown_as_it_is_and_steers_nothing(run_dir: Path) -> None:
    assert r"\x1b]0;owned\x07[red]hi[/]" in invoke(str(run_dir), "--step", "3").stdout
    rows = json.loads(invoke(str(run_dir), "--step", "3", "--json").stdout)
    assert rows[0]["turns"][0]["text"] == "\x1b]0;owned\x07[red]hi[/]"


def test_the_turns_of_an_episode_are_shown_in_their_order_and_long_ones_lose_their_middle(run_dir: Path) -> None:
    long = "a" * 3000 + "b" * 3000
    turns = [
        ShownTurn("model", long, 6000), ShownTurn("tool", "\x1b[2J", 3, name="py\x07"),
        ShownTurn("environment", "warmer", 2, fresh=True), ShownTurn("model", "7", 1),
    ]  # fmt: skip
    SamplesFile(run_dir / "samples.jsonl", 1 << 20).add([sample(9, turns=turns)])
    shown = invoke(str(run_dir)).stdout
    titles = [line for line in shown.splitlines() if line.startswith("turn ")]
    assert titles == [
        "turn 1, model, 6000 tokens:",
        r"turn 2, tool py\x07, 3 tokens:",
        "turn 3, environment, fresh context, 2 tokens:",
        "turn 4, model, 1 tokens:",
    ]
    assert "2,011 characters left out" in shown and r"\x1b[2J" in shown
    (row,) = json.loads(invoke(str(run_dir), "--json").stdout)
    assert row["turns"][0] == {"role": "model", "text": long, "tokens": 6000, "name": "", "fresh": False}


def asked(run_dir: Path, *arguments: str) -> list[tuple[int, str, float | None]]:
    rows = json.loads(invoke(str(run_dir), "--json", *arguments).stdout)
    return [(row["step"], row["chosen"], row["reward"]) for row in rows]


def test_the_best_the_worst_and_the_random_ones_of_a_step_or_of_a_prompt(run_dir: Path) -> None:
    lines = [("best", 0.9, 7), ("worst", 0.1, 8), ("random", 0.3, 9), ("random", 0.8, 7), ("dropped", None, 8)]
    step_9 = [sample(9, chosen=chosen, reward=reward, prompt=prompt) for chosen, reward, prompt in lines]
    SamplesFile(run_dir / "samples.jsonl", 1 << 20).add(step_9)
    assert asked(run_dir, "--best", "--count", "2") == [(9, "best", 0.9), (9, "random", 0.8)]
    assert asked(run_dir, "--worst") == [(9, "worst", 0.1), (9, "random", 0.3), (9, "random", 0.8), (9, "best", 0.9)]
    assert asked(run_dir, "--random") == [(9, "random", 0.3), (9, "random", 0.8)]
    assert asked(run_dir, "--count", "1") == [(9, "best", 0.9)]
    assert asked(run_dir, "--worst", "--step", "0") == [(0, "worst", 0.0), (0, "best", 0.5)]
    assert [step for step, *_ in asked(run_dir, "--prompt", "7")] == [0, 0, 3, 8, 9, 9]
    assert asked(run_dir, "--prompt", "7", "--best", "--count", "1") == [(9, "best", 0.9)]
    assert asked(run_dir, "--prompt", "8", "--step", "20") == [(9, "worst", 0.1), (9, "dropped", None)]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--best", "--random"], "--best, --random: expected one of them"),
        (["--prompt", "11"], "has no samples of prompt 11. It has some of 7; a run keeps few of each step"),
        (["--random"], "has no samples for --random in that step. Leave it out, or name another --step"),
        (["--best"], "has no samples for --best in that step"),
        (["--count", "0"], "--count"),
    ],
)
def test_what_there_is_none_of_is_said(run_dir: Path, arguments: list[str], words: str) -> None:
    result = invoke(str(run_dir), *arguments)
    assert result.exit_code == 2 and words in " ".join(result.stderr.split())


def test_a_directory_without_samples_is_told_why(run_dir: Path) -> None:
    assert invoke(str(run_dir), "--step", "-1").exit_code == 2
    (run_dir / "samples.jsonl").unlink()
    result = invoke(str(run_dir))
    assert result.exit_code == 2 and "metrics.samples" in result.stderr
    (run_dir / "job.yaml").unlink()
    assert "is no run directory" in invoke(str(run_dir)).stderr


def test_the_file_is_thinned_and_keeps_samples_of_all_its_time(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    file = SamplesFile(path, 20_000)
    for step in range(1000):
        file.add([sample(step), sample(step, chosen="worst")])
        assert path.stat().st_size <= 20_000
    steps = [row["step"] for row in read_samples(path)]
    assert steps == sorted(steps) and steps[-1] == 999 and steps[0] == 0
    assert sum(step < 500 for step in steps) > 0.1 * len(steps)
    assert all(steps.count(step) == 2 for step in steps)


def test_a_line_that_was_cut_off_is_passed_over(run_dir: Path) -> None:
    with (run_dir / "samples.jsonl").open("a") as file:
        file.write('{"step": 9, "chos')
    assert [row["step"] for row in read_samples(run_dir / "samples.jsonl")] == [0, 0, 3, 8]
    SamplesFile(run_dir / "samples.jsonl", 1 << 20).add([sample(10)])
    assert read_samples(run_dir / "samples.jsonl")[-1]["step"] == 10
