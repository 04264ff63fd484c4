"""Makes a tiny Qwen3 on the spot: its own tokenizer, random weights, a short supervised warm start.

RL needs something to reinforce. The warm start shows the model the task's own answers, and towards its end, for some
prompts, the answer to another one, so that the model answers some right and has something left to learn. A job with an
environment gets another kind of tokenizer, and learns from its environment's examples (``tiny_chat.py``). The output is
an ordinary Hugging Face directory, which the same code reads as any other model. Equal seeds give equal models.

The module runs in its own process (``python -P -m supervisors.preparation.tiny_model ORDER DIRECTORY REPORT``), so that
the head never imports torch. REPORT, a file replaced as a whole, says how many steps of the warm start are done.
"""

from __future__ import annotations

import json
import os
import random
import string
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from actors.environments.prompts.rows import Row
from actors.environments.prompts.sources import open_source, open_sources
from actors.host.parent_death import die_with_parent
from actors.host.whole_file import write_whole
from configs.data_mix import Mix
from configs.model_files import tiny_positions
from configs.schema import JobConfig, ModelConfig
from supervisors.preparation.tiny_chat import Example, example_maker, make_chat_tokenizer

PAD, END = "<pad>", "<end>"
_ROWS_FOR_VOCABULARY = 200
_BATCH = 32
_HEAD_SIZE = 32
"""The smallest head for which vLLM's attention on a CPU has a kernel."""
_INITIAL_SCALE = 0.6
"""Standard deviation of the initial weights, times the root of the hidden size. The usual 0.02 is for models a hundred
times as wide: at this size, the weights would take a third of the warm start to grow."""
_ONE_THREAD_HIDDEN = 192
"""Largest hidden size for which one thread is as fast as several, which would mostly wait for each other, and on a busy
machine much longer than they compute."""
_PEAK_LEARNING_RATE = 3e-3
_BETAS = (0.9, 0.98)
_CLEAN = 0.8
"""Fraction of the warm start that shows right answers only, so that the task is learned before wrong answers come."""
_SHORT = 10
"""Longest warm start, in steps, that begins at the full learning rate."""


_EXPERTS_TAKEN = 2
"""Experts of a token in a model with experts; together they are as wide as a dense layer."""
_NO_LABEL = -100
TinyModel = Qwen3ForCausalLM | Qwen3MoeForCausalLM
Lesson = Callable[[list[Row], float, random.Random], list[Example]]
"""Function of rows, noise and a random generator → an example of each row for the model."""
OnStep = Callable[[int], None]
"""Callback that is told how many steps of the warm start are done."""


def make_tiny_model(job: JobConfig, directory: Path, on_step: OnStep = lambda _: None) -> None:
    """Write the model of ``job.model`` to ``directory``: config, safetensors, tokenizer."""
    if job.model.hidden <= _ONE_THREAD_HIDDEN:
        torch.set_num_threads(1)
    torch.manual_seed(job.seed)
    if job.has_episodes:
        rows, lesson = open_source(job.data, job.seed, tasks=True), _games(job)
        tokenizer = make_chat_tokenizer(_texts(rows, lesson, job.seed))
    else:
        rows, lesson = open_source(job.data, job.seed) if not job.data.mix else _MixedRows(job), _answers(job)
        tokenizer = make_tokenizer(rows, job)
    model = make_model(job.model, tokenizer, positions=tiny_positions(job))
    if lesson is not None:
        _warm_start(model, tokenizer, rows, job, on_step, lesson)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


class Rows(Protocol):
    """The model learns from these rows."""

    def __len__(self) -> int: ...

    def row(self, index: int) -> Row:
        """The row with this index, with prompt and answer."""
        ...


class _MixedRows:
    """Rows of several sources are mixed here by the sources' weights, each prompt in its source's template."""

    def __init__(self, job: JobConfig) -> None:
        self._sources, self._data = list(open_sources(job).values()), list(job.data.sources.values())
        self._mix = Mix.of(job.data, job.seed)

    def __len__(self) -> int:
        return sum(map(len, self._sources))

    def row(self, index: int) -> Row:
        which = self._mix.source_of(index)
        source = self._sources[which]
        row = source.row(self._mix.before(index)[which] % len(source))
        return replace(row, prompt=self._data[which].template.replace("{prompt}", str(row.prompt)))


def make_tokenizer(source: Rows, job: JobConfig) -> PreTrainedTokenizerFast:
    """One token per character that the data uses; the text with which every prompt begins is a single token."""
    rows = [source.row(index) for index in range(min(len(source), _ROWS_FOR_VOCABULARY))]
    texts = [job.data.template.replace("{prompt}", str(row.prompt)) for row in rows]
    characters = set(string.ascii_letters + string.digits + string.punctuation + " \n").union(
        *texts, *(str(row.answer) for row in rows)
    )
    vocabulary = {token: i for i, token in enumerate([PAD, END, "<unk>", *sorted(characters)])}
    core: Any = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))  # noqa: S106 (a token of text, no secret)
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    core.decoder = decoders.Fuse()
    if shared := os.path.commonprefix(texts):
        core.add_tokens([shared])  # an instruction repeated letter by letter would be most of a tiny model's work
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token=PAD, eos_token=END, unk_token="<unk>")  # noqa: S106 (as above)


