"""Each checker lets the recorded history of a real job pass, and names what is wrong in one that was tampered with."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.ledger import events as ev
from supervisors.checkers.checks import PROMISES, check
from supervisors.checkers.history import History
from supervisors.checkers.replay import replay
from tests.supervisors.checkers.recorded import in_async_mode, still_running, with_episodes, with_faults

Tamper = Callable[[History], None]


def tampered(change: Tamper, base: Callable[[], History] = with_faults) -> History:
    history = copy.deepcopy(base())
    change(history)
    return history


def find(history: History, kind: type, nth: int = 0) -> int:
    """The index of the nth event of ``kind``."""
    return [i for i, event in enumerate(history.ledger) if isinstance(event, kind)][nth]


def replace_event(history: History, at: int, **fields: Any) -> None:
    history.ledger[at] = msgspec.structs.replace(history.ledger[at], **fields)


def replace_sample(history: History, at: int, **fields: Any) -> None:
    history.samples[at] = msgspec.structs.replace(history.samples[at], **fields)


def event(history: History, name: str, nth: int = 0) -> dict[str, Any]:
    return dict(history.named(name)[nth])


# ------------------------------------------------------------ what is right passes


@pytest.mark.parametrize("base", [with_faults, in_async_mode, still_running])
def test_what_really_happened_is_clean(base: Callable[[], History]) -> None:
    report = check(base())
    assert report.violations == []
    assert report.clean
    assert report.counted["tokens_followed"] > 100


def test_the_recorded_faults_are_in_the_history() -> None:
    """Otherwise the clean one above would say little."""
    report = check(with_faults())
    assert report.counted["replays"] == 1
    assert report.counted["hand_outs"] > report.counted["samples"]
    assert [s.reason for s in with_faults().samples if s.state == "dropped"] == ["data: it cannot be read"]
    assert {s.first_version for s in in_async_mode().samples} > {0}


def test_the_fold_follows_every_token_of_every_sample() -> None:
    folded = replay(with_faults().ledger)
    assert sum(len(s.tokens) for s in folded.samples) == sum(s.n_tokens for s in with_faults().samples)


# ------------------------------------------------------------ what is wrong is named


def drop_row(history: History) -> None:
    del history.samples[9]


def two_ends(history: History) -> None:
    history.samples.append(msgspec.structs.replace(history.samples[9], state="dropped", reason="later"))


def no_reason(history: History) -> None:
    at = next(i for i, s in enumerate(history.samples) if s.state == "dropped")
    replace_sample(history, at, reason="")


def dropped_but_named(history: History) -> None:
    replace_sample(history, 9, state="dropped", reason="it was not")


def other_reward(history: History) -> None:
    replace_sample(history, 9, reward=0.75)


def scored_twice(history: History) -> None:
    at = find(history, ev.Scored)
    history.ledger.insert(at + 1, history.ledger[at])


def left_behind(history: History) -> None:
    """The last step's commit, and all that was put down of it, is gone; the run calls itself finished."""
    del history.ledger[find(history, ev.Committed, -1)]
    history.samples = [s for s in history.samples if s.step < 3]
    history.rows = history.rows[:3]


def one_token_more(history: History) -> None:
    replace_sample(history, 9, n_tokens=history.samples[9].n_tokens + 1)


def one_token_less(history: History) -> None:
    replace_sample(history, 9, n_tokens=history.samples[9].n_tokens - 1)


def lost_report(history: History) -> None:
    del history.ledger[find(history, ev.TokensAppended, 3)]


def other_token(history: History) -> None:
    at = find(history, ev.TokensAppended, 3)
    report = history.ledger[at]
    assert isinstance(report, ev.TokensAppended)
    tokens = report.tokens.copy()
    tokens[0] = 49 if tokens[0] != 49 else 48
    replace_event(history, at, tokens=tokens)


def past_the_stop_token(history: History) -> None:
    at = next(
        i
        for i, e in enumerate(history.ledger)
        if isinstance(e, ev.TokensAppended) and (e.finished == 1).any() and (e.offsets < 6).any()
    )
    report = history.ledger[at]
    assert isinstance(report, ev.TokensAppended)
    row = int(np.nonzero((report.finished == 1) & (report.offsets < 6))[0][0])
    finished = report.finished.copy()
    finished[row] = 0
    replace_event(history, at, finished=finished)
    of_row = np.repeat(np.arange(len(report.workers)), report.row_counts)
    more = ev.TokensAppended.one(
        report.workers[of_row[row]], int(report.versions[of_row[row]]), report.assignments[[row]],
        report.offsets[[row]] + 1, np.ones(1, np.int32), np.ones(1, np.uint8), np.array([9], np.int32),
        np.zeros(1, np.float32),
    )  # fmt: skip
    history.ledger.insert(at + 1, more)


