"""Drives vLLM's EngineCore in this process: its requests, steps, weights and memory.

    VllmEngine (event loop) ──▶ one thread ──▶ VllmCore ──▶ EngineCore ──▶ scheduler, model runner

Invariants
- All methods run on one thread; vLLM's forward context is process-global, so a process holds one live core.
- Log-probabilities are of the sampling distribution (``logprobs_mode="processed_logprobs"``; vLLM's default is raw).
- The noise of a token is a function of (seed, prompt, sibling, position) alone: the generator of each request is
  seeded anew for every position, so a moved or preempted sequence draws the same tokens that it would have drawn.
- The prefix cache is keyed by version through ``cache_salt``.
- No file outlives the core: the rendezvous file of torch.distributed lies in a directory that is removed at start.

Why EngineCore and not AsyncLLM: ``docs/decisions/0009-vllm-engine-core.md``.
"""

# pyright: reportMissingImports=false
# vLLM is an optional extra.

from __future__ import annotations

import contextlib
import dataclasses
import gc
import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from actors.protocol.work import SamplingParams
from actors.rollout.engine import EngineSpec, WeightTensors
from actors.rollout.engines.adapter_tensors import AdapterTensors
from actors.rollout.engines.vllm.adapters import Adapters
from actors.rollout.engines.vllm.ranks import RankPlace, without_shared_memory
from actors.rollout.engines.vllm.setup import (
    brief,
    engine_config,
    forget_failed_core,
    groups_over_streams,
    is_about_memory,
    prepare_process,
    resolved_device,
    thread_setting_kept,
)
from actors.rollout.engines.vllm.weights import Expected, reload_in_place
from actors.rollout.errors import EngineError, EngineUnavailable, ModelUnreadable
from actors.rollout.sampling import stream_keys, uniforms

_GREEDY_BELOW = 1e-5
"""The temperature below which vLLM's sampler is greedy."""


def noise_seeds(streams: Sequence[int], positions: Sequence[int]) -> list[int]:
    """A 52-bit seed for each token: the bits of its uniform random number in ``actors.rollout.sampling``."""
    noise = uniforms(np.array(streams, np.uint64), np.array(positions, np.int64))
    return (noise * float(1 << 52)).astype(np.int64).tolist()


@dataclasses.dataclass(slots=True)
class CoreRows:
    """Holds the results of one engine step in columns, with one entry a request."""

    core_ids: list[str]
    tokens: list[list[int]]
    logprobs: np.ndarray  # float32[all tokens], end to end
    ended: dict[str, str]
    """Core id → vLLM's finish reason ("stop", "length"), for requests that have ended."""
    prefilled_tokens: int = 0
    """Number of tokens that prefill computed for sequences that began in this step."""
    prefix_hit_tokens: int = 0
    """Number of tokens of those sequences that came from the prefix cache."""
    preemptions: int = 0
    """Number of times that a request was set aside in this step for want of KV blocks."""


