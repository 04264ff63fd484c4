"""What the page shows, as pure functions: rows, spans, events and samples in, plain values out.

metrics.jsonl ─▶ step_values, progress      trace.json ─▶ lanes, rates      events.jsonl ─▶ told, Workers
samples.jsonl ─▶ sample_card
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, cast

from actors.core.terminal_text import shortened
from actors.metrics.samples import titled
from supervisors.cli.plot.run_data import BESIDE, BUBBLES, Bar, busy_fraction, lane_order, presence

Plain = dict[str, Any]

COLUMNS: Final = (
    "step", "seconds", "reward_mean", "reward_std", "tokens_per_s", "samples_per_s", "samples", "samples_dropped",
    "response_tokens_mean", "response_tokens_max", "truncated_fraction", "loss", "kl", "entropy", "grad_norm",
    "learning_rate", "clip_fraction", "degenerate_fraction", "engine_mismatch", "stale_mismatch",
    "rollout_idle_fraction", "trainer_idle_fraction", "staleness_max", "policy_version", "update_skipped", "restarts",
    "samples_migrated", "prompts_lost", "samples_trained_twice", "cost",
)  # fmt: skip
"""Columns of ``metrics.jsonl`` that the page always gets, and two computed from others; more come behind these."""
_MORE_COLUMNS_MAX: Final = 200
_DIGITS: Final = 6
_ETA_STEPS: Final = 20
"""Newest steps, by whose mean duration the rest of the run is estimated."""
_RATE_S: Final = 10.0
"""Seconds over which a worker's token rate is averaged."""
_NEIGHBOURS_S: Final = 0.002
"""Gap in seconds below which two spans of one activity are joined."""


def more_columns(rows: Iterable[Mapping[str, Any]], known: Sequence[str]) -> list[str]:
    """Columns of ``rows`` with numbers that are not ``known``, by name."""
    found = {name for row in rows for name, value in row.items() if _number(value) is not None} - {*known}
    return sorted(found)[: len(COLUMNS) + _MORE_COLUMNS_MAX - len(known)]


def step_values(row: Mapping[str, Any], columns: Sequence[str] = COLUMNS) -> list[float | None]:
    """The values of ``columns``; None where a row has no such number."""
    seconds = _number(row.get("seconds")) or 0.0
    more = {
        f"{what}_per_s": (_number(row.get(column)) or 0.0) / seconds if seconds > 0 else None
        for what, column in (("tokens", "tokens_generated"), ("samples", "samples"))
    }
    return [_short(_number(more[name] if name in more else row.get(name))) for name in columns]


def progress(values: Sequence[Sequence[float | None]], steps: int | None) -> Plain:
    """How far the run is, and in how many seconds it is over if steps keep their recent pace."""
    if not values:
        return {"step": 0, "steps": steps, "eta_s": None}
    newest = dict(zip(COLUMNS, values[-1], strict=False))
    done = int(newest["step"] or 0) + 1
    recent = [seconds for row in values[-_ETA_STEPS:] if (seconds := row[1]) is not None]
    left = max(0, steps - done) if steps else None
    return {
        "step": done,
        "steps": steps,
        "eta_s": left * sum(recent) / len(recent) if recent and left is not None else None,
        **{name: newest[name] for name in ("policy_version", "staleness_max", "restarts", "samples_dropped")},
        **{name: newest[name] for name in ("prompts_lost", "samples_trained_twice")},
    }


class Activity(NamedTuple):
    """One activity of one process, in wall-clock seconds."""

    lane: str
    name: str
    start_s: float
    end_s: float
    args: Mapping[str, Any]


_ARGS: Final = ("step", "version", "missing", "tokens", "running", "queued")


def plain_args(args: object) -> dict[str, float]:
    """What the page shows of a span's arguments: numbers alone."""
    given = cast("dict[str, object]", args) if isinstance(args, dict) else {}
    return {name: value for name in _ARGS if isinstance(value := given.get(name), int | float)}


def lanes(spans: Sequence[Activity], version_at: Callable[[str, float], int | None], steps: int, bars: int) -> Plain:
    """The bars of the last ``steps`` steps, at most ``bars`` of them, lane by lane, in seconds since the first of them.

    A bar is [activity, start, end, step, version, what is missing]. Its step is the one that the trainer had open when
    it began. ``version_at`` gives the version that a worker served then.
    """
    if not spans:
        return {"origin_s": 0.0, "end_s": 0.0, "lanes": [], "steps": []}
    opened = _steps_opened(spans)
    begin = opened[-steps][0] if len(opened) >= steps else spans[0].start_s
    shown = sorted((span for span in spans if span.end_s > begin), key=lambda span: span.start_s)[-bars:]
    origin = max(begin, shown[0].start_s)
    end = max(span.end_s for span in shown)
    starts = [start for start, _ in opened]

    def step_at(second: float) -> int | None:
        place = bisect.bisect_right(starts, second) - 1
        return opened[place][1] if place >= 0 else None

    found: dict[str, list[list[Any]]] = {}
    for span in shown:
        step, version = span.args.get("step", step_at(span.start_s)), span.args.get("version")
        if version is None:
            version = version_at(span.lane, span.start_s)
        start, stop = max(0.0, span.start_s - origin), span.end_s - origin
        bar = [span.name, round(start, 4), round(stop, 4), step, version, span.args.get("missing")]
        _append(found.setdefault(span.lane, []), bar)
    return {
        "origin_s": origin,
        "end_s": round(end - origin, 4),
        "lanes": [
            {"name": lane, "bars": found[lane], **_shares(found[lane])} for lane in sorted(found, key=lane_order)
        ],
        "steps": [[step, round(start - origin, 4)] for start, step in opened if start >= origin],
    }


