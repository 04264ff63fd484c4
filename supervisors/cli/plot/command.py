"""``headrace plot RUN_DIR``: pictures of a run, or of what ``simulate --out`` wrote, and one page that holds them all.

RUN_DIR ─▶ read_run ─▶ draw                  ─┬─▶ RUN_DIR/plots/*.png, RUN_DIR/plots/index.html
DIR of several jobs ─▶ read_services ─▶ draw: a lane for each job of each training service
SIM_DIR ─▶ benchmarks/papers ─▶ draw_result ─┘
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Final

import typer

from configs.errors import ConfigError
from supervisors.cli.bench import papers
from supervisors.cli.command import EXIT_BAD_CONFIG, EXIT_FAILED, Json, fail
from transport.errors import HeadraceError

STUDY: Final = "result.json"
"""Name of the file that ``simulate --out`` writes of a study, and that no run has."""


def plot(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Of a run, over or not, or of simulate --out.")],
    out: Annotated[Path | None, typer.Option(help="Where to write. Default: plots in the run directory.")] = None,
    json_: Json = False,
) -> None:
    """Draw a run: how busy each process was, response lengths, reward and throughput, as PNG and one HTML page.

    Of the directory of several jobs: their bursts, waits and switches on the training services that they share.

    Of a study that varies a parameter (simulate --out): throughput over the plain baseline, point by point.
    """
    from supervisors.cli.plot.page import draw
    from supervisors.cli.plot.run_data import read_run, read_services
    from supervisors.cli.run_several import is_several

    folder = out or run_dir / "plots"
    try:
        if (run_dir / STUDY).is_file():
            pictures = papers(f"headrace plot {run_dir}").draw_result(run_dir, folder)
        else:
            pictures = draw(read_services(run_dir) if is_several(run_dir) else read_run(run_dir), folder)
    except ConfigError as error:
        fail(str(error), EXIT_BAD_CONFIG)
    except (HeadraceError, OSError) as error:
        fail(f"{type(error).__name__}: {error}", EXIT_FAILED)
    page = folder / "index.html"
    if json_:
        print(json.dumps({"page": str(page), "pictures": [str(path) for path in pictures]}), flush=True)
    else:
        print(f"{page}, and {len(pictures)} pictures beside it")
