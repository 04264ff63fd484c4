"""The policy's files, before any process needs them: where the job says, fetched from a hub, or made on the spot.

    source: tiny ─────────▶ the user's cache, else supervisors.jobs.tiny_model ─▶ RUN_DIR/model        (or model.path)
    path is a directory ──▶ itself
    path is a hub name ───▶ supervisors.jobs.model_fetch ──▶ Hugging Face cache; its commit ──▶ RUN_DIR/model.json

Whatever takes long is a process of its own.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from configs.hub_names import is_hub_name
from configs.schema import JobConfig
from supervisors.jobs.child_wait import child_ended
from supervisors.jobs.model_cache import ModelCache, cache_key
from supervisors.jobs.model_fetch import HubModel, fetch_model
from supervisors.jobs.phase import Phase, Say, Show, to_nobody
from supervisors.machine.process import Launch, launch
from supervisors.machine.process_log import last_lines
from supervisors.tree.errors import ModelNotMade

RECORD: Final = "model.json"
"""File of the run directory that says which commit of which hub name the run uses."""


async def prepare_model(job: JobConfig, run_dir: Path, say: Say = to_nobody, show: Show = to_nobody) -> Path:
    """Have the job's model on disk; returns its directory.

    Raises:
        ModelNotMade: the maker of the tiny model failed; the message holds the last lines of its log.
        ModelNotFetched: a hub name led to no model; the message names ``model.path``, what was tried and what to do.
    """
    if job.model.source == "tiny":
        return await _make_tiny(job, run_dir, say, show)
    path = Path(str(job.model.path)).expanduser()
    if path.exists() or not is_hub_name(str(job.model.path)):
        return path  # the job file's check has looked at it, and whoever reads it says what is wrong with it
    wanted = HubModel("model.path", str(job.model.path), "model.revision", job.model.revision)
    return await fetch_model(wanted, run_dir / RECORD, run_dir / "logs" / "model.log", job.limits, say, show)


async def _make_tiny(job: JobConfig, run_dir: Path, say: Say, show: Show) -> Path:
    directory = Path(job.model.path) if job.model.path is not None else run_dir.resolve() / "model"
    if (directory / "config.json").exists():
        return directory
    partial = directory.with_name(directory.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    cache, wait_s = ModelCache.of_user(), job.limits.model_cache_s
    if await in_time(wait_s, lambda: cache.take(cache_key(job), partial)):
        say("the model is one that was made before, from the cache")
    else:
        shutil.rmtree(partial, ignore_errors=True)
        await _run_maker(job, run_dir, partial, show)
        await in_time(wait_s, lambda: cache.keep(cache_key(job), partial))
    partial.rename(directory)  # a directory of that name is whole
    return directory


async def in_time(wait_s: float, use_cache: Callable[[], bool]) -> bool:
    """What ``use_cache`` returns; False if a home that hangs does not answer: the run goes on without it."""
    try:
        async with asyncio.timeout(wait_s):
            return await asyncio.to_thread(use_cache)
    except TimeoutError:
        return False


async def _run_maker(job: JobConfig, run_dir: Path, directory: Path, show: Show) -> None:
    order, report, log = run_dir / "model_order.json", run_dir / "model_making.json", run_dir / "logs" / "model.log"
    order.write_text(job.model_dump_json())
    report.unlink(missing_ok=True)
    words = [str(order), str(directory), str(report)]
    maker = launch(Launch([sys.executable, "-P", "-m", "supervisors.jobs.tiny_model", *words], log))
    limits = job.limits

    def look() -> None:
        if report.exists() and (done := int(json.loads(report.read_text("utf-8"))["done"])):
            show(Phase("making the model", done, job.model.warm_start_steps, "steps"))

    try:
        end = await child_ended(maker, limits.model_preparation_timeout_s, look, limits.model_making_look_s)
    except TimeoutError as error:
        raise ModelNotMade(f"the tiny model was not made within {limits.model_preparation_timeout_s:g} s") from error
    if end.code != 0:
        tail = "\n".join(last_lines(log, limits.exit_log_lines))
        raise ModelNotMade(f"the tiny model could not be made ({end}); last lines of {log}:\n{tail}")
    report.unlink(missing_ok=True)