def older_version_in_mid_sample(history: History) -> None:
    at = find(history, ev.TokensAppended, -4)
    report = history.ledger[at]
    assert isinstance(report, ev.TokensAppended)
    assert (report.offsets > 0).any()
    replace_event(history, at, versions=report.versions - 1)


def begins_newer_than_it_ends(history: History) -> None:
    last = history.samples[9].last_version
    assert last is not None
    replace_sample(history, 9, first_version=last + 1)


def announced_back(history: History) -> None:
    history.events.append(event(history, "version_available") | {"version": 1})


def worker_back(history: History) -> None:
    history.events.append(event(history, "worker_version", -1) | {"version": 0})


def too_stale(history: History) -> None:
    for at, e in enumerate(history.ledger):
        if isinstance(e, ev.TokensAppended) and (e.versions == 2).any():
            replace_event(history, at, versions=np.full_like(e.versions, 1))


def from_the_future(history: History) -> None:
    for at, e in enumerate(history.ledger):
        if isinstance(e, ev.TokensAppended) and (e.versions == 2).any():
            replace_event(history, at, versions=np.full_like(e.versions, 7))


def pruned_and_stale(history: History) -> None:
    history.pruned_below = 4
    history.ledger = [
        e for e in history.ledger if isinstance(e, ev.Opened | ev.Committed | ev.Checkpointed | ev.Rewound)
    ]
    at = next(i for i, s in enumerate(history.samples) if s.step == 3)
    replace_sample(history, at, first_version=1)


def without_a_grant(history: History) -> None:
    del history.ledger[find(history, ev.Granted, -1)]


def commit_forgets_one(history: History) -> None:
    at = find(history, ev.Committed, 0)
    commit = history.ledger[at]
    assert isinstance(commit, ev.Committed)
    replace_event(history, at, prompts=commit.prompts[1:], siblings=commit.siblings[1:])


def another_steps_sample(history: History) -> None:
    at = find(history, ev.Committed, -1)
    commit = history.ledger[at]
    assert isinstance(commit, ev.Committed)
    prompts = commit.prompts.copy()
    prompts[0] = 0
    replace_event(history, at, prompts=prompts)


def replayed_with_others(history: History) -> None:
    steps = [e.step for e in history.ledger if isinstance(e, ev.Committed)]
    replayed = next(step for step in steps if steps.count(step) == 2)
    at = [i for i, e in enumerate(history.ledger) if isinstance(e, ev.Committed) and e.step == replayed][1]
    commit = history.ledger[at]
    assert isinstance(commit, ev.Committed)
    replace_event(history, at, prompts=commit.prompts[1:], siblings=commit.siblings[1:])


def prompts_passed_over(history: History) -> None:
    at = find(history, ev.BatchIssued, 1)
    batch = history.ledger[at]
    assert isinstance(batch, ev.BatchIssued)
    replace_event(history, at, prompts=batch.prompts + 1)


def two_rows(history: History) -> None:
    history.rows.append(history.rows[1])


def wrong_version_of_step(history: History) -> None:
    replace_event(history, find(history, ev.Committed, 0), policy_version=5)


def ask_overdue(history: History) -> None:
    fields = {"process": "head.j.trainer", "asker": "trainer", "target": "scheduler.j@head#1", "question": "commit"}
    history.events.append({"time_s": 1.0, "event": "ask_overdue", **fields, "overdue_s": 12.5})


def ask_lost(history: History) -> None:
    history.events.append(event(history, "asks_counted") | {"opened": 10, "ended": 7, "open": 1})


def handed_out_twice(history: History) -> None:
    at = find(history, ev.Assigned)
    first = history.ledger[at]
    assert isinstance(first, ev.Assigned)
    again = msgspec.structs.replace(first, workers=["rollout-9"] * len(first.workers), first=first.first + 1000)
    history.ledger.insert(at + 1, again)


def number_used_again(history: History) -> None:
    at = find(history, ev.Assigned, -1)
    replace_event(history, at, first=history.ledger[find(history, ev.Assigned, 0)].first)  # type: ignore[union-attr]


def more_than_its_slots(history: History) -> None:
    history.events = [dict(e) | ({"slots": 3} if e["event"] == "worker_registered" else {}) for e in history.events]


def never_returned(history: History) -> None:
    del history.ledger[find(history, ev.Returned)]


def attempts_forgotten(history: History) -> None:
    replace_sample(history, 9, attempts=0)


