"""Wrong job files: each ends with exit code 2 and one message with the field and the fix, and leaves nothing behind."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from configs.loader import load_job
from supervisors.cli.app import app

QUICKSTART = Path(__file__).parents[1] / "configs" / "quickstart.yaml"
JSONL = {"data.source": "jsonl", "reward.kind": "exact_match"}
SCORED = {"data.source": "jsonl", "reward.kind": "function", "reward.function": "rewards:score"}
REWARDS = """
def score(prompt, response, answer, **columns): return 1.0
def positional(prompt, response, answer, /, **columns): return 1.0
def own_names(question, said, right, *, response): return 1.0
def narrow(question, said, right): return 1.0
wrapped = print
"""

CASES: dict[str, tuple[Mapping[str, object], str, str]] = {
    "unknown key": ({"rollout.wokers": 2}, "rollout.wokers", "Did you mean 'rollout.workers'?"),
    "unknown section": ({"rolout": {"workers": 2}}, "rolout", "Did you mean 'rollout'?"),
    "key at the wrong level": ({"lr": 1.0}, "lr", "Did you mean 'trainer.lr'?"),
    "text for a number": ({"steps": "many"}, "steps", "without quotes"),
    "quoted number": ({"steps": "60"}, "steps", "without quotes"),
    "fraction of a step": ({"steps": 6.5}, "steps", "whole number"),
    "truth for a number": ({"rollout.workers": True}, "rollout.workers", "expected a valid integer"),
    "number for a name": ({"name": 7}, "name", 'name: "7"'),
    "name with a slash": ({"name": "a/b"}, "name", "Use letters"),
    "value for a section": ({"trainer": 3}, "trainer", "Write it as a section"),
    "missing field": ({"steps": None}, "steps", "Add it"),
    "missing section": ({"data": None}, "data", "Add it"),
    "bad range": ({"algorithm.group_size": 1}, "algorithm.group_size", "Samples per prompt"),
    "negative": ({"trainer.lr": -1.0}, "trainer.lr", "greater than 0"),
    "not finite": ({"trainer.lr": float("inf")}, "trainer.lr", "finite"),
    "unknown limit": (
        {"limits.mailbox_message": 9},
        "limits.mailbox_message",
        "Did you mean 'limits.mailbox_messages'?",
    ),
    "limit like no other": ({"limits.zzz": 9}, "limits.zzz", "in docs/reference/limits.md"),
    "limit of nothing": ({"limits.mailbox_messages": 0}, "limits.mailbox_messages", "above 0"),
    "unknown engine": ({"rollout.engine": "tourch"}, "rollout.engine", "Did you mean 'torch'?"),
    "nucleus of the distribution": (
        {"rollout.top_p": 0.7},
        "rollout.top_p",
        "0.7, but there is no such key any more",
    ),
    "likeliest tokens only": ({"rollout.top_k": 20}, "rollout.top_k", "Remove it"),
    "unknown algorithm": ({"algorithm.name": "ppo"}, "algorithm.name", "grpo"),
    "unknown scorer": ({"reward.kind": "math_verifi"}, "reward.kind", "Did you mean 'math_verify'?"),
    "unknown task": ({"data.task": "spel_backward"}, "data.task", "Did you mean 'spell_backward'?"),
    "no task": ({"data.task": None}, "data.task", "spell_backward"),
    "hf model without a path": ({"model.source": "hf"}, "model.path", "Name a Hugging Face directory"),
    "missing model": (
        {"model.source": "hf", "model.path": "./nowhere/at/all"},
        "model.path",
        "Name an existing directory",
    ),
    "model not on a reachable hub": (
        {"model.source": "hf", "model.path": "nobody/nothing"},
        "model.path",
        "local directory",
    ),
    "model directory without a model": ({"model.source": "hf", "model.path": "empty"}, "model.path", "from_pretrained"),
    "revision of a made model": ({"model.revision": "main"}, "model.revision", "Remove it"),
    "revision of a directory": (
        {"model.source": "hf", "model.path": "whole", "model.revision": "main"},
        "model.revision",
        "hub name",
    ),
    "revision of no form": (
        {"model.source": "hf", "model.path": "cached/model", "model.revision": "../main"},
        "model.revision",
        "40 hexadecimal digits",
    ),
    "data without a path": (JSONL, "data.path", "Name the file"),
    "missing data": (JSONL | {"data.path": "nowhere.jsonl"}, "data.path", "Check the path"),
    "directory for a file": (JSONL | {"data.path": "empty"}, "data.path", "save_to_disk"),
    "data of an unknown form": (JSONL | {"data.source": "file", "data.path": "rows.txt"}, "data.path", ".jsonl"),
    "a null answer": (JSONL | {"data.path": "null.jsonl"}, "data.answer_key", "reward.function"),
    "a list for an answer": (JSONL | {"data.path": "listed.json"}, "data.answer_key", "reward.function"),
    "an array that is none": (JSONL | {"data.path": "cut.json"}, "data.path", "one array of objects"),
    "gzip that is none": (JSONL | {"data.path": "plain.jsonl.gz"}, "data.path", "that you may read"),
    "Parquet that is none": (JSONL | {"data.path": "plain.parquet"}, "data.path", "Write the file anew"),
    "splits without train": (JSONL | {"data.path": "splits"}, "data.path", "Set data.split to the one to train on"),
    "empty data": (JSONL | {"data.path": "void.jsonl"}, "data.path", "one JSON object a line"),
    "unreadable data": (JSONL | {"data.path": "binary.jsonl"}, "data.path", "UTF-8"),
    "broken row": (JSONL | {"data.path": "broken.jsonl"}, "data.path", "line 2"),
    "row that is no object": (JSONL | {"data.path": "list.jsonl"}, "data.path", "Write rows such as"),
    "wrong column": (JSONL | {"data.path": "rows.jsonl"}, "data.prompt_key", "Use one of its columns"),
    "prompt of the wrong type": (JSONL | {"data.path": "numbers.jsonl"}, "data.prompt_key", "expected text"),
    "column with the name of the function's own parameter": (
        SCORED | {"data.path": "answered.jsonl"},
        "data.path",
        "has a column 'response', and rewards:score has a parameter of that name. Rename one of them",
    ),
    "column with the name of a parameter that cannot be read": (
        SCORED | {"data.path": "answered.jsonl", "reward.function": "rewards:wrapped"},
        "data.path",
        "has a column 'response'",
    ),
    "column that the function does not take": (
        SCORED | {"data.path": "answered.jsonl", "reward.function": "rewards:narrow"},
        "reward.function",
        "Add **columns",
    ),
    "column of a data set that the function does not take": (
        SCORED | {"data.source": "hf_dataset", "data.path": "set", "reward.function": "rewards:narrow"},
        "reward.function",
        "Add **columns",
    ),
    "not a data set": (
        {"data.source": "hf_dataset", "data.path": "empty", "reward.kind": "exact_match"},
        "data.path",
        "save_to_disk",
    ),
    "foreign scorer": (
        JSONL | {"data.path": "good.jsonl", "reward.kind": "reasoning_gym"},
        "reward.kind",
        "Set data.source",
    ),
    "function not named": ({"reward.kind": "function"}, "reward.function", "package.module:name"),
    "function of no form": (
        {"reward.kind": "function", "reward.function": "score"},
        "reward.function",
        "my_rewards:score",
    ),
    "function of no module": (
        {"reward.kind": "function", "reward.function": "nomodule_x:f"},
        "reward.function",
        "Install it",
    ),
    "function that is not there": (
        {"reward.kind": "function", "reward.function": "json:lods"},
        "reward.function",
        "json:loads?",
    ),
    "function unused": ({"reward.function": "json:loads"}, "reward.function", "Set reward.kind to function"),
    "pattern without a group": ({"reward.answer_pattern": "####"}, "reward.answer_pattern", "one pair of parentheses"),
    "template without a prompt": ({"data.template": "Q: "}, "data.template", "{prompt}"),
    "micro-batch too small": (
        {"trainer.micro_batch_tokens": 100, "data.max_prompt_tokens": 500, "rollout.max_tokens": 36},
        "trainer.micro_batch_tokens",
        "at least 536",
    ),
    "greedy": ({"rollout.temperature": 0}, "rollout.temperature", "above 0"),
    "a mode that is called otherwise now": ({"sync.mode": "colocated"}, "sync.mode", "Write sync instead"),
    "a choice that went": (
        {"rollout.dedicated_workers": "closed_form"},
        "rollout.dedicated_workers",
        "is no longer a choice. Write simulated instead",
    ),
    "windows without a mode that has them": (
        {"sync": {"mode": "dynamic"}, "trainer.window_prompts": 4},
        "trainer.window_prompts",
        "minibatch or async",
    ),
    "a threshold without a mode that has one": (
        {"trainer.saturation_tokens": 4},
        "trainer.saturation_tokens",
        "sync.mode to dynamic",
    ),
    "async without staleness": ({"sync": {"mode": "async", "max_staleness": 0}}, "sync.max_staleness", "1 or more"),
    "a bound without the other": ({"scheduling.workers_min": 2}, "scheduling.workers_min", "workers_max too"),
    "bounds the wrong way round": (
        {"scheduling": {"workers_min": 4, "workers_max": 3}},
        "scheduling.workers_max",
        "at least 4",
    ),
    "a beginning beyond the bound": (
        {"rollout.workers": 3, "scheduling.workers_max": 2},
        "rollout.workers",
        "between the two",
    ),
    "more workers than the scheduler's mailbox takes deltas of": (
        {"rollout.workers": 3, "scheduling.workers_max": 9, "limits.mailbox_messages": 36},
        "limits.mailbox_messages",
        "Set it to 72",
    ),
    "a ranker's model without a ranker": (
        {"rollout.ranker_model": "models/small"},
        "rollout.ranker_model",
        "length_ranking to learned",
    ),
    "a ranker's model that is none": (
        {"rollout": {"length_ranking": "learned", "ranker_model": "nowhere"}},
        "rollout.ranker_model",
        "from_pretrained",
    ),
    "relief where nothing moves": (
        {"scheduling.relief": True},
        "scheduling.relief",
        "Set scheduling.policy to rlboost",
    ),
    "a plan, which is not built": (
        {"scheduling": {"policy": "planned", "workers_max": 4}, "rollout.length_ranking": "history"},
        "scheduling.policy",
        "Set it to assign or rlboost",
    ),
    "a plan for any number of workers": (
        {"scheduling": {"policy": "planned"}, "rollout.length_ranking": "history"},
        "scheduling.workers_max",
        "Set it to the number of workers",
    ),
    "a plan without lengths": (
        {"scheduling": {"policy": "planned", "workers_max": 4}},
        "rollout.length_ranking",
        "Set it to history",
    ),
    "a plan for mixed versions": (
        {
            "scheduling": {"policy": "planned", "workers_max": 4},
            "rollout.length_ranking": "history",
            "sync.mode": "async",
        },
        "sync.mode",
        "Set it to sync or minibatch",
    ),
    "a plan and seeding": (
        {
            "scheduling": {"policy": "planned", "workers_max": 4, "seeding": True},
            "rollout.length_ranking": "history",
            "cluster.place_rollout": "elastic",
        },
        "scheduling.seeding",
        "the plan says who generates",
    ),
    "a weight of time above 1": (
        {"scheduling": {"policy": "planned", "workers_max": 4, "plan": {"time_weight": 1.5}}},
        "scheduling.plan.time_weight",
        "less than or equal to 1",
    ),
    "a plan's keys without a plan": (
        {"scheduling": {"plan": {"cut_at": 0.5}}},
        "scheduling.plan.cut_at",
        "Set scheduling.policy to planned",
    ),
    "seeding where nobody is beside the trainer": (
        {"scheduling.seeding": True},
        "cluster.place_rollout",
        "Set it to elastic",
    ),
    "seeding with a barrier": (
        {"scheduling.seeding": True, "cluster.place_rollout": "local", "sync.mode": "one_step_barrier"},
        "sync.mode",
        "Set it to async",
    ),
    "seeding without seeders": (
        {"scheduling.seeding": True, "cluster.place_rollout": "elastic", "rollout.workers": 0},
        "rollout.workers",
        "1 or more",
    ),
    "seeding and stage balancing": (
        {"scheduling": {"seeding": True, "workers_max": 4}, "cluster.place_rollout": "elastic"},
        "scheduling.workers_max",
        "Remove it",
    ),
    "a window without seeding": (
        {"scheduling.seeding_first_s": 20},
        "scheduling.seeding_first_s",
        "Set scheduling.seeding to true",
    ),
    "an estimate without lengths": (
        {"scheduling": {"seeding": True, "seeding_end": "estimated"}, "cluster.place_rollout": "elastic"},
        "scheduling.seeding_end",
        "Set rollout.length_ranking",
    ),
    "an end of windows that nobody knows": (
        {"scheduling": {"seeding": True, "seeding_end": "sometime"}},
        "scheduling.seeding_end",
        "Use one of: learned, estimated",
    ),
    "nowhere to place": ({"cluster.place_rollout": "remote"}, "cluster.place_rollout", "cluster.nodes"),
    "a name of other trainers": ({"trainer.learning_rate": 1.0}, "trainer.learning_rate", "Here it is 'trainer.lr'"),
    "another one, at the top": ({"num_generations": 8}, "num_generations", "Here it is 'algorithm.group_size'"),
    "one that means something else": ({"trainer.epochs": 3}, "trainer.epochs", "'data.epochs': and steps, which ends"),
    "a schedule that nobody knows": ({"trainer.lr_schedule": "cosin"}, "trainer.lr_schedule", "Did you mean 'cosine'?"),
    "a warm-up that leaves nothing": (
        {"trainer.lr_schedule": "linear", "trainer.warmup_steps": 150},
        "trainer.warmup_steps",
        "Lower it",
    ),
    "tags of no project": ({"metrics.wandb_tags": ["a"]}, "metrics.wandb_tags", "Set metrics.wandb_project"),
    "a function in a folder that has our name": (
        SCORED | {"data.path": "good.jsonl", "reward.function": "configs.mine:score"},
        "reward.function",
        "Give yours another name",
    ),
    "no package": ({"metrics.wandb_project": "demo"}, "metrics.wandb_project", "pip install"),
}


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with files that are wrong in one way each, on a machine without wandb."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    import configs.checks.checks

    real = configs.checks.checks.installed
    monkeypatch.setattr(configs.checks.checks, "installed", lambda package: package != "wandb" and real(package))
    (tmp_path / "empty").mkdir()
    (tmp_path / "whole").mkdir()
    (tmp_path / "set").mkdir()
    for split in ("dev", "test"):
        (tmp_path / "splits" / split).mkdir(parents=True)
    (tmp_path / "splits" / "dataset_dict.json").write_text("{}")
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / "whole" / name).write_text("{}")
    (tmp_path / "whole" / "pytorch_model.bin").write_bytes(b"an old pickle")
    (tmp_path / "hf" / "hub" / "models--cached--model" / "snapshots").mkdir(parents=True)
    good = json.dumps({"prompt": "2+2=", "answer": "4"}) + "\n"
    files = {
        "good.jsonl": good,
        "rows.txt": good,
        "null.jsonl": good + '{"prompt": "2+2=", "answer": null}\n',
        "listed.json": '[{"prompt": "2+2=", "answer": ["4"]}]',
        "cut.json": '[{"prompt": "2+2=", "answer": "4"},',
        "plain.jsonl.gz": good,
        "plain.parquet": good,
        "void.jsonl": "\n\n",
        "broken.jsonl": good + "{oops\n",
        "list.jsonl": "[1, 2]\n",
        "rows.jsonl": '{"question": "2+2=", "answer": "4"}\n',
        "numbers.jsonl": '{"prompt": 4, "answer": "4"}\n',
        "answered.jsonl": '{"prompt": "2+2=", "answer": "4", "response": "5"}\n',
        "rewards.py": REWARDS,
        "set/dataset_info.json": json.dumps({"features": {"prompt": {}, "answer": {}, "level": {}}}),
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00\x01")
    return tmp_path


@pytest.mark.parametrize("function", ["positional", "own_names"])
def test_a_function_that_takes_each_column_is_let_through(function: str, workplace: Path) -> None:
    """Only what a call would refuse is refused: the same column is no harm to these."""
    job = SCORED | {"data.path": "answered.jsonl", "reward.function": f"rewards:{function}"}
    (workplace / "job.yaml").write_text(yaml.safe_dump(_changed(job)))
    assert load_job("job.yaml").reward.function == f"rewards:{function}"


@pytest.mark.parametrize("case", CASES)
def test_a_wrong_job_ends_with_code_2_and_one_message_with_field_and_fix(case: str, workplace: Path) -> None:
    changes, field, fix = CASES[case]
    job = workplace / "job.yaml"
    job.write_text(yaml.safe_dump(_changed(changes)))
    result = CliRunner().invoke(app, ["run", str(job), "--json"])
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    message = result.stderr
    assert len(message.strip().splitlines()) == 1, message
    assert "job.yaml" in message
    assert f": {field}: " in message
    assert fix in message
    assert not (workplace / "runs").exists()


def _changed(changes: Mapping[str, object]) -> dict[str, object]:
    job = yaml.safe_load(QUICKSTART.read_text())
    for path, value in changes.items():
        *sections, key = path.split(".")
        section = job
        for name in sections:
            section = section.setdefault(name, {})
        if value is None:
            section.pop(key, None)
        else:
            section[key] = value
    return job


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "expected a mapping"),
        ("- a\n- b\n", "expected a mapping"),
        ("name: [a\n", "is not valid YAML"),
        ("name: a\n\tsteps: 1\n", "is not valid YAML"),
        ("steps: 1\nsteps: 2\n", "given twice"),
    ],
)
def test_a_file_that_is_no_job_ends_with_code_2(text: str, says: str, workplace: Path) -> None:
    (workplace / "job.yaml").write_text(text)
    result = CliRunner().invoke(app, ["run", "job.yaml"])
    assert result.exit_code == 2
    assert says in result.stderr
    assert "job.yaml" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run"], "no job file was named"),
        (["run", "nowhere.yaml"], "there is no such file"),
        (["run", str(QUICKSTART), "--set", "rollout"], "not of the form a.b=value"),
        (["run", str(QUICKSTART), "--set", "seed.x=1"], "seed is 0, not a section"),
        (["run", str(QUICKSTART), "--set", "rollout.wokers=1"], "--set rollout.wokers=1: rollout.wokers"),
        (["run", "--resume", "empty"], "no job.yaml"),
        (["run", str(QUICKSTART), "--resume", "empty"], "neither a job file nor --dir"),
    ],
)
def test_a_wrong_command_line_ends_with_code_2(arguments: list[str], says: str, workplace: Path) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2, result.output
    assert says in result.stderr
