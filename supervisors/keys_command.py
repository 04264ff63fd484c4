"""``headrace keys``: makes key pairs, and says who may connect and what they may do."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from transport.errors import HeadraceError

_EXIT_WRONG: Final = 2
_Entries = list[str] | None


def keys(
    directory: Annotated[
        Path,
        typer.Argument(
            help="Key directory of a node, of a control socket or of a control client; made, with a new pair, if it "
            "is not there."
        ),
    ],
    allow: Annotated[_Entries, typer.Option(metavar="NAME=PUBLIC", help="Let whoever has this key connect.")] = None,
    read_only: Annotated[
        _Entries, typer.Option(metavar="NAME=PUBLIC", help="For a control socket: let this key look, not touch.")
    ] = None,
    operator: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="CLIENT_DIR", help="For a control socket: make a client's pair there, which may do everything."
        ),
    ] = None,
    reader: Annotated[
        list[Path] | None,
        typer.Option(metavar="CLIENT_DIR", help="For a control socket: make a client's pair there, which may look."),
    ] = None,
) -> None:
    """Make keys, show the public one, and choose who may connect."""
    try:
        print(_change(directory, allow or [], read_only or [], operator or [], reader or []), flush=True)
    except (HeadraceError, ValueError, OSError) as error:
        print(f"headrace: {error}", file=sys.stderr, flush=True)
        raise typer.Exit(_EXIT_WRONG) from None
    print(_summary(directory), file=sys.stderr)


def _change(directory: Path, allow: list[str], read_only: list[str], operators: list[Path], readers: list[Path]) -> str:
    from actors.control.keys import allow_client, allow_read_only, make_client
    from transport import security

    if not (directory / "node.secret").exists():
        security.write_keys(security.generate_keys(), directory)
    public = security.load_keys(directory).public.decode()
    for name, key in map(_entry, allow):
        allow_client(directory, name, key)
    for name, key in map(_entry, read_only):
        allow_read_only(directory, name, key)
    for client in operators:
        allow_client(directory, client.resolve().name, make_client(client).public)
    for client in readers:
        allow_read_only(directory, client.resolve().name, make_client(client).public)
    return public


def _entry(text: str) -> tuple[str, bytes]:
    name, _, public = text.partition("=")
    return name, public.encode()


def _summary(directory: Path) -> str:
    from actors.control.keys import client_names

    allowed, readers = client_names(directory)
    look = f", {len(readers)} may only look ({', '.join(readers)})" if readers else ""
    names = f" ({', '.join(allowed)})" if allowed else ""
    return (
        f"{len(allowed)} others are allowed{names}{look}; add one with --allow NAME=PUBLIC, "
        f"take one away by removing its file in {directory}"
    )


def register(app: Any) -> None:
    """Add the command to ``app``."""
    app.command()(keys)
