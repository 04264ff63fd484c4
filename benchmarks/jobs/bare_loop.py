"""What Headrace is measured against: the same job as one plain process, as fast as we can write it.

    prompts ─ prefill once a prompt ─ decode all rows together ─ score ─ advantages ─ cut by length ─ train ─┐
       ▲                                                                                                     │
       └──────────────────── copy the weights to the decoder's own model ◀── AdamW ◀─────────────────────────┘

No actors, no journal, no checkpoints, no metrics, no second process. It shares with Headrace what is arithmetic: the
fused decoder and its shared rows, the losses, the cut into micro-batches, the flat parameters. It is faster where a
loop may be: noise comes from torch's generator, a prompt's data set entry is made once for its whole group.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

from actors.environments.prompts.rows import Row, Source
from actors.environments.prompts.sources import ReasoningGymSource, open_source
from actors.environments.prompts.tokenizer import TextCodec
from actors.host.host_memory import keep_freed_memory
from actors.jobs.stop_tokens import stop_token_ids
from actors.rollout.engines.torch.branches import one_slot_each, rearranged
from actors.rollout.engines.torch.decoder import make_decoder
from actors.rollout.engines.torch.model_loading import load_model as load_for_generation
from actors.rollout.engines.torch.model_loading import pick_device
from actors.trainer.backend import BackendSpec
from actors.trainer.backends.torch.replicas import Replicas
from actors.trainer.learning.rules import LearningRule, StepShape
from actors.trainer.learning.samples import TrainSample, cut
from actors.trainer.setup import loss_spec, resolve_device
from benchmarks._jobs import stream_index
from configs.loader import load_job
from configs.schema import JobConfig


@dataclass(frozen=True, slots=True)
class StepTimes:
    """One step. Seconds are of this part alone; ``seconds`` is all of it."""

    seconds: float
    generate_s: float
    score_s: float
    train_s: float
    samples: int
    tokens: int
    reward_mean: float


@dataclass(frozen=True, slots=True)
class Responses:
    """n responses of at most t tokens: tokens int64[n, t], logprobs float32[n, t], lengths int64[n]."""

    tokens: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    lengths: NDArray[np.int64]


class Generator:
    """Static-batch generation with a KV cache, on a model of its own."""

    def __init__(self, job: JobConfig, model_path: Path) -> None:
        self._max_tokens, self._temperature = job.rollout.max_tokens, job.rollout.temperature
        self._stop = np.array(stop_token_ids(model_path, job.rollout.stop), dtype=np.int64)
        rows = job.algorithm.group_size * job.algorithm.prompts_per_step
        self._model: Any = load_for_generation(model_path, job.model.dtype, pick_device(job.rollout.device))
        self._decoder = make_decoder(
            self._model,
            "auto",
            max_rows=rows,
            max_tokens=job.data.max_prompt_tokens + job.rollout.max_tokens,
            prefill_tokens=16_384,
        )
        self._parameters = list(self._model.parameters())

    def load(self, model: torch.nn.Module) -> None:
        """Take over the weights of ``model``, which has the same parameters in the same order."""
        with torch.no_grad():
            torch._foreach_copy_(self._parameters, list(model.parameters()))  # pyright: ignore[reportPrivateImportUsage]
        self._decoder.weights_changed()

    @torch.inference_mode()
    def generate(self, prompts: list[NDArray[np.int32]], group: int) -> Responses:
        """``group`` responses to each prompt; row ``i`` answers prompt ``i // group``."""
        n = len(prompts) * group
        result = Responses(
            np.zeros((n, self._max_tokens), np.int64),
            np.zeros((n, self._max_tokens), np.float32),
            np.zeros(n, np.int64),
        )
        rows = np.arange(n)  # the samples that go on
        lengths = np.repeat([prompt.size for prompt in prompts], group).astype(np.int64)
        branches = rows // group
        self._decoder.clear()
        logits = self._decoder.prefill(prompts)
        for position in range(self._max_tokens):
            tokens, logprobs = self._draw(logits[torch.from_numpy(branches)])
            result.tokens[rows, position], result.logprobs[rows, position] = tokens, logprobs
            result.lengths[rows] = position + 1
            running = ~np.isin(tokens, self._stop)
            if not running.any() or position + 1 == self._max_tokens:
                break
            rows, lengths, tokens = rows[running], lengths[running] + 1, tokens[running]
            new = rearranged(branches[running], tokens)
            branches = new.branches
            self._decoder.arrange(new.sources, new.targets, new.rows)
            one_each = one_slot_each(branches, new.rows)
            logits = self._decoder.decode(tokens[one_each], lengths[one_each])
        return result

    def _draw(self, logits: torch.Tensor) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """An exponential race: argmax of p / e with e ~ Exp(1) is a draw from p."""
        logprobs = torch.log_softmax(logits.float() / self._temperature, -1)
        tokens = (logprobs.exp() / torch.empty_like(logprobs).exponential_()).argmax(-1, keepdim=True)
        return tokens[:, 0].cpu().numpy(), logprobs.gather(-1, tokens)[:, 0].cpu().numpy()


