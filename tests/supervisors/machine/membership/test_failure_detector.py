"""Hung, busy, unreachable or gone: the verdicts on made-up evidence and made-up time."""

from configs.limits import DEFAULT_LIMITS
from supervisors.machine.membership.failure_detector import DetectorLimits, FailureDetector, Health

LIMITS = DetectorLimits(ready_s=10.0, link_grace_s=0.5, stopped_grace_s=0.8, beacon_budget_s=120.0)


def _ready() -> FailureDetector:
    detector = FailureDetector(LIMITS, 0.0)
    assert detector.health(1.0) is Health.STARTING
    detector.saw_ready(1.0)
    assert detector.health(1.0) is Health.ALIVE
    return detector


def test_a_process_that_is_not_ready_in_time_is_hung():
    detector = FailureDetector(LIMITS, 0.0)
    assert detector.health(9.9) is Health.STARTING
    assert detector.health(10.0) is Health.HUNG
    assert "not ready" in detector.why(10.0)


def test_a_gil_held_for_five_seconds_with_live_heartbeats_is_busy():
    detector = _ready()
    assert detector.health(6.0) is Health.ALIVE


def test_a_thirty_second_engine_step_is_busy():
    assert _ready().health(31.0) is Health.ALIVE


def test_a_silent_event_loop_is_suspect_and_then_hung_after_its_budget():
    detector = _ready()
    assert detector.health(61.0) is Health.SUSPECT
    assert detector.health(120.9) is Health.SUSPECT
    assert detector.health(121.0) is Health.HUNG


def test_a_lost_link_of_our_own_process_is_suspect_then_hung():
    detector = _ready()
    detector.saw_link_down(5.0)
    assert detector.health(5.4) is Health.SUSPECT
    assert detector.health(5.5) is Health.HUNG


def test_a_stopped_process_is_hung_within_a_second_and_a_short_stop_is_forgiven():
    detector = _ready()
    detector.saw_run_state(5.0, stopped=True)
    detector.saw_run_state(5.5, stopped=True)
    assert detector.health(5.5) is Health.SUSPECT
    detector.saw_run_state(5.6, stopped=False)
    assert detector.health(6.5) is Health.ALIVE
    detector.saw_run_state(7.0, stopped=True)
    assert detector.health(7.9) is Health.HUNG


def test_a_beacon_refutes_every_suspicion():
    detector = _ready()
    detector.saw_link_down(5.0)
    detector.saw_beacon(5.3)
    assert detector.health(9.0) is Health.ALIVE


def test_an_exit_is_final():
    detector = _ready()
    detector.saw_exit()
    detector.saw_beacon(2.0)
    assert detector.health(2.0) is Health.GONE


def test_with_the_limits_as_they_are_a_stopped_process_is_hung_within_two_seconds():
    """It is looked at every ``health_check_s``, and may have been stopped just after a look."""
    limits = DEFAULT_LIMITS
    silences = DetectorLimits(
        limits.ready_timeout_s, limits.link_grace_s, limits.stopped_grace_s, limits.beacon_budget_s
    )
    detector = FailureDetector(silences, 0.0)
    detector.saw_ready(0.0)
    stopped_s, now_s = 10.001, 10.0
    while detector.health(now_s) is not Health.HUNG:
        now_s += limits.health_check_s
        detector.saw_run_state(now_s, stopped=True)
        assert now_s - stopped_s < 2.0
    assert limits.heartbeat_interval_s + limits.heartbeat_timeout_s <= 2.0, "nor may its link live longer"
