"""``headrace head``: what keeps it from beginning."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from configs.run_files import RUN_LOCK
from supervisors import trees
from supervisors.cli.app import app
from supervisors.machine.run_directory import RunLock


def test_a_second_head_in_the_same_directory_is_refused_before_it_touches_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = list[Path]()

    async def run_head(directory: Path, jobs: object, **_: object) -> None:
        assert jobs is None, "it serves"
        served.append(directory)

    monkeypatch.setattr(trees, "run_head", run_head)
    with RunLock.take(tmp_path):
        result = CliRunner().invoke(app, ["head", "--dir", str(tmp_path)])
        assert result.exit_code == 2 and served == []
        assert f"{tmp_path} is in use by process" in result.stderr and "choose another directory" in result.stderr
        assert [path.name for path in tmp_path.iterdir()] == [RUN_LOCK]
    assert CliRunner().invoke(app, ["head", "--dir", str(tmp_path)]).exit_code == 0
    assert served == [tmp_path]
