"""What the pool found, as the scheduler is told: a reward, or a typed failure; never a 0 that nobody gave."""

from __future__ import annotations

from actors.environments.scoring.reward_worker import _verdict
from actors.environments.scoring.scorer_frames import ScorerVerdict
from actors.protocol.failures import FailureKind


def test_a_response_without_a_result_has_a_typed_failure_and_no_reward() -> None:
    verdict = _verdict(7, 2, ScorerVerdict(None, "no answer within 1 s"), 1e9)
    assert (verdict.prompt, verdict.sibling, verdict.reward) == (7, 2, None)
    assert (verdict.failure_kind, verdict.failure_message) == (FailureKind.NO_RESULT, "no answer within 1 s")


def test_a_reward_of_0_is_a_reward() -> None:
    verdict = _verdict(7, 2, ScorerVerdict(0.0), 1e9)
    assert verdict.reward == 0.0
    assert not verdict.failure_kind
