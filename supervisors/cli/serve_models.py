"""``headrace serve``: models for programs that train and sample with the client ``tinker``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from supervisors.cli.command import EXIT_BAD_CONFIG, fail, finish


def serve(
    model: Annotated[
        list[str],
        typer.Option(metavar="[NAME=]DIR", help="A base model: a Hugging Face directory. Repeatable."),
    ],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1; 0: any.")] = 8900,
    dir_: Annotated[
        Path, typer.Option("--dir", help="Where operations and saved states are kept; with it, it goes on.")
    ] = Path("served"),
    tenant: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Print a key for this tenant. Repeatable.")
    ] = None,
) -> None:
    """Serve models to programs that use the tinker client, from this process, until stopped."""
    try:
        import tinker as _client  # pyright: ignore[reportMissingImports] - an optional extra  # noqa: F401
    except ImportError:
        fail("headrace serve needs the client's message types: pip install 'headrace[tinker]'", EXIT_BAD_CONFIG)
    from supervisors.serving.local_models import NotServable
    from supervisors.serving.local_server import base_models
    from supervisors.serving.local_server import serve as run

    try:
        bases = base_models(model)
    except NotServable as error:
        fail(str(error), EXIT_BAD_CONFIG)
    finish(lambda: run(dir_, bases, port, tenant or ["me"], lambda line: print(line, flush=True)))
