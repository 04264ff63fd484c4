"""What every backend that can be parked promises (``actors/trainer/parking.py``): simulated, torch on CPU and CUDA, and
fsdp; ``fsdp:2`` is a world of two ranks, in two processes.

A schedule is drawn and followed by two backends, of which one is parked whenever the schedule says so, and the other
never: their whole state is the same, bit for bit. The model is large enough that its buffers are many pages.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import mmap
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.models.adapter import AdapterSpec
from actors.trainer.backend import BackendSpec, CriticSpec, LossSpec
from actors.trainer.backends.fsdp.parkable_ranks import ParkableRanks
from actors.trainer.backends.simulated_backend import SimulatedBackend
from actors.trainer.backends.torch.torch_backend import TorchBackend
from actors.trainer.errors import ParkedStateDamaged, StateParked
from actors.trainer.parking import SUMS, TRAINED, Parkable, Place, StoredPart
from configs.checks.checks import installed
from tests.contracts.backend_worlds import ADAPTER
from tests.contracts.test_train_backend_contract import judged, samples, whole
from tests.rank_processes import RankProcesses
from tests.tiny_checkpoint import make_tiny_checkpoint

LOSS = LossSpec()
CHUNK_BYTES = 10_000
Backend = TorchBackend | SimulatedBackend | ParkableRanks
needs_bitsandbytes = pytest.mark.skipif(not installed("bitsandbytes"), reason="bitsandbytes is not installed")
KINDS: dict[str, Callable[[], Backend]] = {
    "torch": TorchBackend,
    "simulated": SimulatedBackend,
    "fsdp": ParkableRanks,
    "fsdp:2": lambda: ParkableRanks(second().followers()),
}
WORLDS = [
    ("simulated", {}),
    ("torch", {}),
    ("torch", {"dtype": "bfloat16"}),
    ("torch", {"replicas": 2, "threads": 2}),
    ("torch", {"optimizer": "muon", "dtype": "bfloat16"}),
    pytest.param(("torch", {"optimizer": "adamw8bit", "dtype": "bfloat16"}), marks=needs_bitsandbytes),
    ("torch", {"replicas": 2, "threads": 2, "dtype": "bfloat16"}),
    ("torch", {"adapter": ADAPTER, "replicas": 2, "threads": 2, "dtype": "bfloat16"}),
    pytest.param(("fsdp", {}), marks=pytest.mark.long),
    pytest.param(("fsdp:2", {}), marks=pytest.mark.long),
    pytest.param(("fsdp:2", {"dtype": "bfloat16", "critic_warmup": 1}), marks=pytest.mark.long),
    pytest.param(("fsdp:2", {"adapter": AdapterSpec(rank=1, alpha=2.0)}), marks=pytest.mark.long),
    ("simulated", {"critic_warmup": 1}),
    ("torch", {"critic_warmup": 1, "replicas": 2, "threads": 2, "dtype": "bfloat16"}),
    pytest.param(("torch", {"device": "cuda"}), marks=pytest.mark.gpu),
    pytest.param(("torch", {"device": "cuda", "dtype": "bfloat16"}), marks=pytest.mark.gpu),
    pytest.param(
        ("torch", {"device": "cuda", "dtype": "bfloat16", "optimizer": "adamw8bit"}),
        marks=[pytest.mark.gpu, needs_bitsandbytes],
    ),
    pytest.param(("torch", {"device": "cuda", "dtype": "bfloat16", "adapter": ADAPTER}), marks=pytest.mark.gpu),
    pytest.param(("torch", {"device": "cuda", "dtype": "bfloat16", "critic_warmup": 1}), marks=pytest.mark.gpu),
]
ROOM: list[Path] = []
NUMBERS = itertools.count()
World = tuple[str, dict[str, object]]


@functools.cache
def second() -> RankProcesses:
    """The process of rank 1 of all worlds of two."""
    return RankProcesses("fsdp", 2)


@pytest.fixture(scope="module", autouse=True)
def _second_ends() -> Iterator[None]:
    yield
    if second.cache_info().currsize:
        second().close()
        second.cache_clear()


@pytest.fixture(scope="module", autouse=True)
def room() -> Iterator[Path]:
    """A directory for the files of stored parts."""
    with tempfile.TemporaryDirectory() as directory:
        ROOM[:] = [Path(directory)]
        yield ROOM[0]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("model"), hidden=64)


@asynccontextmanager
async def started(world: World, model_path: Path) -> AsyncIterator[Backend]:
    kind, changes = world
    backend = KINDS[kind]()
    spec = {"learning_rate": 0.01, "parkable": True, **changes}
    if (warmup := spec.pop("critic_warmup", None)) is not None:
        spec["critic"] = CriticSpec(model_path=model_path, learning_rate=0.01, warmup_steps=warmup)  # type: ignore[arg-type]
    await backend.start(BackendSpec(model_path=model_path, **spec))  # type: ignore[arg-type]
    try:
        yield backend
    finally:
        await backend.close()


async def stored(backend: Parkable) -> dict[str, StoredPart]:
    """A copy of the whole state, each part in a file of its own."""
    parts = [part for part in backend.parts() if part.blocks]
    places = {part.name: place(part.size_bytes) for part in parts}
    digests = await backend.copy_out(places, CHUNK_BYTES)
    return {
        part.name: StoredPart(
            blocks=part.blocks,
            memory=places[part.name].memory,
            hashes=digests[part.name],
            chunk_bytes=CHUNK_BYTES,
            path=places[part.name].path,
        )
        for part in parts
    }


def place(size: int) -> Place:
    path = ROOM[0] / str(next(NUMBERS))
    with path.open("x+b") as file:
        file.truncate(size)
        return Place(memoryview(mmap.mmap(file.fileno(), size)), path)


async def bits(backend: Parkable) -> dict[str, dict[str, bytes]]:
    """The bytes of each block."""
    copy = await stored(backend)
    return {name: {block.name: bytes(part.block(block.name)) for block in part.blocks} for name, part in copy.items()}


async def parked_and_resumed(backend: Parkable) -> None:
    copy = await stored(backend)
    await backend.release()
    await backend.restore(copy)
    for part in copy.values():
        await backend.forget_place(part.memory)


async def act(backend: Backend, action: str, number: int, directory: Path) -> None:
    batch = whole(judged(samples(seed=number)))[0]
    if action == "accumulate":
        await backend.accumulate(batch, LOSS)
    elif action == "score":
        await backend.score(batch, temperature=1.0, reference=False)
    elif action == "step":
        await backend.step(weight=10.0)
    elif action == "save":
        await backend.save(directory / f"saved-{number}")
    elif action == "load" and (saved := sorted(directory.glob("saved-*"))):
        await backend.load(saved[0])


ACTIONS = st.lists(st.sampled_from(["accumulate", "step", "park", "score", "save", "load"]), min_size=4, max_size=10)


@pytest.mark.parametrize("world", WORLDS, ids=str)
@settings(max_examples=6)
@given(actions=ACTIONS)
def test_parking_whenever_one_likes_changes_no_bit(
    world: World, actions: list[str], model_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    async def follow() -> None:
        one_place, two_place = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("two")
        async with started(world, model_path) as one, started(world, model_path) as two:
            for number, action in enumerate(["accumulate", *actions, "park", "accumulate", "step", "park"]):
                if action == "park":
                    await parked_and_resumed(one)
                else:
                    await act(one, action, number, one_place)
                    await act(two, action, number, two_place)
            assert await bits(one) == await bits(two)
            assert one.steps == two.steps

    asyncio.run(follow())


@pytest.fixture(params=WORLDS, ids=str)
async def backend(request: pytest.FixtureRequest, model_path: Path) -> AsyncIterator[Backend]:
    async with started(request.param, model_path) as made:
        yield made


async def some_steps(backend: Backend) -> None:
    for seed in range(2):
        await backend.accumulate(whole(judged(samples(seed=seed)))[0], LOSS)
        await backend.step(weight=10.0)


async def test_another_life_goes_on_from_stored_state_and_the_half_step_is_dropped_with_its_sums(
    backend: Backend, request: pytest.FixtureRequest, model_path: Path
) -> None:
    await some_steps(backend)
    before = await bits(backend)
    await backend.accumulate(whole(judged(samples(seed=7)))[0], LOSS)
    copy = await stored(backend)
    assert set(copy) == {TRAINED, SUMS}
    async with started(request.node.callspec.params["backend"], model_path) as other:
        assert other.fingerprint() == backend.fingerprint()
        await other.restore({TRAINED: copy[TRAINED]})
        assert await bits(other) == before
        assert other.steps == 2
        for each in (backend, other):
            await each.restore({TRAINED: copy[TRAINED]})
            await each.accumulate(whole(judged(samples(seed=8)))[0], LOSS)
            await each.step(weight=10.0)
        assert await bits(other) == await bits(backend)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.long if "fsdp" in kind else ()) for kind in sorted(KINDS)]
)
async def test_another_life_goes_on_from_state_that_was_stored_while_the_critic_warmed_up(
    kind: str, model_path: Path
) -> None:
    """Its optimizer has moments then, and the policy's has none."""
    world: World = (kind, {"critic_warmup": 9})
    async with started(world, model_path) as one, started(world, model_path) as other:
        await some_steps(one)
        await other.restore(await stored(one))
        for backend in (one, other):
            await some_steps(backend)
        assert await bits(one) == await bits(other)


