"""A run is gone on with only if it is the same run still; what is not is said in a sentence before anything starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from configs.errors import ConfigError
from configs.run_files import BEGAN_WITH
from configs.schema import JobConfig
from supervisors.api.resume import check_options, check_run, committed_steps
from supervisors.jobs.run_record import changed_keys, data_news, model_news, note_changes, write_record
from tests.smallest_job import smallest_job


def job(tmp_path: Path, **changes: object) -> JobConfig:
    data = tmp_path / "data.jsonl"
    if not data.exists():
        data.write_text('{"prompt": "1+1=", "answer": "2"}\n' * 3)
    sections = {"data": {"source": "jsonl", "path": str(data)}, "steps": 4, "trainer": {"lr": 0.001}}
    return smallest_job(**{**sections, **changes})


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The directory of a run that has committed two steps and stored a checkpoint."""
    directory = tmp_path / "run"
    (directory / "checkpoints" / "step_000002").mkdir(parents=True)
    (directory / "journal.db").write_bytes(b"...")
    (directory / "job.yaml").write_text("{}")
    wide = {f"column_{i}": 0.123456789 for i in range(80)}  # rows are as long as real ones
    rows = [{"step": step, **wide} for step in range(2)]
    (directory / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    write_record(directory, job(tmp_path))
    return directory


def refusal(run: Path, job: JobConfig) -> str:
    with pytest.raises(ConfigError) as refused:
        check_run(run, job)
    return str(refused.value)


def test_a_run_that_is_as_it_was_is_gone_on_with_also_elsewhere(run: Path, tmp_path: Path) -> None:
    check_run(run, job(tmp_path))
    moved = run.rename(tmp_path / "elsewhere")
    check_run(moved, job(tmp_path))
    assert data_news(moved, job(tmp_path)) == "" == model_news(moved, job(tmp_path))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"trainer": {"lr": 0.1}}, "trainer.lr was 0.001 and is 0.1"),
        ({"seed": 5}, "seed was 0 and is 5"),
        ({"algorithm": {"group_size": 4}}, "algorithm.group_size was"),
        ({"name": "other"}, 'and is "other"'),
    ],
)
def test_a_key_that_may_not_change_is_named_with_its_old_and_new_value(
    run: Path, tmp_path: Path, changes: dict[str, object], says: str
) -> None:
    message = refusal(run, job(tmp_path, **changes))
    assert says in message and "Put back what the run began with" in message


def test_a_learning_rate_may_change_where_the_user_says_so_and_the_record_says_when(run: Path, tmp_path: Path) -> None:
    slower = job(tmp_path, trainer={"lr": 0.0001})
    assert "or say --set trainer.lr=0.0001 with the resume" in refusal(run, slower), "an edit may be an oversight"
    check_run(run, slower, ["trainer.lr=0.0001"])
    assert "seed was" in refusal(run, job(tmp_path, seed=5, trainer={"lr": 0.0001}))
    said = note_changes(run, slower, committed_steps(run))
    assert said == "trainer.lr was 0.001 and is 0.0001, for the steps after 2"
    check_run(run, slower)
    assert note_changes(run, slower, 3) == "", "it goes on as it is"
    assert "trainer.lr was 0.0001 and is 0.001" in refusal(run, job(tmp_path))
    check_run(run, job(tmp_path), ["trainer.lr=0.001"])
    note_changes(run, job(tmp_path), 3)
    changes = json.loads((run / BEGAN_WITH).read_text())["changes"]
    assert [(change["is"], change["after_steps"]) for change in changes] == [(0.0001, 2), (0.001, 3)]


def test_what_a_resume_may_set_may_be_edited_too(run: Path, tmp_path: Path) -> None:
    changes = {"steps": 9, "limits": {"restart_max": 3}, "checkpoint": {"every": 7}, "rollout": {"workers": 5}}
    rollout = job(tmp_path).rollout.model_dump() | {"workers": 5}
    check_run(run, job(tmp_path, **changes | {"rollout": rollout}))


def test_fewer_steps_than_are_committed_are_refused_and_as_many_are_not(run: Path, tmp_path: Path) -> None:
    assert "steps is 1, and 2 steps are committed already" in refusal(run, job(tmp_path, steps=1))
    check_run(run, job(tmp_path, steps=2))


def test_a_run_whose_journal_is_gone_is_refused_with_what_is_left_of_it(run: Path, tmp_path: Path) -> None:
    (run / "journal.db").unlink()
    message = refusal(run, job(tmp_path))
    assert "its journal.db is gone" in message and "step_000002" in message
    (run / "checkpoints" / "step_000002").rmdir()
    check_run(run, job(tmp_path))  # it was killed before it had anything


