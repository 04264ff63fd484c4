"""Any Hugging Face causal LM, asked only for the log-probabilities of response tokens.

    MicroBatch ─ layout ─▶ ids[R, L] ─ decoder ─▶ hidden[R, L, H] ─ rows that predict ─▶ [U, H] ─ head ─▶ N numbers

The rows are picked by a hook in front of the output embedding: the prompt and the padding never meet the vocabulary.
The head gives log-probabilities (``layers/blocked_head.py``), or a critic's values. In a padded layout padding comes
last, so causal attention alone keeps it away from every token that counts, and no mask is built.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from actors.host.import_guard import hide_broken_optionals
from actors.models.model_errors import brief, passes
from actors.models.whole_model import load_whole
from actors.trainer.backend import BackendSpec, MicroBatch
from actors.trainer.backends.torch.attention.context import ContextRanks, TokenShare
from actors.trainer.backends.torch.attention.row_attention import (
    KINDS,
    RowAttention,
    kinds_to_try,
    narrow_windows,
    use_attention,
)
from actors.trainer.backends.torch.device_sums import on_device
from actors.trainer.backends.torch.flat import GradientSums
from actors.trainer.backends.torch.layers.blocked_head import BlockedHead, Question
from actors.trainer.backends.torch.layers.compiled_layers import Answer, compile_layers, compiled_layers
from actors.trainer.backends.torch.layers.fast_linear import replace_linears
from actors.trainer.backends.torch.layers.rms_norm import replace_rms_norms
from actors.trainer.backends.torch.layers.routed_experts import attach, routed_experts
from actors.trainer.backends.torch.packing import Layout, choose, packed, padded, plan_blocks
from actors.trainer.backends.torch.recompute import check_kept, recompute_layers
from actors.trainer.backends.torch.slicing import sliced
from actors.trainer.errors import BadMicroBatch, ModelNotLoadable

_COLUMNS: Final = (
    *("behaviour_logprobs", "advantages", "loss_weight", "reference_logprobs", "stale"),
    *("old_logprobs", "old_values", "returns", "targets", "ratio_mask"),
)
"""Fields of a micro-batch with a number for each position, or None."""


def load_model(path: Path, spec: BackendSpec, at_first: Callable[[nn.Module], None] | None = None) -> nn.Module:
    """The model of ``path`` in the spec's dtype, on its device, in eval mode.

    ``at_first``: called with the model in main memory, before anything of it is on the device.

    Raises:
        ModelNotLoadable: the directory is missing, holds no causal LM, or one whose tensors are not all there.
    """
    hide_broken_optionals()
    from transformers import AutoModelForCausalLM

    if not path.is_dir():
        raise ModelNotLoadable(f"model.path: {path} is not a directory; name a Hugging Face directory")
    dtype = getattr(torch, spec.dtype)
    try:
        model = load_whole(AutoModelForCausalLM, path, dtype=dtype)
    except Exception as error:
        if passes(error):
            raise
        raise ModelNotLoadable(
            f"model.path: {path} cannot be loaded as a causal language model: {brief(error)}"
        ) from error
    if at_first is not None:
        at_first(model)
    model = prepared(model, spec)
    attach(model, spec)
    return model


def prepared(model: nn.Module, spec: BackendSpec) -> nn.Module:
    """A loaded model, made ready to compute: on its device, in eval mode, with our faster parts."""
    model.to(spec.device)
    for parameter in model.parameters():  # not the buffers: rotary frequencies in bfloat16 would encode other positions
        parameter.data = parameter.data.to(getattr(torch, spec.dtype))
    replace_rms_norms(model)
    replace_linears(model)
    use_attention(model, spec.attention)
    _find_no_documents()
    model.eval()  # for good: with dropout and the like of training mode it would not be the engine's policy
    if spec.compile:
        compile_layers(model)
    recompute_layers(model, spec.recompute)
    return model


def _find_no_documents() -> None:
    """Spare transformers its search for documents in rows without a mask, for which the host would wait in each pass.
    There are none: rows that hold several sequences have a mask of ours.
    """
    from transformers import masking_utils

    masking_utils.find_packed_sequence_indices = lambda position_ids: None  # type: ignore[assignment]


@dataclass(frozen=True, kw_only=True, slots=True)
class Predictions:
    """Asks a model for N tokens, whenever it is called for them. Siblings with the same tokens so far share a row."""

    head: BlockedHead | None
    call: Callable[[], Tensor]
    """Calls the model. Its head gives logits [U, V], unless ``head`` has it do otherwise."""
    rows: Tensor  # int64[N], the row that predicts each token
    targets: Tensor  # int64[N]
    share: TokenShare | None = None
    """Which of the tokens asked for these N are, where several ranks share a row; None: all of them."""

    @property
    def logits(self) -> Tensor:
        """What a head gives that is not asked for log-probabilities: [U, V], of a critic [U, 1]."""
        return self.call()

    def logprobs(self, temperature: float, *, learns_entropy: bool = False) -> tuple[Tensor, Tensor]:
        """(log-probabilities, entropies), float32[N]."""
        assert self.head is not None, "a critic has no vocabulary"
        question = Question(
            rows=self.rows, targets=self.targets, temperature=temperature, learns_entropy=learns_entropy
        )
        logprobs, entropies = self.head.answer(question, self.call)
        return self.of_all(logprobs), self.of_all(entropies)

    def of_all(self, numbers: Tensor) -> Tensor:
        """One number for each token that was asked for, from those of the N tokens."""
        return numbers if self.share is None else self.share.of_all(numbers)


class ResponseLogits:
    """Calls a causal LM for what its head gives at chosen positions. ``may_pack``: it was seen to obey packed masks.

    ``sums``: where its gradients add up, if not in the parameters' ``grad``. Without ``has_vocabulary`` it is a critic.
    ``ranks``: those that share each row with this one.

    Raises:
        ModelNotLoadable: rows of this model cannot be shared.
    """

    def __init__(
        self,
        model: nn.Module,
        device: str,
        sums: GradientSums | None = None,
        ranks: ContextRanks | None = None,
        *,
        has_vocabulary: bool = True,
    ) -> None:
        self.model = model
        self._ranks = ranks
        self.may_pack = False
        self._attention: RowAttention = KINDS["dense"]
        self.experts = routed_experts(model)
        self._device = device
        self._rows: Tensor | None = None
        self._computed = torch.float32
        """Dtype of the hidden states, which sharded parameters may not have."""
        self._hidden: int = model.get_input_embeddings().weight.shape[1]  # type: ignore[operator]
        head: nn.Module = model.get_output_embeddings()  # type: ignore[operator]
        head.register_forward_pre_hook(self._pick_rows)
        self.blocked_head: BlockedHead | None = None
        if has_vocabulary:
            self.blocked_head = BlockedHead(model, sums)
            self._try_blocks(self.blocked_head)
        self.may_pack = self._obeys_masks()
        example = padded(*probe_batch(int(model.config.vocab_size)))  # type: ignore[union-attr, arg-type]
        check_kept(model, partial(self.forward, example))
        if ranks is not None:
            self._check_slices(ranks)
        self._try_compiled()

    def _pick_rows(self, _head: nn.Module, args: tuple[Any, ...]) -> tuple[Tensor] | None:
        if self._rows is None:
            return None
        hidden = args[0]
        self._computed = hidden.dtype
        return (hidden.reshape(-1, hidden.shape[-1]).index_select(0, self._rows)[None],)

    def __call__(self, batch: MicroBatch, predicted: np.ndarray) -> Predictions:
        """Predictions of the N positions where ``predicted`` bool[B, T] holds, in row order."""
        check_batch(batch, predicted)
        long_rows = self._attention.long_rows
        layout = choose(batch, predicted, hidden=self._hidden, may_pack=self.may_pack, long_rows=long_rows)
        tokens = batch.input_ids if batch.targets is None else batch.targets
        targets = on_device(tokens[predicted].astype(np.int64), self._device)
        share: TokenShare | None = None
        if self._ranks is not None:
            layout, share = sliced(layout, self._ranks, self._device)
            targets = targets[share.where]
        if self.experts is not None:
            self.experts.take(batch, layout, self._device)
        rows = on_device(layout.row_of, self._device)
        call = partial(self.forward, layout)
        return Predictions(head=self.blocked_head, call=call, rows=rows, targets=targets, share=share)

    def forget(self) -> None:
        """Let go of what the last pass has left here: after a failed one, that would keep all of its results."""
        if self.experts is not None:
            self.experts.forget()

    def forward(self, layout: Layout) -> Tensor:
        """What the head gives for the layout's predicting positions: logits [U, V], but see ``BlockedHead``."""
        extra: dict[str, Any] = {}
        if layout.ends is not None and layout.position_ids is not None:
            extra["attention_mask"] = self._attention.mask(layout, self._device)
            extra["position_ids"] = on_device(layout.here(layout.position_ids), self._device)
        self._rows = on_device(layout.rows, self._device)
        try:
            ids = on_device(layout.here(layout.input_ids), self._device)
            return self.model(input_ids=ids, use_cache=False, **extra).logits[0]
        finally:
            self._rows = None

    def _try_blocks(self, head: BlockedHead) -> None:
        example, predicted = probe_batch(int(self.model.config.vocab_size))  # type: ignore[union-attr, arg-type]
        layout = padded(example, predicted)
        rows = torch.from_numpy(layout.row_of).to(self._device)
        targets = torch.from_numpy(example.input_ids[predicted].astype(np.int64)).to(self._device)
        head.try_blocks(Question(rows=rows, targets=targets, temperature=1.0), partial(self.forward, layout))

    def _obeys_masks(self) -> bool:
        """Whether packed rows give the padded rows' logits on an example. Those of ALiBi or recurrence do not.

        The kinds of attention are tried in turn; the model stays with the first by which they do.
        """
        example, predicted = probe_batch(int(self.model.config.vocab_size))  # type: ignore[union-attr]
        for kind in kinds_to_try(self.model, self._device):
            self._attention = kind
            with torch.no_grad(), narrow_windows(self.model):
                expected = self._per_token(padded(example, predicted))
                try:
                    actual = self._per_token(packed(example, predicted, [tuple(plan_blocks(example))]))
                except (AttributeError, TypeError, ValueError, RuntimeError, IndexError):
                    continue
            if self._alike(expected, actual):
                return True
        return False

    def _try_compiled(self) -> None:
        compiled = compiled_layers(self.model)
        if compiled is None:
            return
        example, predicted = probe_batch(int(self.model.config.vocab_size))  # type: ignore[union-attr]
        layouts = [padded(example, predicted)]
        if self.may_pack:
            layouts.append(packed(example, predicted, [tuple(plan_blocks(example))]))

        def answered(layout: Layout) -> Answer:
            parameters = compiled.parameters
            with torch.set_grad_enabled(bool(parameters)):
                numbers = self._per_token(layout)
                gradients = torch.autograd.grad(numbers.sum(), parameters, allow_unused=True) if parameters else ()
            return numbers.detach(), [one for one in gradients if one is not None]

        compiled.try_on([partial(answered, layout) for layout in layouts])

    def _check_slices(self, ranks: ContextRanks) -> None:
        """On an example rows that ranks share must give the logits of whole ones; all ranks are asked at once."""
        why = "its attention cannot be computed in blocks of query rows, or something else looks at other tokens"
        if self.may_pack and self._attention is KINDS["blocks"]:
            example, predicted = probe_batch(int(self.model.config.vocab_size))  # type: ignore[union-attr]
            layouts = (padded(example, predicted), packed(example, predicted, [tuple(plan_blocks(example))]))
            with torch.no_grad(), narrow_windows(self.model):
                alike = [self._sliced_alike(layout, ranks) for layout in layouts]
            if all(alike):
                return
            why = "on an example its logits came out otherwise than those of whole rows"
        raise ModelNotLoadable(
            f"trainer.context_ranks: {ranks.count} ranks cannot share a row of {type(self.model).__name__}: {why}. "
            "Leave the key out"
        )

    def _sliced_alike(self, layout: Layout, ranks: ContextRanks) -> bool:
        expected = self._per_token(layout)
        part, share = sliced(layout, ranks, self._device)
        actual = self._per_token(part)
        return not share.where.numel() or self._alike(expected[share.where], actual)

    def _alike(self, expected: Tensor, actual: Tensor) -> bool:
        # the spread of a real model's logits is about 1; half precision rounds in the second digit
        tolerance = 1e-3 if self._computed == torch.float32 else 0.1
        scale = max(1.0, expected.abs().max().item())
        return (expected - actual).abs().max().item() < tolerance * scale

    def _per_token(self, layout: Layout) -> Tensor:
        return self.forward(layout).float()[torch.from_numpy(layout.row_of).to(self._device)]


