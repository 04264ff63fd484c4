"""How the threads of torch's own pool wait for each other."""

from __future__ import annotations

import os


def let_waiting_threads_rest() -> None:
    """Call it before torch is imported, when its thread pool reads this. What the user has set stays.

    Threads that spin while they wait take the cores from whoever shares them: on two busy cores a training step with
    two of them took five times as long, and so did generation with a model of 135 million parameters.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