@pytest.mark.parametrize("rows", [b"", b'{"step": 0}\n{"st', b"\xff\xfe\n", b"[]\n", b'{"step": "x"}\n', b"{}\n"])
def test_metrics_that_cannot_be_read_say_nothing_of_the_steps(run: Path, rows: bytes) -> None:
    (run / "metrics.jsonl").write_bytes(rows)
    assert committed_steps(run) in (0, 1)


@pytest.mark.parametrize("content", [None, "", "[]", "{", '{"job": 5, "data": []}', '{"data": {"bytes": "x"}}'])
def test_a_run_of_before_or_with_a_broken_record_is_held_against_nothing(
    run: Path, tmp_path: Path, content: str | None
) -> None:
    (run / BEGAN_WITH).unlink()
    if content is not None:
        (run / BEGAN_WITH).write_text(content)
    changed = job(tmp_path, trainer={"lr": 9.0})
    check_run(run, changed)
    assert changed_keys(run, changed) == []
    data_news(run, changed)
    assert model_news(run, changed) == ""


def test_a_key_that_the_record_does_not_know_is_no_change(run: Path, tmp_path: Path) -> None:
    """It was added to the schema since."""
    record = json.loads((run / BEGAN_WITH).read_text())
    del record["job"]["trainer"]["lr"]
    (run / BEGAN_WITH).write_text(json.dumps(record))
    check_run(run, job(tmp_path, trainer={"lr": 9.0}))


def test_data_that_has_changed_is_said_and_not_refused(run: Path, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    before = data.read_text()
    data.write_text(before.replace("1+1", "1+2", 1))
    assert "has changed since the run began (102 bytes, as then)" in data_news(run, job(tmp_path))
    data.write_text(before * 2)
    assert "(102 bytes then, 204 now)" in data_news(run, job(tmp_path))
    check_run(run, job(tmp_path))
    data.write_text(before)
    assert data_news(run, job(tmp_path)) == ""


def test_a_model_that_lies_elsewhere_is_said_and_not_refused(run: Path, tmp_path: Path) -> None:
    moved = job(tmp_path)
    moved = moved.model_copy(update={"model": moved.model.model_copy(update={"path": "/new/place"})})
    check_run(run, moved)
    assert "and is /new/place" in model_news(run, moved)


def test_a_directory_of_data_is_held_against_the_list_of_its_files(tmp_path: Path) -> None:
    (tmp_path / "set" / "train").mkdir(parents=True)
    (tmp_path / "set" / "train" / "a.arrow").write_bytes(b"x" * 10)
    (tmp_path / "run").mkdir()
    one = job(tmp_path, data={"source": "hf_dataset", "path": str(tmp_path / "set")})
    write_record(tmp_path / "run", one)
    assert data_news(tmp_path / "run", one) == ""
    (tmp_path / "set" / "train" / "b.arrow").write_bytes(b"x")
    assert "10 bytes then, 11 now" in data_news(tmp_path / "run", one)


def test_options_that_do_not_go_with_it_are_refused(run: Path, tmp_path: Path) -> None:
    check_options(None, None, run, ["steps=9", "limits.restart_max=2", "trainer.lr=1"])
    for options in ((Path("job.yaml"), None, run, []), (None, tmp_path, run, []), (None, None, tmp_path, []),
                    (None, None, run, ["algorithm.group_size=4"])):  # fmt: skip
        with pytest.raises(ConfigError):
            check_options(*options)


def test_of_a_mix_each_source_is_held_against_the_record_and_may_lie_elsewhere(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text('{"prompt": "2+2", "answer": "4"}\n')

    def mixed(weight: float = 1.0, names: tuple[str, ...] = ("a", "b"), place: str = "") -> JobConfig:
        return smallest_job(
            data={"mix": [{"name": n, "weight": weight, "path": str(tmp_path / f"{place}{n}.jsonl")} for n in names]}
        )

    write_record(tmp_path, mixed())
    assert changed_keys(tmp_path, mixed()) == [] and data_news(tmp_path, mixed()) == ""
    (tmp_path / "b.jsonl").rename(tmp_path / "moved_b.jsonl")
    (tmp_path / "a.jsonl").rename(tmp_path / "moved_a.jsonl")
    assert changed_keys(tmp_path, mixed(place="moved_")) == [], "they are taken for the same, in another place"
    (tmp_path / "moved_b.jsonl").write_text("other rows")
    news = data_news(tmp_path, mixed(place="moved_"))
    assert news.startswith("data.mix.1.path: ") and "moved_b.jsonl has changed since the run began" in news
    assert changed_keys(tmp_path, mixed(weight=2.0)) == [
        ("data.mix.0.weight", 1.0, 2.0),
        ("data.mix.1.weight", 1.0, 2.0),
    ]
    assert ("data.mix", "2 of them", "1 of them") in changed_keys(tmp_path, mixed(names=("a",)))
