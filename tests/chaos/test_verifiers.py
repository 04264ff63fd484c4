"""An environment of ``verifiers`` 0.4, written as its authors would, trains through the gateway on real processes.

``HEADRACE_VERIFIERS_PYTHON`` names an interpreter that has verifiers 0.4 and uv; without it the test is skipped.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.environments.episodes import verifiers_call
from actors.ledger.events import TokensAppended
from actors.protocol.marks import contexts
from supervisors.checkers.replay import Sample, replay
from supervisors.checkers.run_directory import read_history
from supervisors.testing.run_under_test import HeadraceRun

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "write_an_environment.md"
EXPORT = re.compile(r"^`export_tasks.py`[^\n]*:\n\n```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PYTHON = os.environ.get("HEADRACE_VERIFIERS_PYTHON", "")

GAME = textwrap.dedent('''
    import json
    import os
    import re
    from pathlib import Path

    import verifiers.v1 as vf


    class HiddenData(vf.TaskData):
        answer: int


    class HiddenTask(vf.Task[HiddenData]):
        @vf.metric
        async def turns(self, trace: vf.Trace) -> float:
            return float(trace.num_turns)


    class HiddenTaskset(vf.Taskset[HiddenTask]):
        def load(self):
            return [HiddenTask(HiddenData(prompt="Guess, 1 to 8.", answer=n), self.config.task) for n in range(1, 9)]


    class HiddenConfig(vf.EnvConfig):
        player: vf.AgentConfig = vf.AgentConfig()


    class HiddenEnv(vf.Env[HiddenConfig]):

        async def run(self, task, agents):
            async with agents.player.interaction(task) as interaction:
                segment = await interaction.turn()
                while not segment.terminated:
                    found = re.search(r"[1-8]", segment.last_reply or "")
                    guess = int(found.group()) if found else 0
                    if guess == task.data.answer:
                        break
                    segment = await interaction.turn("higher" if guess < task.data.answer else "lower")
            said = "".join(node.message.content or "" for node in interaction.trace.nodes if node.sampled)
            interaction.trace.record_reward("found", sum(map(ord, said)) % 7 / 7, 1.0)

        async def finalize(self, task, episode):
            """Leave the trace's samples as prime-rl would train them: nodes that branches share, once."""
            (trace,) = episode.traces
            seen, samples = set(), []
            for branch in trace.branches:
                tokens, mask, logprobs = [], [], []
                for node in branch.nodes:
                    tokens += node.token_ids
                    mask += [one and id(node) not in seen for one in node.mask]
                    logprobs += node.logprobs if id(node) not in seen else []
                    seen.add(id(node))
                samples.append({"tokens": tokens, "mask": mask, "logprobs": logprobs})
            place = Path(os.environ["HIDDEN_TRACES"]) / f"{trace.id}.json"
            place.write_text(json.dumps({"reward": trace.reward, "samples": samples}))


    __all__ = ["HiddenEnv", "HiddenTaskset"]