def restarting(supervisor: str, at_s: float, cause: str = "crashed") -> dict[str, Any]:
    fields = {"child": "rollout-0", "supervisor": supervisor, "cause": cause, "detail": "", "at_s": at_s}
    return {"time_s": at_s, "event": "child_restarting", **fields}


def too_many_restarts(history: History) -> None:
    history.events += [restarting("rollout.j", at_s) for at_s in range(11)]


def restarted_after_giving_up(history: History) -> None:
    gave_up = {"time_s": 1.0, "event": "child_gave_up", "supervisor": "rollout.j", "child": "rollout-0"}
    history.events += [gave_up, restarting("rollout.j", 2.0)]


def member(what: str, child: str, cause: str = "") -> dict[str, Any]:
    fields = {"child": child, "supervisor": "services.j", "cause": cause, "detail": "", "incarnation": 3}
    return {"time_s": 1.0, "event": f"child_{what}", **fields}


def of_a_group(history: History, *words: str) -> None:
    """Events such as ``started 1``: of the trainer's ranks 0 and above, in a head that has just begun."""
    history.events.append(member("started", "scheduler.j") | {"supervisor": "core.j", "incarnation": 99})
    for word in words:
        what, rank = word.split()
        child = f"trainer.rank{rank}" if rank != "0" else "trainer"
        history.events.append(member(what, child, "killed" if what in ("exited", "restarting") else ""))


WHOLE = ("started 1", "started 2", "started 0")


def adopted_in_part(history: History) -> None:
    of_a_group(history, "adopted 1", "adopted 2", "started 0")


def restarted_alone(history: History) -> None:
    of_a_group(history, *WHOLE, "exited 1", "restarting 1", "started 1")


def paid_for_twice(history: History) -> None:
    of_a_group(history, *WHOLE, "exited 1", "restarting 1", "exited 0", "restarting 0", "stopped 2", *WHOLE)


def a_step_short(history: History) -> None:
    history.job = history.job.model_copy(update={"steps": 5})


def planned(history: History, source: str, target: str) -> None:
    plan = {"step": 2, "workers": "rollout-1,rollout-0", "longest": "rollout-1"}
    cut = {"step": 2, "worker": source, "target": target, "samples": 3}
    history.events += [{"time_s": 1.0, "event": "step_planned"} | plan, {"time_s": 2.0, "event": "samples_cut"} | cut]


def the_longest_is_cut(history: History) -> None:
    planned(history, "rollout-1", "rollout-0")


def cut_to_itself(history: History) -> None:
    planned(history, "rollout-0", "rollout-0")


def other_tokens_trained(history: History) -> None:
    row = next(row for row in history.rows if row["step"] == 1)
    history.rows[history.rows.index(row)] = {**row, "tokens_trained": row["tokens_trained"] + 1}


def discarded_and_not_told(history: History) -> None:
    row = history.rows[-1]
    history.rows[-1] = {**row, "tokens_discarded": row["tokens_discarded"] - 1}


def written_by_nobody(history: History) -> None:
    at = find(history, ev.Turned)
    replace_event(history, at, fresh=np.zeros(1, np.uint8))


OF_EPISODES = (other_tokens_trained, discarded_and_not_told, written_by_nobody)


def test_a_recorded_job_with_episodes_breaks_no_promise() -> None:
    report = check(with_episodes(), must_finish=True)
    assert report.clean, report.violations
    assert with_episodes().rows[-1]["tokens_discarded"] > 0


