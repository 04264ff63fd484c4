"""The head's keys: who may join as a node, and who may steer. Two directories, two pairs, and no key in both.

Invariants
- A listener that others than this user could reach has keys, or it is refused before anything is written. On loopback
  these are the user's own (``transport/zmq/own_keys.py``) where no directory was named.
- A node's key never steers: a machine that was lent for work does not hold the means to cancel it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from actors.control.keys import ControlKeys, load_control_keys
from actors.control.socket import check_bind
from transport.endpoints import lane_binds
from transport.zmq.security import KeyFileError, NodeKeys, load_keys


@dataclass(frozen=True)
class HeadKeys:
    """The keys of either side; None: that side has Unix sockets only."""

    nodes: NodeKeys | None = None
    control: ControlKeys | None = None


def load_head_keys(nodes: Path | None, control: Path | None) -> HeadKeys:
    """Read both directories, as ``directory_or_own`` has named them.

    Raises:
        KeyFileError: a file is missing or wrong, or a key stands in both.
    """
    keys = HeadKeys(load_keys(nodes) if nodes else None, load_control_keys(control) if control else None)
    if keys.nodes is None or keys.control is None:
        return keys
    of_nodes = keys.nodes.allowed | {keys.nodes.public}
    everybody = keys.control.for_allow_list()
    shared = of_nodes & (everybody.allowed | {everybody.public})
    if shared:
        raise KeyFileError(
            f"{control}: the control socket has keys of its own, and {len(shared)} of its keys "
            f"({min(shared).decode()}) is a node's in {nodes} too; make others with headrace keys"
        )
    return keys


def check_sockets(keys: HeadKeys, *, listen: str | None, control: str | None) -> None:
    """Refuse what binding would refuse later.

    Raises:
        InsecureBind: an endpoint is open to other machines, and there are no keys for it; says what to do.
        ValueError: an endpoint is malformed.
    """
    if listen is not None and not listen.startswith("ipc://"):  # for ipc it would make the directory
        lane_binds(listen, secure=keys.nodes is not None)
    if control is not None:
        check_bind(control, keys.control)
