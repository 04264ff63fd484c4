"""What the command line calls of the studies: one is run, and what it left is drawn.

    headrace simulate configs/papers/X.yaml --out DIR ─▶ simulate_paper ─▶ claims beside our numbers, DIR/result.json
    headrace plot DIR ─▶ holds_result, draw_result ─▶ DIR/plots/curves.png, DIR/plots/index.html

The product imports nothing of ``benchmarks``. Its command line loads this module by name from the folder beside it, as
``headrace bench`` does; where that folder is not, there are no studies.
"""

from __future__ import annotations

from pathlib import Path

from actors.core.strict_json import strict_json
from benchmarks.papers.result_data import holds_result, read_result
from benchmarks.papers.scenario import is_paper_scenario, load_paper_scenario
from configs.errors import ConfigError, Problem

__all__ = ["draw_result", "holds_result", "is_paper_scenario", "simulate_paper"]


def simulate_paper(path: Path, seed: int | None, out: Path | None, *, json_: bool) -> int:
    """Run the study in the file at ``path`` and print its claims; returns the exit code.

    Raises:
        ConfigError: the file does not fit, or ``out`` cannot be written.
    """
    from benchmarks.papers.claims import run_paper, table

    result = run_paper(load_paper_scenario(path), seed)
    if out is not None:
        try:
            result.write(out)
        except OSError as error:
            problem = Problem(f"--out {out}", "", f"cannot be written: {error}", "Name a directory that can be")
            raise ConfigError([problem]) from error
    print(strict_json(result.as_map()) if json_ else table(result), flush=True)
    return 0


def draw_result(directory: Path, folder: Path, below: Path | None = None) -> list[Path]:
    """Draw what a study left in ``directory``: pictures and one page, written into ``folder``; returns the pictures.

    Raises:
        ConfigError: its file is damaged, the study varied nothing, or ``folder`` leads out of ``below``.
        OSError: ``folder`` cannot be written.
    """
    from actors.host.plain_file import folder_to_write, put
    from benchmarks.papers.sweep_figures import curves
    from supervisors.cli.console.export import page_file
    from supervisors.cli.plot.figures import png

    data = read_result(directory)
    picture = png(curves(data.sweep))
    facts = [("claims within tolerance", f"{data.within} of {data.claims}"), ("varied", data.sweep.parameter)]
    with folder_to_write(folder, below=below) as opened:
        put(opened, "curves.png", picture)
        put(opened, "index.html", page_file(data.name, facts, {"curves": (picture, "")}).encode())
    return [folder / "curves.png"]
