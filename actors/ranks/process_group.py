"""A process group of torch's for CPU tensors, whose ranks exchange over ``Streams``: nobody else can be among them.

    use_streams(directory) ─▶ name of the backend ─▶ init_process_group, new_group ─▶ StreamGroup of those ranks

Gloo would listen at loopback, where whoever connects first and sends a small number is taken for a rank.

Invariants
- Each operation is over when its call returns; ranks make the same calls in the same order, as torch asks of them.
- Sums are made in the order of the ranks, so all ranks have the same bits.
- A rank that is gone or silent is a ``DistNetworkError`` in all ranks that wait for it.
"""

# Torch's stubs name parameters as no caller does, want lists, and know one of two ways to make a group.
# pyright: reportIncompatibleMethodOverride=false, reportAssignmentType=false, reportCallIssue=false

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import Work
from torch.futures import Future

from actors.ranks.errors import StreamsEnded
from actors.ranks.streams import Streams, meet

BACKEND: Final = "headrace"

_place: list[Path] = []
"""Directory in which groups of this process meet; torch makes groups with no arguments of ours."""


def use_streams(directory: Path) -> str:
    """The name of the backend for torch, whose groups meet in ``directory`` from now on. Only our user may enter it."""
    _place[:] = [directory]
    if BACKEND.upper() not in dist.Backend._plugins:  # noqa: SLF001  torch tells it nowhere else
        dist.Backend.register_backend(BACKEND, _make, extended_api=True, devices=["cpu"])
    return BACKEND


def _make(group: Any, _: object) -> StreamGroup:
    """The group that torch wants: its store, our rank, its size, timeout and name."""
    rank, size, timeout_s = group.group_rank, group.group_size, group.timeout.total_seconds()
    try:
        streams = meet(
            _place[0], rank, size, timeout_s,
            tell=lambda own, name: group.store.set(f"rank{own}", name),
            told=lambda other: group.store.get(f"rank{other}").decode(),
        )  # fmt: skip
    except StreamsEnded as error:
        raise dist.DistNetworkError(str(error)) from error
    return StreamGroup(streams, rank, size, group.group_id)