async def test_versions_tell_what_has_changed_and_nothing_else(backend: Backend, tmp_path: Path) -> None:
    async def changed(action: str) -> set[str]:
        before = {part.name: part.version for part in backend.parts()}
        await act(backend, action, 1, tmp_path)
        return {part.name for part in backend.parts() if part.version != before[part.name]}

    assert await changed("score") == set()
    assert await changed("accumulate") == {SUMS}
    assert await changed("score") == set()
    assert await changed("step") == {TRAINED, SUMS}
    assert await changed("save") == set()
    assert await changed("load") == {TRAINED, SUMS}
    (trained, sums) = backend.parts()
    assert (trained.name, sums.name) == (TRAINED, SUMS)
    assert sums.blocks == ()
    copy = await stored(backend)
    assert {part.name: part.version for part in backend.parts()} == {p.name: p.version for p in (trained, sums)}
    assert set(copy) == {TRAINED}


async def test_a_parked_backend_refuses_to_compute_and_still_tells_of_itself(backend: Backend, tmp_path: Path) -> None:
    await some_steps(backend)
    sizes, parts = backend.stored_bytes(), backend.parts()
    copy = await stored(backend)
    await backend.release()
    for action in ("accumulate", "score", "step", "save"):
        with pytest.raises(StateParked):
            await act(backend, action, 3, tmp_path)
    with pytest.raises(StateParked):
        await backend.export_segment(tmp_path / "no", job="j", policy_version=1, chunk_bytes=4096)
    with pytest.raises(StateParked):
        await backend.copy_out({}, CHUNK_BYTES)
    assert backend.stored_bytes() == sizes
    assert backend.parts() == parts
    assert backend.steps == 2
    await backend.restore(copy)
    await act(backend, "accumulate", 3, tmp_path)