def _append(bars: list[list[Any]], bar: list[Any]) -> None:
    """Add ``bar``, or lengthen the one before if it continues the same activity, step and version."""
    last = bars[-1] if bars else None
    if last and last[0] == bar[0] and last[3:] == bar[3:] and bar[1] - last[2] < _NEIGHBOURS_S:
        last[2] = max(last[2], bar[2])
    else:
        bars.append(bar)


def _steps_opened(spans: Iterable[Activity]) -> list[tuple[float, int]]:
    """Start of the trainer's first span of each step, with the step; ascending."""
    opened: dict[int, float] = {}
    for span in spans:
        step = span.args.get("step")
        if span.lane == "trainer" and span.name in ("wait", "train") and isinstance(step, int):
            opened[step] = min(opened.get(step, span.start_s), span.start_s)
    return sorted((start, step) for step, start in opened.items())


def _shares(bars: list[list[Any]]) -> Plain:
    """Busy share and number of bubbles while the process was there, and the gaps in which it was not."""
    plain = [Bar(name, start, end) for name, start, end, *_ in bars]
    there_s = sum(end - start for start, end in presence(plain))
    busy_s = sum(busy_fraction(plain, start, end) * (end - start) for start, end in presence(plain))
    asleep_s = sum(bar.end_s - bar.start_s for bar in plain if bar.name == "asleep")
    return {
        "busy": _short((busy_s - asleep_s) / there_s) if there_s > 0 else None,
        "bubbles": sum(bar.name in BUBBLES for bar in plain),
        "gaps": [[round(a[1], 4), round(b[0], 4)] for a, b in itertools.pairwise(presence(plain))],
    }


def rates(spans: Sequence[Activity]) -> dict[str, Plain]:
    """Worker → its recent tokens per second, and how many samples it runs and has queued."""
    newest = max((span.end_s for span in spans), default=0.0)
    found: dict[str, Plain] = {}
    for span in spans:
        if "tokens" not in span.args or span.name in BESIDE:
            continue
        worker = found.setdefault(span.lane, {"tokens_per_s": 0.0, "running": 0, "queued": 0})
        worker["running"], worker["queued"] = span.args.get("running"), span.args.get("queued")
        if span.end_s > newest - _RATE_S and span.end_s > span.start_s:
            inside = (span.end_s - max(span.start_s, newest - _RATE_S)) / (span.end_s - span.start_s)
            worker["tokens_per_s"] += float(span.args["tokens"]) * inside / _RATE_S
    return found


class EventEntry(NamedTuple):
    """An event as people read it."""

    level: str
    """Level: ``bad`` needs a person, ``warn`` was recovered from at some cost, ``note`` is normal."""
    text: str
    kind: str
    """Kind; entries of equal kind in a row become one with a count."""


_QUIET: Final = frozenset([
    "worker_version", "version_available", "process_health", "asks_counted", "service_registered", "worker_began",
    "child_stopped", "child_started", "child_adopted", "samples_balanced", "samples_taken_up", "samples_returned",
    "capacity_target", "seeding_window", "step_planned", "samples_cut", "worker_released", "worker_woken",
    "faults_started", "devices_given",
])  # fmt: skip
_BAD: Final = frozenset([
    "child_gave_up", "child_start_failed", "commit_refused", "delta_refused", "assignments_broken",
    "trouble", "fault_failed",
])  # fmt: skip
_NOTE: Final = frozenset([
    "job_state", "checkpoint_stored", "worker_registered", "scheduler_opened", "progress_resumed", "pool_resized",
    "samples_reassigned", "node_joined", "node_left", "fault_healed", "data_ended", "ranker_refreshed",
    "worker_went_on", "worker_leaving", "samples_taken_back", "lengths_without_history", "replicas_placed",
    "worker_draining", "environment_registered", "evaluation_began", "evaluation_ended", "data_replaced",
    "trainer_ran_dry", "engine_stays_awake",
])  # fmt: skip
_ENDS: Final = frozenset(["child_exited", "child_ended", "service_down", "worker_down", "environment_lost"])
_ENDS_WELL: Final = frozenset(["stopped", "completed"])
_SUBJECTS: Final = ("worker", "child", "node", "process", "asker", "role")
_LEFT_OUT: Final = frozenset(["time_s", "job", "event", "incarnation", "at_s", "supervisor", "count", *_SUBJECTS])


