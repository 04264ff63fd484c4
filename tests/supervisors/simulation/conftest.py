"""What holds in every simulation: nothing is refused that the product's own processes say to each other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from actors.core.kernel.answers import Refusal
from actors.core.kernel.inbound import Inbound
from transport.address import PeerId


@pytest.fixture(autouse=True)
def nothing_is_forbidden(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    refused: list[str] = []
    forbid = Inbound._forbid

    def noted(self: Inbound, peer: PeerId, why: str) -> Refusal:
        refused.append(why)
        return forbid(self, peer, why)

    monkeypatch.setattr(Inbound, "_forbid", noted)
    yield
    assert refused == []
