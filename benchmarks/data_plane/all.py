"""All benchmarks of the data plane, each short and in a process of its own, as one object under their names.

What a benchmark adds to its command line to be short is its own ``SHORT``. One that fails appears with its error,
and the exit code says so.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Final

from benchmarks._command import Result, command_line
from benchmarks._jobs import BenchmarkFailed, last_line

NAMES: Final = ("ask", "tell", "stream", "tokens", "weights", "delta", "join", "control")
CURVE_NAMES: Final = ("ask", "tell", "stream", "tokens", "weights")
"""Those that take ``--curve``."""
TIMEOUT_S: Final = 300.0


def run(name: str, *, short: bool, curve: bool) -> Result:
    """One benchmark's result; ``{"error": …}`` if it failed."""
    extra = getattr(importlib.import_module(f"benchmarks.data_plane.{name}"), "SHORT", ()) if short else ()
    twice = curve and name in CURVE_NAMES
    command = [sys.executable, "-m", f"benchmarks.data_plane.{name}", "--json", *extra, *(["--curve"] if twice else [])]
    try:
        return json.loads(last_line(command, timeout_s=TIMEOUT_S * (2 if twice else 1)))
    except (BenchmarkFailed, json.JSONDecodeError) as error:
        return {"error": str(error)}


def main(args: list[str]) -> int:
    """Measure and print."""
    parser = command_line("all", __doc__)
    parser.add_argument("--long", action="store_true", help="each as long as when it is run by itself")
    parser.add_argument("--only", default=",".join(NAMES), help="names, with commas")
    parser.add_argument("--curve", action="store_true", help="those that send, with encrypted sockets as well")
    options = parser.parse_args(args)
    wanted = options.only.split(",")
    unknown = [name for name in wanted if name not in NAMES]
    if unknown:
        parser.error(f"--only: there is no {unknown[0]!r}; expected some of {', '.join(NAMES)}")
    found: dict[str, Result] = {}
    for name in [name for name in NAMES if name in wanted]:
        print(f"{name} …", file=sys.stderr)
        found[name] = run(name, short=not options.long, curve=options.curve)
        if not options.json:
            print(f"{name:<8} {json.dumps(found[name])}", flush=True)
    if options.json:
        print(json.dumps(found), flush=True)
    return int(any("error" in result for result in found.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
