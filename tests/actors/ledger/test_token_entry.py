"""Reports that came together enter the ledger as if each had come alone, whatever is wrong with some of them."""

from __future__ import annotations

import msgpack
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.fleet.inflow import joined
from actors.ledger import events as ev
from actors.ledger.batch import SampleState, StepBatch
from actors.ledger.errors import IllegalTransition
from actors.ledger.ledger import Ledger, Outcome
from actors.protocol.tokens import FinishReason, TokenReport
from actors.protocol.work import EngineStats, SamplingParams

WORKERS, ROWS, BUDGET, STOP = ("a", "b"), 4, 6, 9


def handed_out() -> Ledger:
    """Two steps of four samples; each worker has two of each step."""
    ledger = Ledger()
    ledger.apply(ev.Opened(1))
    sampling = SamplingParams(max_tokens=BUDGET, stop_token_ids=(STOP,))
    for step in range(2):
        prompts, lengths = np.arange(2 * step, 2 * step + 2), np.ones(2, np.int32)
        ledger.apply(ev.BatchIssued(step, 2, sampling, prompts, lengths, lengths, [b"", b""]))
        for i, worker in enumerate(WORKERS):
            rows = np.arange(2 * i, 2 * i + 2, dtype=np.int32)
            ledger.apply(ev.Assigned.to_one(worker, step, ledger.next_assignment, rows))
    return ledger


def report(worker: str, version: int, rows: list[tuple[int, int, int, int]]) -> TokenReport:
    """Rows of (assignment, offset, count, finished). Worker ``a`` tells routes, of two bytes a token."""
    tokens = [10 * (number % 1000) + at + i for number, at, n, _ in rows for i in range(n)]
    return TokenReport.of(
        np.array([r[0] for r in rows], np.int64), np.array([r[1] for r in rows], np.int32),
        np.array([r[2] for r in rows], np.int32), np.array([r[3] for r in rows], np.uint8),
        np.array(tokens, np.int32), np.array(tokens, np.float32),
        np.array([(token % 255, 7) for token in tokens], np.uint8) if worker == "a" and tokens else None,
        job="j", worker=worker, term=1, sequence=0, policy_version=version, stats=EngineStats(),
    )  # fmt: skip


def state(ledger: Ledger) -> list[object]:
    """All that a ledger says."""
    found: list[object] = [ledger.counters, ledger.count_states()]
    for batch in ledger.batches.values():
        held = batch.ragged(np.arange(ROWS, dtype=np.int32), routes=True)
        columns = (held.lengths, held.tokens, held.logprobs, held.versions, batch.state, batch.finish, batch.assignment)
        found += [column.tolist() for column in columns]
        found.append(routes_of(batch).tolist())
    return [*found, *(sorted(ledger.in_flight(worker).tolist()) for worker in WORKERS)]


def routes_of(batch: StepBatch) -> np.ndarray:
    """uint8[tokens, 2]: routes of all that a batch holds, 0 if it knows none."""
    held = batch.ragged(np.arange(ROWS, dtype=np.int32), routes=True)
    return np.zeros((len(held.tokens), 2), np.uint8) if held.routes is None else held.routes


def told(outcomes: list[Outcome]) -> list[object]:
    """What the scheduler is told, in an order that does not depend on how the reports were put together."""
    rows = [
        sorted((step, row) for o in outcomes for step, part in vars_of(o, name).items() for row in part.tolist())
        for name in ("finished", "queued")
    ]
    broken = sorted((worker, number) for o in outcomes for worker, part in o.broken.items() for number in part.tolist())
    ended = {worker: sum(o.ended.get(worker, 0) for o in outcomes) for worker in WORKERS}
    return [*rows, broken, ended, sum(o.tokens for o in outcomes)]


def vars_of(outcome: Outcome, name: str) -> dict[int, np.ndarray]:
    return outcome.finished if name == "finished" else outcome.queued


