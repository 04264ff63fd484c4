"""What a schema cannot see: fields that contradict each other, and things that this machine lacks.

``check_job`` returns every problem as (field, what is wrong, what to do) and raises nothing. Nothing heavy is imported:
packages are looked up, not loaded; data files are sampled; a reward function is found in its source, not run.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path

from configs.checks.adapter_checks import check_adapter
from configs.checks.compile_checks import check_compile
from configs.checks.critic_checks import check_critic
from configs.checks.data_checks import check_data, check_evaluation
from configs.checks.environment_checks import check_environment, check_episodes, check_gateway
from configs.checks.expert_checks import check_experts
from configs.checks.learning_checks import check_learning
from configs.checks.model_checks import check_model, check_optimizer, check_ranker_model
from configs.checks.provider_checks import check_provider
from configs.checks.rank_checks import check_rank_places, check_sharding, check_tensor_parallel
from configs.checks.reward_checks import check_reward
from configs.checks.scheduling_checks import check_scheduling
from configs.checks.server_checks import check_servers
from configs.errors import Found
from configs.hub_names import is_hub_data
from configs.schema import JobConfig
from configs.task_schema import DataConfig

OWN_TEMPLATE_ARGUMENTS = (
    *("conversation", "tokenize", "tokenizer_kwargs", "add_generation_prompt", "continue_final_message"),
    *("padding", "truncation", "max_length", "return_dict", "return_tensors", "return_assistant_tokens_mask"),
)
"""Arguments of ``apply_chat_template`` that the product itself sets, or that would change more than the text."""


def check_job(job: JobConfig) -> list[Found]:
    """Every problem that would stop ``job`` on this machine, the cheapest to find first."""
    checks: list[Callable[[JobConfig], list[Found]]] = [
        _check_consistency,
        _check_text_forms,
        check_learning,
        check_critic,
        check_adapter,
        check_optimizer,
        check_experts,
        check_sharding,
        check_rank_places,
        check_environment,
        check_episodes,
        _check_cluster,
        check_scheduling,
        check_reward,
        check_gateway,
        _check_packages,
        _check_workers,
        _check_device,
        check_data,
        check_evaluation,
        check_model,
        check_ranker_model,
        check_tensor_parallel,
        check_servers,
    ]
    return [problem for check in checks for problem in check(job)]


def _check_consistency(job: JobConfig) -> list[Found]:
    found: list[Found] = []
    longest = job.sequence_tokens
    if job.trainer.micro_batch_tokens != "auto" and job.trainer.micro_batch_tokens < longest:
        parts = ("data.max_prompt_tokens + rollout.max_tokens", "one of the two")
        sample, lower = ("environment.episode_tokens",) * 2 if job.has_episodes else parts
        wrong = f"cannot hold one sample of {sample} = {longest}"
        fix = f"Set it to at least {longest}, or lower {lower}"
        found.append(("trainer.micro_batch_tokens", f"{job.trainer.micro_batch_tokens} {wrong}", fix))
    if job.rollout.temperature == 0:
        fix = "Set it above 0; 1.0 is usual"
        found.append(
            ("rollout.temperature", "0 makes all samples of a group equal, so nothing can be learnt from them", fix)
        )
    if job.sync.mode == "async" and job.sync.max_staleness == 0:
        fix = "Set max_staleness to 1 or more, or mode to sync"
        found.append(("sync.max_staleness", "0 with mode: async is what mode: sync does", fix))
    mode = job.sync.mode
    if job.trainer.window_prompts and mode in ("sync", "dynamic", "one_step_barrier"):
        fix = "Set sync.mode to minibatch or async, or remove it"
        found.append(("trainer.window_prompts", f"is set, but sync.mode: {mode} has no windows of prompts", fix))
    if job.trainer.saturation_tokens and mode != "dynamic":
        fix = "Remove it, or set sync.mode to dynamic"
        found.append(("trainer.saturation_tokens", f"is set, but sync.mode is {mode}", fix))
    if job.limits.bulk_chunk_bytes > job.limits.message_max_bytes:
        wrong = f"{job.limits.bulk_chunk_bytes} is more than limits.message_max_bytes ({job.limits.message_max_bytes})"
        found.append(("limits.bulk_chunk_bytes", wrong, "Lower it; 1 to 4 MiB is best"))
    if job.trainer.lr_schedule != "constant" and job.trainer.warmup_steps >= job.steps:
        wrong = (
            f"{job.trainer.warmup_steps} leaves none of the {job.steps} steps to lr_schedule: {job.trainer.lr_schedule}"
        )
        found.append(("trainer.warmup_steps", wrong, "Lower it, or set trainer.lr_schedule to constant"))
    if job.metrics.wandb_project is None:
        for key in ("wandb_entity", "wandb_name", "wandb_tags"):
            if getattr(job.metrics, key):
                fix = "Set metrics.wandb_project, or remove it"
                found.append((f"metrics.{key}", "is set, but metrics.wandb_project is not", fix))
    return [*found, *_check_mailbox(job)]


def _check_mailbox(job: JobConfig) -> list[Found]:
    """Check that the scheduler's mailbox has room for all reports; tokens of a refused one are generated again."""
    workers = max(job.rollout.workers, job.scheduling.workers_max or 0)
    workers += (job.provider.nodes_max or 0) * job.provider.slots
    most = workers * job.limits.reports_under_way
    if most < job.limits.mailbox_messages:
        return []
    wrong = f"{job.limits.mailbox_messages} is not above limits.reports_under_way x {workers} workers ({most})"
    return [("limits.mailbox_messages", f"{wrong}: the scheduler would refuse tokens", f"Set it to {2 * most}")]


