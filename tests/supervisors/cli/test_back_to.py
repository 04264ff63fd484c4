"""A damaged run is refused with what is wrong and what to do; and it goes back to a checkpoint, destroying nothing."""

from __future__ import annotations

import asyncio
import json
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from actors.ledger import events as ev
from actors.ledger.journal import SqliteJournal, committed_samples
from actors.ledger.ledger import Ledger
from actors.protocol.work import SamplingParams
from actors.trainer import checkpoint
from actors.trainer.checkpoint import CheckpointState
from configs.errors import ConfigError
from supervisors.checkers.condition import check_can_go_on, look
from supervisors.checkers.run_directory import read_history
from supervisors.cli.app import app
from supervisors.machine.run_directory import RunLock
from tests.supervisors.checkers.recorded import with_faults
from tests.supervisors.checkers.test_run_directory import write


def store(run_dir: Path, step: int) -> Path:
    partial = checkpoint.begin(run_dir, step)
    (partial / "model.safetensors").write_text(f"weights of {step}")
    return checkpoint.commit(partial, CheckpointState(job="j", step=step))


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run of four steps with checkpoints at 2 and 4."""
    run_dir = write(tmp_path / "run", with_faults())
    for step in (2, 4):
        store(run_dir, step)
    return run_dir


def doctor(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["doctor", *arguments])


def sql(run_dir: Path, statement: str) -> None:
    with closing(sqlite3.connect(run_dir / "journal.db")) as db, db:
        assert db.execute(statement).rowcount > 0


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def newest_commit_altered(run_dir: Path) -> None:
    sql(run_dir, "UPDATE events SET body = x'00' WHERE kind = 'committed' AND step = 3")


def an_event_missing(run_dir: Path) -> None:
    sql(run_dir, "DELETE FROM events WHERE kind = 'scored' AND step = 3")


def its_end_missing(run_dir: Path) -> None:
    sql(run_dir, "DELETE FROM events WHERE seq > (SELECT max(seq) FROM events WHERE kind = 'committed' AND step = 2)")


def a_sample_altered(run_dir: Path) -> None:
    sql(run_dir, "UPDATE samples SET reward = 9.0 WHERE step = 3 AND sibling = 0")


def a_sample_deleted(run_dir: Path) -> None:
    sql(run_dir, "DELETE FROM samples WHERE step = 3 AND sibling = 0")


def newest_checkpoint_cut(run_dir: Path) -> None:
    (run_dir / "checkpoints" / "step_000004" / "model.safetensors").write_text("w")


def newest_state_altered(run_dir: Path) -> None:
    state = run_dir / "checkpoints" / "step_000004" / "state.json"
    state.write_text(state.read_text().replace('"step": 4', '"step": 3'))


HARMS: list[tuple[Callable[[Path], None], str]] = [
    (newest_commit_altered, r"event \d+ \(committed\) was altered"),
    (an_event_missing, "events are missing, or were added"),
    (a_sample_altered, "rows of the table samples were altered"),
    (a_sample_deleted, "rows of the table samples were altered, removed"),
    (its_end_missing, r"the events after \d+ are missing"),
    (newest_checkpoint_cut, "model.safetensors: 1 bytes, expected 12"),
    (newest_state_altered, "state.json: its content was altered"),
]


@pytest.mark.parametrize(("harm", "told"), HARMS)
def test_damage_is_refused_with_the_checkpoint_to_go_back_to_and_the_run_goes_back(
    run_dir: Path, harm: Callable[[Path], None], told: str
) -> None:
    check_can_go_on(run_dir)
    harm(run_dir)
    with pytest.raises(ConfigError, match=told) as refused:
        check_can_go_on(run_dir)
    wanted = 4 if harm in (an_event_missing, a_sample_altered, a_sample_deleted) else 2
    remedy = f"headrace doctor --run {run_dir} --back-to {wanted}"
    assert remedy in str(refused.value)
    shown = doctor("--run", str(run_dir))
    assert shown.exit_code == 1 and remedy in (shown.stdout + shown.stderr).replace("\n", " ")
    assert doctor("--run", str(run_dir), "--back-to", str(wanted)).exit_code == 0
    check_can_go_on(run_dir)
    assert _ledger(run_dir).committed_steps == wanted
    assert doctor("--run", str(run_dir)).exit_code == 0


def test_a_run_that_went_back_is_issued_the_prompts_of_the_step_anew(run_dir: Path) -> None:
    """By the time of the checkpoint the batches of later steps had been issued; now they have not."""
    assert doctor("--run", str(run_dir), "--back-to", "2").exit_code == 0
    assert _ledger(run_dir).next_prompt == 2 * 4, "else the batch of step 2 is refused, as one of an earlier step"


def test_going_back_leaves_the_run_at_weights_and_biases_to_the_steps_that_were_undone(run_dir: Path) -> None:
    """W&B takes no step that is not above the last one; the run goes on in a new one there, and that is told."""
    (run_dir / "wandb_id").write_text("abc")
    told = doctor("--run", str(run_dir), "--back-to", "2")
    assert "charts at Weights & Biases go on in a new run" in told.stdout
    assert not (run_dir / "wandb_id").exists()
    assert (run_dir / "set-aside" / "1" / "wandb_id").read_text() == "abc"
    assert "Weights" not in doctor("--run", str(run_dir), "--back-to", "2").stdout


def test_going_back_leaves_what_was_before_and_sets_aside_everything_else(run_dir: Path) -> None:
    before = {path.name: path.read_bytes() for path in run_dir.iterdir() if path.is_file() and path.suffix != ".yaml"}
    told = doctor("--run", str(run_dir), "--back-to", "2", "--json")
    aside = Path(json.loads(told.stdout)["set_aside"])
    for name in ("journal.db", "metrics.jsonl", "events.jsonl"):
        assert (aside / name).read_bytes() == before[name], name
    assert (aside / "step_000004" / "model.safetensors").read_text() == "weights of 4"
    assert [path.name for path in checkpoint.stored(run_dir)] == ["step_000002"]
    assert [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()] == [0, 1]
    ledger = _ledger(run_dir)
    assert (ledger.committed_steps, ledger.trainer_step, ledger.floor, ledger.issued_steps) == (2, 2, 2, 2)
    assert ledger.term > 0 and not ledger.stopping and not ledger.ended
    with closing(sqlite3.connect(run_dir / "journal.db")) as db:
        assert db.execute("SELECT max(step) FROM samples").fetchone() == (1,)
    again = doctor("--run", str(run_dir), "--back-to", "2", "--json")
    assert json.loads(again.stdout)["set_aside"] != str(aside), "what was set aside is never written over"


def test_going_back_needs_a_whole_checkpoint_and_the_record_of_what_came_before(run_dir: Path) -> None:
    wrong = doctor("--run", str(run_dir), "--back-to", "3")
    assert wrong.exit_code == 2 and "there is no checkpoint of step 3. Those that are whole: 2, 4" in wrong.stderr
    flip(run_dir / "checkpoints" / "step_000004" / "model.safetensors")
    assert "its content was altered" in doctor("--run", str(run_dir), "--back-to", "4").stderr
    sql(run_dir, "DELETE FROM events WHERE kind = 'committed' AND step = 0")
    wrong = doctor("--run", str(run_dir), "--back-to", "2")
    assert wrong.exit_code == 2 and "no intact record of every step" in wrong.stderr and "model.path=" in wrong.stderr
    assert not (run_dir / "set-aside").exists()


def test_without_its_journal_a_run_is_not_gone_on_with_and_says_what_can_be_done(run_dir: Path) -> None:
    (run_dir / "journal.db").unlink()
    with pytest.raises(ConfigError, match=r"journal\.db is missing") as refused:
        check_can_go_on(run_dir)
    assert f"model.path={run_dir / 'checkpoints' / 'step_000004'}" in str(refused.value)
    shutil.rmtree(run_dir / "checkpoints")
    check_can_go_on(run_dir)  # it had not come anywhere: it begins


def test_a_checkpoint_ahead_of_its_journal_is_found(run_dir: Path) -> None:
    store(run_dir, 6)
    with pytest.raises(ConfigError, match=r"step_000006 is ahead of journal\.db, which knows of 4 steps"):
        check_can_go_on(run_dir)
    assert look(run_dir).back_to == 4


def test_without_checkpoints_a_run_begins_again_only_if_all_of_it_can_be_trained_again(run_dir: Path) -> None:
    shutil.rmtree(run_dir / "checkpoints")
    check_can_go_on(run_dir)
    sql(run_dir, "INSERT OR REPLACE INTO meta VALUES ('pruned_below', '2')")
    with pytest.raises(ConfigError, match="its checkpoints are gone, and steps below 2 cannot be trained again"):
        check_can_go_on(run_dir)


@pytest.mark.parametrize("name", ["exp#2", "what?", "50%41", "a b", "[x]"])
def test_a_run_goes_on_and_back_whatever_letters_its_directory_has(tmp_path: Path, name: str) -> None:
    run_dir = write(tmp_path / name, with_faults())
    for step in (2, 4):
        store(run_dir, step)
    check_can_go_on(run_dir)
    told = doctor("--run", str(run_dir))
    assert told.exit_code == 0, told.output
    assert len(committed_samples(run_dir / "journal.db")) == len(read_history(run_dir).samples) > 0
    assert doctor("--run", str(run_dir), "--back-to", "2").exit_code == 0
    assert _ledger(run_dir).committed_steps == 2
    assert [path.name for path in tmp_path.iterdir()] == [name], "no file beside it, such as exp"


def test_a_run_that_lives_is_not_changed(run_dir: Path) -> None:
    with RunLock.take(run_dir):
        refused = doctor("--run", str(run_dir), "--back-to", "2")
    assert refused.exit_code == 2 and "is in use by process" in refused.stderr
    assert look(run_dir).back_to == 4 and not (run_dir / "set-aside").exists()


def test_a_run_that_a_worker_has_poisoned_is_named_and_goes_back_to_before(tmp_path: Path) -> None:
    """As left by a version that let nonsense into the ledger: the trainer would end at every replay of the step."""
    history = replace(with_faults(), ledger=list(with_faults().ledger))
    ledger = Ledger()
    ledger.restore(history.ledger)
    one, four = np.ones(1, np.int32), np.ones(4, np.int32)
    number = np.array([ledger.next_assignment], np.int64)
    sampling = SamplingParams(max_tokens=8, stop_token_ids=(9,))
    logprobs = np.array([float("nan")], np.float32)
    history.ledger += [
        ev.BatchIssued(4, 4, sampling, np.arange(16, 20), four, four, [b""] * 4),
        ev.Assigned.to_one("w", 4, ledger.next_assignment, 0 * one),
        ev.TokensAppended.one("w", 4, number, 0 * one, one, np.zeros(1, np.uint8), 11 * one, logprobs),
    ]
    run_dir = write(tmp_path / "run", history)
    for step in (2, 4):
        store(run_dir, step)
    shown = doctor("--run", str(run_dir))
    said = (shown.stdout + shown.stderr).replace("\n", " ")
    assert shown.exit_code == 1 and "has the id 11 and the log-probability nan" in said, said
    assert "the trainer cannot take it" in said and f"headrace doctor --run {run_dir} --back-to 4" in said
    assert doctor("--run", str(run_dir), "--back-to", "4").exit_code == 0
    assert doctor("--run", str(run_dir)).exit_code == 0
    assert 4 not in _ledger(run_dir).batches


def test_back_to_goes_with_a_run() -> None:
    refused = doctor("--back-to", "2")
    assert refused.exit_code == 2 and "--back-to goes with --run" in refused.stderr


def _ledger(run_dir: Path) -> Ledger:
    async def read() -> Ledger:
        journal = SqliteJournal(run_dir / "journal.db", "j")
        floor, events = journal.read()
        ledger = Ledger(floor)
        ledger.restore(events)
        await journal.close()
        journal._writer.shutdown()
        return ledger

    return asyncio.run(read())
