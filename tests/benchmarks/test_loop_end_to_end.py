"""``headrace bench loop`` on a job of three steps: what it prints, and that the loop it beats is a real one."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks._processes import ROOT
from benchmarks.jobs import loop
from benchmarks.jobs.bare_loop import BareLoop
from configs.loader import load_job
from supervisors.preparation.model_preparation import prepare_model

SMALL = [
    "model.hidden=32",
    "model.layers=1",
    "model.warm_start_steps=30",
    "algorithm.prompts_per_step=4",
    "algorithm.group_size=4",
    "rollout.workers=1",
    "rollout.threads=1",
    "trainer.threads=1",
    "metrics.tensorboard=false",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("bench_model")
    job = load_job(ROOT / "configs" / "quickstart.yaml", SMALL)
    return asyncio.run(prepare_model(job, directory))


@pytest.fixture
def bare(model):
    threads = torch.get_num_threads()
    job = load_job(ROOT / "configs" / "quickstart.yaml", [*SMALL, "trainer.lr=0.003"])
    yield BareLoop(job, model, threads=(1, 1))
    torch.set_num_threads(threads)


def test_the_bare_loops_engine_and_learner_agree_on_every_log_probability(bare):
    bare.step()  # so that the weights have moved and been copied once
    _, prompts = bare._prompts(4)
    responses = bare._generator.generate(prompts, 4)
    for row, length in enumerate(responses.lengths):
        ids = torch.from_numpy(np.concatenate([prompts[row // 4], responses.tokens[row, :length]]).astype(np.int64))
        with torch.no_grad():
            logits = bare._learner.model(input_ids=ids[None]).logits[0, -length - 1 : -1]
        expected = torch.log_softmax(logits, -1).gather(-1, ids[-length:, None])[:, 0].numpy()
        np.testing.assert_allclose(responses.logprobs[row, :length], expected, atol=1e-4)


def test_the_bare_loops_responses_end_at_their_first_stop_token_or_at_the_limit(bare):
    _, prompts = bare._prompts(4)
    responses = bare._generator.generate(prompts, 4)
    stops = np.isin(responses.tokens, bare._generator._stop)
    for row, length in enumerate(responses.lengths):
        assert not stops[row, : length - 1].any()
        assert stops[row, length - 1] or length == responses.tokens.shape[1]
    assert len(set(responses.lengths.tolist())) > 1, "rows that end at different times are what this is about"


def test_the_bare_loop_changes_the_weights_it_generates_with(bare):
    before = [parameter.clone() for parameter in bare._generator._parameters]
    while not any((new != old).any() for new, old in zip(bare._generator._parameters, before, strict=True)):
        assert bare._position < 400, "no step changed anything"
        bare.step()


@pytest.mark.long
@pytest.mark.timeout(400)
def test_bench_loop_prints_ours_the_loops_and_their_ratio_for_both_modes(model, capsys):
    sets = [part for override in SMALL for part in ("--set", override)]
    short = ["--steps", "3", "--skip", "1", "--threads", "1:1", "--cores", "64", "--model", str(model)]
    code = loop.main(["--json", *short, *sets])
    found = json.loads(capsys.readouterr().out)
    assert code == 0
    assert found["hardware"]["class"]
    for mode in ("sync", "async"):
        row = found[mode]
        assert row["ours_samples_per_second"] > 0
        assert row["ratio"] == pytest.approx(row["ours_samples_per_second"] / row["loop_samples_per_second"], rel=0.01)
        assert row["ours"]["prompts_lost"] == 0
        assert row["ours"]["samples_trained_twice"] == 0
