"""When does the trainer begin with what has arrived? One plan per step, from the job's mode (StreamRL 1.3).

    mode               trains                                               gradient sums
    sync               once, when all of the step is there                  bit for bit the same in every run
    minibatch          in fixed chunks of prompts, in prompt order          bit for bit the same
    one_step_barrier   once; the scheduler sends nothing earlier            bit for bit the same, given the samples
    dynamic            what has arrived, once it holds enough tokens        the same but for rounding
    async              what has arrived, once it is enough prompts          the same but for rounding
    any, with a rule   once, when nothing more will come                    bit for bit the same, given the samples;
    that whitens, or                                                        in async with ``trainer.score_early`` but
    several updates                                                         for rounding of the KL

In all of them a step is exactly its samples: the plan decides what is computed together, never what is learned from.
"""

from __future__ import annotations

from dataclasses import dataclass

from configs.schema import JobConfig

CHUNKS = 4
"""Each micro-batch costs a few milliseconds beside its tokens: a handful of chunks streams, many would crawl."""


@dataclass(frozen=True, slots=True)
class Consumption:
    """Says how the groups of one step are taken together."""

    window_prompts: int
    in_order: bool
    """Windows are fixed ranges of prompts; else a window is whatever is there."""
    saturation_tokens: int = 0
    """Not in order: this many tokens are enough for a window, instead of ``window_prompts`` groups; 0: groups count."""
    is_whole: bool = False
    """The only window is the step, prompts that nobody expected included: advantages are whitened over all of it, or it
    is cut into minibatches."""


def consumption(job: JobConfig, tokens_before: int) -> Consumption:
    """The plan of the next step. ``tokens_before``: prompt and response tokens of the step before it, 0 if unknown."""
    mode, configured, whole = job.sync.mode, job.trainer.window_prompts, job.algorithm.prompts_per_step
    if job.algorithm.needs_whole_step:
        return Consumption(whole, in_order=True, is_whole=True)
    chunk = configured or -(-whole // CHUNKS)
    if mode == "async":
        return Consumption(chunk, in_order=False)
    if mode == "dynamic":
        return Consumption(chunk, in_order=False, saturation_tokens=_saturation(job, tokens_before))
    if mode == "minibatch":
        return Consumption(chunk, in_order=True)
    return Consumption(whole, in_order=True)


def _saturation(job: JobConfig, tokens_before: int) -> int:
    """Tokens that fill the device; a threshold near a whole step's tokens would be no streaming at all."""
    if job.trainer.saturation_tokens:
        return job.trainer.saturation_tokens
    full = job.trainer.pass_tokens
    return min(full, -(-tokens_before // CHUNKS)) if tokens_before else full
