"""A real run on prompts of a hub and of a file, mixed, with several rewards: killed as a whole, and resumed offline."""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from actors.environments.prompts.mixed_stream import open_stream
from actors.environments.prompts.sources import open_sources
from actors.ledger.journal import committed_samples
from configs.loader import read_job
from supervisors.testing.run_under_test import HeadraceRun
from tests.supervisors.jobs.hub_server import HubServer, Repository

NAME = "acme/sums"
MARK = """
import zlib

def mark(prompt, response, answer, **columns):
    return zlib.crc32(prompt.encode()) % 1000 / 1000

def length(prompt, response, answer, **columns):
    return len(response)
"""


@pytest.mark.timeout(400)
def test_a_run_that_was_killed_goes_on_with_the_same_prompts_in_the_same_order(
    start_run: Callable[..., HeadraceRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reward of each sample says which prompt it was scored for; it is that of a stream that was never interrupted.

    After the kill neither the hub nor its cache are there, and the run goes on with its own copy.
    """
    (tmp_path / "marking.py").write_text(MARK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    rows = {kind: [{"prompt": f"{kind} {i}", "answer": str(i)} for i in range(13)] for kind in ("hub", "own")}
    text = {kind: "".join(json.dumps(row) + "\n" for row in found) for kind, found in rows.items()}
    (tmp_path / "own.jsonl").write_text(text["own"])
    hub = HubServer()
    hub.repositories[f"datasets/{NAME}"] = Repository()
    hub.repositories[f"datasets/{NAME}"].commit({"train.jsonl": text["hub"].encode()})
    monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    mix = [
        {"name": "hub", "path": NAME, "weight": 2.0, "template": "hub: {prompt}"},
        {"name": "own", "path": str(tmp_path / "own.jsonl")},
    ]
    functions = [
        {"kind": "function", "function": "marking:mark", "weight": 2.0},
        {"kind": "function", "function": "marking:length", "weight": 0.0},
    ]
    run = start_run("run", data={"mix": mix}, reward=functions, steps=12, seed=3)
    run.wait_for_step(4)
    run.kill()
    run.process.wait(timeout=30)
    hub.close()
    shutil.rmtree(tmp_path / "hf")
    run.resume()
    run.finish()

    job = read_job(run.run_dir / "job.yaml")
    copies = {"hub": {"path": str(run.run_dir / "dataset-hub")}, "own": {}}
    sources = {name: source.model_copy(update=copies[name]) for name, source in job.data.sources.items()}
    job = job.model_copy(update={"data": job.data.with_sources(sources)})
    count = 12 * job.algorithm.prompts_per_step
    read = open_stream(job, Path(str(job.model.path)), None, open_sources(job)).read(0, count)
    prompts = [text.removeprefix("hub: ") for _, _, text, _ in read["prompts"]]
    assert {prompt.split()[0] for prompt in prompts[:6]} == {"hub", "own"}

    samples = committed_samples(run.run_dir / "journal.db")
    assert [sample.prompt for sample in samples] == [prompt for prompt in range(count) for _ in range(4)]
    for sample in samples:
        assert sample.reward == 2.0 * (zlib.crc32(prompts[sample.prompt].encode()) % 1000 / 1000)
    for row in run.rows():
        assert row["reward_mean"] == pytest.approx(2.0 * row["reward_mark_mean"])
        assert row["reward_length_mean"] >= 0
        assert row["source_hub_reward_mean"] is not None
    shown = [json.loads(line) for line in (run.run_dir / "samples.jsonl").read_text().splitlines()]
    assert {sample["source"] for sample in shown} <= {"hub", "own"}
    assert all(sample["reward"] == 2.0 * sample["reward_parts"]["mark"] for sample in shown)