class Learns(Protocol):
    """What a loop trains with."""

    model: Any
    """The policy, whose weights generation takes over."""

    def learn(
        self, prompts: list[NDArray[np.int32]], group: int, responses: Responses, rewards: NDArray[np.float64]
    ) -> None:
        """One step; ``rewards`` float64[n], one for each response."""
        ...


Scores = Callable[[Sequence[Row], Sequence[str]], NDArray[np.float64]]
"""Rewards of responses, each with the row that it answers."""


class Learner:
    """Micro-batches to weights: the same losses and optimizer as the torch backend, without its thread and protocol."""

    def __init__(self, job: JobConfig, model_path: Path, threads: int) -> None:
        trainer, algorithm = job.trainer, job.algorithm
        if algorithm.kl_coefficient > 0 or job.model.dtype != "float32" or trainer.warmup_steps:
            raise ValueError(
                "algorithm.kl_coefficient, model.dtype, trainer.warmup_steps: the bare loop has none of these"
            )
        if algorithm.needs_whole_step:
            raise ValueError("algorithm: the bare loop has one update a step, and whitens nothing")
        device = resolve_device(trainer.device, trainer.backend)
        self._replicas = Replicas(BackendSpec(model_path=model_path, threads=threads, replicas=threads, device=device))
        self.model, self._flat = self._replicas.model, self._replicas.parameters
        self._rule = LearningRule(algorithm, job.rollout.max_tokens)
        self._loss = loss_spec(job)
        self._budget, self._max_norm, self._max_tokens = (
            trainer.pass_tokens,
            trainer.max_grad_norm,
            job.rollout.max_tokens,
        )
        master = torch.nn.Parameter(self._flat.master)
        master.grad = self._flat.grad
        self._optimizer = torch.optim.AdamW(
            [master], lr=trainer.lr, betas=trainer.betas, weight_decay=trainer.weight_decay, fused=True
        )

    def learn(
        self, prompts: list[NDArray[np.int32]], group: int, responses: Responses, rewards: NDArray[np.float64]
    ) -> None:
        """One optimizer step; ``rewards`` float64[n]."""
        samples = self._samples(prompts, group, responses, rewards)
        for batch in cut(samples, budget_tokens=self._budget, keep_zero=False):
            self._replicas.accumulate(batch, self._loss)
        shape = StepShape(
            samples=len(rewards),
            response_tokens=int(responses.lengths.sum()),
            max_response_tokens=self._max_tokens,
        )
        weight = self._rule.normaliser(shape)
        self._flat.gather_gradients()
        norm = float(torch.linalg.vector_norm(self._flat.grad)) / weight
        self._flat.grad.mul_(min(1.0, self._max_norm / (norm + 1e-6)) / weight)
        self._optimizer.step()
        self._flat.zero_gradients()

    def _samples(
        self, prompts: list[NDArray[np.int32]], group: int, responses: Responses, rewards: NDArray[np.float64]
    ) -> list[TrainSample]:
        samples: list[TrainSample] = []
        fresh = np.zeros(self._max_tokens, dtype=np.bool_)
        for prompt, ids in enumerate(prompts):
            first = prompt * group
            siblings = slice(first, first + group)
            advantages = self._rule.advantages(rewards[siblings], responses.lengths[siblings])
            for sibling, advantage in enumerate(advantages):
                row, length = first + sibling, int(responses.lengths[first + sibling])
                samples.append(
                    TrainSample(
                        prompt=prompt,
                        sibling=sibling,
                        prompt_ids=ids,
                        tokens=responses.tokens[row, :length],
                        logprobs=responses.logprobs[row, :length],
                        stale=fresh[:length],
                        advantage=float(advantage),
                        weight=self._rule.token_weight(length),
                    )
                )
        return samples


