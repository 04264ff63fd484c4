"""``headrace check``: everything that ``headrace run`` checks before it starts, and what it would then run.

JOB.yaml ─▶ load_job, fault plan ─▶ a few lines, or JSON ─▶ exit code 0, or 2 with what to mend
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from configs.errors import ConfigError
from configs.hub_names import is_hub_data
from configs.local_paths import RUN_ROOT
from configs.schema import JobConfig
from configs.services import ServiceConfig
from supervisors.cli.command import EXIT_BAD_CONFIG, Json, devices_of_this_machine, fail
from supervisors.cli.run import Overrides, load_faults
from supervisors.cli.services_file import ServicesFile, check_served, services_of


def check(
    job: Annotated[Path, typer.Argument(metavar="JOB.yaml", help="The job file, or the name of a preset.")],
    set_: Overrides = None,
    faults: Annotated[
        Path | None, typer.Option(metavar="PLAN.yaml", help="Check this fault plan for the job, too.")
    ] = None,
    services: ServicesFile = None,
    json_: Json = False,
) -> None:
    """Check a job file without running it, and say what would run; exit code 2 if something is wrong."""
    from configs.loader import load_job

    try:
        loaded = load_job(job, set_ or [])
        shared = services_of(services, None)
        if shared is not None:  # without the file, what it would say is checked when the job starts
            check_served(loaded, shared)
        plan = load_faults(faults, loaded)
    except ConfigError as error:
        fail(str(error), EXIT_BAD_CONFIG)
    devices_of_this_machine(None, loaded)
    if json_:
        print(json.dumps(loaded.model_dump(mode="json")), flush=True)
        return
    for name, text in what_would_run(loaded).items():
        print(f"{name:9} {text}")
    if shared is not None:
        print(f"{'services':9} {', '.join(service_line(service) for service in shared.services)}, {shared.placement}")
    if plan is not None:
        print(f"{'faults':9} {len(plan.faults)} of {faults}")
    print("Nothing wrong was found. What needs the model, the tokenizer or your code is checked when the run starts.")


def what_would_run(job: JobConfig) -> dict[str, str]:
    """A line for each part of the job."""
    algorithm, rollout, trainer = job.algorithm, job.rollout, job.trainer
    model = job.model.path if job.model.source == "hf" else f"made on the spot: {job.model.layers} layers"
    schedule = trainer.lr_schedule + (f" after {trainer.warmup_steps} steps" if trainer.warmup_steps else "")
    kl = f", KL term {algorithm.kl_coefficient:g}" if algorithm.kl_coefficient else ""
    prompts, group = algorithm.prompts_per_step, algorithm.group_size
    where = f", {job.cluster.nodes} nodes are waited for" if job.cluster.nodes else ""
    lines = {
        "job": f"{job.name}: {job.steps} steps, seed {job.seed}",
        "model": f"{model}, {job.model.dtype}",
        "data": _data(job),
        "reward": _reward(job),
        "learning": f"{algorithm.name}, {prompts} prompts x {group} samples = {prompts * group} a step{kl}",
        "rollout": f"{rollout.workers} {rollout.engine} workers, at most {rollout.max_tokens} tokens a sample{where}",
        "trainer": f"{trainer.backend}, learning rate {trainer.lr:g}, {schedule}",
        "service": f"{trainer.service}, priority {trainer.priority}, share {trainer.share:g}, {trainer.project}",
        "sync": job.sync.mode + (f", at most {job.staleness} versions behind" if job.staleness else ""),
        "critic": f"{job.critic.path or 'the policy with a new head'}, learning rate {job.critic.lr:g}",
        "saved": f"every {job.checkpoint.every} steps" if job.checkpoint.every else "at the end",
        "directory": f"{RUN_ROOT / job.name}, or the next number if that is there",
    }
    if trainer.service is None:
        del lines["service"]
    if algorithm.name != "ppo":
        del lines["critic"]
    if job.metrics.wandb_project:
        owner = f"{job.metrics.wandb_entity}/" if job.metrics.wandb_entity else ""
        lines["W&B"] = f"{owner}{job.metrics.wandb_project}, run {job.metrics.wandb_name or job.name}"
    return lines


def _data(job: JobConfig) -> str:
    weights = {source.name: source.weight for source in job.data.mix}
    told: list[str] = []
    for name, data in job.data.sources.items():
        what: Any = {"reasoning_gym": data.task}.get(data.source, data.path)
        share = f"{100 * weights[name] / sum(weights.values()):.3g} % {name}: " if name else ""
        where = " of the hub, which is asked when the run starts" if is_hub_data(data.path, data.source) else ""
        told.append(f"{share}{data.source} {what}{where}, column {data.prompt_key}")
    return "; ".join(told)


def _reward(job: JobConfig) -> str:
    if job.reward.parts:
        return " + ".join(f"{part.weight:g} x {part.called}" for part in job.reward.parts)
    return f"{job.reward.kind} {job.reward.function or job.reward.path or ''}".rstrip()


def service_line(service: ServiceConfig) -> str:
    """One training service in some words."""
    threads = f"{service.threads} threads" if service.threads else "all cores"
    return f"{service.name}: {service.backend} on {service.device}, {threads}, at most {service.jobs_max} jobs"
