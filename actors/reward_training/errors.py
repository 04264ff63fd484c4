"""Why the training of a reward model fails.

HeadraceError
└── RewardTrainingError
    ├── CannotTrain       preferences, model or settings do not allow a training; the message says what to mend
    └── TrainingFailed    after the start: the loss is not finite, or memory is short; other settings may help
"""

from __future__ import annotations

from transport.errors import HeadraceError


class RewardTrainingError(HeadraceError):
    """No reward model was trained; nothing was written."""

    permanent = True


class CannotTrain(RewardTrainingError):
    """Preferences, model or settings do not allow a training; the message names field, value and what to do."""


class TrainingFailed(RewardTrainingError):
    """The training has begun and failed; the message says what to change."""