class BareLoop:
    """The whole job in one process. ``threads`` are torch's, for generation and for training."""

    def __init__(
        self,
        job: JobConfig,
        model_path: Path,
        *,
        threads: tuple[int, int],
        learner: Learns | None = None,
        scores: Scores | None = None,
    ) -> None:
        torch.manual_seed(job.seed)
        self._job, self._threads, self._source = job, threads, open_source(job.data, job.seed)
        self._scores = scores or _own_scorer(job, self._source)
        self._codec = TextCodec(model_path, job.data)
        self._tokenizer: Any = Tokenizer.from_file(str(model_path / "tokenizer.json"))
        self._generator = Generator(job, model_path)
        self._learner: Learns = learner or Learner(job, model_path, threads[1])
        self._position = 0

    def step(self) -> StepTimes:
        """Generate, score, learn."""
        group = self._job.algorithm.group_size
        started = perf_counter()
        rows, prompts = self._prompts(self._job.algorithm.prompts_per_step)
        torch.set_num_threads(self._threads[0])
        responses = self._generator.generate(prompts, group)
        generated = perf_counter()
        rewards = self._score(rows, group, responses)
        scored = perf_counter()
        torch.set_num_threads(self._threads[1])
        self._learner.learn(prompts, group, responses, rewards)
        self._generator.load(self._learner.model)
        ended = perf_counter()
        return StepTimes(
            seconds=ended - started,
            generate_s=generated - started,
            score_s=scored - generated,
            train_s=ended - scored,
            samples=len(rewards),
            tokens=int(responses.lengths.sum()),
            reward_mean=float(rewards.mean()),
        )

    def _prompts(self, count: int) -> tuple[list[Row], list[NDArray[np.int32]]]:
        """The next prompts, in the order in which Headrace takes them."""
        rows: list[Row] = []
        prompts: list[NDArray[np.int32]] = []
        while len(rows) < count:
            index = stream_index(self._job.data, self._job.seed, len(self._source), self._position)
            if index is None:
                raise ValueError(f"data.epochs {self._job.data.epochs}: the data set ends before the benchmark does")
            self._position += 1
            row = self._source.row(index)
            _, ids = self._codec.encode(row.prompt)
            if 0 < ids.size <= self._job.data.max_prompt_tokens:
                rows.append(row)
                prompts.append(ids)
        return rows, prompts

    def _score(self, rows: list[Row], group: int, responses: Responses) -> NDArray[np.float64]:
        ids = [tokens[:length].tolist() for tokens, length in zip(responses.tokens, responses.lengths, strict=True)]
        texts = self._tokenizer.decode_batch(ids, skip_special_tokens=True)
        return self._scores([rows[i // group] for i in range(len(texts))], texts)


def _own_scorer(job: JobConfig, source: Source) -> Scores:
    """The scorer of a reasoning_gym task."""
    if not isinstance(source, ReasoningGymSource) or job.reward.kind != "reasoning_gym" or job.reward.answer_pattern:
        raise ValueError("data.source, reward.kind: the bare loop scores reasoning_gym tasks with their own scorer")
    dataset: Any = source._dataset  # noqa: SLF001 an entry is made once a prompt, not once a sample

    def scores(rows: Sequence[Row], texts: Sequence[str]) -> NDArray[np.float64]:
        entries = {row.index: dataset[row.index] for row in rows}
        return np.array(
            [
                float(dataset.score_answer(text.strip(), entries[row.index]))
                for row, text in zip(rows, texts, strict=True)
            ]
        )

    return scores


def main(args: list[str]) -> int:
    """``python -m benchmarks.jobs.bare_loop JOB.yaml --model DIR``: one JSON line with every step's times."""
    parser = argparse.ArgumentParser(prog="headrace bench bare_loop", description=main.__doc__)
    parser.add_argument("job", type=Path)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face directory to start from")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--threads", default="1:1", help="torch threads for generation and for training")
    options = parser.parse_args(args)
    keep_freed_memory(one_arena=True)
    generate, train = (int(part) for part in options.threads.split(":"))
    loop = BareLoop(load_job(options.job), options.model, threads=(generate, train))
    steps = [asdict(loop.step()) for _ in range(options.steps)]
    print(json.dumps({"threads": {"generate": generate, "train": train}, "steps": steps}), flush=True)
    return 0


if __name__ == "__main__":
    import sys

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    sys.exit(main(sys.argv[1:]))
