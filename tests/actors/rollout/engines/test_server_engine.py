"""A worker's engine and a server that a user started: what is asked at the start, and what if it is another later."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from aiohttp import web

from actors.protocol.weights import Manifest
from actors.protocol.work import SamplingParams
from actors.rollout.engine import EngineSpec, GenerationRequest
from actors.rollout.engines.server import gauges
from actors.rollout.engines.server.client import ServerClient
from actors.rollout.engines.server.engine import ServerEngine
from actors.rollout.engines.server.gauges import Preemptions
from actors.rollout.errors import EngineError, EngineUnavailable, ServerGone
from actors.weights.manifest import SegmentViews, layout
from tests.tiny_checkpoint import make_tiny_checkpoint
from tests.vllm_server import SmallServer


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("model"), vocab=100)


@pytest.fixture(scope="module")
def weights(checkpoint: Path) -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    return load_file(checkpoint / "model.safetensors")


Start = Callable[..., Any]


@pytest_asyncio.fixture
async def servers(checkpoint: Path) -> AsyncIterator[Start]:
    """Starts small servers, without the flags that are named as False."""
    started: list[SmallServer] = []

    async def start(**flags: Any) -> SmallServer:
        server = SmallServer(checkpoint, **flags)
        await server.start()
        started.append(server)
        return server

    yield start
    for server in started:
        server.deaf = False
        await server.stop()


@pytest_asyncio.fixture
async def engines(checkpoint: Path) -> AsyncIterator[Start]:
    """Starts engines on a server, and closes them."""
    started: list[ServerEngine] = []

    async def start(url: str, *, start_s: float = 0.0, context_tokens: int = 96, answer_s: float = 5.0) -> ServerEngine:
        engine = ServerEngine()
        options = {"url": url, "answer_s": answer_s, "start_s": start_s, "load_s": 30.0, "step_ms": 0}
        spec = EngineSpec(
            model_path=checkpoint, max_running=4, max_context_tokens=context_tokens, options=options
        )  # fmt: skip
        started.append(engine)
        await engine.start(spec)
        return engine

    yield start
    for engine in started:
        await engine.close()


def ask(request: int, *, max_tokens: int = 60, prompt: int = 0) -> GenerationRequest:
    sampling = SamplingParams(
        max_tokens=max_tokens, temperature=1.0, stop_token_ids=(), seed=7, top_k=0, top_p=1.0
    )  # fmt: skip
    return GenerationRequest(
        request=request, prompt=prompt, sibling=0, prompt_ids=np.array([5, 6, 7], np.int32),
        generated=np.empty(0, np.int32), sampling=sampling,
    )  # fmt: skip


async def load(engine: ServerEngine, weights: dict[str, np.ndarray], version: int, **how: Any) -> None:
    await engine.load_weights(
        weights, dict.fromkeys(weights, "float32"), version, in_flight=how.get("in_flight", "recompute")
    )


# ------------------------------------------------------------ at the start


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"dev_mode": False}, "VLLM_SERVER_DEV_MODE=1"),
        ({"scale_out": False}, "--enable-scale-out"),
        ({"processed_logprobs": False}, "--logprobs-mode processed_logprobs"),
        ({"max_model_len": 90}, "--max-model-len 96"),
        ({"config": {"model_type": "qwen3", "hidden_size": 4096}}, "the job's model; its model has hidden_size 4096"),
    ],
)
async def test_a_flag_with_which_a_server_was_not_started_and_another_model_are_named(
    servers: Start, engines: Start, flags: dict[str, Any], named: str
) -> None:
    server = await servers(**flags)
    with pytest.raises(EngineUnavailable, match="It lacks") as raised:
        await engines(server.url)
    assert named in str(raised.value) and server.url in str(raised.value)


async def test_all_that_is_missing_is_said_at_once(servers: Start, engines: Start) -> None:
    server = await servers(dev_mode=False, scale_out=False)
    with pytest.raises(EngineUnavailable, match=r"DEV_MODE.*; and --enable-scale-out"):
        await engines(server.url)


async def test_the_key_of_a_server_comes_from_the_environment_and_is_asked_for_by_its_name(
    servers: Start, engines: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = await servers(api_key="secret")
    monkeypatch.setenv("VLLM_API_KEY", "wrong-key")
    with pytest.raises(EngineUnavailable, match="VLLM_API_KEY") as raised:
        await engines(server.url)
    assert "wrong-key" not in str(raised.value)
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    assert (await engines(server.url)).kind == "server"


async def test_a_server_is_waited_for_and_one_that_does_not_come_is_named(servers: Start, engines: Start) -> None:
    server = await servers()
    await server.stop()
    with pytest.raises(ServerGone, match=rf"{server.url} \(rollout\.servers\) for 0 s. Start it"):
        await engines(server.url)
    waiting = asyncio.create_task(engines(server.url, start_s=20.0))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    ServerEngine().hurry()  # as a worker does that has pulled a version meanwhile
    await server.start()
    await waiting


@pytest.mark.parametrize("status", [502, 503, 504])
async def test_a_proxy_with_no_server_behind_it_is_a_server_that_is_away(engines: Start, status: int) -> None:
    async def nobody(request: web.Request) -> web.Response:
        return web.Response(status=status, text="no healthy upstream")

    app = web.Application()
    app.add_routes([web.route("*", "/{path:.*}", nobody)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        with pytest.raises(ServerGone, match=r"\(rollout\.servers\) for 0 s"):
            await engines(f"http://127.0.0.1:{runner.addresses[0][1]}")
    finally:
        await runner.cleanup()


async def test_what_a_server_has_set_aside_since_the_last_look_is_counted_and_seldom_asked_for(servers: Start) -> None:
    server = await servers()
    client = ServerClient(server.url, 5.0)
    await client.open()
    counted = Preemptions(client)
    server.preemptions = [2, 3]
    assert await counted.new(0.0) == 0, "those of before are not this worker's"
    server.preemptions = [2, 7]
    assert await counted.new(1.0) == 0, "it is not asked at every step"
    assert [await counted.new(now_s) for now_s in (6.0, 12.0)] == [4, 0]
    server.preemptions = []
    assert await counted.new(18.0) == 0, "a server that does not say has none"
    await client.close()


async def test_an_engine_tells_what_its_server_has_set_aside(
    servers: Start, engines: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gauges, "_LOOK_S", 0.0)
    server = await servers()
    engine = await engines(server.url)
    engine.add([ask(1, max_tokens=8)])
    server.preemptions = [5]
    await engine.step()
    assert engine.stats().preemptions_total == 0
    server.preemptions = [7]
    while engine.has_work:
        await engine.step()
    assert engine.stats().preemptions_total == 2


async def test_an_address_at_which_something_else_answers_is_named(engines: Start) -> None:
    async def page(request: web.Request) -> web.Response:
        return web.Response(text="<html>hello</html>")

    app = web.Application()
    app.add_routes([web.get("/{path:.*}", page)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        with pytest.raises(EngineError, match=r"/version with '<html>.*expected addresses of vllm serve"):
            await engines(f"http://127.0.0.1:{runner.addresses[0][1]}")
    finally:
        await runner.cleanup()


async def test_a_redirect_is_followed_nowhere(servers: Start, engines: Start) -> None:
    elsewhere = await servers()

    async def moved(request: web.Request) -> web.Response:
        raise web.HTTPTemporaryRedirect(elsewhere.url + request.path)

    app = web.Application()
    app.add_routes([web.route("*", "/{path:.*}", moved)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    elsewhere.asked.clear()
    try:
        with pytest.raises(EngineError, match="with 307"):
            await engines(f"http://127.0.0.1:{runner.addresses[0][1]}")
    finally:
        await runner.cleanup()
    assert elsewhere.asked == []


async def test_what_a_killed_worker_left_a_pause_and_an_open_update_is_ended(
    servers: Start, engines: Start, weights: dict[str, np.ndarray]
) -> None:
    server = await servers()
    server.going.clear()
    server._pending = {}
    engine = await engines(server.url)
    assert server.going.is_set()
    await load(engine, weights, 3)
    engine.add([ask(0, max_tokens=3)])
    assert (await engine.step()).policy_version == 3


# ------------------------------------------------------------ weights


async def test_a_version_in_shared_memory_is_mapped_where_it_lies(
    servers: Start, engines: Start, weights: dict[str, np.ndarray], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries, size = layout([(name, "float32", array.shape) for name, array in weights.items()])
    content = bytearray(size)
    for entry in entries:
        content[entry.offset_bytes : entry.offset_bytes + entry.length_bytes] = weights[entry.name].tobytes()
    path = tmp_path / "segment"
    path.write_bytes(content)
    manifest = Manifest(
        job="j", policy_version=4, parent=3, tensors=entries, total_bytes=size, chunk_bytes=size, chunk_hashes=(b"",)
    )  # fmt: skip
    server = await servers()
    read: list[str] = []
    true_read = server._read
    monkeypatch.setattr(server, "_read", lambda update: (read.append(update["path"]), true_read(update))[1])
    engine = await engines(server.url)
    views = SegmentViews(manifest, memoryview(content), path)
    await engine.load_weights(views, dict.fromkeys(views, "float32"), 4, in_flight="recompute")
    assert read == [str(path)] and server.label.endswith("-v4")


@pytest.mark.parametrize("in_flight", ["keep", "recompute"])
async def test_a_sequence_that_goes_through_a_load_keeps_its_part_of_the_cache_or_begins_a_new_one(
    servers: Start, engines: Start, weights: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch, in_flight: str
) -> None:
    server = await servers()
    salts: list[str] = []
    true_add = server._add
    monkeypatch.setattr(server, "_add", lambda body: (salts.append(body.get("cache_salt", "")), true_add(body))[1])
    engine = await engines(server.url)
    await load(engine, weights, 1)
    salts.clear()
    engine.add([ask(0)])
    await engine.step()
    await load(engine, weights, 2, in_flight=in_flight)
    engine.add([ask(1)])
    while len(salts) < 3:
        await engine.step()
    old, again, new = salts
    assert (again == old, again == new) == ((True, False) if in_flight == "keep" else (False, True))


async def test_an_aborted_sequence_is_one_whose_connection_is_closed(servers: Start, engines: Start) -> None:
    server = await servers()
    engine = await engines(server.url)
    engine.add([ask(n) for n in range(3)])
    await engine.step()
    assert server.running == 3
    server.going.clear()  # so that none ends by itself
    engine.abort([0, 1, 2])
    await engine.step()
    async with asyncio.timeout(5):
        while server.running:
            await asyncio.sleep(0.01)


# ------------------------------------------------------------ another server than it was


async def test_a_server_that_ends_in_the_middle_of_its_streams_ends_the_worker_without_blame(
    servers: Start, engines: Start
) -> None:
    server = await servers()
    engine = await engines(server.url)
    engine.add([ask(n) for n in range(3)])
    await engine.step()
    await server.restart()
    with pytest.raises(ServerGone):
        for _ in range(80):
            await engine.step()
    assert ServerGone.blameless


async def test_no_token_of_a_server_that_was_started_again_becomes_a_row(servers: Start, engines: Start) -> None:
    """While it was idle, so that no stream has broken: it answers, with the weights of its beginning."""
    server = await servers()
    engine = await engines(server.url)
    engine.add([ask(0, max_tokens=4)])
    while engine.has_work:
        await engine.step()
    await server.restart()
    engine.add([ask(1, max_tokens=4)])
    with pytest.raises(ServerGone, match="labelled 'default', not 'headrace-"):
        await engine.step()


async def test_weights_that_somebody_else_loads_end_the_worker_before_a_token_of_theirs_is_a_row(
    servers: Start, engines: Start, weights: dict[str, np.ndarray]
) -> None:
    server = await servers()
    one, other = await engines(server.url), await engines(server.url)
    await load(one, weights, 1)
    one.add([ask(0)])
    await one.step()
    await load(other, weights, 1)
    with pytest.raises(EngineError, match="given weights by another worker") as raised:
        await one.step()
    assert not raised.value.blameless, "two jobs that use one server would go on for ever"


async def test_a_server_that_is_silent_is_gone_after_two_answers_have_failed_to_come(
    servers: Start, engines: Start
) -> None:
    server = await servers()
    engine = await engines(server.url, answer_s=0.2)
    engine.add([ask(0, max_tokens=3)])
    await engine.step()
    server.going.clear()
    server.deaf = True
    engine.add([ask(1)])
    with pytest.raises(ServerGone, match="silent"):
        for _ in range(10):
            await engine.step()


async def test_tokens_without_log_probabilities_are_refused(
    servers: Start, engines: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = await servers()
    engine = await engines(server.url)
    true_generate = server._generate

    async def without(body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        async for choice in true_generate(body):
            yield choice | {"logprobs": None}

    monkeypatch.setattr(server, "_generate", without)
    engine.add([ask(0)])
    with pytest.raises(EngineError, match="without log-probabilities"):
        await engine.step()