@pytest.mark.parametrize(
    ("checker", "change", "says"),
    [
        ("samples", drop_row, "step 0 prompt 2 sibling 1 is not put down among the samples of its committed step"),
        ("samples", two_ends, "has two ends: committed and dropped (later)"),
        ("samples", no_reason, "step 1 prompt 5 sibling 2 was dropped without a reason"),
        ("samples", dropped_but_named, "is put down as dropped, but the commit of its step names it"),
        ("samples", other_reward, "but is put down with 0.75"),
        ("samples", scored_twice, "which is scored, not finished"),
        ("samples", left_behind, "is still granted in a finished run"),
        ("tokens", one_token_more, "entered twice or out of nowhere"),
        ("tokens", one_token_less, "is missing"),
        ("tokens", lost_report, "but the reports that followed on made"),
        ("tokens", other_token, "are not those that the reports made"),
        ("tokens", past_the_stop_token, "follows the stop token at"),
        ("versions", older_version_in_mid_sample, "the one before it of version"),
        ("versions", begins_newer_than_it_ends, "ends with the older version"),
        ("versions", announced_back, "the weight server announced version 1 after version 4"),
        ("versions", worker_back, "loaded version 0 after version"),
        ("staleness", too_stale, "generated by version 1, which is staler than the bound of 0 for step 2"),
        ("staleness", from_the_future, "generated by version 7, which is from the future for step 2"),
        ("staleness", pruned_and_stale, "generated by version 1, which is staler than the bound of 0 for step 3"),
        ("steps", without_a_grant, "which was not granted"),
        ("steps", commit_forgets_one, "whose commit does not name it"),
        ("steps", another_steps_sample, "prompt 0 sibling 0 was trained twice: by step 0 and by step 3"),
        ("steps", replayed_with_others, "was committed twice with different samples"),
        ("steps", prompts_passed_over, "prompt 4 is missing from it"),
        ("steps", two_rows, "metrics.jsonl has two rows for step 1"),
        ("steps", wrong_version_of_step, "step 0 made version 5, expected 1"),
        ("asks", ask_overdue, "waited 12.5 s past its deadline"),
        ("asks", ask_lost, "2 of 10 asks of head never ended"),
        ("credit", handed_out_twice, "was handed to rollout-9 while rollout-"),
        ("credit", number_used_again, "had been given before"),
        ("credit", more_than_its_slots, "but has 3 slots"),
        ("credit", never_returned, "while rollout-0 had it"),
        ("credit", attempts_forgotten, "was handed out 1 times, but is put down with 0"),
        ("episodes", other_tokens_trained, "and its samples have"),
        ("episodes", discarded_and_not_told, "discarded tokens, and the journal of"),
        ("episodes", written_by_nobody, "begins with the mark -1, and not with a fresh context"),
        ("plans", the_longest_is_cut, "rollout-1 was cut in step 2: it had the longest part"),
        ("plans", cut_to_itself, "rollout-0 was cut in step 2: what it handed over went to itself"),
        ("restarts", too_many_restarts, "rollout.j made 11 restarts within 120 s"),
        ("restarts", restarted_after_giving_up, "rollout.j had given up, and restarted rollout-0"),
        ("groups", adopted_in_part, "trainer was started, and trainer.rank1, trainer.rank2 adopted"),
        ("groups", restarted_alone, "trainer.rank1 was started again, while trainer, trainer.rank2 went on"),
        ("groups", paid_for_twice, "the end of trainer cost a unit of budget, though a recovery under way had"),
        ("finish", a_step_short, "4 of its 5 steps are committed"),
    ],
    ids=lambda value: getattr(value, "__name__", value if isinstance(value, str) and " " not in value else ""),
)
def test_a_broken_promise_is_named(checker: str, change: Tamper, says: str) -> None:
    base = in_async_mode if change is older_version_in_mid_sample else with_faults
    base = with_episodes if change in OF_EPISODES else base
    found = check(tampered(change, base)).of(checker)
    assert any(says in violation.what for violation in found), [v.what for v in found]


@pytest.mark.parametrize(
    "words",
    [
        (*WHOLE, "exited 1", "restarting 1", "stopped 0", "stopped 2", *WHOLE, "exited 2", "restarting 2"),
        ("adopted 1", "adopted 2", "adopted 0", "exited 0", "restarting 0", "stopped 1", "stopped 2", *WHOLE),
        ("started 1", "exited 1", "restarting 1", "started 0", "stopped 0", *WHOLE),
        (*WHOLE, "exited 1", "exited 0", "restarting 1", "stopped 2", "start_failed 0", "restarting 0", *WHOLE),
    ],
)
def test_a_group_that_comes_and_goes_as_one_keeps_its_promise(words: Sequence[str]) -> None:
    history = with_faults()
    of_a_group(history, *words)
    assert check(history).of("groups") == []
    history.events.append(member("started", "scheduler.j") | {"supervisor": "core.j", "incarnation": 100})
    of_a_group(history, "adopted 1", "adopted 2", "adopted 0")
    assert check(history).of("groups") == []


def test_every_promise_has_a_history_that_breaks_it() -> None:
    marks = next(m for m in test_a_broken_promise_is_named.pytestmark if m.name == "parametrize")  # type: ignore[attr-defined]
    assert {case[0] for case in marks.args[1]} == set(PROMISES)


def test_a_violation_says_where() -> None:
    [violation] = check(tampered(one_token_more)).violations
    place = violation.as_map()
    assert (place["step"], place["prompt"], place["sibling"]) == (0, 2, 1)
    assert place["token_index"] == with_faults().samples[9].n_tokens
    assert place["worker"] in ("rollout-0", "rollout-1")