def _reducer(operation: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """How two tensors become one, in the first."""
    for kind, reduce in (
        (dist.ReduceOp.SUM, torch.Tensor.add_),
        (dist.ReduceOp.MIN, lambda mine, other: torch.minimum(mine, other, out=mine)),
        (dist.ReduceOp.MAX, lambda mine, other: torch.maximum(mine, other, out=mine)),
    ):
        if operation == kind:
            return reduce
    raise NotImplementedError(f"ranks of one machine do not compute {operation}: expected SUM, MIN or MAX")


class StreamGroup(dist.ProcessGroup):
    """The ranks of a group as one of them sees it. Torch calls its methods, by these names."""

    def __init__(self, streams: Streams, rank: int, size: int, name: str) -> None:
        super().__init__(rank, size)
        self._streams, self._rank, self._size, self._name = streams, rank, size, name
        self._others = [other for other in range(size) if other != rank]

    def getBackendName(self) -> str:  # noqa: N802  torch's name
        return BACKEND

    @property
    def group_name(self) -> str:
        return self._name

    # ------------------------------------------------------------ to all

    def broadcast(self, tensors: Sequence[Tensor], opts: Any = None) -> Work:
        root = 0 if opts is None else opts.rootRank
        for tensor in tensors:
            if root == self._rank:
                self._exchange(dict.fromkeys(self._others, tensor), {})
            else:
                self._exchange({}, {root: tensor})
        return _done(tensors)

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> Work:
        for parts, own in zip(outputs, inputs, strict=True):
            self._exchange(dict.fromkeys(self._others, own), self._of_others(parts))
            parts[self._rank].copy_(own)
        return _done(outputs)

    def all_gather_single(self, output: Tensor, own: Tensor, opts: Any = None) -> Work:
        return self.allgather([list(output.view(self._size, -1))], [own.reshape(-1)])

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        for output, own in zip(outputs, inputs, strict=True):
            self.all_gather_single(output, own)
        return _done(outputs)

    def all_to_all_single(
        self, output: Tensor, own: Tensor, taken: Sequence[int], sent: Sequence[int], opts: Any = None
    ) -> Work:
        """``taken``, ``sent``: rows from each rank and to each; empty: as many from and to all."""
        outgoing = own.split(list(sent) or own.shape[0] // self._size)
        incoming = output.split(list(taken) or output.shape[0] // self._size)
        self._exchange(self._of_others(outgoing), self._of_others(incoming))
        incoming[self._rank].copy_(outgoing[self._rank])
        return _done([output])

    def gather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> Work:
        root = 0 if opts is None else opts.rootRank
        if root != self._rank:
            self._exchange({root: inputs[0]}, {})
            return _done(inputs)
        self._exchange({}, self._of_others(outputs[0]))
        outputs[0][self._rank].copy_(inputs[0])
        return _done(outputs)

    def barrier(self, opts: Any = None) -> Work:
        return self.allgather([list(torch.empty(self._size, 1))], [torch.zeros(1)])

    # ------------------------------------------------------------ sums

    def reduce_scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = None) -> Work:
        reduce = _reducer(dist.ReduceOp.SUM if opts is None else opts.reduceOp)
        for output, parts in zip(outputs, inputs, strict=True):
            found = [torch.empty_like(output) for _ in range(self._size)]
            self._exchange(self._of_others(parts), self._of_others(found))
            found[self._rank] = parts[self._rank]
            output.copy_(found[0])
            for part in found[1:]:
                reduce(output, part.view_as(output))
        return _done(outputs)

    def reduce_scatter_single(self, output: Tensor, whole: Tensor, opts: Any = None) -> Work:
        return self.reduce_scatter([output.view(-1)], [list(whole.reshape(self._size, -1))], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        for output, whole in zip(outputs, inputs, strict=True):
            self.reduce_scatter_single(output, whole, opts)
        return _done(outputs)

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> Work:
        """Each rank sums a part and gives the sum to all."""
        for tensor in tensors:
            flat = tensor.reshape(-1)
            padded = flat.new_zeros(-(-flat.numel() // self._size) * self._size)
            padded[: flat.numel()] = flat
            own = padded.new_empty(padded.numel() // self._size)
            self.reduce_scatter_single(own, padded, opts)
            self.all_gather_single(padded, own)
            tensor.copy_(padded[: flat.numel()].view_as(tensor))
        return _done(tensors)

    allreduce_coalesced = allreduce

    # older torch calls these
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def shutdown(self) -> None:
        self._streams.close()

    def abort(self) -> None:
        self._streams.close()

    def set_timeout(self, timeout: timedelta) -> None:
        self._streams.timeout_s = timeout.total_seconds()

    def _of_others(self, of_all: Sequence[Tensor]) -> dict[int, Tensor]:
        return {other: of_all[other] for other in self._others}

    def _exchange(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> None:
        into = {rank: tensor.contiguous() for rank, tensor in incoming.items()}
        try:
            self._streams.exchange(
                {rank: _bytes(tensor.contiguous()) for rank, tensor in outgoing.items()},
                {rank: _bytes(tensor) for rank, tensor in into.items()},
            )
        except StreamsEnded as error:
            raise dist.DistNetworkError(str(error)) from error
        for rank, tensor in into.items():
            if tensor is not incoming[rank]:
                incoming[rank].copy_(tensor)


def _bytes(tensor: Tensor) -> memoryview:
    flat: Any = tensor.detach().view(-1).view(torch.uint8).numpy()
    return memoryview(flat)


def _done(result: Any) -> Work:
    future = Future[Any]()
    future.set_result(result)
    return getattr(c10d, "_create_work_from_future")(future)  # noqa: B009  torch's stubs lack it
