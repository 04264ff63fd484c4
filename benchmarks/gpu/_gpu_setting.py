"""On what the parts of `bench gpu` measure, and how much: the model, and our engine and trainer on it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from actors.rollout.engine import EngineSpec
from actors.rollout.engines.torch.torch_engine import TorchEngine
from actors.trainer.backend import BackendSpec
from actors.trainer.backends.torch.torch_backend import TorchBackend
from actors.trainer.learning.samples import TrainSample


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """How much is measured; by default the shape is that of Qwen3-0.6B."""

    hidden: int = 1024
    layers: int = 28
    heads: int = 16
    kv_heads: int = 8
    head_dim: int = 128
    vocab: int = 151_936
    rows: tuple[int, ...] = (64, 256)
    """Sequences decoded together."""
    decoded_tokens: int = 128
    prompt_tokens: int = 128
    new_tokens: int = 256
    """Length of a response that is trained on."""
    siblings: int = 8
    groups: int = 8
    micro_batch_tokens: int = 16_384
    versions: int = 2


SMALL: Final = Work(
    hidden=64, layers=2, heads=2, kv_heads=1, head_dim=32, vocab=128, rows=(2,), decoded_tokens=8, prompt_tokens=8,
    new_tokens=8, siblings=2, groups=2, micro_batch_tokens=64, versions=1,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Setting:
    """On what is measured, and how much."""

    device: str
    scratch: Path
    work: Work

    def model(self) -> Path:
        """The checkpoint; the first part that needs it makes it, on the device itself, where that takes a second."""
        path, work = self.scratch / "model", self.work
        if not path.exists():
            from transformers import AutoConfig, AutoModelForCausalLM

            config = AutoConfig.for_model(
                "qwen3", vocab_size=work.vocab, hidden_size=work.hidden, intermediate_size=3 * work.hidden,
                num_hidden_layers=work.layers, num_attention_heads=work.heads, num_key_value_heads=work.kv_heads,
                head_dim=work.head_dim, max_position_embeddings=4096, tie_word_embeddings=True,
            )  # fmt: skip
            torch.manual_seed(0)
            with torch.device(self.device):
                made = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
            made.save_pretrained(path)
        return path

    def load(self) -> Any:
        """The model as transformers has it, for the peers."""
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(self.model(), dtype=torch.bfloat16)
        return model.to(self.device)

    async def engine(self, rows: int) -> TorchEngine:
        """Ours, started."""
        engine, context = TorchEngine(), self.work.prompt_tokens + self.work.decoded_tokens + 1
        spec = EngineSpec(
            model_path=self.model(), dtype="bfloat16", device=self.device, max_running=rows, max_context_tokens=context
        )
        await engine.start(spec)
        return engine

    async def backend(self, *, checkpointing: bool = False, parkable: bool = False) -> TorchBackend:
        """Ours, started."""
        backend = TorchBackend()
        spec = BackendSpec(
            model_path=self.model(),
            dtype="bfloat16",
            device=self.device,
            recompute="whole" if checkpointing else "none",
            parkable=parkable,
        )
        await backend.start(spec)
        return backend

    def bytes_in_use(self, *, peak: bool = False) -> int:
        """Memory of the card that this process uses; a peak is one since ``torch.cuda.reset_peak_memory_stats``."""
        if self.device != "cuda":
            return 0
        return torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()


def samples_of(work: Work, siblings: int) -> list[TrainSample]:
    """Groups of ``siblings``, as many samples in all whatever ``siblings`` is."""
    rng, made = np.random.default_rng(0), list[TrainSample]()
    for prompt in range(work.groups * work.siblings // siblings):
        prompt_ids = rng.integers(3, work.vocab, work.prompt_tokens).astype(np.int32)
        for sibling in range(siblings):
            tokens = rng.integers(3, work.vocab, work.new_tokens).astype(np.int32)
            logprobs, stale = np.full(work.new_tokens, -11.0, np.float32), np.zeros(work.new_tokens, np.bool_)
            made.append(
                TrainSample(
                    prompt=prompt, sibling=sibling, prompt_ids=prompt_ids, tokens=tokens, logprobs=logprobs,
                    stale=stale, advantage=float(rng.normal()),
                )
            )  # fmt: skip
    return made
