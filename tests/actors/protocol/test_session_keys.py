"""Session keys: whoever has one drives just that episode, of a step or of an evaluation."""

from __future__ import annotations

import pytest

from actors.protocol.episodes import EpisodeName
from actors.protocol.evaluations import evaluation_step
from actors.protocol.session_keys import BadKey, SessionKeys

KEYS = SessionKeys("hr-admin-secret", "a-job-7")


@pytest.mark.parametrize("step", [0, 41, evaluation_step(0), evaluation_step(41)])
def test_a_key_names_its_episode(step: int) -> None:
    name = EpisodeName(step, 3, 0, 2)
    assert KEYS.read(KEYS.sign(name)) == name


def test_a_step_and_an_evaluation_of_the_same_number_have_keys_of_their_own() -> None:
    of_step, of_evaluation = (KEYS.sign(EpisodeName(step, 3, 0, 2)) for step in (5, evaluation_step(5)))
    assert of_evaluation.startswith("hr-a-job-7-e5-3-0-2-")
    signature = of_step.rpartition("-")[2]
    with pytest.raises(BadKey, match="signature"):
        KEYS.read(of_evaluation.rpartition("-")[0] + "-" + signature)


@pytest.mark.parametrize("step", ["-1", "e", "ee1", "e-1", "", "1e"])
def test_what_is_no_step_is_no_key(step: str) -> None:
    with pytest.raises(BadKey, match="no session key"):
        KEYS.read(f"hr-a-job-7-{step}-3-0-2-0123")
