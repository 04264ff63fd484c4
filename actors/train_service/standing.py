"""How a bundle stands, for the head and its operators: where its state lies, what it has used, what it waits for."""

from __future__ import annotations

from actors.protocol.training import BundleState
from actors.train_service.bundles import Bundle
from actors.train_service.notes import Notes
from actors.train_service.tiers import BundleReport
from actors.train_service.turns import Turns


def bundle_state(bundle: Bundle, place: BundleReport | None, turns: Turns, notes: Notes) -> BundleState:
    """``place``: where its state lies; None: it has none yet."""
    job, times = bundle.job, bundle.times
    return BundleState(
        job=job,
        tier="" if place is None else "memory" if place.tier == "budget" else place.tier,
        state_bytes=0 if place is None else max(place.resident_bytes, place.host_bytes, place.disk_bytes),
        bursts=turns.bursts(job),
        asking_s=turns.asking_s(job),
        waited_s=times.waited_s,
        switch_s=times.switch_s,
        compute_s=times.compute_s,
        isolated=notes.is_isolated(job),
    )