def _check_text_forms(job: JobConfig) -> list[Found]:
    found: list[Found] = []
    if taken := [name for name in OWN_TEMPLATE_ARGUMENTS if name in job.data.chat_template_kwargs]:
        wrong = f"{', '.join(taken)} is not yours to set: prompts are rendered so that the model answers"
        found.append(("data.chat_template_kwargs", wrong, "Remove it"))
    return found


def _check_cluster(job: JobConfig) -> list[Found]:
    place, nodes = job.cluster.place_rollout, job.cluster.nodes
    if place == "remote" and nodes == 0:
        fix = "Set cluster.nodes to how many will join, or place_rollout to spread"
        return [("cluster.place_rollout", "remote, but cluster.nodes is 0: no worker could be placed", fix)]
    if place == "local" and nodes > 0 and job.trainer_machines == 1:
        return [
            (
                "cluster.place_rollout",
                f"local, but cluster.nodes waits for {nodes}",
                "Set it to spread, or cluster.nodes to 0",
            )
        ]
    if job.cluster.prices and "reserved" not in job.cluster.prices:
        fix = "Add reserved: what the head's machine costs an hour, 0 if nothing"
        return [("cluster.prices", f"has {', '.join(sorted(job.cluster.prices))}, and no reserved", fix)]
    return check_provider(job)


def _check_packages(job: JobConfig) -> list[Found]:
    held_out = job.evaluation.data
    needs = [
        ("rollout.engine", job.rollout.engine == "vllm", "vllm", "Run make vllm, or set rollout.engine to torch"),
        *(
            (f"{where}.kind", reward.kind == "math_verify", "math_verify", "Run pip install math-verify")
            for where, reward in job.reward.each
        ),
        *(need for name, data in job.data.sources.items() for need in _needs_of(job.data.key_of(name), data)),
        *(need for data in held_out.sources.values() for need in _needs_of("eval.data", data)),
        (
            "trainer.optimizer",
            job.trainer.optimizer == "adamw8bit",
            "bitsandbytes",
            "Run pip install 'headrace[optimizers]', or leave it out",
        ),
        (
            "model.adapter.quantization",
            job.model.adapter is not None and job.model.adapter.quantization == "nf4",
            "bitsandbytes",
            "Run pip install 'headrace[nf4]', or leave it out",
        ),
        (
            "metrics.wandb_project",
            bool(job.metrics.wandb_project),
            "wandb",
            "Run pip install 'headrace[wandb]', or unset it",
        ),
        (
            "metrics.tensorboard",
            job.metrics.tensorboard,
            "tensorboardX",
            "Run pip install tensorboardX, or set it to false",
        ),
    ]
    return [
        (field, f"needs the package {package}, which is not installed here", fix)
        for field, needed, package, fix in needs
        if needed and not installed(package)
    ]


