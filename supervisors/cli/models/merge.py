"""``headrace merge``: makes a whole model of an adapter and the model that it was trained on."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from actors.core.strict_json import strict_json
from supervisors.cli.command import EXIT_BAD_CONFIG, EXIT_FAILED, Json, fail


def merge(
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="A checkpoint of a job with model.adapter.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Directory to write; it may not exist yet.")],
    base: Annotated[
        Path | None, typer.Option(help="The model that it was trained on, if that lies elsewhere by now.")
    ] = None,
    json_: Json = False,
) -> None:
    """Make a whole Hugging Face model of an adapter (LoRA)."""
    if out.exists():
        fail(f"OUT {out}: something is there already; name another directory, or remove it", EXIT_BAD_CONFIG)
    began_s = time.monotonic()
    from actors.host.import_guard import hide_broken_optionals

    hide_broken_optionals()
    from actors.trainer.backends.torch.merging import merge as merged
    from actors.trainer.errors import CannotMerge
    from transport.errors import HeadraceError

    try:
        result = merged(checkpoint, out, base)
    except CannotMerge as error:
        fail(str(error), EXIT_BAD_CONFIG)
    except (HeadraceError, OSError) as error:
        fail(f"{type(error).__name__}: {error}", EXIT_FAILED)
    if json_:
        print(strict_json(result | {"seconds": round(time.monotonic() - began_s, 2)}), flush=True)
    else:
        print(f"{result['path']}: {result['base']} with the adapter of {result['layers']} layers merged in")
