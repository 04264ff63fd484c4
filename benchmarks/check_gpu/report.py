"""The report of a check, in Markdown: device, driver and versions, each part with its result and figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

from benchmarks.check_gpu.running import Result

_SMALL: Final = "Measurements are of small models and short jobs: they say that it works, and not how fast."


def last_line(results: Mapping[str, Result]) -> str:
    """How many parts came to what."""
    counts = Counter(result.outcome for result in results.values())
    return f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped"


def markdown(facts: Mapping[str, Any], results: Mapping[str, Result], parts: Mapping[str, str], *, device: str) -> str:
    """The whole report; ``parts`` says of each part what it shows."""
    lines = [_title(facts, device), "", *([_SMALL, ""] if device == "cpu" else []), *_machine(facts), ""]
    lines += ["| part | shows that | result | seconds | figures |", "|---|---|---|---|---|"]
    for name, result in results.items():
        lines.append(f"| {name} | {parts[name]} | {result.outcome} | {result.seconds:.0f} | {_figures(result)} |")
    for outcome in ("failed", "skipped"):
        these = {name: result for name, result in results.items() if result.outcome == outcome}
        if these:
            lines += ["", f"## What {'failed' if outcome == 'failed' else 'was skipped, and why'}"]
        for why in dict.fromkeys(result.why for result in these.values()):
            names = ", ".join(name for name, result in these.items() if result.why == why)
            lines += ["", f"**{names}**: {_quoted(why)}"]
    return "\n".join([*lines, "", last_line(results), ""])


def _title(facts: Mapping[str, Any], device: str) -> str:
    if device == "cpu":
        return "# GPU check with the CPU in the device's place: nothing of this has run on a GPU"
    return f"# GPU check: {facts['device']}" if facts.get("device") else "# GPU check: no device could be used"


def _machine(facts: Mapping[str, Any]) -> list[str]:
    told = {name: value for name, value in facts.items() if name not in ("refused", "versions") and value != ""}
    told |= facts.get("versions", {})
    return ["| | |", "|---|---|", *(f"| {name.replace('_', ' ')} | {value} |" for name, value in told.items())]


def _figures(result: Result) -> str:
    return "; ".join(f"{name.replace('_', ' ')} {value}" for name, value in result.figures.items())


def _quoted(why: str) -> str:
    """A sentence as it is, several lines as a block."""
    return why if "\n" not in why else f"\n\n```\n{why}\n```"
