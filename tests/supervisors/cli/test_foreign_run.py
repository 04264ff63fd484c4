"""Commands that read a run answer soon and in a sentence, whatever its directory holds, and change nothing outside it.

A run directory may have been sent by somebody, or lie where others may write. Each case damages a recorded run in one
way, and then every command that reads it is called.
"""

from __future__ import annotations

import json
import os
import signal
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from actors.ledger.journal import SqliteJournal
from configs.errors import ConfigError
from configs.limits import DEFAULT_LIMITS
from configs.run_files import (
    CONTROL_ENDPOINT,
    EVALUATIONS,
    EVENTS,
    JOB_FILE,
    JOURNAL,
    METRICS,
    SAMPLES,
    TRACE,
)
from supervisors.cli.app import app
from supervisors.cli.console.feed import Feed
from supervisors.cli.console.run_files import RunFiles
from supervisors.cli.console.server import encode
from tests.supervisors.cli.console.recorded_run import event, record, row, sample

PATIENCE_S = 20
RECORDS = (JOB_FILE, METRICS, EVENTS, SAMPLES, TRACE, EVALUATIONS, JOURNAL)
SECRET = "- what: nobody else may read\n"
DEEP = '{"step": ' + "[" * 100_000 + "]" * 100_000 + "}"


@contextmanager
def soon() -> Iterator[None]:
    """Fail if what is inside waits."""

    def late(*_: object) -> None:
        raise AssertionError(f"it waited for more than {PATIENCE_S} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(PATIENCE_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = record(tmp_path / "runs" / "demo", steps=3)
    (folder / EVALUATIONS).write_text('{"version": 1, "k": 1, "avg_at_k": 0.5, "pass_at_k": {"1": 0.5}}\n')
    SqliteJournal.make(folder / JOURNAL, "demo")
    (folder / JOB_FILE).write_text(
        "name: demo\nsteps: 3\nmodel: {source: tiny}\ndata: {source: reasoning_gym, task: spell_backward}\n"
        "reward: {kind: reasoning_gym}\n"
    )
    return folder


def invoke(*arguments: str) -> Result:
    with soon():
        result = CliRunner().invoke(app, arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit), (arguments, result.exception)
    return result


def all_commands(run_dir: Path) -> dict[str, Result]:
    """What each command says of the run; the console is asked for all that a page gets.

    Pictures are made and not painted, which takes most of the time of ``plot``.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("supervisors.cli.plot.page.png", lambda _: b"")
        plotted = invoke("plot", str(run_dir))
    found = {
        "plot": plotted,
        "samples": invoke("samples", str(run_dir), "--json"),
        "runs": invoke("runs", str(run_dir.parent), "--json"),
        "doctor": invoke("doctor", "--run", str(run_dir), "--json"),
    }
    with soon():
        try:
            encode(Feed(RunFiles(run_dir, DEFAULT_LIMITS), DEFAULT_LIMITS).snapshot())
        except ConfigError as error:
            assert str(run_dir) in str(error)
    return found


def test_a_run_as_it_was_recorded_is_read_by_all(run_dir: Path) -> None:
    """So that what follows shows the damage, and not the recording."""
    found = all_commands(run_dir)
    assert {name: result.exit_code for name, result in found.items()} == {
        "plot": 0, "samples": 0, "runs": 0, "doctor": 1
    }, "its journal knows of no step, which doctor says"  # fmt: skip
    assert json.loads(found["doctor"].stdout)["checked"]["ledger_events"] == 0


@pytest.mark.parametrize("name", RECORDS)
def test_a_pipe_in_place_of_a_file_is_never_waited_for(run_dir: Path, name: str) -> None:
    (run_dir / name).unlink()
    os.mkfifo(run_dir / name)
    all_commands(run_dir)


@pytest.mark.parametrize("name", [JOB_FILE, METRICS, SAMPLES, JOURNAL])
def test_a_link_that_leads_out_of_the_run_is_not_followed(run_dir: Path, tmp_path: Path, name: str) -> None:
    outside = tmp_path / "outside"
    outside.write_text(json.dumps(sample(0, prompt_text=SECRET)) + "\n" + json.dumps(row(0)) + "\n")
    (run_dir / name).unlink()
    (run_dir / name).symlink_to(outside)
    said = all_commands(run_dir)
    assert all(SECRET not in result.output for result in said.values())
    refused = {METRICS: "plot", SAMPLES: "samples", JOB_FILE: "plot", JOURNAL: "plot"}[name]
    assert "is a link that leads out of its directory" in " ".join(said[refused].stderr.split())


def test_an_endpoint_that_is_a_link_out_of_the_run_is_not_read(run_dir: Path, tmp_path: Path) -> None:
    from actors.control.socket import read_endpoint

    (tmp_path / "secret").write_text("secret")
    (run_dir / CONTROL_ENDPOINT).symlink_to(tmp_path / "secret")
    with pytest.raises(ConfigError, match="leads out"):
        read_endpoint(str(run_dir))


@pytest.mark.parametrize("link", ["plots", "plots/index.html", "plots/reward.png"])
def test_plot_writes_through_no_link(run_dir: Path, tmp_path: Path, link: str) -> None:
    outside = tmp_path / "mine"
    (run_dir / link).parent.mkdir(exist_ok=True)
    if link == "plots":
        outside.mkdir()
    else:
        outside.write_text("mine")
    (run_dir / link).symlink_to(outside)
    result = all_commands(run_dir)["plot"]
    if link == "plots":
        assert (result.exit_code, list(outside.iterdir())) == (2, [])
        assert "Say with --out where to write" in " ".join(result.stderr.split())
    else:
        assert (result.exit_code, outside.read_text()) == (0, "mine")
        assert not (run_dir / link).is_symlink()


def _views(file: Path) -> None:
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i AS name, i AS value FROM n"
    with closing(sqlite3.connect(file)) as db:
        db.executescript(f"DROP TABLE meta; CREATE VIEW meta AS {endless};")


def _odd_rows(file: Path) -> None:
    with closing(sqlite3.connect(file)) as db:
        db.execute("INSERT OR REPLACE INTO meta VALUES ('durable_seq', 'many'), ('pruned_below', 'x')")
        db.execute("INSERT INTO events VALUES ('1', 'opened', 'demo', 0, x'93', x'00')")
        db.execute("INSERT INTO samples VALUES ('demo', 0, 0, 0, 'committed', '', 1e300, 'x', '', 0, 0, 1, '')")
        db.commit()


def _pages_that_refer_to_each_other(file: Path) -> None:
    """Fill the root of a table with the same child, many times over, a few levels deep."""
    content = bytearray(file.read_bytes())
    content[4096:] = b"\x05" * (len(content) - 4096)
    file.write_bytes(bytes(content))


@pytest.mark.parametrize("damage", [_views, _odd_rows, _pages_that_refer_to_each_other])
def test_a_journal_that_is_none_is_called_so(run_dir: Path, damage: Callable[[Path], None]) -> None:
    damage(run_dir / JOURNAL)
    doctor = all_commands(run_dir)["doctor"]
    assert doctor.exit_code == 1
    assert len(doctor.output) < 4000


def _aliases() -> str:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    return "\n".join([*lines, "model: {path: *a11}", "name: *a11", ""])


@pytest.mark.parametrize(
    "text",
    [
        _aliases(),
        "name: " + "[" * 200_000,
        "name: &a [*a]\n",
        "- 1\n",
        "name: \x00\n",
        "name: [1, 2]\nsteps: {a: 1}\nmodel: 3\n",
    ],
    ids=["aliases", "deep", "inside itself", "list", "control character", "odd types"],
)
def test_a_job_file_that_no_run_has_written_is_passed_over_or_refused(run_dir: Path, text: str) -> None:
    (run_dir / JOB_FILE).write_text(text)
    assert all_commands(run_dir)["doctor"].exit_code == 2


@pytest.mark.parametrize("name", [METRICS, EVENTS, SAMPLES, TRACE, EVALUATIONS])
def test_lines_of_any_form_are_passed_over(run_dir: Path, name: str) -> None:
    """Deep nesting, odd types, numbers that are none."""
    odd: list[Any] = ["x", [1], {"a": [1]}, 10**400, 1e999, True, None]
    known: dict[str, Any] = {
        METRICS: row(5), EVENTS: event(1.0, "process_health", oldest_wait_s=1.0, process="p", worker="rollout-0"),
        SAMPLES: sample(5), TRACE: {"name": "train", "ph": "X", "ts": 1.0, "dur": 1.0, "tid": 1, "args": {"tokens": 1}},
        EVALUATIONS: {"version": 5, "k": 1, "avg_at_k": 0.5, "pass_at_k": {"1": 0.5}},
    }[name]  # fmt: skip
    lines = [json.dumps(known | {key: value}) for key in known for value in odd]
    if name == EVENTS:
        names = ("worker_version", "job_state", "child_restarting", "asks_counted", "trouble", "worker_registered")
        keys = ("time_s", "version", "state", "child", "opened", "process")
        for kind in names:
            lines += [json.dumps({"event": kind, "worker": "rollout-0", **dict.fromkeys(keys, value)}) for value in odd]
    text = "\n".join([DEEP, json.dumps("[" * 500), *lines, '{"a":' * 900 + "1" + "}" * 900])
    with (run_dir / name).open("a") as file:
        file.write("\n" + text + "\n")
    all_commands(run_dir)


def test_a_sample_without_a_number_for_reward_is_shown_without_one(run_dir: Path) -> None:
    with (run_dir / SAMPLES).open("a") as file:
        file.write(json.dumps(sample(20, reward=float("nan"), reward_parts={"a": float("inf"), "b": 1.0})) + "\n")
    found = all_commands(run_dir)["samples"]
    (shown,) = json.loads(found.stdout)
    assert (shown["step"], shown["reward"], shown["reward_parts"]) == (20, None, {"a": None, "b": 1.0})
    assert "reward –" in invoke("samples", str(run_dir)).stdout


def test_a_file_that_is_longer_than_any_of_a_run_is_read_in_part(run_dir: Path) -> None:
    for name in (METRICS, EVENTS, SAMPLES, TRACE):
        os.truncate(run_dir / name, 1 << 40)  # it takes no room on the disk
    all_commands(run_dir)
