"""PPO: a critic says what to expect of each token, and the loss is averaged over all tokens of the step.

What is given here for a group are the scores themselves: siblings are not compared. The advantages of their tokens
follow from scores, values and the KL to the reference in ``actors/trainer/ppo.py``.
Source: Schulman et al. 2017 (PPO); for language models Ouyang et al. 2022 (InstructGPT), section 3.5.
"""

from __future__ import annotations

from actors.trainer.advantages import scores
from actors.trainer.algorithms.grpo import tokens_of_step
from actors.trainer.algorithms.rule import Algorithm

PPO = Algorithm(name="ppo", advantages=scores, normaliser=tokens_of_step)
