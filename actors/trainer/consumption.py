"""Decides when the trainer begins with groups that have arrived: a plan per step, from the job's mode (StreamRL 1.3).

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
"""Chunks of a step. Each micro-batch costs a few milliseconds besides its tokens, so many chunks would be slow."""


@dataclass(frozen=True, slots=True)
class Consumption:
    """Says how the groups of one step are taken together."""

    window_prompts: int
    in_order: bool
    """Whether windows are fixed ranges of prompts; else a window is whatever is there."""
    saturation_tokens: int = 0
    """Tokens that are enough for a window, if not ``in_order``; 0: ``window_prompts`` groups are."""
    is_whole: bool = False
    """Whether the only window is the step, unexpected prompts included: advantages are whitened over all of it, or it
    is cut into minibatches."""


def consumption(job: JobConfig, tokens_before: int, *, pass_tokens: int = 0) -> Consumption:
    """The plan of the next step.

    ``tokens_before``: prompt and response tokens of the step before it, 0 if unknown; ``pass_tokens``: those of a
    micro-batch, 0 if they are as configured.
    """
    mode, configured, whole = job.sync.mode, job.trainer.window_prompts, job.algorithm.prompts_per_step
    if job.algorithm.needs_whole_step:
        return Consumption(whole, in_order=True, is_whole=True)
    chunk = configured or -(-whole // CHUNKS)
    if mode == "async":
        return Consumption(chunk, in_order=False)
    if mode == "dynamic":
        return Consumption(chunk, in_order=False, saturation_tokens=_saturation(job, tokens_before, pass_tokens))
    if mode == "minibatch":
        return Consumption(chunk, in_order=True)
    return Consumption(whole, in_order=True)


def _saturation(job: JobConfig, tokens_before: int, pass_tokens: int) -> int:
    """Tokens that fill the device, or fewer: a threshold near a whole step's tokens would leave nothing to stream."""
    if job.trainer.saturation_tokens:
        return job.trainer.saturation_tokens
    full = pass_tokens or job.trainer.pass_tokens
    return min(full, -(-tokens_before // CHUNKS)) if tokens_before else full