''')


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.skipif(not PYTHON, reason="HEADRACE_VERIFIERS_PYTHON names no interpreter with verifiers")
@pytest.mark.parametrize("client", ["train", "eval"])
def test_an_unmodified_environment_trains_two_steps_and_its_masks_are_ours(
    client: str, headrace_run: Callable[..., HeadraceRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With token ids the traces hold what was sampled, and which of it is trained; in chat they hold no tokens."""
    (tmp_path / "hidden_number.py").write_text(GAME)
    (export,) = EXPORT.findall(GUIDE.read_text("utf-8"))
    with (tmp_path / "tasks.jsonl").open("w") as tasks:
        subprocess.run([PYTHON, "-c", export], cwd=tmp_path, stdout=tasks, check=True, timeout=100)
    traces = tmp_path / "traces"
    traces.mkdir()
    monkeypatch.setenv("HIDDEN_TRACES", str(traces))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    asks: dict[str, Any] = {"type": client}
    if client == "train":
        asks["renderer_model_name"] = str(tmp_path / client / "model")
    job = {
        "name": "hidden",
        "steps": 2,
        "model": {"source": "tiny", "hidden": 32, "layers": 1},
        "data": {"source": "jsonl", "path": str(tmp_path / "tasks.jsonl")},
        "environment": {
            "kind": "verifiers",
            "path": "hidden-number",
            "interpreter": PYTHON,
            "options": {"player": {"harness": {"id": "null"}}, "client": asks},
            "turns_max": 3,
            "turn_tokens": 4,
            "episode_tokens": 400,
            "episode_s": 200,
        },
        "algorithm": {"name": "grpo", "group_size": 2, "prompts_per_step": 2},
        "rollout": {"max_tokens": 12},
        "checkpoint": {"every": 0},
    }
    run = headrace_run(job, name=client)
    summary = run.finish()
    assert (summary["samples"], summary["samples_dropped"], summary["tokens_discarded"]) == (8, 0, 0)
    for row in run.rows():
        assert row["env_turns"] == row["turns_mean"]
        assert row["env_found"] == pytest.approx(row["reward_mean"])
        assert (row["engine_mismatch"] or 0.0) < 1e-5
    told = [json.loads(file.read_text()) for file in traces.iterdir()]
    trained = committed(run)
    assert sorted(one["reward"] for one in told) == pytest.approx(sorted(one.reward or 0.0 for one in trained))
    assert sum(row["trainer_tokens_trained"] for row in run.rows()) > 0
    if client == "train":
        masks = [mask for one in told for sample in one["samples"] for mask in sample["mask"]]
        assert sum(row["tokens_trained"] for row in run.rows()) == sum(masks)
        logprobs = [one for trace in told for sample in trace["samples"] for one in sample["logprobs"]]
        assert sorted(np.array(logprobs, np.float32).tolist()) == sorted(drawn_logprobs(run))
        assert sorted(sorted(ours(one)) for one in trained) == sorted(sorted(theirs(one)) for one in told)
    else:
        assert [row["contexts_mean"] for row in run.rows()] == [1.0, 1.0]


def committed(run: HeadraceRun) -> list[Sample]:
    history = read_history(run.run_dir)
    return [one for one in replay(history.ledger, history.pruned_below).samples if one.state == "committed"]


def drawn_logprobs(run: HeadraceRun) -> list[float]:
    events = read_history(run.run_dir).ledger
    return [float(one) for event in events if isinstance(event, TokensAppended) for one in event.logprobs]


def ours(sample: Sample) -> list[tuple[list[int], list[bool]]]:
    """The contexts of a row: tokens, and which of them are trained."""
    marks = np.array(sample.versions)
    return [(sample.tokens[c.start : c.end], (marks[c.start : c.end] >= 0).tolist()) for c in contexts(marks)]


def theirs(trace: dict[str, Any]) -> list[tuple[list[int], list[bool]]]:
    return [(one["tokens"], one["mask"]) for one in trace["samples"]]


TASKSET = """
import pathlib
import verifiers.v1 as vf
pathlib.Path(__file__).with_suffix(".imported").touch()
class Data(vf.TaskData):
    answer: int
class One(vf.Task[Data]): ...
class Several(vf.Taskset[One]):
    def load(self):
        return [One(Data(prompt="x", answer=1), self.config.task)]
__all__ = ["Several"]
"""


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.skipif(not PYTHON, reason="HEADRACE_VERIFIERS_PYTHON names no interpreter with verifiers")
@pytest.mark.parametrize(
    ("path", "options", "allowed"),
    [
        ("good-env", {}, ["good_env"]),
        ("good-env", {"agent": {"harness": {"id": "null"}}}, ["good_env", "null"]),
        ("evil-env", {}, ["good_env"]),
        ("good-env", {"id": "evil-env"}, ["good_env"]),
        ("good-env", {"agent": {"harness": {"id": "evil-env"}}}, ["good_env"]),
        ("good-env", {"agent": {"harness": {"id": "codex"}}}, ["good_env"]),
        ("good-env", {"taskset": {"task": {"judges": [{"id": "evil-env"}]}}}, ["good_env"]),
        ("good-env", {"taskset": {"task": {"rewards": {"a": {"fn": "evil_env:Several"}}}}}, ["good_env"]),
        ("good-env", {"taskset": {"task": {"rewards": {"a": {"fn": "evil_env.py:Several"}}}}}, ["good_env"]),
        ("good-env", {"taskset": {"id": "evil-env"}}, ["good_env"]),
    ],
)
def test_the_library_imports_nothing_that_its_head_does_not_allow(
    path: str, options: dict[str, Any], allowed: list[str], tmp_path: Path
) -> None:
    """Whatever options say: the server is ready, or says what is not allowed, and the other module was not run."""
    for name in ("good_env", "evil_env"):
        (tmp_path / f"{name}.py").write_text(TASKSET)
    order = {"path": path, "options": options, "roles": {}, "address": f"\0{tmp_path}", "allowed": allowed}
    server = subprocess.Popen(
        [PYTHON, "-P", str(Path(verifiers_call.__file__).with_name("verifiers_server.py"))], cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert server.stdin is not None and server.stdout is not None
        server.stdin.write(json.dumps(order).encode() + b"\n")
        server.stdin.flush()
        said = json.loads(server.stdout.readline())
    finally:
        server.kill()
        server.communicate()
    assert "ready" in said or "is not allowed: only good_env" in said["broken"]
    assert "ready" in said or path == "evil-env" or "evil" in json.dumps(options) or "codex" in json.dumps(options)
    assert not (tmp_path / "evil_env.imported").exists()
