"""A real run whose reward is behind HTTP: ill for a while it costs no sample; refused, the run ends with a sentence."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from supervisors.testing.run_under_test import HeadraceRun
from tests.scorer_server import Question, Reply, rewards, scorer_server


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_run_survives_a_scorer_that_is_ill_and_ends_with_a_sentence_where_it_is_refused(
    start_run: Callable[..., HeadraceRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCORER_KEY", "secret-7")
    count = itertools.count()

    def answer(question: Question) -> Reply:
        asked = next(count)
        if 2 <= asked < 5:
            return 503, b"starting"
        if asked > 12:
            return 403, b"key has expired"
        return rewards(*(len(query) % 3 for query in question["query"]))

    with scorer_server(answer) as server:
        reward = {"kind": "http", "url": server.url, "key_env": "SCORER_KEY"}
        run = start_run("remote", reward=reward, steps=200)
        summary = run.finish(state="failed")
    assert "reward.url http://127.0.0.1" in summary["error"] and "answered 403" in summary["error"]
    assert summary["steps"] >= 1 and len(server.questions) < 40
    assert all(row["samples_dropped"] == 0 for row in run.rows())
    for file in run.run_dir.rglob("*"):
        assert not file.is_file() or b"secret-7" not in file.read_bytes(), file