def make_model(config: ModelConfig, tokenizer: PreTrainedTokenizerFast, positions: int) -> TinyModel:
    """A Qwen3 of ``config.layers`` layers and hidden size ``config.hidden``, randomly initialised."""
    heads = max(1, config.hidden // _HEAD_SIZE)
    shape: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": config.hidden,
        "intermediate_size": config.hidden * 3,
        "num_hidden_layers": config.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // 2),
        "head_dim": _HEAD_SIZE,
        "initializer_range": _INITIAL_SCALE / config.hidden**0.5,
        "max_position_embeddings": positions,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.get_vocab()[str(tokenizer.eos_token)],
        "pad_token_id": tokenizer.get_vocab()[str(tokenizer.pad_token)],
    }
    if not config.experts:
        return Qwen3ForCausalLM(Qwen3Config(**shape))
    taken = min(_EXPERTS_TAKEN, config.experts)
    experts = {
        "num_experts": config.experts,
        "num_experts_per_tok": taken,
        "moe_intermediate_size": config.hidden * 3 // taken,
        "norm_topk_prob": True,
    }
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **experts))


def _warm_start(
    model: TinyModel,
    tokenizer: PreTrainedTokenizerFast,
    source: Rows,
    job: JobConfig,
    on_step: OnStep,
    lesson: Lesson,
) -> None:
    steps = job.model.warm_start_steps
    draw = random.Random(f"headrace warm start {job.seed}")
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=_PEAK_LEARNING_RATE, betas=_BETAS, weight_decay=0.01, fused=True
    )
    rising = 0.1 if steps > _SHORT else 0.0  # a tenth of 10 steps is one, and torch would divide by 0
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, _PEAK_LEARNING_RATE, total_steps=max(steps, 1), pct_start=rising
    )
    model.train()
    for step in range(steps):
        noise = job.model.warm_start_noise if step >= _CLEAN * steps else 0.0
        rows = [source.row(draw.randrange(len(source))) for _ in range(_BATCH)]
        ids, labels = _padded(lesson(rows, noise, draw), tokenizer)
        logits = model(input_ids=ids).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=_NO_LABEL)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        on_step(step + 1)


def _games(job: JobConfig) -> Lesson | None:
    """A lesson that shows the environment's example games; None if it has no examples."""
    if (example := example_maker(job)) is None:
        return None
    return lambda rows, _, draw: [example(row, draw) for row in rows]


def _texts(rows: Rows, lesson: Lesson | None, seed: int) -> list[str]:
    """The texts that the tokenizer is trained on."""
    few = [rows.row(index) for index in range(min(len(rows), _ROWS_FOR_VOCABULARY))]
    if lesson is None:
        return [str(row.prompt) for row in few]
    shown = lesson(few, 0.0, random.Random(f"headrace words {seed}"))
    return ["".join(text for text, _ in example) for example in shown]


def _answers(job: JobConfig) -> Lesson:
    """A lesson that shows each row's prompt and answer, with ``noise`` the probability of another row's answer."""

    def lesson(rows: list[Row], noise: float, draw: random.Random) -> list[Example]:
        answers = [str((row if draw.random() >= noise else draw.choice(rows)).answer) for row in rows]
        prompts = [job.data.template.replace("{prompt}", str(row.prompt)) for row in rows]
        return [[(prompt, False), (answer, True)] for prompt, answer in zip(prompts, answers, strict=True)]

    return lesson


def _padded(examples: list[Example], tokenizer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels, int64[B, T]; labels are -100 on padding and on tokens that the model does not say."""
    rows: list[list[int]] = []
    said: list[list[int]] = []
    for example in examples:
        row: list[int] = []
        labels: list[int] = []
        for text, by_model in example:
            part: list[int] = [*tokenizer(text)["input_ids"], *([tokenizer.eos_token_id] if by_model else [])]
            row += part
            labels += part if by_model else [_NO_LABEL] * len(part)
        rows.append(row)
        said.append(labels)
    width = max(len(row) for row in rows)
    ids = [row + [tokenizer.pad_token_id] * (width - len(row)) for row in rows]
    padded = [row + [_NO_LABEL] * (width - len(row)) for row in said]
    return torch.tensor(ids), torch.tensor(padded)


def _reporter(file: Path, every_s: float) -> OnStep:
    """A callback that writes the steps done to ``file``, replaced as a whole, at most once in ``every_s``."""
    last_s = float("-inf")

    def report(done: int) -> None:
        nonlocal last_s
        if (now_s := time.monotonic()) - last_s >= every_s:
            last_s = now_s
            write_whole(file, json.dumps({"done": done}))

    return report


if __name__ == "__main__":
    die_with_parent()
    _order, _directory, _report = map(Path, sys.argv[1:])
    _job = JobConfig.model_validate_json(_order.read_text())
    make_tiny_model(_job, _directory, _reporter(_report, _job.limits.model_making_look_s))
