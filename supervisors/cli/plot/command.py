"""``headrace plot RUN_DIR``: pictures of a run, or of what ``simulate --out`` wrote, and one page that holds them all.

RUN_DIR ─▶ read_run ─▶ draw ───────────────────────┬─▶ plots/*.png, plots/index.html, in the directory that was named
DIR of several jobs ─▶ read_services ─▶ draw ──────┤   (of several jobs: a lane for each job of each training service)
SIM_DIR ─▶ benchmarks/papers ─▶ draw_result ───────┘
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from actors.core.strict_json import strict_json
from configs.errors import ConfigError
from supervisors.cli.bench import papers
from supervisors.cli.command import EXIT_BAD_CONFIG, EXIT_FAILED, Json, fail
from transport.errors import HeadraceError

STUDY: Final = "result.json"
"""Name of the file that ``simulate --out`` writes of a study, and that no run has."""


def plot(
    run_dir: Annotated[
        Path, typer.Argument(metavar="RUN_DIR", help="Directory of a run, which may still go on, or of simulate --out.")
    ],
    out: Annotated[Path | None, typer.Option(help="Where to write. Default: plots in the run directory.")] = None,
    json_: Json = False,
) -> None:
    """Draw a run: how busy each process was, response lengths, reward and throughput, as PNG and one HTML page.

    Of the directory of several jobs: their bursts, waits and switches on the training services that they share.

    Of a study that varies a parameter (simulate --out): throughput over the plain baseline, point by point.
    """
    from supervisors.cli.plot.page import draw
    from supervisors.cli.plot.run_data import read_run, read_services
    from supervisors.cli.running.run import is_several

    folder, below = (out, None) if out is not None else (run_dir / "plots", run_dir)
    try:
        if (run_dir / STUDY).is_file():
            pictures = papers(f"headrace plot {run_dir}").draw_result(run_dir, folder, below)
        else:
            data = read_services(run_dir) if is_several(run_dir) else read_run(run_dir)
            pictures = draw(data, folder, below=below)
    except ConfigError as error:
        fail(str(error), EXIT_BAD_CONFIG)
    except (HeadraceError, OSError) as error:
        fail(f"{type(error).__name__}: {error}", EXIT_FAILED)
    page = folder / "index.html"
    if json_:
        print(strict_json({"page": str(page), "pictures": [str(path) for path in pictures]}), flush=True)
    else:
        print(f"{page}, and {len(pictures)} pictures beside it")
