"""``headrace check``: everything that ``headrace run`` checks before it starts, and what it would then run.

JOB.yaml ─▶ load_job, fault plan ─▶ a few lines, or JSON ─▶ exit code 0, or 2 with what to mend

``headrace schema``: the job file as JSON Schema, so that an editor completes, explains and checks its keys.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from actors.core.strict_json import strict_json
from actors.core.terminal_text import harmless
from configs.errors import ConfigError
from configs.hub_names import is_hub_data
from configs.local_paths import RUN_ROOT
from supervisors.cli.command import EXIT_BAD_CONFIG, Json, devices_of_this_machine, fail
from supervisors.cli.running.run import Overrides, load_faults
from supervisors.cli.running.services_file import ServicesFile, check_served, services_of

if TYPE_CHECKING:
    from configs.schema import JobConfig
    from configs.services import ServiceConfig


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
    from actors.rollout.engines.server.abilities import described
    from configs.loader import load_job

    try:
        loaded = load_job(job, set_ or [])
        shared = services_of(services, None)
        if shared is not None:  # without the file, the job is checked against it at its start
            check_served(loaded, shared)
        plan = load_faults(faults, [loaded])
    except ConfigError as error:
        fail(str(error), EXIT_BAD_CONFIG)
    found = devices_of_this_machine(None, loaded)
    if json_:
        print(strict_json(loaded.model_dump(mode="json")), flush=True)
        return
    for name, text in (what_would_run(loaded) | {"devices": _devices(loaded, len(found.ids))}).items():
        print(f"{name:11} {text}")
    for url in loaded.rollout.servers:
        said, usable = asyncio.run(described(url, loaded.limits.server_answer_s))
        if not usable:
            fail(f"rollout.servers: {url}: {harmless(said)}", EXIT_BAD_CONFIG)
        print(f"{'server':11} {url}: {harmless(said)}")
    if shared is not None:
        print(f"{'services':11} {', '.join(service_line(service) for service in shared.services)}, {shared.placement}")
    if plan is not None:
        print(f"{'faults':11} {len(plan.faults)} of {faults}")
    print("Nothing wrong was found. What needs the model, the tokenizer or your code is checked when the run starts.")


def what_would_run(job: JobConfig) -> dict[str, str]:
    """A line for each part of the job."""
    algorithm, rollout, trainer = job.algorithm, job.rollout, job.trainer
    schedule = trainer.lr_schedule + (f" after {trainer.warmup_steps} steps" if trainer.warmup_steps else "")
    kl = f", KL term {algorithm.kl_coefficient:g}" if algorithm.kl_coefficient else ""
    prompts, group = algorithm.prompts_per_step, algorithm.group_size
    where = f", {job.cluster.nodes} nodes are waited for" if job.cluster.nodes else ""
    lines = {
        "job": f"{job.name}: {job.steps} steps, seed {job.seed}",
        "model": _model(job),
        "adapter": _adapter(job),
        "data": _data(job),
        "environment": _environment(job),
        "reward": _reward(job),
        "learning": f"{algorithm.name}, {prompts} prompts x {group} samples = {prompts * group} a step{kl}",
        "rollout": f"{_workers(job)}, at most {rollout.max_tokens} tokens a sample{where}",
        "trainer": f"{trainer.backend}, learning rate {trainer.lr:g}, {schedule}",
        "ranks": _ranks(job),
        "service": _service(job),
        "sync": job.sync.mode + (f", at most {job.staleness} versions behind" if job.staleness else ""),
        "critic": _critic(job),
        "evaluation": _evaluation(job),
        "machines": _machines(job),
        "saved": f"every {job.checkpoint.every} steps" if job.checkpoint.every else "at the end",
        "directory": f"{RUN_ROOT / job.name}, or the next number if that is there",
    }
    if job.metrics.wandb_project:
        owner = f"{job.metrics.wandb_entity}/" if job.metrics.wandb_entity else ""
        lines["W&B"] = f"{owner}{job.metrics.wandb_project}, run {job.metrics.wandb_name or job.name}"
    return {name: text for name, text in lines.items() if text}


def _workers(job: JobConfig) -> str:
    rollout, servers = job.rollout, job.rollout.servers
    own = f"{rollout.workers - len(servers)} {rollout.engine} workers"
    return f"{len(servers)} workers at {', '.join(servers)}, and {own}" if servers else own


def _model(job: JobConfig) -> str:
    model = job.model
    if model.source == "hf":
        return f"{model.path}{f' at {model.revision}' if model.revision else ''}, {model.dtype}"
    shown = "examples of the environment" if job.has_episodes else "the data's own answers"
    warmed = f"shown {shown} for {model.warm_start_steps} steps" if model.warm_start_steps else "untrained"
    return f"made on the spot: {model.layers} layers of width {model.hidden}, {warmed}, {model.dtype}"


def _adapter(job: JobConfig) -> str:
    adapter = job.model.adapter
    if adapter is None:
        return ""
    targets = adapter.targets if isinstance(adapter.targets, str) else ", ".join(adapter.targets)
    kept = "stays as it is" if adapter.quantization == "none" else f"is rounded to {adapter.quantization}, and stays so"
    return f"rank {adapter.rank}, alpha {adapter.alpha:g}, on {targets}; the model itself {kept}"


def _environment(job: JobConfig) -> str:
    environment = job.environment
    if not job.has_episodes:
        return ""
    named = (
        environment.path or environment.url or ("agents outside" if environment.kind == "external" else "ready-made")
    )
    tools = f" with tools {', '.join(environment.tools)}" if environment.tools else ""
    budgets = f"{environment.turns_max} turns, {job.episode_tokens} tokens, {environment.episode_s:g} s an episode"
    at_once = f", {environment.workers} x {environment.slots} at once" if environment.kind != "external" else ""
    return f"{environment.kind} {named}{tools}, at most {budgets}{at_once}"


def _ranks(job: JobConfig) -> str:
    from supervisors.jobs.rank_traffic import traffic_words

    trainer, machines = job.trainer, job.trainer_machines
    if trainer.ranks == 1:
        return ""
    copies = f", {trainer.replicas} copies" if trainer.replicas > 1 else ""
    where = f" on {machines} machines, {job.ranks_here} on the head's" if machines > 1 else " on this machine"
    if trainer.context_ranks > 1:
        copies += f", {trainer.context_ranks} of them share each row"
    return f"{trainer.ranks}{where}{copies}{f': {words}' if (words := traffic_words(job)) else ''}"


def _service(job: JobConfig) -> str:
    trainer = job.trainer
    if trainer.service is None:
        return ""
    return f"{trainer.service}, priority {trainer.priority}, share {trainer.share:g}, {trainer.project}"


def _critic(job: JobConfig) -> str:
    if not job.algorithm.has_critic:
        return ""
    critic = job.critic
    begins = f"the model of reward {critic.reward}" if critic.reward else critic.path or "the policy with a new head"
    alone = f", trained alone for {critic.warmup_steps} steps" if critic.warmup_steps else ""
    return f"{begins}, learning rate {critic.lr:g}{alone}"


def _evaluation(job: JobConfig) -> str:
    if job.eval is None:
        return ""
    few = f"{job.eval.prompts} prompts" if job.eval.prompts else "all prompts"
    often = "before and after" if job.eval.only else f"first, every {job.eval.every} steps, and last"
    return f"{often}: {few} x {job.eval.samples} samples of {_data(job.evaluation)}"


def _machines(job: JobConfig) -> str:
    provider = job.provider
    if provider.kind == "none":
        return ""
    most = f", at most {provider.nodes_max}" if provider.nodes_max else ""
    whose = f" on {provider.machines} machines" if provider.kind == "functions" else ""
    trace = f", as {provider.trace} says" if provider.trace else ""
    return f"from provider {provider.kind}{whose}{most}, {provider.slots} workers each{trace}"


def _devices(job: JobConfig, here: int) -> str:
    """Who wants a device, and how many there are."""
    from supervisors.jobs.device_needs import devices_wanted

    wants = {role: devices_wanted(job, role) for role in ("trainer", "rollout")}
    takers = [role for role, count in wants.items() if count]
    if not takers or not here:
        return "none are here: all compute on the cores" if takers else "none are used"
    return f"{here} here, one for each process of {' and '.join(takers)}"


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
    if job.has_episodes:
        return "from the environment"
    return f"{job.reward.kind} {job.reward.function or job.reward.path or ''}".rstrip()


def service_line(service: ServiceConfig) -> str:
    """One training service as a short phrase."""
    threads = f"{service.threads} threads" if service.threads else "all cores"
    return f"{service.name}: {service.backend} on {service.device}, {threads}, at most {service.jobs_max} jobs"


def schema() -> None:
    """Print the JSON Schema of the job file: headrace schema > job.schema.json."""
    print(strict_json(job_schema(), indent=1), flush=True)


def job_schema() -> dict[str, Any]:
    """JSON Schema of a job file: all keys, with types, ranges, choices, defaults and meanings."""
    from configs.schema import JobConfig

    found = JobConfig.model_json_schema()
    section, parts = found["properties"]["reward"], found["$defs"]["RewardConfig"]["properties"]["parts"]
    found["properties"]["reward"] = {"anyOf": [section, {"type": "array", "items": parts["items"]}]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **found, "title": "Headrace job file"}
