"""PPO as one plain process: what Headrace's is held against, in what is learned and in how fast.

    prompts ─ generate ─ score ─ reference and values ─ KL, GAE, whitening ─ policy and critic forward, backward ─ AdamW

Generation is the bare loop's (``bare_loop``). All that is learned with is written once more here, from the papers and
with transformers and torch alone: no packing, no flat buffers, no code of the trainer's or of a scorer's. It is faster
where a loop may be: the log-probabilities that the policy had are those that generation has computed.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from actors.environments.prompts.rows import Row
from actors.host.host_memory import keep_freed_memory
from benchmarks.jobs.bare_loop import BareLoop, Responses
from configs.loader import load_job
from configs.schema import JobConfig


class PpoLearner:
    """Trains policy and critic on one response a prompt, or several; ``kl_per_response``: of the last step."""

    def __init__(self, job: JobConfig, model_path: Path) -> None:
        trainer, critic = job.trainer, job.critic
        if job.model.dtype != "float32" or trainer.warmup_steps or critic.path or trainer.lr_schedule != "constant":
            raise ValueError(
                "model.dtype, trainer.warmup_steps, trainer.lr_schedule, critic.path: the bare loop has none of these"
            )
        self._job = job
        self.model, self._reference, backbone = (_causal_lm(model_path) for _ in range(3))
        self._backbone: Any = backbone.base_model
        self._head = torch.nn.Linear(backbone.get_output_embeddings().weight.shape[1], 1, bias=False)
        torch.nn.init.normal_(self._head.weight, std=backbone.config.initializer_range)
        self._of_policy = list(self.model.parameters())
        self._of_critic = [*self._backbone.parameters(), *self._head.parameters()]
        options: dict[str, Any] = {"betas": trainer.betas, "weight_decay": trainer.weight_decay, "fused": True}
        self._optimizers = (
            torch.optim.AdamW(self._of_policy, lr=trainer.lr, **options),
            torch.optim.AdamW(self._of_critic, lr=critic.lr, **options),
        )
        self._steps = 0
        self.kl_per_response = 0.0

    def learn(
        self, prompts: list[NDArray[np.int32]], group: int, responses: Responses, rewards: NDArray[np.float64]
    ) -> None:
        """One step: all of its passes."""
        order = np.argsort([-(len(prompts[i // group]) + responses.lengths[i]) for i in range(len(rewards))])
        batches = list(self._batches(prompts, group, responses, order))
        with torch.no_grad():
            for batch in batches:
                batch["reference"] = _logprobs(self._reference, batch, self._job.rollout.temperature)
                batch["old_values"] = self._values(batch)
        self._judge(batches, rewards)
        tokens = float(responses.lengths.sum())
        warming = self._steps < self._job.critic.warmup_steps
        self._steps += 1
        for _ in range(self._job.algorithm.epochs):
            for batch in batches:
                (self._value_loss(batch) / tokens).backward()
                if not warming:
                    (self._policy_loss(batch) / tokens).backward()
            trained = ((self._of_policy, self._of_critic), self._optimizers)
            for parameters, optimizer in list(zip(*trained, strict=True))[int(warming) :]:
                torch.nn.utils.clip_grad_norm_(parameters, self._job.trainer.max_grad_norm)
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)

    def _batches(
        self, prompts: list[NDArray[np.int32]], group: int, responses: Responses, order: NDArray[np.int64]
    ) -> Iterator[dict[str, Tensor]]:
        """Padded micro-batches, the longest first; ``where`` bool[B, T - 1]: predicts a token of a response."""
        rows, width = list[int](), 0
        for index in [*order.tolist(), None]:
            length = 0 if index is None else len(prompts[index // group]) + int(responses.lengths[index])
            full = (len(rows) + 1) * max(width, length) > self._job.trainer.pass_tokens
            if rows and (index is None or full):
                yield self._padded(prompts, group, responses, rows, width)
                rows, width = [], 0
            if index is not None:
                rows, width = [*rows, index], max(width, length)

    def _padded(
        self, prompts: list[NDArray[np.int32]], group: int, responses: Responses, rows: list[int], width: int
    ) -> dict[str, Tensor]:
        ids = torch.zeros((len(rows), width), dtype=torch.int64)
        old, where = torch.zeros((len(rows), width - 1)), torch.zeros((len(rows), width - 1), dtype=torch.bool)
        for line, index in enumerate(rows):
            prompt, length = prompts[index // group], int(responses.lengths[index])
            p = len(prompt)
            ids[line, :p] = torch.from_numpy(prompt.astype(np.int64))
            ids[line, p : p + length] = torch.from_numpy(responses.tokens[index, :length])
            old[line, p - 1 : p - 1 + length] = torch.from_numpy(responses.logprobs[index, :length])
            where[line, p - 1 : p - 1 + length] = True
        return {"ids": ids, "old": old, "where": where, "rows": torch.tensor(rows)}

    def _judge(self, batches: list[dict[str, Tensor]], rewards: NDArray[np.float64]) -> None:
        """Rewards with the KL in them, generalised advantages, returns; advantages whitened over all tokens."""
        algorithm, kl = self._job.algorithm, 0.0
        for batch in batches:
            where, values = batch["where"], batch["old_values"]
            difference = (batch["old"] - batch["reference"]) * where
            kl += float(difference.sum())
            shaped = -algorithm.kl_coefficient * difference
            last = where.shape[1] - 1 - where.flip(1).int().argmax(1)
            shaped[torch.arange(len(last)), last] += torch.from_numpy(rewards[batch["rows"].numpy()]).float()
            advantages, ahead = torch.zeros_like(values), torch.zeros(len(values))
            for t in range(where.shape[1] - 1, -1, -1):
                following = values[:, t + 1] if t + 1 < where.shape[1] else torch.zeros(len(values))
                delta = shaped[:, t] + algorithm.gamma * following - values[:, t]
                ahead = (delta + algorithm.gamma * algorithm.gae_lambda * ahead) * where[:, t]
                advantages[:, t] = ahead
            batch["returns"], batch["advantages"] = advantages + values, advantages
        every = torch.cat([batch["advantages"][batch["where"]] for batch in batches])
        for batch in batches:
            batch["advantages"] = (batch["advantages"] - every.mean()) * torch.rsqrt(every.var() + 1e-8)
        self.kl_per_response = kl / len(rewards)

    def _policy_loss(self, batch: dict[str, Tensor]) -> Tensor:
        """Schulman et al. 2017, equation 7."""
        algorithm, where, advantages = self._job.algorithm, batch["where"], batch["advantages"]
        ratio = torch.exp(_logprobs(self.model, batch, self._job.rollout.temperature) - batch["old"])
        limited = ratio.clamp(1.0 - algorithm.clip_low, 1.0 + algorithm.clip_high)
        return -torch.minimum(ratio * advantages, limited * advantages)[where].sum()

    def _value_loss(self, batch: dict[str, Tensor]) -> Tensor:
        values, old, returns, clip = (
            self._values(batch),
            batch["old_values"],
            batch["returns"],
            self._job.critic.value_clip,
        )
        far = old + (values - old).clamp(-clip, clip) if clip else values
        return 0.5 * torch.maximum((values - returns) ** 2, (far - returns) ** 2)[batch["where"]].sum()

    def _values(self, batch: dict[str, Tensor]) -> Tensor:
        hidden = self._backbone(input_ids=batch["ids"][:, :-1], use_cache=False).last_hidden_state
        return self._head(hidden)[..., 0] * batch["where"]


class LearnedReward:
    """Asks the reward model of ``reward.path`` for the whole batch at once."""

    def __init__(self, job: JobConfig) -> None:
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        path = str(job.reward.path)
        auto: Any = AutoModelForSequenceClassification
        self._model: Any = auto.from_pretrained(path, dtype=torch.float32, local_files_only=True).eval()
        self._tokenizer: Any = AutoTokenizer.from_pretrained(path, local_files_only=True)
        if self._tokenizer.chat_template or job.data.system_prompt:
            raise ValueError("reward.path, data.system_prompt: the bare loop scores plain text alone")
        self._tokenizer.padding_side, self._model.config.pad_token_id = "right", self._tokenizer.pad_token_id
        self._template = job.data.template

    @torch.inference_mode()
    def __call__(self, rows: Sequence[Row], texts: Sequence[str]) -> NDArray[np.float64]:
        both = zip(rows, texts, strict=True)
        read = [self._template.replace("{prompt}", str(row.prompt)) + text for row, text in both]
        batch = self._tokenizer(read, padding=True, return_tensors="pt")
        logits = self._model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        return logits[:, 0].double().numpy()


def _causal_lm(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True).eval()


def _logprobs(model: Any, batch: dict[str, Tensor], temperature: float) -> Tensor:
    """float32[B, T - 1]: of each next token, 0 where none is of a response."""
    logits = model(input_ids=batch["ids"][:, :-1], use_cache=False).logits / temperature
    chosen = logits.gather(-1, batch["ids"][:, 1:, None])[..., 0] - torch.logsumexp(logits, -1)
    return chosen * batch["where"]


def main(args: list[str]) -> int:
    """``bare_ppo JOB.yaml --model DIR``: one JSON line with every step's times, reward and KL."""
    parser = argparse.ArgumentParser(prog="headrace bench bare_ppo", description=main.__doc__)
    parser.add_argument("job", type=Path)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face directory to start from")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", help="override a key of the job file")
    parser.add_argument("--threads", default="2:2", help="torch threads for generation and for training")
    options = parser.parse_args(args)
    keep_freed_memory(one_arena=True)
    generate, train = (int(part) for part in options.threads.split(":"))
    job = load_job(options.job, options.set)
    learner = PpoLearner(job, options.model)
    scores = LearnedReward(job) if job.reward.kind == "model" else None
    loop = BareLoop(job, options.model, threads=(generate, train), learner=learner, scores=scores)
    steps = [asdict(loop.step()) | {"kl_per_response": learner.kl_per_response} for _ in range(job.steps)]
    print(json.dumps({"threads": {"generate": generate, "train": train}, "steps": steps}), flush=True)
    return 0


if __name__ == "__main__":
    import sys

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    sys.exit(main(sys.argv[1:]))
