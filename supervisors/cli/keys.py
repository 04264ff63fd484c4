"""``headrace keys``: makes key pairs, and says who may connect and what they may do.

headrace keys DIR [--allow …]            pairs of nodes, of control sockets and their clients
headrace keys DIR --tenant, --revoke     keys of programs that ask the server whose --dir is DIR
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from supervisors.cli.command import EXIT_BAD_CONFIG, fail
from transport.errors import HeadraceError

_Entries = list[str] | None


def keys(
    directory: Annotated[
        Path,
        typer.Argument(
            help="Key directory of a node, of a control socket or of a control client; made, with a new pair, if it "
            "is not there. With --tenant or --revoke: the --dir of headrace serve."
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
    tenant: Annotated[
        str | None, typer.Option(metavar="NAME", help="For headrace serve: print a new key of this tenant.")
    ] = None,
    days: Annotated[
        int | None, typer.Option(min=1, max=36500, help="With --tenant: the key is good for so many days.")
    ] = None,
    revoke: Annotated[
        str | None,
        typer.Option(
            metavar="KEY|ID|NAME", help="For headrace serve: make void a key, or all that a tenant has, at once."
        ),
    ] = None,
) -> None:
    """Make keys, show the public one, and choose who may connect."""
    if tenant is not None or revoke is not None or days is not None:
        _of_tenants(directory, tenant, days, revoke, others=bool(allow or read_only or operator or reader))
        return
    try:
        print(_change(directory, allow or [], read_only or [], operator or [], reader or []), flush=True)
    except (HeadraceError, ValueError, OSError) as error:
        fail(str(error), EXIT_BAD_CONFIG)
    print(_summary(directory), file=sys.stderr)


def _of_tenants(directory: Path, tenant: str | None, days: int | None, revoke: str | None, *, others: bool) -> None:
    from actors.tinker.keys import TenantKeys

    try:
        if others or (tenant is None) == (revoke is None) or (days is not None and tenant is None):
            raise ValueError(
                "--tenant NAME makes a key, for a time with --days N, and --revoke ends one: use one of both"
            )
        keys = TenantKeys.of_directory(directory, make=False)
        if tenant is not None:
            key = keys.new(tenant, days=days)
            print(key, flush=True)
            end = f"headrace keys {directory} --revoke {'-'.join(key.split('-')[1:3])}"
            print(f"nothing keeps it but you; this ends it: {end}", file=sys.stderr)
        else:
            ended = keys.revoke(revoke or "")
            print(f"void: {'the key' if '-' in ended else 'all keys so far of'} {ended}", file=sys.stderr)
    except FileNotFoundError:
        fail(
            f"{directory} holds no tinker.key: name the --dir of headrace serve, once that has been started",
            EXIT_BAD_CONFIG,
        )
    except (ValueError, OSError) as error:
        fail(str(error), EXIT_BAD_CONFIG)


def _change(directory: Path, allow: list[str], read_only: list[str], operators: list[Path], readers: list[Path]) -> str:
    from actors.control.keys import allow_client, allow_read_only, make_client
    from transport.zmq import security

    allowed, looking = _entries("--allow", allow), _entries("--read-only", read_only)
    for wanted in (directory, *operators, *readers):
        if wanted.exists() and not wanted.is_dir():
            raise ValueError(f"{wanted} is a file: expected a directory of keys, or a name for a new one")
    if not (directory / "node.secret").exists():
        security.write_keys(security.generate_keys(), directory)
    public = security.load_keys(directory).public.decode()
    for name, key in allowed:
        allow_client(directory, name, key)
    for name, key in looking:
        allow_read_only(directory, name, key)
    for client in operators:
        allow_client(directory, client.resolve().name, make_client(client).public)
    for client in readers:
        allow_read_only(directory, client.resolve().name, make_client(client).public)
    return public


def _entries(option: str, texts: list[str]) -> list[tuple[str, bytes]]:
    for text in texts:
        if not all(text.partition("=")):
            raise ValueError(f"{option} {text}: expected NAME=PUBLIC")
    return [(name, public.encode()) for name, _, public in (text.partition("=") for text in texts)]


def _summary(directory: Path) -> str:
    from actors.control.keys import READ_ONLY_FOLDER, client_names

    allowed, readers = client_names(directory)
    look = f", {len(readers)} may only look ({', '.join(readers)})" if readers else ""
    names = f" ({', '.join(allowed)})" if allowed else ""
    folders = [str(directory / "allowed"), *([str(directory / READ_ONLY_FOLDER)] if readers else [])]
    return (
        f"{len(allowed)} others are allowed{names}{look}; add one with --allow NAME=PUBLIC, "
        f"take one away by removing its file in {' or '.join(folders)}"
    )