def probe_batch(vocabulary: int) -> tuple[MicroBatch, np.ndarray]:
    """Three siblings of one prompt, two of which begin alike, and one of another prompt.

    Enough to see leaks between responses and between branches of one, and wrong positions.
    """
    rng = np.random.default_rng(0)
    ids = rng.integers(0, vocabulary, (4, 12)).astype(np.int32)
    ids[1:3, :5] = ids[0, :5]
    ids[2, 5:8] = ids[0, 5:8]
    lengths, prompts = np.array([12, 9, 11, 12], dtype=np.int32), np.array([5, 5, 5, 3], dtype=np.int32)
    zeros = np.zeros(ids.shape, dtype=np.float32)
    batch = MicroBatch(
        input_ids=ids,
        lengths=lengths,
        prompt_lengths=prompts,
        behaviour_logprobs=zeros,
        advantages=zeros,
        loss_weight=zeros,
    )
    return batch, response_positions(batch)


def response_positions(batch: MicroBatch) -> np.ndarray:
    """bool[B, T]: where a response token stands."""
    t = np.arange(batch.input_ids.shape[1])
    return (t >= batch.prompt_lengths[:, None]) & (t < batch.lengths[:, None])


def check_batch(batch: MicroBatch, predicted: np.ndarray) -> None:
    """Raise BadMicroBatch, naming the field, when shapes differ or a position cannot be predicted."""
    shape = batch.input_ids.shape
    for name in _COLUMNS:
        column = getattr(batch, name)
        if column is not None and column.shape != shape:
            raise BadMicroBatch(f"{name}: shape {column.shape}, expected {shape} as input_ids")
    if (routes := batch.routes) is not None and (routes.ndim != 3 or routes.shape[:2] != shape):
        raise BadMicroBatch(f"routes: shape {routes.shape}, expected {(*shape, 'bytes')} as input_ids")
    if predicted[:, 0].any():
        raise BadMicroBatch("loss_weight: a token at position 0 has nothing to be predicted from, expected 0 there")
    if (predicted & ~response_positions(batch)).any():
        raise BadMicroBatch("loss_weight: not 0 on a prompt or padding position")
