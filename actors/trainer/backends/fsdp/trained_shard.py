"""One model that ranks train together, as one of them has it: what a backend trains one of, or with a critic two.

micro-batch ─ our part ─▶ forward ─ losses ─ backward ─▶ gradients summed into our rows ─ AdamW ─▶ rows
"""

from __future__ import annotations

from pathlib import Path

from torch import nn

from actors.trainer.backend import BackendSpec, LossSpec, MicroBatch, MicroBatchStats
from actors.trainer.backends.fsdp import parts
from actors.trainer.backends.fsdp.optimizer import ShardedAdam
from actors.trainer.backends.fsdp.orders import nothing
from actors.trainer.backends.fsdp.sharded_model import Rows, local
from actors.trainer.backends.fsdp.world import World
from actors.trainer.backends.torch.causal_lm import response_positions
from actors.trainer.backends.torch.replicas import NO_STATS, Member


class TrainedShard:
    """Holds this rank's rows of one model, their optimizer, and the ``member`` that computes with the model."""

    def __init__(
        self, model: nn.Module, member: Member, world: World, spec: BackendSpec, *, prefix: str = "", kind: str = ""
    ) -> None:
        """``model`` is sharded by now. ``prefix`` and ``kind``: see ``FlatParameters``."""
        self.model = model
        self.member = member
        self.rows = Rows(model, spec.dtype, prefix=prefix, kind=kind)
        self.adam = ShardedAdam(self.rows.parameters, spec, world)
        self._world = world

    def accumulate(self, part: MicroBatch, loss: LossSpec, *, learn: bool = True) -> MicroBatchStats:
        """Add to the gradient sums if it is to ``learn``. Where nothing is in our part, something passes all the same:
        the others wait for our rows.
        """
        if (part.loss_weight != 0).any():
            return self.member.accumulate(part, loss, learn=learn)
        empty = nothing()
        if not learn:
            self.member.score(empty, 1.0)
            return NO_STATS
        logits = self.member.logits(empty, response_positions(empty)).logits
        logits[:0].sum().backward()  # type: ignore[no-untyped-call]
        return NO_STATS

    @property
    def numbers(self) -> int:
        """Count of weights, those of all ranks."""
        return sum(own.numel() for _, own in self.rows.parameters)

    def save(self, directory: Path) -> None:
        if self._world.is_first_replica:
            parts.save(directory, self.adam.state(), self._world.rank)

    def restore(self, path: Path, model_path: Path, steps: int, *, is_flat: bool) -> None:
        """Take over what is at ``path``, after so many steps of its optimizer; sums are forgotten.

        ``is_flat``: it is the file of a torch backend, else a directory of ranks.
        """
        state = self.adam.state()
        if self._world.is_first_replica:
            if is_flat:
                parts.load_flat(path, state, self.rows, model_path)
            else:
                parts.load(path, state, model_path)
        for tensor in state.values():
            self._world.from_first_replica(local(tensor))
        self.adam.set_steps(steps)
        self.adam.leave()