@st.composite
def reports(draw: st.DrawFn) -> list[TokenReport]:
    """Mostly what right workers say; now and then a gap, a repeat, a stranger's number, more than the budget."""
    first = 1 << 40
    ends = {(w, first + 4 * s + 2 * i + r): 0 for s in range(2) for i, w in enumerate(WORKERS) for r in range(2)}
    said: list[TokenReport] = []
    for _ in range(draw(st.integers(1, 6))):
        worker = draw(st.sampled_from(WORKERS))
        rows: list[tuple[int, int, int, int]] = []
        for name, end in list(ends.items()):
            if name[0] != worker or draw(st.integers(0, 3)) == 0:
                continue
            n, wrong = draw(st.integers(0, 2)), draw(st.integers(0, 30))
            finished = draw(st.sampled_from((0, 0, 0, 0, FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORTED)))
            offset = max(end + {0: -1, 1: 1}.get(wrong, 0), 0)
            rows.append((name[1] + 2 * (wrong == 2), offset, n, 7 if wrong == 3 else int(finished)))
            ends[name] = offset + n
            if finished and draw(st.integers(0, 9)):
                del ends[name]
        if rows:
            said.append(report(worker, draw(st.integers(0, 1)), rows))
    return said or [report("a", 0, [(first, 0, 1, 0)])]


@settings(max_examples=50, deadline=None)
@given(said=reports())
def test_reports_that_came_together_enter_as_if_each_had_come_alone(said: list[TokenReport]) -> None:
    together, alone = handed_out(), handed_out()
    outcome = together.apply(joined(said))
    outcomes = [alone.apply(joined([one])) for one in said]
    assert state(together) == state(alone)
    assert told([outcome]) == told(outcomes)


@settings(max_examples=50, deadline=None)
@given(said=reports())
def test_an_event_of_many_reports_is_taken_apart_into_those_that_it_was_made_of(said: list[TokenReport]) -> None:
    for part, one in zip(joined(said).split(), said, strict=True):
        assert (part.workers, part.versions.tolist()) == ([one.worker], [one.policy_version])
        assert part.assignments.tolist() == one.assignments.tolist()
        assert part.finished.tolist() == one.finished.tolist()
        assert (part.tokens.tolist(), part.logprobs.tolist()) == (one.tokens.tolist(), one.logprobs.tolist())
        if one.routes is not None:
            assert part.routes is not None and part.routes.tolist() == one.routes.tolist()
        else:
            assert part.routes is None or not part.routes.any()


def test_one_worker_that_is_wrong_keeps_no_other_one_from_entering() -> None:
    ledger, first = handed_out(), 1 << 40
    outcome = ledger.apply(
        joined([report("a", 0, [(first, 3, 1, 0)]), report("b", 1, [(first + 2, 0, 2, FinishReason.STOP)])])
    )
    assert (ledger.counters.gap_rows, ledger.counters.tokens, outcome.ended) == (1, 2, {"b": 1})
    assert {worker: numbers.tolist() for worker, numbers in outcome.broken.items()} == {"a": [first]}
    assert ledger.batches[0].state.tolist()[2] == SampleState.FINISHED


@pytest.mark.parametrize(
    ("row_bytes", "token_bytes"),
    [(b"x" * 16, b""), (b"", b"x" * 8), (b"\0" * 17, b"x" * 8), (b"\0" * 17, b"x" * 7), (b"\xff" * 17, b"")],
)
def test_bytes_that_are_no_rows_are_refused_before_anything_enters(row_bytes: bytes, token_bytes: bytes) -> None:
    good = report("a", 0, [(1 << 40, 0, 1, 0)])
    bad = TokenReport(
        job="j", worker="b", term=1, sequence=0, policy_version=0, row_bytes=row_bytes, token_bytes=token_bytes,
        stats=EngineStats(),
    )  # fmt: skip
    ledger = handed_out()
    before = state(ledger)
    with pytest.raises(IllegalTransition):
        ledger.apply(joined([good, bad]))
    assert state(ledger) == before


