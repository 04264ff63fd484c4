"""How the threads of torch's own pool wait for each other."""

from __future__ import annotations

import os


def let_waiting_threads_rest() -> None:
    """Make waiting threads sleep. To be called before torch is imported; a value that the user has set stays.

    Threads that spin while they wait take the cores from other processes: on two busy cores a training step with two
    threads took five times as long, and so did generation with a model of 135 million parameters.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