class VllmCore:
    """Drives one EngineCore, which is built, stepped and shut down on one thread."""

    _live: ClassVar[VllmCore | None] = None

    def __init__(self, spec: EngineSpec, expected: Expected | AdapterTensors, place: RankPlace | None = None) -> None:
        """``place``: this rank's place among several that compute together; None: it computes alone."""
        if VllmCore._live is not None:
            raise EngineUnavailable(
                "this process already runs a vLLM engine, and vLLM's state is process-global. "
                "Use one worker process per engine."
            )
        spec = dataclasses.replace(spec, device=resolved_device(spec.device))
        prepare_process(spec)
        self.on_cpu = spec.device == "cpu"
        self._scratch = Path(tempfile.mkdtemp(prefix="headrace-vllm-"))
        try:
            self._core = self._build(spec, place)
        finally:
            shutil.rmtree(self._scratch, ignore_errors=True)
        VllmCore._live = self
        self._runner: Any = self._core.model_executor.driver_worker.worker.model_runner
        self._expected = expected
        self.adapters = Adapters(self._runner, expected) if isinstance(expected, AdapterTensors) else None
        self._draws: dict[str, tuple[int, int]] = {}
        """Core id → (noise stream, position of the next token), for requests that runner V1 samples."""
        self._set_aside: dict[str, int] = {}
        """Core id → how often vLLM has set a request aside that it still has."""
        self.vocabulary: int = self.model_config.get_vocab_size()
        self.context_tokens: int = self.model_config.max_model_len
        """Most tokens of prompt plus response; fewer than the spec's where the model has fewer positions."""

    def _build(self, spec: EngineSpec, place: RankPlace | None) -> Any:
        from vllm.v1.engine.core import EngineCore
        from vllm.v1.executor.uniproc_executor import UniProcExecutor

        rendezvous = f"file://{self._scratch}/rendezvous"

        class InProcessExecutor(UniProcExecutor):
            """vLLM's own in-process executor, with its rendezvous file in our directory instead of the shared one."""

            def _distributed_args(self) -> tuple[str, int, int]:
                _, rank, local_rank = super()._distributed_args()
                return rendezvous, rank, local_rank

        config = engine_config(spec, {} if place is None else place.engine_arguments())
        executor = InProcessExecutor if place is None else place.executor()
        queues = contextlib.nullcontext() if place is None else without_shared_memory()
        with (
            thread_setting_kept(spec.threads),
            groups_over_streams(place.directory if place is not None else self._scratch),
            queues,
        ):
            try:
                return EngineCore(config, executor, log_stats=False)
            except (ValueError, KeyError, AssertionError, OSError, RuntimeError) as error:
                forget_failed_core()
                if is_about_memory(error):
                    raise EngineUnavailable(f"vLLM could not get the memory it needs: {brief(error)}") from error
                if place is not None and isinstance(
                    error, RuntimeError
                ):  # torch raises this for a rank that is gone or late
                    raise EngineUnavailable(f"rank {place.rank} of {place.size} fails: {brief(error)}") from error
                raise ModelUnreadable(f"vLLM cannot load {str(spec.model_path)!r}: {brief(error)}") from error

    # ------------------------------------------------------------ requests

    def submit(
        self,
        core_id: str,
        token_ids: list[int],
        sampling: SamplingParams,
        *,
        origin: tuple[int, int],
        start: int,
        context: int,
        budget: int,
        salt: str,
    ) -> None:
        """Queue one sequence. ``token_ids``: prompt and response so far.

        ``start``, ``context``: positions of the next token and of the first token of its context, for the noise.
        """
        from vllm.sampling_params import SamplingParams as VllmSampling
        from vllm.v1.engine import EngineCoreRequest

        stream = int(stream_keys(sampling.seed, *origin)[0])
        # Runner V2 (CUDA) draws by (seed, position) itself; its seed must not depend on where this call starts.
        seed = noise_seeds([stream], [start if self.on_cpu else context])[0]
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
            lora_request=None if self.adapters is None else self.adapters.request,
            cache_salt=salt,
            data_parallel_rank=None,
        )
        if temperature and self._seeds_positions:
            self._draws[core_id] = (stream, start)
        self._core.add_request(*self._core.preprocess_add_request(request))

    def drop(self, core_ids: Iterable[str]) -> None:
        """Forget these requests; vLLM reports nothing about them any more."""
        core_ids = list(core_ids)
        self._core.abort_requests(core_ids)
        for core_id in core_ids:
            self._draws.pop(core_id, None)

    def not_begun(self, core_id: str) -> bool:
        """Whether vLLM has computed nothing for this request yet, not even its prefix."""
        from vllm.v1.request import RequestStatus

        request = self._core.scheduler.requests.get(core_id)
        return request is not None and request.status == RequestStatus.WAITING

    def step(self) -> CoreRows:
        """Take one engine step: schedule, run the model, sample."""
        if self._draws:
            self._seed_positions()
        outputs, executed = self._core.step_fn()
        self._core.post_step(model_executed=executed)
        rows = rows_of([output for batch in (outputs or {}).values() for output in batch.outputs])
        if self._draws:
            self._move_on(rows)
        return dataclasses.replace(rows, preemptions=self._preemptions())

    def _preemptions(self) -> int:
        """How often the scheduler has set a request aside for want of KV blocks since the last call."""
        requests, before = self._core.scheduler.requests, self._set_aside
        self._set_aside = {name: one.num_preemptions for name, one in requests.items() if one.num_preemptions}
        return sum(max(0, count - before.get(name, 0)) for name, count in self._set_aside.items())

    @property
    def _seeds_positions(self) -> bool:
        """Whether we seed each position: runner V1 keeps a generator a request, V2 draws by (seed, position) itself."""
        return isinstance(getattr(self._runner, "requests", None), dict)

    def _seed_positions(self) -> None:
        """Seed each request's generator for the position that it draws next."""
        states = self._runner.requests
        streams, positions = zip(*self._draws.values(), strict=True)
        for core_id, seed in zip(self._draws, noise_seeds(streams, positions), strict=True):
            state = states.get(core_id)
            if state is not None and state.generator is not None:
                state.generator.manual_seed(seed)

    def _move_on(self, rows: CoreRows) -> None:
        """Advance the positions by the tokens that have been drawn."""
        for core_id, tokens in zip(rows.core_ids, rows.tokens, strict=True):
            if (draw := self._draws.get(core_id)) is not None:
                self._draws[core_id] = (draw[0], draw[1] + len(tokens))
        for core_id in rows.ended:
            self._draws.pop(core_id, None)

    # ------------------------------------------------------------ the model

    @property
    def model(self) -> Any:
        return self._runner.get_model()

    @property
    def model_config(self) -> Any:
        return self._core.vllm_config.model_config

    def load(self, tensors: WeightTensors, *, name: str, can_undo: bool, all_agree: Callable[[bool], bool]) -> None:
        """Serve checked ``tensors`` under a new ``name``. On an error the former version is kept if ``can_undo``.

        With adapters, no request that was submitted before may be left in the core.
        """
        if isinstance(self._expected, Expected):
            reload_in_place(
                self.model, self.model_config, self._expected, tensors, can_undo=can_undo, all_agree=all_agree
            )
        elif self.adapters is not None:
            self.adapters.load(tensors, name)

    def gauges(self) -> tuple[int, int, float]:
        """Numbers of running and waiting requests (preempted ones included), and the used fraction of the KV cache."""
        running, waiting = self._core.scheduler.get_request_counts()
        return running, waiting, float(self._core.scheduler.kv_cache_manager.usage)

    @property
    def kv_tokens(self) -> int:
        """Number of tokens whose keys and values the cache holds."""
        cache = self._core.vllm_config.cache_config
        return int(cache.num_gpu_blocks or 0) * int(cache.block_size)

    def release_kv_cache(self) -> None:
        """Free the KV cache, on a CPU. No request may be in the core."""
        self._core.reset_prefix_cache()
        self._kv_bytes = [tensor.untyped_storage().nbytes() for tensor in self._runner.kv_caches]
        for tensor in self._runner.kv_caches:
            tensor.untyped_storage().resize_(0)

    def restore_kv_cache(self) -> None:
        """Undo :meth:`release_kv_cache`, zeroed as at vLLM's start, since a NaN in an unwritten place spoils attention.

        The layers' caches are views of one storage, which is therefore resized once and zeroed through every view.
        """
        for tensor, size in zip(self._runner.kv_caches, self._kv_bytes, strict=True):
            if tensor.untyped_storage().nbytes() != size:
                tensor.untyped_storage().resize_(size)
        for tensor in self._runner.kv_caches:
            tensor.zero_()

    def sleep(self, level: int) -> None:
        """Let vLLM itself sleep, on an accelerator. No request may be in the core."""
        self._core.sleep(level)

    def wake(self) -> None:
        self._core.wake_up()

    def close(self) -> None:
        if VllmCore._live is self:
            VllmCore._live = None
        self._core.shutdown()
        del self._core, self._runner
        gc.collect()


def rows_of(outputs: list[Any]) -> CoreRows:
    """Turn vLLM's outputs of a step into columns."""
    ended = {output.request_id: str(output.finish_reason) for output in outputs if output.finish_reason is not None}
    for core_id, reason in ended.items():
        if reason not in ("stop", "length"):
            raise EngineError(f"vLLM ended request {core_id} with {reason!r}")
    begun = [output.prefill_stats for output in outputs if output.prefill_stats is not None]
    scores = [output.new_logprobs.logprobs for output in outputs if output.new_logprobs is not None]
    return CoreRows(
        core_ids=[output.request_id for output in outputs],
        tokens=[output.new_token_ids for output in outputs],
        logprobs=np.concatenate(scores)[:, 0].astype(np.float32) if scores else np.zeros(0, np.float32),
        ended=ended,
        prefilled_tokens=sum(stats.num_computed_tokens for stats in begun),
        prefix_hit_tokens=sum(stats.num_cached_tokens for stats in begun),
    )