@pytest.mark.parametrize("cause", ["preempted", "stopped", "completed"])
def test_restarts_that_cost_no_budget_are_not_counted(cause: str) -> None:
    def often(history: History) -> None:
        history.events += [restarting("rollout.j", at_s, cause) for at_s in range(50)]

    assert check(tampered(often)).clean


def test_restarts_at_the_edge_of_the_budget_are_allowed() -> None:
    def often(history: History) -> None:
        history.events += [restarting("rollout.j", 12.0 * n) for n in range(60)]
        history.events += [restarting("services.j", n / 10) for n in range(10)]

    assert check(tampered(often)).clean


def test_a_lost_node_costs_one_restart_however_many_workers_it_had() -> None:
    def node_lost(history: History) -> None:
        history.events += [restarting("rollout.j", 5.0 + n / 100, "unreachable") for n in range(40)]

    assert check(tampered(node_lost)).clean


def test_a_run_that_has_not_finished_is_clean_unless_it_must_be() -> None:
    assert check(still_running()).clean
    [violation] = check(still_running(), must_finish=True).violations
    assert (violation.checker, "not finished but running: 1 of 4 steps" in violation.what) == ("finish", True)


def test_data_that_ended_early_may_end_a_job_early() -> None:
    def short(history: History) -> None:
        a_step_short(history)
        history.events.append({"time_s": 1.0, "event": "data_ended", "step": 4})

    assert check(tampered(short)).clean


def test_a_new_head_begins_again_at_a_checkpoint_and_may_announce_an_older_version() -> None:
    def resumed(history: History) -> None:
        started = {"event": "child_started", "supervisor": "core.j", "child": "metrics.j", "time_s": 0.0}
        history.events.insert(0, started | {"incarnation": 1})
        history.events += [started | {"incarnation": 2}, event(history, "version_available") | {"version": 1}]

    assert check(tampered(resumed)).clean


def test_what_was_pruned_is_not_missed() -> None:
    """The journal of a long run holds old steps as commits and as rows of samples only."""

    def prune(history: History) -> None:
        history.pruned_below = 3
        kept = (ev.Opened, ev.Committed, ev.Checkpointed, ev.Rewound)
        history.ledger = [e for e in history.ledger if isinstance(e, kept) or _step(e, history) >= 3]

    report = check(tampered(prune))
    assert report.violations == []
    assert 0 < report.counted["tokens_followed"] < report.counted["tokens"]


def _step(event: ev.Event, history: History) -> int:
    if isinstance(event, ev.TokensAppended | ev.Returned):
        return event_step(int(event.assignments[0]), history)
    return int(getattr(event, "step", 0))


def event_step(assignment: int, history: History) -> int:
    for e in with_faults().ledger:
        if isinstance(e, ev.Assigned) and e.first <= assignment < e.first + len(e.rows):
            return e.step
    raise AssertionError(assignment)


# ------------------------------------------------------------ whatever is taken out or put in twice

LOAD_BEARING = (
    ev.BatchIssued,
    ev.Assigned,
    ev.TokensAppended,
    ev.Returned,
    ev.Scored,
    ev.Dropped,
    ev.Granted,
    ev.Committed,
)


@given(place=st.integers(0, 10**6))
def test_a_journal_without_one_of_its_events_is_never_clean(place: int) -> None:
    """An un-journaled transition shows, whichever it is."""
    history = copy.deepcopy(with_faults())
    load = [i for i, e in enumerate(history.ledger) if isinstance(e, LOAD_BEARING) and not _is_replay(e)]
    gone = history.ledger.pop(load[place % len(load)])
    assert check(history).violations, gone


@given(place=st.integers(0, 10**6))
def test_a_report_that_came_twice_changes_nothing_and_any_other_event_shows(place: int) -> None:
    history = copy.deepcopy(with_faults())
    load = [i for i, e in enumerate(history.ledger) if isinstance(e, LOAD_BEARING) and not _is_replay(e)]
    at = load[place % len(load)]
    twice = history.ledger[at]
    history.ledger.insert(at + 1, twice)
    assert check(history).clean == isinstance(twice, ev.TokensAppended | ev.Returned)


def _is_replay(event: ev.Event) -> bool:
    """A replayed lease changes no sample, and repeats are what it is there for."""
    return isinstance(event, ev.Granted) and event.replay


def test_checking_changes_nothing_and_says_the_same_again() -> None:
    history = copy.deepcopy(with_faults())
    before = [ev.encode_event(event) for event in history.ledger]
    assert check(history) == check(history)
    assert [ev.encode_event(event) for event in history.ledger] == before
    assert history.samples == with_faults().samples
