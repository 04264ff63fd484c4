"""Says how many bytes the ranks of a trainer on several machines exchange, by arithmetic, before anything starts.

    weights gathered     twice in a micro-batch, for forward and backward, in the model's dtype
    gradients summed     once in a micro-batch, over a copy's ranks and then over the copies, in float32
    rows for the leader  for each checkpoint, with both moments in float32; a version stays where its rows are

Messages go round a ring: of n ranks each passes on (n - 1) / n of what is gathered or summed over the ranks, and twice
that where all of them are to have the sum. As much leaves a machine, whatever the number of its ranks. With an adapter
the model is gathered, and the adapter's gradients alone are summed. A critic and a reference come on top: they are not
counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from actors.models.adapter import adapter_spec
from actors.train_service.sizes import in_words, parameters_of
from configs.schema import JobConfig

_FLOAT32_BYTES: Final = 4
_MOMENTS: Final = 2
_LINK_BITS_PER_S: Final = 10e9
_STATE_BYTES: Final = 16
"""Master weight, both moments and gradient of a trained weight, in float32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Says how ranks hold copies of the weights: ``ranks`` on ``machines`` together, with ``copies``."""

    ranks: int
    machines: int
    copies: int

    @property
    def spans(self) -> int:
        """Machines of one copy."""
        return max(1, self.machines // self.copies)

    def micro_batch_bytes(self, weights: int, trained: int, dtype_bytes: int) -> int:
        """Bytes that leave each machine in one micro-batch."""
        shards = self.ranks // self.copies
        gathered = 2 * dtype_bytes * weights + _FLOAT32_BYTES * trained
        within = gathered * (shards - 1) / shards if self.spans > 1 else 0.0
        between = 2 * _FLOAT32_BYTES * trained * (self.copies - 1) / self.copies / self.spans
        return round(within + between)

    def leader_bytes(self, each: int, trained: int) -> int:
        """Bytes that reach the leader when it writes ``each`` bytes of every trained weight."""
        return round(each * trained * (self.spans - 1) / self.spans)


def traffic_words(job: JobConfig) -> str:
    """What leaves a machine, and where copies of a machine each would send less; empty for a trainer on one machine."""
    trainer = job.trainer
    if job.trainer_machines == 1 or trainer.backend == "simulated":
        return ""
    shape = Shape(ranks=trainer.ranks, machines=job.trainer_machines, copies=trainer.replicas)
    weights, trained = _weights(job)
    told = "" if weights else "for each billion weights "
    weights, trained = (weights, trained) if weights else (10**9, 10**9)
    dtype_bytes = _FLOAT32_BYTES if job.model.dtype == "float32" else 2
    sent = shape.micro_batch_bytes(weights, trained, dtype_bytes)
    told += f"{_in_time(sent)} leave each of {shape.machines} machines in a micro-batch, and a step of samples of "
    told += f"full length has {_passes(job)}"
    if shape.spans == 1:
        return f"{told}: gradients alone"
    saved = shape.leader_bytes((1 + _MOMENTS) * _FLOAT32_BYTES, trained)
    told += f"; with each checkpoint {in_words(saved)} reach the head's machine unless it is on a file system in common"
    told += ", and of each version every machine serves its part"
    apart = Shape(ranks=shape.ranks, machines=shape.machines, copies=shape.machines)
    less = apart.micro_batch_bytes(weights, trained, dtype_bytes)
    if less >= sent:
        return told
    held = (_STATE_BYTES * trained + dtype_bytes * (weights - trained)) * shape.machines // shape.ranks
    told += f". trainer.replicas: {shape.machines} sends {_in_time(less)}, and nothing for checkpoints, if"
    return f"{told} {in_words(held)} of weights, gradients and moments fit on each rank beside its activations"


def _in_time(count: int) -> str:
    return f"{in_words(count)} ({max(0.1, 8 * count / _LINK_BITS_PER_S):.1f} s at 10 Gbit/s)"


def _weights(job: JobConfig) -> tuple[int, int]:
    """Weights of the model, and how many of them are trained; 0 where its files are not here."""
    path = Path(job.model.path or "").expanduser()
    if job.model.source != "hf" or not job.model.path or not path.is_dir():
        return 0, 0
    adapter = adapter_spec(job.model.adapter)
    weights = parameters_of(path)
    return weights, weights if adapter is None else parameters_of(path, adapter)


def _passes(job: JobConfig) -> int:
    """Micro-batches of a step whose samples are all as long as they may be."""
    algorithm = job.algorithm
    samples = algorithm.prompts_per_step * algorithm.group_size
    return -(-samples * job.sequence_tokens // job.trainer.pass_tokens) * algorithm.epochs
