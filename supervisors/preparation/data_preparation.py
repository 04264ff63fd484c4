"""Prepares the job's data before any process needs them: hub data sets are fetched once, into the run directory.

    data.path is a hub name ──▶ dataset_download, a process ──▶ RUN_DIR/dataset; of a mix: RUN_DIR/dataset-NAME
    eval.data.path, likewise ─▶ the same ──▶ RUN_DIR/eval.dataset
    anything else ────────────▶ itself

Role processes get the job with the path of the copy, so they need no hub. A resumed run, and a restarted head, find the
copy and do not contact the hub either.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from pathlib import Path

from configs.checks.data_checks import check_data, check_evaluation
from configs.hub_names import is_hub_data
from configs.run_files import LOGS
from configs.schema import JobConfig
from configs.task_schema import DataConfig
from supervisors.machine.processes.helper_process import run_helper
from supervisors.preparation.dataset_download import DataOrder
from supervisors.preparation.hub_download import read_report
from supervisors.preparation.phase import Say
from supervisors.tree.errors import DataNotFetched


async def prepare_data(job: JobConfig, run_dir: Path, say: Say) -> JobConfig:
    """Fetch every data source of the job to disk; returns the job with the paths of the copies.

    Raises:
        DataNotFetched: a hub name led to no data, or to other columns; the message names the field and what to do.
    """
    prepared = job.model_copy(update={"data": await _prepared(job, job.data, "", run_dir, say)})
    if job.eval is not None:
        held_out = await _prepared(job, job.eval.data, "eval.", run_dir, say)
        prepared = prepared.model_copy(update={"eval": job.eval.model_copy(update={"data": held_out})})
    if prepared != job:  # now check what the check of the job file could not see
        try:
            async with asyncio.timeout(job.limits.data_download_timeout_s):
                found = await asyncio.to_thread(check_data, prepared)
                found += await asyncio.to_thread(check_evaluation, prepared)
        except TimeoutError as error:
            raise DataNotFetched(
                "data: the first rows could not be read within limits.data_download_timeout_s"
            ) from error
        for field, wrong, fix in found:
            raise DataNotFetched(f"{field}: {wrong}. {fix}")
    return prepared


async def _prepared(job: JobConfig, data: DataConfig, section: str, run_dir: Path, say: Say) -> DataConfig:
    """``data`` with the paths of the copies. ``section``: prefix of its keys and of the directories' names."""
    sources = data.sources
    for name, source in sources.items():
        if is_hub_data(source.path, source.source):
            directory = run_dir.resolve() / (f"{section}dataset-{name}" if name else f"{section}dataset")
            if not (directory / "state.json").is_file():
                await _fetch(job, section + data.key_of(name), source, directory, run_dir, say)
            update = {"path": str(directory), "config": None, "split": None, "revision": None}
            sources[name] = source.model_copy(update=update)
    return data.with_sources(sources)


async def _fetch(job: JobConfig, key: str, source: DataConfig, directory: Path, run_dir: Path, say: Say) -> None:
    name, report_file, log = str(source.path), run_dir / "data_download.json", run_dir / LOGS / "data.log"
    report_file.unlink(missing_ok=True)
    say(f"looking for the data set {name}")
    order = DataOrder(
        name=name, key=key, config=source.config, split=source.split, revision=source.revision,
        directory=str(directory), report=str(report_file),
    )  # fmt: skip
    stdin, limit_s = json.dumps(asdict(order)).encode(), job.limits.data_download_timeout_s
    try:
        end = await run_helper("supervisors.preparation.dataset_download", log, job.limits, limit_s, stdin=stdin)
    except TimeoutError as error:
        wrong = f"{key}.path: {name!r} was not fetched within limits.data_download_timeout_s ({limit_s:g} s)"
        raise DataNotFetched(f"{wrong}. Raise it and start again: what the cache has is kept") from error
    report = read_report(report_file)
    if report is None:
        wrong = (
            f"{key}.path: {name!r} could not be fetched: the process that fetches it ended without a word ({end.exit})"
        )
        raise DataNotFetched(f"{wrong}. The last lines of {log}:\n{end.tail}")
    report_file.unlink()
    if report.stage == "failed":
        raise DataNotFetched(f"{report.field}: {report.wrong}. {report.fix}")
    if report.note:
        say(report.note)
    say(f"the data set is {name}: {report.bytes_total} rows, kept in {directory}")