def _needs_of(key: str, data: DataConfig) -> list[tuple[str, bool, str, str]]:
    gym, path = data.source == "reasoning_gym", Path(data.path or "")
    table = path.is_dir() or path.suffix.lower() == ".parquet" or is_hub_data(data.path, data.source)
    return [
        (f"{key}.source", gym, "reasoning_gym", "Run pip install reasoning-gym"),
        (f"{key}.path", not gym and table, "datasets", "Run pip install datasets"),
    ]


def installed(package: str) -> bool:
    """Whether a top-level package can be imported, without importing it."""
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False


def cores_here() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def has_gpu() -> bool:
    """Whether this machine has an NVIDIA driver."""
    return Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists()


def _check_workers(job: JobConfig) -> list[Found]:
    """Refuse more workers than the cores bear: each is a process with a model of its own.

    Simulated workers have no model, and the cores of other machines are not known yet.
    """
    most = job.limits.workers_per_core * cores_here()
    own = job.rollout.workers - len(job.rollout.servers)
    if job.rollout.engine == "simulated" or job.cluster.nodes or own <= most:
        return []
    wrong = f"{own} processes on {cores_here()} cores, each with a model of its own"
    return [("rollout.workers", wrong, f"Set it to at most {most} (limits.workers_per_core), {cores_here()} is usual")]


def _check_recompute(job: JobConfig, *, on_cpu: bool) -> list[Found]:
    trainer, key = job.trainer, "trainer.recompute"
    if trainer.backend == "simulated":
        return []
    if trainer.recompute == "offload" and on_cpu:
        wrong = "offload, which moves activations off a device, and the trainer's is a CPU, whose memory they take"
        return [(key, wrong, "Set it to whole or selective")]
    if trainer.recompute == "offload" and trainer.micro_batch_tokens == "auto":
        wrong = (
            "offload, but trainer.micro_batch_tokens is auto, which does not measure what it takes of the host's memory"
        )
        return [(key, wrong, "Set trainer.micro_batch_tokens to a number, or recompute to auto")]
    if trainer.recompute == "auto" and (trainer.micro_batch_tokens != "auto" or trainer.service is not None):
        wrong = "auto, but nothing is measured at the start: trainer.micro_batch_tokens is a number"
        if trainer.service is not None:
            wrong = "auto, but a training service measures nothing: what is free there changes with other jobs"
        return [(key, wrong, "Set trainer.micro_batch_tokens to auto as well, or recompute to whole or selective")]
    if trainer.recompute in ("selective", "auto") and trainer.attention == "flex":
        wrong = f"{trainer.recompute}, which keeps attention by torch's SDPA, and trainer.attention is flex"
        return [(key, wrong, "Set it to whole, or trainer.attention to blocks")]
    return []


def _check_device(job: JobConfig) -> list[Found]:
    found: list[Found] = []
    on_cpu = job.trainer.device == "cpu" or not has_gpu()
    if job.trainer.attention == "flex" and on_cpu and job.trainer.backend != "simulated":
        wrong = "flex, which has no backward pass on a CPU, and the trainer has no other device"
        found.append(("trainer.attention", wrong, "Set it to blocks"))
    found += _check_recompute(job, on_cpu=on_cpu)
    found += check_compile(job, on_cpu=on_cpu, has_triton=installed("triton"))
    if has_gpu():
        return found
    wrong, fix = "cuda, but this machine has no NVIDIA driver", "Set it to auto or cpu"
    if job.trainer.device == "cuda" and job.trainer.backend != "simulated":
        found.append(("trainer.device", wrong, fix))
    if job.rollout.device == "cuda" and job.rollout.engine != "simulated" and job.cluster.nodes == 0:
        found.append(("rollout.device", wrong, fix))
    return found
