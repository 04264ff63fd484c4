"""``headrace plot RUN_DIR``: pictures of a run, or of what ``simulate --out`` wrote, and one page that holds them all.

RUN_DIR ─▶ read_run    ─▶ draw        ─┬─▶ RUN_DIR/plots/*.png, RUN_DIR/plots/index.html
SIM_DIR ─▶ read_result ─▶ draw_result ─┘
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Final

import typer

from configs.errors import ConfigError
from transport.errors import HeadraceError

EXIT_FAILED: Final = 1
EXIT_BAD_CONFIG: Final = 2


def plot(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Of a run, over or not, or of simulate --out.")],
    out: Annotated[Path | None, typer.Option(help="Where to write. Default: plots in the run directory.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="JSON only on stdout; the last line is the result.")] = False,
) -> None:
    """Draw a run: how busy each process was, response lengths, reward and throughput, as PNG and one HTML page.

    Of a study that varies a parameter (simulate --out): throughput over the plain baseline, point by point.
    """
    from benchmarks.papers.result_data import holds_result, read_result
    from supervisors.cli.plot.page import draw, draw_result
    from supervisors.cli.plot.run_data import read_run

    folder = out or run_dir / "plots"
    try:
        if holds_result(run_dir):
            pictures = draw_result(read_result(run_dir), folder)
        else:
            pictures = draw(read_run(run_dir), folder)
    except ConfigError as error:
        print(f"headrace: {error}", file=sys.stderr, flush=True)
        raise typer.Exit(EXIT_BAD_CONFIG) from error
    except (HeadraceError, OSError) as error:
        print(f"headrace: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        raise typer.Exit(EXIT_FAILED) from error
    page = folder / "index.html"
    if json_:
        print(json.dumps({"page": str(page), "pictures": [str(path) for path in pictures]}), flush=True)
    else:
        print(f"{page}, and {len(pictures)} pictures beside it")
