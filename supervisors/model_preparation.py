"""The policy's files, before any process needs them: where the job says, or made on the spot by its own process."""

from __future__ import annotations

import asyncio
import shutil
import sys
from pathlib import Path

from configs.schema import JobConfig
from supervisors.errors import ModelNotMade
from supervisors.process import ChildProcess, Launch, launch
from supervisors.process_log import last_lines


def model_directory(job: JobConfig, run_dir: Path) -> Path:
    """Where the policy's files are, or will be once they are made."""
    if job.model.path is not None:
        return Path(job.model.path)
    return run_dir.resolve() / "model"


async def prepare_model(job: JobConfig, run_dir: Path) -> Path:
    """Make the tiny model if the job wants one and it is not there yet; returns the model's directory.

    Raises:
        ModelNotMade: the maker failed; the message holds the last lines of its log.
    """
    directory = model_directory(job, run_dir)
    if job.model.source != "tiny" or (directory / "config.json").exists():
        return directory
    partial = directory.with_name(directory.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    order = run_dir / "model_order.json"
    order.write_text(job.model_dump_json())
    log = run_dir / "logs" / "model.log"
    command = [sys.executable, "-m", "actors.rewards.tiny_model", str(order), str(partial)]
    maker = launch(Launch(command, log))
    await _wait(maker, job, log)
    partial.rename(directory)  # a directory of that name is whole
    return directory


async def _wait(maker: ChildProcess, job: JobConfig, log: Path) -> None:
    try:
        end = await maker.wait(job.limits.model_preparation_timeout_s)
    except TimeoutError as error:
        raise ModelNotMade(
            f"the tiny model was not made within {job.limits.model_preparation_timeout_s:g} s"
        ) from error
    except asyncio.CancelledError:
        maker.kill()
        raise
    finally:
        maker.kill()
    if end.code != 0:
        tail = "\n".join(last_lines(log, job.limits.exit_log_lines))
        raise ModelNotMade(f"the tiny model could not be made ({end}); last lines of {log}:\n{tail}")
