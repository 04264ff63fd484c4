"""Why no reward model comes of preferences.

HeadraceError
└── RewardTrainingError
    ├── CannotTrain       preferences, model or numbers with which nothing can be trained; the message says what to mend
    └── TrainingFailed    it had begun: the loss is no number, or memory is short; with other numbers it may go well
"""

from __future__ import annotations

from transport.errors import HeadraceError


class RewardTrainingError(HeadraceError):
    """No reward model was trained; nothing was written."""

    permanent = True


class CannotTrain(RewardTrainingError):
    """Preferences, model or numbers with which no reward model can be trained; names field, value and what to do."""


class TrainingFailed(RewardTrainingError):
    """The training of a reward model has begun and failed; says at which step, and what to change."""
