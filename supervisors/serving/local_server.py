"""A Tinker server in one process: ``headrace serve`` on one page.

    --model [NAME=]DIR ─▶ base models ─▶ an engine each ─┐
    --dir ─▶ operation log, saved states ────────────────┴─▶ TinkerServer ─▶ aiohttp, on this machine alone
                                                              until a signal, or until the log cannot be written

Killed and started again with the same directory, it goes on with what was stored, and clients see a pause.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from aiohttp import web

from actors.rollout.engine import EngineSpec
from actors.sampling.sampler import SamplerSetup, SnapshotSampler
from actors.tinker.errors import LogFailed
from actors.tinker.server import TinkerServer
from actors.tinker.service import ServedModel
from configs.limits import DEFAULT_LIMITS, Limits
from configs.model_files import positions, text_config
from supervisors.serving.local_models import BaseModel, LocalFactory, LocalSampler, NotServable


def base_models(named: Sequence[str]) -> dict[str, BaseModel]:
    """The models of ``[NAME=]DIR`` each, by name, which is the directory as it was written where none is given.

    Raises:
        NotServable: a directory holds no model, says not how long its context is, or two have one name.
    """
    found: dict[str, BaseModel] = {}
    for text in named:
        name, mark, directory = text.partition("=")
        path = Path(directory if mark else name).expanduser()
        if not (path / "config.json").is_file():
            raise NotServable(f"--model {text}: {path} holds no config.json; name a Hugging Face directory")
        vocabulary, limit = text_config(path).get("vocab_size"), positions(path)
        if not isinstance(vocabulary, int) or limit is None:
            raise NotServable(f"--model {text}: {path / 'config.json'} lacks vocab_size, or how many positions it has")
        if name in found:
            raise NotServable(f"--model {text}: {name!r} is served already; give it another name, as NAME=DIR")
        found[name] = BaseModel(path=path.resolve(), vocabulary=vocabulary, context_tokens=limit.count)
    return found


async def serve(
    directory: Path,
    bases: Mapping[str, BaseModel],
    port: int,
    tenants: Sequence[str],
    say: Callable[[str], None],
    *,
    head_stays: bool = False,
    limits: Limits = DEFAULT_LIMITS,
) -> None:
    """Serve until SIGINT or SIGTERM. ``port``: on 127.0.0.1; 0: any.

    Raises:
        LogUnreadable, LogFailed: the directory's log is damaged, or cannot be written.
        EngineUnavailable, ModelUnreadable: a model cannot be served.
        OSError: the port is taken.
    """
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    async with AsyncExitStack() as closing:
        samplers = {name: await _sampler(base, closing, limits) for name, base in bases.items()}
        served = [
            ServedModel(name, str(base.path), base.vocabulary, base.context_tokens, samplers[name])
            for name, base in bases.items()
        ]
        factory = LocalFactory(bases, limits, head_stays=head_stays)
        async with asyncio.timeout(limits.ready_timeout_s):
            server = await asyncio.to_thread(TinkerServer, directory, served, factory, limits)
        closing.push_async_callback(server.close)
        await server.open()
        runner = server.runner()
        closing.push_async_callback(runner.cleanup)
        async with asyncio.timeout(limits.ready_timeout_s):
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", port).start()
        say(f"serving      {', '.join(bases)}")
        say(f"address      TINKER_BASE_URL=http://127.0.0.1:{runner.addresses[0][1]}")
        for tenant in tenants:
            say(f"key          TINKER_API_KEY={server.keys.sign(tenant)}    for {tenant}")
        failing = asyncio.create_task(server.failed.wait(), name="the log fails")
        failing.add_done_callback(lambda _: stopped.set())
        await stopped.wait()
        failing.cancel()
        if server.failed.is_set():
            raise LogFailed(f"{directory}: the operation log cannot be written; mend that, and start again")


async def _sampler(base: BaseModel, closing: AsyncExitStack, limits: Limits) -> LocalSampler:
    spec = EngineSpec(
        model_path=base.path, dtype=base.dtype, device=base.device, threads=base.threads,
        max_context_tokens=base.context_tokens,
    )  # fmt: skip
    sampler = SnapshotSampler(SamplerSetup(engine="torch", spec=spec), limits=limits)
    await sampler.start()
    running = asyncio.create_task(sampler.run(), name="sample")

    async def close() -> None:
        await sampler.close()
        running.cancel()

    closing.push_async_callback(close)
    return LocalSampler(sampler, tries=1 + limits.infrastructure_retries)
