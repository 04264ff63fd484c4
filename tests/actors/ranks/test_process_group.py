"""Collective operations over Unix sockets: what they compute, who can come in, and what a lost rank means."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from actors.ranks.errors import StreamsEnded
from actors.ranks.process_group import StreamGroup
from actors.ranks.streams import Streams, meet

T = TypeVar("T")
TIMEOUT_S = 20.0


class Names:
    """Where ranks that are threads tell their names."""

    def __init__(self) -> None:
        self.known: dict[int, str] = {}
        self._changed = threading.Condition()

    def tell(self, rank: int, name: str) -> None:
        with self._changed:
            self.known[rank] = name
            self._changed.notify_all()

    def told(self, rank: int) -> str:
        with self._changed:
            assert self._changed.wait_for(lambda: rank in self.known, TIMEOUT_S)
            return self.known[rank]


def in_each(size: int, work: Callable[[int], T]) -> list[T]:
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(work, range(size)))


class Meetings:
    """Groups of ranks that are threads, whose streams are closed at the end of a test."""

    def __init__(self) -> None:
        self._met: list[Streams] = []

    def streams(self, directory: Path, size: int) -> list[Streams]:
        names = Names()
        met = in_each(size, lambda rank: meet(directory, rank, size, TIMEOUT_S, tell=names.tell, told=names.told))
        self._met += met
        return met

    def groups(self, directory: Path, size: int) -> list[StreamGroup]:
        return [StreamGroup(streams, rank, size, "all") for rank, streams in enumerate(self.streams(directory, size))]

    def close(self) -> None:
        for streams in self._met:
            streams.close()


@pytest.fixture
def meetings() -> Iterator[Meetings]:
    made = Meetings()
    yield made
    made.close()


def options(kind: type[Any], **values: Any) -> Any:
    made = kind()
    for name, value in values.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize("size", [1, 2, 3])
def test_each_operation_gives_every_rank_what_torch_says(meetings: Meetings, tmp_path: Path, size: int) -> None:
    """With lengths that the ranks do not divide, none, columns of a matrix, and dtypes that numpy does not know."""
    of = meetings.groups(tmp_path, size)

    def all_of(rank: int) -> dict[str, Tensor]:
        group, found = of[rank], dict[str, Tensor]()
        sums = torch.arange(7, dtype=torch.bfloat16) * (rank + 1)
        group.allreduce([sums, torch.empty(0)]).wait()
        least = torch.tensor([rank == 0, True])
        group.allreduce([least], options(dist.AllreduceOptions, reduceOp=dist.ReduceOp.MIN)).wait()
        gathered = torch.empty(size * 3, dtype=torch.int64)
        group.all_gather_single(gathered, torch.full((3,), rank)).wait()
        scattered = torch.empty(1, 2)
        group.reduce_scatter_single(scattered, torch.arange(2.0 * size).view(size, 2) + rank).wait()
        columns = torch.zeros(4, 2)
        told = columns[:, 0]
        if rank == size - 1:
            told.copy_(torch.arange(4.0))
        group.broadcast([told], options(dist.BroadcastOptions, rootRank=size - 1)).wait()
        swapped = torch.empty(size, dtype=torch.bfloat16)
        group.all_to_all_single(swapped, torch.arange(size, dtype=torch.bfloat16) + 10 * rank, [], []).wait()
        taken, sent = [rank] * size, list(range(size))  # as many rows as the number of who takes them
        moved = torch.empty(rank * size, 2, dtype=torch.int64)
        group.all_to_all_single(moved, torch.full((sum(sent), 2), rank), taken, sent).wait()
        group.barrier().wait()
        return (
            found
            | {"sums": sums, "least": least, "all": gathered, "part": scattered, "told": columns}
            | {
                "swapped": swapped,
                "moved": moved,
            }
        )

    times = size * (size + 1) // 2
    for rank, found in enumerate(in_each(size, all_of)):
        assert found["sums"].tolist() == [value * times for value in range(7)]
        assert found["least"].tolist() == [size == 1, True]
        assert found["all"].tolist() == [other for other in range(size) for _ in range(3)]
        assert found["swapped"].tolist() == [10 * other + rank for other in range(size)]
        assert found["moved"].tolist() == [[other, other] for other in range(size) for _ in range(rank)]
        offset = sum(range(size))
        assert found["part"].tolist() == [[2 * rank * size + offset, (2 * rank + 1) * size + offset]]
        assert found["told"][:, 0].tolist() == [0.0, 1.0, 2.0, 3.0]
        assert not found["told"][:, 1].any()


def test_more_goes_both_ways_at_once_than_any_buffer_holds(meetings: Meetings, tmp_path: Path) -> None:
    of = meetings.groups(tmp_path, 2)

    def work(rank: int) -> float:
        large = torch.full((1_000_003,), float(rank + 1))
        of[rank].allreduce([large]).wait()
        return float(large.sum())

    assert in_each(2, work) == [3.0 * 1_000_003] * 2


def test_a_rank_that_is_gone_ends_the_others_wait_at_once_and_a_silent_one_after_the_limit(
    meetings: Meetings, tmp_path: Path
) -> None:
    first, second = meetings.groups(tmp_path, 2)
    second.shutdown()
    with pytest.raises(dist.DistNetworkError, match="rank 1 has ended its stream"):
        first.allreduce([torch.ones(4)])
    silent = meetings.streams(tmp_path, 2)
    silent[0].timeout_s = 0.2
    with pytest.raises(StreamsEnded, match=r"after 0.2 s nothing more goes to or comes from ranks \[1\]"):
        silent[0].exchange({}, {1: memoryview(bytearray(4))})


def test_a_rank_that_does_not_come_is_named(tmp_path: Path) -> None:
    names = Names()
    with pytest.raises(StreamsEnded, match=r"ranks \[1, 2\] have not come"):
        meet(tmp_path, 0, 3, 0.1, tell=names.tell, told=names.told)
    assert list(tmp_path.iterdir()) == []


def test_ranks_meet_in_a_place_whose_path_is_longer_than_a_sockets_and_leave_nothing_there(
    meetings: Meetings, tmp_path: Path
) -> None:
    place = tmp_path / ("long" * 40)
    place.mkdir(mode=0o700)
    for streams in meetings.streams(place, 3):
        streams.close()
    assert list(place.iterdir()) == []


def test_what_ranks_do_not_compute_is_refused_by_name(meetings: Meetings, tmp_path: Path) -> None:
    (alone,) = meetings.groups(tmp_path, 1)
    with pytest.raises(NotImplementedError, match="expected SUM, MIN or MAX"):
        alone.allreduce([torch.ones(1)], options(dist.AllreduceOptions, reduceOp=dist.ReduceOp.PRODUCT))