@pytest.mark.parametrize(
    ("offset", "count", "counter"),
    [(0, 2, "duplicate_rows"), (1, 3, "duplicate_rows"), (3, 1, "gap_rows"), (2, BUDGET - 1, "gap_rows")],
    ids=["what is there already", "an overlap", "a gap", "more than the budget"],
)
def test_a_token_index_enters_once_in_its_order_and_within_the_budget(offset: int, count: int, counter: str) -> None:
    ledger, first = handed_out(), 1 << 40
    ledger.apply(joined([report("a", 0, [(first, 0, 2, 0)])]))
    before = state(ledger)[1:]
    outcome = ledger.apply(joined([report("a", 1, [(first, offset, count, 0)])]))
    assert outcome.tokens == 0 and state(ledger)[1:] == before
    assert getattr(ledger.counters, counter) == 1
    went_on = offset + count <= 2  # a repeat is no news; of all else the worker is told to stop it
    assert outcome.broken.get("a", np.empty(0)).tolist() == ([] if went_on else [first])


def test_routes_stay_with_their_tokens_through_a_move_a_commit_and_the_journal() -> None:
    """Worker ``a`` hands back, ``b`` goes on and tells none; then ``a`` again."""
    ledger, first = handed_out(), 1 << 40
    events = [ev.decode_event(ev.encode_event(joined([report("a", 0, [(first, 0, 2, FinishReason.ABORTED)])])))]
    events += [ev.Assigned.to_one("b", 0, ledger.next_assignment, np.zeros(1, np.int32))]
    events += [joined([report("b", 0, [(ledger.next_assignment, 2, 1, FinishReason.ABORTED)])])]
    events += [ev.Assigned.to_one("a", 0, ledger.next_assignment + 1, np.zeros(1, np.int32))]
    events += [joined([report("a", 0, [(ledger.next_assignment + 1, 3, 1, FinishReason.STOP)])])]
    for event in events:
        ledger.apply(ev.decode_event(ev.encode_event(event)))
    batch = ledger.batches[0]
    tokens = batch.ragged(np.zeros(1, np.int32)).tokens.tolist()
    expected = [[token % 255, 7] for token in tokens]
    expected[2] = [0, 0]
    assert routes_of(batch).tolist() == expected
    batch.archive()
    assert routes_of(batch).tolist() == expected and batch.route_bytes == 2


def test_what_an_environment_writes_where_routes_were_has_none() -> None:
    ledger = handed_out()
    ledger.apply(joined([report("a", 0, [(1 << 40, 0, 3, 0)])]))
    batch = ledger.batches[0]
    batch.length[0] = 1  # an episode is cut off
    batch.put_marked(0, np.array([5, 6], np.int32), -1)
    assert routes_of(batch)[:, 1].tolist() == [7, 0, 0]


def test_an_event_of_a_journal_of_before_has_no_routes() -> None:
    event = joined([report("b", 0, [(1 << 40, 0, 1, 0)])])
    plain = msgpack.unpackb(ev.encode_event(event), ext_hook=msgpack.ExtType)
    del plain["routes"]
    again = ev.decode_event(msgpack.packb(plain) or b"")
    assert isinstance(again, ev.TokensAppended) and again.routes is None
    assert again.tokens.tolist() == event.tokens.tolist()


@pytest.mark.parametrize("size", [1, 3])
def test_routes_of_another_size_are_refused_before_anything_enters(size: int) -> None:
    ledger, first = handed_out(), 1 << 40
    ledger.apply(joined([report("a", 0, [(first, 0, 1, 0)])]))
    other = msgspec.structs.replace(report("a", 0, [(first, 1, 1, 0)]), route_bytes=b"x" * size)
    before = state(ledger)
    with pytest.raises(IllegalTransition, match=f"routes of {size} bytes a token, after others of 2"):
        ledger.apply(joined([other]))
    assert state(ledger) == before


def test_route_bytes_that_do_not_share_out_among_the_tokens_are_refused() -> None:
    bad = msgspec.structs.replace(report("a", 0, [(1 << 40, 0, 2, 0)]), route_bytes=b"xyz")
    with pytest.raises(IllegalTransition, match="routes that do not fit its tokens"):
        joined([bad])
