"""The guide's policy is short, keeps what an assignment policy has to keep, and does in simulation what is said."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.policies.assigning.view import AssignView, GroupView, WorkerView
from benchmarks.decisions._fleet_model import Fleet

PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "writing_a_policy.md").read_text(encoding="utf-8")
POLICY, TRIAL = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
NAMES: dict[str, Any] = {}
exec(compile(POLICY, "writing_a_policy.md", "exec"), NAMES)


def test_the_policy_is_under_fifty_lines() -> None:
    assert len(POLICY.splitlines()) < 50


workers = st.lists(st.tuples(st.integers(-1, 3), st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=5)
groups = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 6), st.booleans(), st.integers(-1, 2)), max_size=8)


@given(workers, groups, st.integers(0, 2))
def test_it_keeps_credit_staleness_and_gives_each_row_once(fleet: Any, queued: Any, staleness: int) -> None:
    views = [WorkerView(f"w{i}", version, slots, min(busy, slots)) for i, (version, slots, busy) in enumerate(fleet)]
    rows = 0
    shown: list[GroupView] = []
    for prompt, (step, count, moved, version) in enumerate(queued):
        part = np.arange(rows, rows + count, dtype=np.int32)
        shown.append(GroupView(step, prompt, part, moved=moved, version=version))
        rows += count
    given_rows: list[int] = []
    left = {w.name: w.slots - w.in_flight for w in views}
    for decision in NAMES["decide"](AssignView(views, shown, staleness, 0.0, 100), 0.0):
        worker = next(w for w in views if w.name == decision.worker)
        left[worker.name] -= len(decision.rows)
        given_rows += decision.rows.tolist()
        for group in shown:
            if set(group.rows.tolist()) & set(decision.rows.tolist()):
                assert worker.policy_version >= max(group.step - staleness, group.version)
    assert min(left.values()) >= 0
    assert len(given_rows) == len(set(given_rows))


def test_the_trial_runs_and_packing_costs_time_and_frees_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    busy: list[set[str]] = []
    hand = Fleet._hand

    def watching(self: Fleet, worker: Any, number: int, rows: np.ndarray) -> None:
        if not self.trained_s and number == 0 and self.now_s == 0.0:
            busy[-1].add(worker.name)
        hand(self, worker, number, rows)

    run = Fleet.run

    def counting(self: Fleet, **options: Any) -> None:
        busy.append(set())
        run(self, **options)

    monkeypatch.setattr(Fleet, "_hand", watching)
    monkeypatch.setattr(Fleet, "run", counting)
    exec(compile(TRIAL, "writing_a_policy.md", "exec"), NAMES)
    ratio = NAMES["seconds"]["pack"] / NAMES["seconds"]["shortest queue"]
    said = re.search(r"packing takes ([\d.]+) times as long", PAGE)
    assert said is not None
    assert ratio == pytest.approx(float(said[1]), abs=0.05)
    assert [len(names) for names in busy] == [8, 4]
