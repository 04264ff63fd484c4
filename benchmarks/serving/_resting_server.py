"""``headrace serve`` whose idle models go to rest at once, for measurements of those: no option says when they do."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from configs.limits import DEFAULT_LIMITS
from supervisors.serving.local_server import base_models, serve

IDLE_S = 2.0

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    parser.add_argument("--dir", type=Path)
    parser.add_argument("--port", type=int)
    parser.add_argument("--tenant", action="append")
    options = parser.parse_args()
    limits = DEFAULT_LIMITS.model_copy(update={"tinker_idle_s": IDLE_S})
    asyncio.run(
        serve(
            options.dir, base_models([options.model]), options.port, options.tenant,
            lambda line: print(line, flush=True), limits=limits,
        )
    )  # fmt: skip
