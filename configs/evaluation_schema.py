"""Held-out evaluation: the section ``eval`` of a job file.

    data          prompts that are not trained on, in any form that the section ``data`` takes
    every         at the start, after every so many steps, and at the end
    samples, …    how responses are drawn; all else is as in ``rollout``

Code that reads or scores evaluation prompts uses ``JobConfig.evaluation``: the job with these prompts as its data.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from configs.section import PositiveInt, Section
from configs.task_schema import DataConfig

SEED_OFFSET = 1_000_000_007
"""Number added to the job's seed, so that an evaluation's generated tasks and sampling differ from training's."""
_PREFIX = "eval."


class EvaluationConfig(Section):
    """How the policy is measured on prompts that it is not trained on."""

    data: DataConfig
    """Prompts of the evaluation, in the same forms as the job's ``data``. They are read once; with ``mix`` they
    alternate by weight until one source is through."""
    every: PositiveInt = 50
    """Steps between evaluations. There is one before the first step and one after the last in any case."""
    prompts: PositiveInt | None = None
    """Prompts at most, the first ones in the order of ``data``. Unset: all, up to ``limits.evaluation_prompts``."""
    samples: PositiveInt = 1
    """Responses to each prompt: the k of avg@k, and the largest k of pass@k."""
    temperature: Annotated[float, Field(ge=0)] = 1.0
    """Sampling temperature; 0: always the likeliest token, which needs ``samples: 1``."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Tokens are drawn from the likeliest ones that together have this probability. 1: from all."""
    max_tokens: PositiveInt | None = None
    """Response length limit. Unset: ``rollout.max_tokens``."""
    pass_reward: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    """A response passes, for pass@k, if its reward is at least this."""
    wait: bool = True
    """On-policy modes: workers load the next version only once the evaluation is through, so that all of its samples
    are of one version; training waits if they take longer than the trainer's step. False: training does not wait, and
    what is left is drawn from newer versions, as in the modes that run ahead; the row says which."""
    only: bool = False
    """Evaluate ``model.path`` as it is and train nothing: what ``headrace eval`` does."""

    @property
    def sources(self) -> dict[str, DataConfig]:
        """Each source of the evaluation, by a name that no source of the training data can have."""
        once = self.data.model_copy(update={"epochs": 1})
        return {_PREFIX + (name or "data"): data for name, data in once.sources.items()}
