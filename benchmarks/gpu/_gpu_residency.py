"""The part `residency` of `bench gpu`: a bundle leaves the card and comes back, against pinned copies of as many bytes.

    step ─▶ park (copy, hash, manifest, memory given back) ─▶ resume (copy, check)      again and again
    accumulate ─▶ park (the sums alone) ─▶ resume (everything) ─▶ compare

Each round parks what a step has changed: weights, master, moments and counts. The first two also find and pin the pages
that the later ones use again. In the end nothing may differ by a bit from what it was.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Awaitable, Callable
from time import perf_counter
from typing import Final, ParamSpec, TypeVar

import psutil
import torch
from torch import Tensor

from actors.host.room import free_bytes
from actors.train_service.residency import Residency, ResidencyRules, remove_parked
from actors.trainer.backend import LossSpec
from actors.trainer.backends.torch.parkable_state import ParkableState
from actors.trainer.backends.torch.torch_backend import TorchBackend
from actors.trainer.learning.samples import cut
from actors.weights.segments import segment_directory
from benchmarks._command import Result
from benchmarks.gpu._gpu_limits import host_copies
from benchmarks.gpu._gpu_setting import Setting, samples_of

P = ParamSpec("P")
R = TypeVar("R")

_ROUNDS: Final = 4
_RATE_BYTES: Final = 1 << 28
"""A copy of that many bytes is as fast as a larger one."""
_JOB: Final = "bench"


async def _run_blocking(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    return await asyncio.to_thread(function, *args, **kwargs)


async def residency(setting: Setting) -> Result:
    """Seconds to park and to resume, whether every bit and every address is the same, and what stays on the card."""
    backend = await setting.backend(parkable=True)
    work, directory = setting.work, setting.scratch / "service"
    (batch, *_) = cut(samples_of(work, 1), budget_tokens=work.micro_batch_tokens, keep_zero=True)
    rules = ResidencyRules(
        budget_bytes=backend.resident_bytes(),
        host_bytes=int(0.9 * free_bytes(segment_directory())),
        disk_bytes=int(0.5 * free_bytes(setting.scratch)),
    )
    tiers = Residency(rules, directory, now=perf_counter, run_blocking=_run_blocking)
    park_s, resume_s, asleep, tier = list[float](), list[float](), 0, ""
    await tiers.open()
    try:
        await tiers.add(_JOB, backend)
        awake = _bytes_in_use(setting.device)
        for _ in range(_ROUNDS):
            await backend.step(weight=(await backend.accumulate(batch, LossSpec())).weight)
            park_s.append(await _seconds(tiers.park, setting.device))
            asleep, tier = _bytes_in_use(setting.device), tiers.report().bundles[0].tier
            resume_s.append(await _seconds(tiers.make_resident, setting.device))
        await backend.accumulate(batch, LossSpec())
        before = {name: tensor.clone() for name, tensor in _tensors(backend).items()}
        addresses, counts = _addresses(backend), _bundle(backend).counts()
        sums_park_s = await _seconds(tiers.park, setting.device)
        sums_resume_s = await _seconds(tiers.make_resident, setting.device)
        after = _tensors(backend)
        size = backend.parts()[0].size_bytes
        equal = all(torch.equal(after[name].view(torch.uint8), before[name].view(torch.uint8)) for name in before)
        equal, same = equal and counts == _bundle(backend).counts(), addresses == _addresses(backend)
    finally:
        await tiers.close()
        await backend.close()
        remove_parked(directory)
    down_s, up_s = (seconds * size / _RATE_BYTES for seconds in host_copies(_RATE_BYTES, setting.device))
    return {
        "bytes": size,
        "parked_in": tier,
        "first_park_s": round(park_s[0], 4),
        "park_s": round(statistics.median(park_s[2:]), 4),
        "first_resume_s": round(resume_s[0], 4),
        "resume_s": round(statistics.median(resume_s[2:]), 4),
        "sums_park_s": round(sums_park_s, 4),
        "with_sums_resume_s": round(sums_resume_s, 4),
        "pinned_from_card_s": round(down_s, 4),
        "pinned_to_card_s": round(up_s, 4),
        "ratio_park": round(statistics.median(park_s[2:]) / down_s, 2),
        "ratio_resume": round(statistics.median(resume_s[2:]) / up_s, 2),
        "bits_equal": equal,
        "addresses_equal": same,
        "awake_bytes": awake,
        "parked_bytes": asleep,
    }


def _bundle(backend: TorchBackend) -> ParkableState:
    core = backend._core  # noqa: SLF001 - nobody else asks for tensors
    assert core is not None
    return core.bundle


def _tensors(backend: TorchBackend) -> dict[str, Tensor]:
    return _bundle(backend).tensors()


def _addresses(backend: TorchBackend) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in _tensors(backend).items()}


async def _seconds(move: Callable[[str], Awaitable[object]], device: str) -> float:
    """How long ``move`` takes, whatever it has put on the card included."""
    _settle(device)
    began = perf_counter()
    await move(_JOB)
    _settle(device)
    return perf_counter() - began


def _settle(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _bytes_in_use(device: str) -> int:
    """Memory that is taken on the card, by whomever; on a CPU this process's own, without what it shares."""
    if device == "cuda":
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        return total - free
    found = psutil.Process().memory_info()
    return found.rss - found.shared
