"""Agents and environments as people bring them, on real processes: an SDK, HTTP, files, a template that forgets."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.protocol.marks import contexts, turn_starts
from configs.schema import JobConfig
from supervisors.checkers.replay import Sample, replay
from supervisors.checkers.run_directory import read_history
from supervisors.preparation.tiny_model import make_tiny_model
from supervisors.testing.run_under_test import HeadraceRun
from tests.actors.gateway.bpe_tokenizer import THINKING

pytestmark = [pytest.mark.timeout(300)]
PLAYED = "played_elsewhere"


def job_in(directory: Path, environment: dict[str, Any], **sections: Any) -> dict[str, Any]:
    tasks = directory / "tasks.jsonl"
    tasks.write_text("".join(json.dumps({"prompt": f"Say {n}.", "answer": str(n)}) + "\n" for n in range(8)))
    return {
        "name": "agents",
        "steps": 1,
        "model": {"source": "tiny", "hidden": 32, "layers": 1},
        "data": {"source": "jsonl", "path": str(tasks)},
        "environment": environment,
        "algorithm": {"name": "grpo", "group_size": 2, "prompts_per_step": 2},
        "rollout": {"max_tokens": 24},
        "checkpoint": {"every": 0},
    } | sections


def simulated_engine(directory: Path, environment: dict[str, Any], **options: float) -> dict[str, Any]:
    """Sections of a job whose engine says what its model, which is made here, has tokens for."""
    model = directory / "model"
    make_tiny_model(JobConfig.model_validate(job_in(directory, environment)), model)
    vocab = json.loads((model / "config.json").read_text())["vocab_size"]
    rollout = {"max_tokens": 24, "engine": "simulated", "engine_options": {**options, "vocab": vocab}}
    return {"model": {"source": "hf", "path": str(model)}, "rollout": rollout}


@pytest.fixture(autouse=True)
def _played(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))


def committed(run: HeadraceRun) -> list[Sample]:
    history = read_history(run.run_dir)
    return [one for one in replay(history.ledger, history.pruned_below).samples if one.state == "committed"]


@pytest.mark.long
def test_a_turn_that_outlasts_the_read_time_out_of_an_sdk_is_one_trained_turn(
    headrace_run: Callable[..., HeadraceRun], tmp_path: Path
) -> None:
    environment = {"kind": "agent", "path": f"{PLAYED}:streaming"}
    slow = simulated_engine(tmp_path, environment, base_s=0.05, mean_tokens=1e6)
    slow["rollout"] |= {"max_tokens": 48}
    run = headrace_run(job_in(tmp_path, environment, **slow))
    summary = run.finish()
    assert (summary["samples"], summary["tokens_discarded"]) == (4, 0)
    (row,) = run.rows()
    assert row["env_seconds"] > 1.5, "no turn has outlasted the time-out"
    assert (row["turns_mean"], row["contexts_mean"], row["tokens_trained"]) == (1.0, 1.0, 4 * 48)
    assert row["trainer_tokens_trained"] > 0


@pytest.mark.parametrize("kind", ["simulated", pytest.param("torch", marks=pytest.mark.long)])
def test_an_agent_outside_trains_a_step_over_plain_http(
    headrace_run: Callable[..., HeadraceRun], tmp_path: Path, kind: str
) -> None:
    environment = {"kind": "external", "turn_tokens": 12}
    sections = simulated_engine(tmp_path, environment, base_s=0.01, mean_tokens=8) if kind == "simulated" else {}
    trainer = {"trainer": {"backend": "simulated"}} if kind == "simulated" else {}
    run = headrace_run(job_in(tmp_path, environment, **sections, **trainer))
    endpoint, key = run.run_dir / "gateway.endpoint", run.run_dir / "gateway.key"
    base = run.wait_until("gateway", lambda: endpoint.exists() and key.exists() and endpoint.read_text().strip())
    rewards: list[float] = []
    while len(rewards) < 4:
        status, begun = post(f"{base}/episodes", {}, key.read_text().strip())
        if status in (429, 503):  # no episode may begin now, or the job is still coming up
            time.sleep(0.1)
            continue
        assert status == 200, begun
        messages = [{"role": "user", "content": begun["task"]["prompt"]}]
        for _ in range(2):
            status, said = post(f"{base}/chat/completions", {"messages": messages}, begun["key"])
            assert status == 200, said
            messages += [said["choices"][0]["message"], {"role": "user", "content": "Again."}]
        rewards.append(len(rewards) / 4)
        for _ in range(2):  # the second finds it said
            assert post(f"{base}/episodes/end", {"reward": rewards[-1]}, begun["key"]) == (200, {})
    summary = run.finish()
    assert (summary["samples"], summary["samples_dropped"]) == (4, 0)
    (row,) = run.rows()
    assert (row["turns_mean"], row["reward_mean"]) == (2.0, pytest.approx(sum(rewards) / 4))
    assert row["trainer_tokens_trained"] > 0
    assert kind == "simulated" or (row["engine_mismatch"] or 0.0) < 1e-5


def post(url: str, body: dict[str, Any], key: str) -> tuple[int, Any]:
    head = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), head)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


@pytest.mark.long
def test_eight_episodes_at_once_write_to_one_file_name_and_none_reads_of_another(
    headrace_run: Callable[..., HeadraceRun], tmp_path: Path
) -> None:
    meeting = tmp_path / "meeting"
    meeting.mkdir()
    options = {"meeting": str(meeting)}
    environment = {"kind": "python", "path": f"{PLAYED}:Scratchpad", "options": options, "slots": 8}
    environment |= {"turn_tokens": 8, "episode_tokens": 400}
    algorithm = {"name": "grpo", "group_size": 4, "prompts_per_step": 2}
    run = headrace_run(job_in(tmp_path, environment, algorithm=algorithm))
    summary = run.finish()
    assert (summary["samples"], summary["reward_last"]) == (8, 1.0)
    assert len(list(meeting.iterdir())) == 8
    assert [row["turns_mean"] for row in run.rows()] == [3.0]


@pytest.mark.long
def test_where_a_template_drops_thoughts_contexts_are_counted_and_each_token_is_trained_once(
    headrace_run: Callable[..., HeadraceRun], tmp_path: Path
) -> None:
    environment = {"kind": "python", "path": f"{PLAYED}:Thinks", "turn_tokens": 24, "episode_tokens": 800}
    tiny = {"source": "tiny", "hidden": 64, "layers": 2, "warm_start_steps": 120}
    sections = {"rollout": {"max_tokens": 72}, "steps": 2}
    model = tmp_path / "model"
    make_tiny_model(JobConfig.model_validate(job_in(tmp_path, environment, model=tiny, **sections)), model)
    (model / "chat_template.jinja").write_text(THINKING)
    run = headrace_run(job_in(tmp_path, environment, model={"source": "hf", "path": str(model)}, **sections))
    summary = run.finish()
    assert (summary["samples"], summary["tokens_discarded"]) == (8, 0)
    rows, samples = run.rows(), committed(run)
    marks = [np.array(sample.versions) for sample in samples]
    said = sum(int((one >= 0).sum()) for one in marks)
    assert sum(len(contexts(one)) for one in marks) == 4 * sum(row["contexts_mean"] for row in rows) > 8
    assert sum(len(turn_starts(one)) for one in marks) == 4 * sum(row["turns_mean"] for row in rows) == 24
    assert sum(row["tokens_trained"] for row in rows) == said
    assert sum(row["trainer_tokens_trained"] for row in rows) > 0
    assert all((row["engine_mismatch"] or 0.0) < 1e-5 for row in rows)
    assert any(event.get("kind") == "gateway_unbridged" for event in run.events()), "it was not said"
