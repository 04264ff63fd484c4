"""Slurm's jobs as text: what is asked for, what is said of one that is over; and commands with a deadline."""

from __future__ import annotations

import asyncio
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from supervisors.providers.provider import How
from supervisors.providers.slurm import judged
from supervisors.providers.slurm_commands import JobRow, Slurm, SlurmError, seconds
from supervisors.providers.slurm_script import MachineJob
from tests.smallest_job import smallest_job

MARK = "headrace-j-12345678"
JOB = MachineJob(smallest_job(), "tcp://head:7001?key=ab", MARK, Path("/logs"), Path("/keys"), 7.5, "life")


@pytest.mark.parametrize(
    ("state", "details", "how", "says"),
    [
        ("PREEMPTED", {}, "taken", "the job 7 was preempted on n1"),
        ("COMPLETED", {"PreemptTime": "2026-01-01T00:00:00"}, "taken", "was preempted"),
        ("TIMEOUT", {}, "taken", "reached its time limit"),
        ("NODE_FAIL", {}, "taken", "lost its node on n1"),
        ("COMPLETED", {"RunTime": "03:59:00", "TimeLimit": "04:00:00"}, "taken", "before its time limit of 04:00:00"),
        ("COMPLETED", {"RunTime": "00:01:00", "TimeLimit": "04:00:00", "ExitCode": "0:0"}, "failed", "exit code 0:0"),
        ("COMPLETED", {"RunTime": "00:01:00", "TimeLimit": "UNLIMITED"}, "failed", "COMPLETED"),
        ("FAILED", {"ExitCode": "127:0", "PreemptTime": "None"}, "failed", "is over: FAILED, exit code 127:0, on n1"),
        ("CANCELLED", {}, "failed", "the job 7 is over: CANCELLED"),
    ],
)  # fmt: skip
def test_what_the_cluster_took_is_told_from_what_failed(
    state: str, details: dict[str, str], how: How, says: str
) -> None:
    row = JobRow("7", state, "n1", "None", "a", MARK)
    found = judged(row, details, 67.5)
    assert found[0] == how
    assert says in found[1]


def test_a_job_is_one_step_of_one_node_and_what_users_add_cannot_change_that() -> None:
    slurm = {
        "partition": "spot", "account": "lab", "time_limit": "4:00:00", "sbatch": ["--gres=gpu:4 -C h100"],
        "environment": "module load cuda\nsource venv/bin/activate", "command": "apptainer exec img headrace",
    }  # fmt: skip
    job = smallest_job(provider={"kind": "slurm", "nodes_max": 2, "slots": 2, "notice_s": 60, "slurm": slurm})
    machine = replace(JOB, job=job)
    options = machine.options("j-1")
    for option in ("--partition=spot", "--account=lab", "--time=4:00:00", "--gres=gpu:4", "--exclusive", "h100"):
        assert option in options
    assert options[-6:] == ["--job-name=j-1", f"--comment={MARK} life", "--nodes=1", "--ntasks=1",
                            "--no-requeue", "--signal=TERM@8"]  # fmt: skip
    lines = machine.script("j-1", "spot").splitlines()
    assert lines[:3] == ["#!/bin/bash", "module load cuda", "source venv/bin/activate"]
    words = shlex.split(lines[3])
    assert words[:8] == ["exec", "srun", "--nodes=1", "--ntasks=1", "--cpu-bind=none", "apptainer", "exec", "img"]
    assert words[8:] == ["headrace", "node", "--join", "tcp://head:7001?key=ab", "--name", "j-1", "--kind", "spot",
                         "--slots", "2", "--notice", "60", "--keys", "/keys"]  # fmt: skip
    shared = smallest_job(provider={"slurm": {"exclusive": False, "keys": "/local/keys"}})
    assert "--exclusive" not in replace(JOB, job=shared).options("j-1")
    assert "/local/keys" in replace(JOB, job=shared).script("j-1", "spot")


def test_a_percent_sign_in_the_run_directory_is_no_pattern_of_slurms() -> None:
    assert "--output=/runs/50%%j/logs/j-1.log" in replace(JOB, logs=Path("/runs/50%j/logs")).options("j-1")


def test_times_are_read_as_slurm_writes_them() -> None:
    assert [seconds(text) for text in ("00:00:09", "04:00:00", "2-01:00:00")] == [9, 14400, 176400]
    assert seconds("UNLIMITED") == seconds("Partition_Limit") == float("inf")


def test_commands_have_a_deadline_and_say_in_their_own_words_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fakes on the PATH; a head that is a job itself does not hand its own variables on."""
    row, foreign = f"1|RUNNING|n1|None|a|{MARK} x|y", "$SLURM_JOB_ID$SQUEUE_PARTITION$CUDA_VISIBLE_DEVICES$SBATCH_WAIT"
    for name, line in {
        "sbatch": "echo 'sbatch: error: Invalid account' >&2; exit 1",
        "squeue": f'[ -z "{foreign}" ] && echo "{row}"; echo "2|RUNNING|n1|None|b|other"',
        "scancel": "exec sleep 100",
        "scontrol": "echo JobId=1 JobState=COMPLETED RunTime=00:00:09",
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    for name in ("SQUEUE_PARTITION", "CUDA_VISIBLE_DEVICES", "SBATCH_WAIT"):
        monkeypatch.setenv(name, "0")

    async def main() -> None:
        slurm = Slurm(2.0, 5)
        assert await slurm.jobs(MARK) == [JobRow("1", "RUNNING", "n1", "None", "a", f"{MARK} x|y")]
        assert (await slurm.details("1"))["RunTime"] == "00:00:09"
        with pytest.raises(SlurmError, match="sbatch: error: Invalid account"):
            await slurm.submit([], "#!/bin/sh\n")
        with pytest.raises(SlurmError, match=r"scancel has not answered within 0.3 s"):
            await Slurm(0.3, 5).cancel(["1"])
        monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
        with pytest.raises(SlurmError, match=r"sbatch cannot be run.*on its PATH"):
            await slurm.check([], "#!/bin/sh\n")

    asyncio.run(main())