def told(event: Mapping[str, Any], *, over: bool = False) -> EventEntry | None:
    """``event`` as an entry of the list; None if it belongs to the ordinary course of each step, or of a job's end.

    ``over``: whether the job has ended, so that its processes end, too.
    """
    name = str(event.get("event", ""))
    ends_well = over or str(event.get("reason", event.get("cause"))) in _ENDS_WELL
    if name in _QUIET or (ends_well and name in _ENDS):
        return None
    if name == "trouble":
        return EventEntry("bad", str(event.get("message", "")), f"trouble {event.get('kind')}")
    level = "bad" if name in _BAD else "note" if name in _NOTE else "warn"
    if name == "job_state":
        level = "bad" if event.get("state") == "failed" else "note"
        reason = f": {event['reason']}" if event.get("reason") else ""
        return EventEntry(level, f"the job is {event.get('state')}{reason}", f"job_state {event.get('state')}")
    subject = next((str(event[key]) for key in _SUBJECTS if event.get(key)), "")
    rest = [
        _value(value) if key in ("state", "detail", "why", "cause") else _named(key, value)
        for key, value in event.items()
        if key not in _LEFT_OUT and value not in ("", None)
    ]
    words = " ".join(part for part in (name.replace("_", " "), subject) if part)
    return EventEntry(
        level, f"{words}: {', '.join(rest)}" if rest else words, f"{name} {subject} {event.get('why', '')}"
    )


def _named(key: str, value: object) -> str:
    """``after_s``, 2.5 becomes "after 2.5 s"."""
    name, _, unit = key.rpartition("_")
    words = key.replace("_", " ")
    return f"{name.replace('_', ' ')} {_value(value)} s" if unit == "s" and name else f"{words} {_value(value)}"


def _value(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


class Workers:
    """Follows rollout workers through events: what each serves, where it runs, how often it was started again."""

    def __init__(self, versions_kept: int) -> None:
        self._versions_kept = versions_kept
        self._known: dict[str, Plain] = {}
        self._served: dict[str, tuple[list[float], list[int]]] = {}

    def hear(self, event: Mapping[str, Any], *, over: bool = False) -> None:
        """Take in one event. ``over``: whether the job has ended, so that its workers end, too."""
        name, worker = event.get("event"), event.get("worker") or event.get("child")
        if name == "child_restarting" and worker in self._known:
            self._known[worker]["restarts"] += 1
            self._known[worker]["state"] = "starting"
        if not isinstance(event.get("worker"), str):
            return
        known = self._known.setdefault(
            str(worker), {"name": worker, "state": "", "version": None, "node": "", "restarts": 0, "why": ""}
        )
        if name == "worker_registered":
            known |= {"state": "running", "node": event.get("node", ""), "slots": event.get("slots"), "why": ""}
        elif name == "worker_version":
            known["version"] = event.get("version")
            times, versions = self._served.setdefault(str(worker), ([], []))
            times.append(float(event.get("time_s", 0.0)))
            versions.append(int(event.get("version", 0)))
            if len(times) > self._versions_kept:
                del times[0], versions[0]
        elif name in ("worker_down", "worker_crashed", "worker_lease_lapsed"):
            ended = over or event.get("reason") in _ENDS_WELL
            known |= {"state": "ended" if ended else "lost", "why": str(event.get("detail", ""))}
        elif name in ("worker_leaving", "worker_draining"):
            known |= {"state": "leaving", "why": str(event.get("why", ""))}

    def version_at(self, worker: str, second: float) -> int | None:
        """Version that ``worker`` served at ``second``; None if it is not known."""
        times, versions = self._served.get(worker, ([], []))
        place = bisect.bisect_right(times, second) - 1
        return versions[place] if place >= 0 else None

    def table(self, spans: Sequence[Activity], tree: Iterable[Mapping[str, Any]] = ()) -> list[Plain]:
        """One row per worker. ``tree``, the processes that the running system lists, overrides the events."""
        seen = {str(row["name"]): row for row in tree if row.get("role") == "rollout"}
        lately = rates(spans)
        rows: list[Plain] = []
        for name in sorted({*self._known, *seen}, key=lane_order):
            row = {"name": name, "restarts": 0, **self._known.get(name, {})}
            if name in seen:
                row |= {key: seen[name].get(key) for key in ("state", "pid", "node", "restarts")}
            working = row.get("state") not in ("ended", "lost")
            rows.append(row | (lately.get(name, {}) if working else {}))
        return rows


def sample_card(row: Mapping[str, Any], chars: int) -> Plain:
    """A line of ``samples.jsonl``; prompt, answer and all turns together have about ``chars`` characters at most."""
    card = {
        key: row.get(key) for key in ("chosen", "step", "prompt", "sibling", "reward", "finish", "tokens", "reason")
    }
    texts = {key: shortened(str(row.get(key) or ""), chars) for key in ("prompt_text", "answer")}
    turns: list[Plain] = row.get("turns") or []
    said = [
        {"role": turn["role"], "title": title, "text": text}
        for turn, (title, text) in zip(turns, titled(turns, chars), strict=True)
    ]
    return card | texts | {"turns": said}


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.{_DIGITS}g}")