async def test_state_that_was_altered_is_refused_and_the_right_one_is_taken_afterwards(backend: Backend) -> None:
    await some_steps(backend)
    await backend.accumulate(whole(judged(samples(seed=7)))[0], LOSS)
    before = await bits(backend)
    copy = await stored(backend)
    await backend.release()
    for part in copy.values():
        for at in (0, part.blocks[-1].offset_bytes, len(part.memory) - 1):
            part.memory[at] ^= 1
            with pytest.raises(ParkedStateDamaged):
                await backend.restore(copy)
            with pytest.raises(StateParked):
                await backend.step(weight=1.0)
            part.memory[at] ^= 1
    await backend.restore(copy)
    assert await bits(backend) == before


def resident_kib() -> int:
    """What of this process's private memory the system has pages for."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1])
    raise AssertionError("the system does not tell")


async def test_a_released_bundle_gives_its_memory_back_and_has_it_again_at_the_same_addresses(tmp_path: Path) -> None:
    """On a CPU; 6 million parameters, of which 16 bytes each are state."""
    path = make_tiny_checkpoint(tmp_path / "model", hidden=256, layers=8)
    async with started(("torch", {}), path) as made:
        assert isinstance(made, TorchBackend) and made._core is not None
        await some_steps(made)
        tensors = made._core.bundle.tensors()
        states = [id(state) for state in made._core.policy.optimizer._adam.state.values()]
        addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}
        copy = await stored(made)
        before = resident_kib()
        await made.release()
        freed = 1024 * (before - resident_kib())
        kept = made.released_bytes()
        assert freed >= 0.95 * (sum(tensor.nbytes for tensor in tensors.values()) - kept)
        assert kept < 2 * mmap.PAGESIZE * len(tensors) + 100
        await made.restore(copy)
        assert {name: tensor.data_ptr() for name, tensor in made._core.bundle.tensors().items()} == addresses
        assert [id(state) for state in made._core.policy.optimizer._adam.state.values()] == states
        views = [p.data_ptr() for p in made._core.policy.replicas.model.parameters()]
        weights = tensors["weights"]
        assert all(weights.data_ptr() <= view < weights.data_ptr() + weights.nbytes for view in views)


async def test_sizes_are_those_of_the_tensors(backend: Backend) -> None:
    if not isinstance(backend, TorchBackend):
        return
    assert backend._core is not None
    await some_steps(backend)
    tensors = backend._core.bundle.tensors()
    counts = 8 * (1 + len(backend._core.bundle.counts()))
    taken = backend._core.policy.parameters.memory.taken_bytes
    assert backend.resident_bytes() == sum(taken(tensor.nbytes) for tensor in tensors.values()) + counts
    assert len({tensor.data_ptr() for tensor in tensors.values()}) == len(tensors)
    of_trained = (tensor.nbytes for name, tensor in tensors.items() if "sums" not in name and "low" not in name)
    assert backend.parts()[0].size_bytes >= sum(of_trained)
    assert np.all([block.offset_bytes % 64 == 0 for part in backend.parts() for block in part.blocks])
