"""One measurement of ``bench train_memory``: forward, loss and backward of a head, and nothing else in this process.

python -m benchmarks.gpu._head_memory '{"way": "blocks", "dtype": "float32", "device": "cpu", "tokens": 4096, …}'
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch
from torch import Tensor, nn

from actors.host.host_memory import keep_freed_memory
from actors.trainer.backends.torch.flat import FlatParameters
from actors.trainer.backends.torch.layers.fast_linear import replace_linears
from actors.trainer.learning.token_logprobs import Reading, TokenLogprobs, token_logprobs


class Head(nn.Module):
    """A head alone, with weights as small as in a model that has learned nothing."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        super().__init__()
        kind = {"dtype": getattr(torch, arguments["dtype"]), "device": arguments["device"]}
        self.lm_head = nn.Linear(arguments["hidden"], arguments["vocabulary"], bias=False, **kind)
        nn.init.normal_(self.lm_head.weight, std=0.02)


def measure(arguments: dict[str, Any]) -> dict[str, Any]:
    """Peak of memory added, in bytes; seconds, and those of all threads; sums that both ways have to agree on."""
    device, count = arguments["device"], arguments["tokens"]
    torch.manual_seed(0)
    model = Head(arguments)
    replace_linears(model)
    parameters = FlatParameters(model)
    (sums,) = parameters.sums
    head, total = model.lm_head, sums.of(model.lm_head.weight)
    assert total is not None
    for buffer in (sums.total, sums.low):  # they take their pages now, as in any micro-batch after the first
        buffer.fill_(1.0).zero_()
    hidden = torch.empty(count, arguments["hidden"], dtype=head.weight.dtype, device=device).normal_()
    hidden.requires_grad_()
    rows = torch.arange(count, device=device)
    targets = torch.randint(0, arguments["vocabulary"], (count,), device=device)
    before = _begin(device)
    began, computed = perf_counter(), process_time()
    if arguments["way"] == "blocks":
        reading = Reading(gradient_into=total)
        logprobs: Tensor = TokenLogprobs.apply(hidden, head.weight, rows, targets, reading)[0]  # type: ignore[index]
    else:
        logprobs = token_logprobs(head(hidden), targets, 1.0, rows)[0]
    logprobs.sum().backward()  # type: ignore[no-untyped-call]
    sums.collect()
    added = _peak(device) - before
    seconds, cpu_s = perf_counter() - began, process_time() - computed
    assert hidden.grad is not None
    norms = [float(torch.linalg.vector_norm(found, dtype=torch.float32)) for found in (hidden.grad, total)]
    agreed = {"logprobs": float(logprobs.detach().sum()), "gradients": norms}
    return {"added_bytes": added, "seconds": seconds, "cpu_s": cpu_s, **agreed}


def _begin(device: str) -> int:
    """Bytes that are in use; from now on the peak counts."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return _status("VmRSS")


def _peak(device: str) -> int:
    if device == "cuda":
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()
    return _status("VmHWM")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


if __name__ == "__main__":
    asked: dict[str, Any] = json.loads(sys.argv[1])
    keep_freed_memory(one_arena=True)  # as in a trainer's process
    torch.set_num_threads(asked["threads"])
    print(json.dumps(measure(asked)))
