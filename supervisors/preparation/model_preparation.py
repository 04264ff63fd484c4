"""Prepares the policy's files before any process needs them: a given path, fetched from a hub, or made on the spot.

    source: tiny ─────────▶ the user's cache, else tiny_model, a process ─▶ RUN_DIR/model        (or model.path)
    path is a directory ──▶ itself
    path is a hub name ───▶ model_fetch ──▶ Hugging Face cache; its commit ──▶ RUN_DIR/model.json
    quantization: nf4 ────▶ rounded_model, a process, makes a copy of any of these ──▶ RUN_DIR/model_nf4

Work that takes long runs in its own process.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path

from configs.hub_names import is_hub_name
from configs.run_files import LOGS, MODEL_RECORD, ROUNDED_MODEL
from configs.schema import JobConfig
from supervisors.machine.processes.helper_process import run_helper
from supervisors.preparation.model_cache import ModelCache, cache_key
from supervisors.preparation.model_fetch import HubModel, fetch_model
from supervisors.preparation.phase import Phase, Say, Show, to_nobody
from supervisors.tree.errors import ModelNotMade


async def prepare_model(job: JobConfig, run_dir: Path, say: Say = to_nobody, show: Show = to_nobody) -> Path:
    """Fetch or make the job's model on disk; returns its directory.

    Raises:
        ModelNotMade: the maker of the tiny model, or of a rounded copy, failed; the message holds the last lines of its
            log.
        ModelNotFetched: a hub name led to no model; the message names ``model.path``, what was tried and what to do.
    """
    model = await _whole_model(job, run_dir, say, show)
    adapter = job.model.adapter
    return model if adapter is None or adapter.quantization == "none" else await _rounded(model, job, run_dir, say)


async def _whole_model(job: JobConfig, run_dir: Path, say: Say, show: Show) -> Path:
    if job.model.source == "tiny":
        return await _make_tiny(job, run_dir, say, show)
    path = Path(str(job.model.path)).expanduser()
    if path.exists() or not is_hub_name(str(job.model.path)):
        return path  # the job file's checks have examined it, and the processes that read it report the rest
    wanted = HubModel("model.path", str(job.model.path), "model.revision", job.model.revision)
    return await fetch_model(wanted, run_dir / MODEL_RECORD, run_dir / LOGS / "model.log", job.limits, say, show)


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
    partial.rename(directory)  # a directory of that name is complete
    return directory


async def _rounded(model: Path, job: JobConfig, run_dir: Path, say: Say) -> Path:
    """A copy of ``model`` whose linear layers have numbers that 4 bits hold, made once in a run."""
    directory = run_dir.resolve() / ROUNDED_MODEL
    if directory.exists():
        return directory
    partial, log, limits = directory.with_name(f"{ROUNDED_MODEL}.partial"), run_dir / LOGS / "model.log", job.limits
    shutil.rmtree(partial, ignore_errors=True)
    say(f"rounding the model's linear layers to nf4: {directory}")
    words = [str(model), job.model.dtype, str(partial)]
    timeout_s = limits.model_preparation_timeout_s
    try:
        end = await run_helper("supervisors.preparation.rounded_model", log, limits, timeout_s, words=words)
    except TimeoutError as error:
        raise ModelNotMade(f"model.adapter.quantization: no copy of {model} was made within {timeout_s:g} s") from error
    if end.exit.code != 0:
        raise ModelNotMade(f"model.adapter.quantization: no copy of {model} in nf4 could be made {end}")
    partial.rename(directory)
    return directory


async def in_time(wait_s: float, use_cache: Callable[[], bool]) -> bool:
    """The result of ``use_cache``; False after ``wait_s``, as when the home directory hangs: the run needs no cache."""
    try:
        async with asyncio.timeout(wait_s):
            return await asyncio.to_thread(use_cache)
    except TimeoutError:
        return False


async def _run_maker(job: JobConfig, run_dir: Path, directory: Path, show: Show) -> None:
    order, report, log = run_dir / "model_order.json", run_dir / "model_making.json", run_dir / LOGS / "model.log"
    order.write_text(job.model_dump_json())
    report.unlink(missing_ok=True)
    words = [str(order), str(directory), str(report)]
    limits = job.limits

    def look() -> None:
        if report.exists() and (done := int(json.loads(report.read_text("utf-8"))["done"])):
            show(Phase("making the model", done, job.model.warm_start_steps, "steps"))

    try:
        end = await run_helper(
            "supervisors.preparation.tiny_model", log, limits, limits.model_preparation_timeout_s,
            words=words, look=look, every_s=limits.model_making_look_s,
        )  # fmt: skip
    except TimeoutError as error:
        raise ModelNotMade(f"the tiny model was not made within {limits.model_preparation_timeout_s:g} s") from error
    if end.exit.code != 0:
        raise ModelNotMade(f"the tiny model could not be made {end}")
    report.unlink(missing_ok=True)
