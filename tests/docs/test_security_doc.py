"""The security guide's table is the one that is obeyed."""

from __future__ import annotations

import re
from pathlib import Path

from actors.core.senders import SenderKind
from actors.protocol.who_may_send import WHO_MAY_SEND

PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "security.md").read_text(encoding="utf-8")
KINDS = {
    "the head": SenderKind.HEAD,
    "the process that keeps the head": SenderKind.MACHINE,
    "a node": SenderKind.AGENT,
    "trainer, weights, rewards, ranker, gateway, environments": SenderKind.SERVICE,
    "a training service": SenderKind.TRAIN_SERVICE,
    "a rollout worker": SenderKind.WORKER,
    "the model server": SenderKind.MODEL_SERVER,
    "a sampler": SenderKind.SAMPLER,
    "a rank of a trainer, a training service or a rollout worker": SenderKind.RANK,
}


def test_the_page_says_what_each_kind_of_peer_may_send() -> None:
    rows = dict(re.findall(r"^\| ([^|]+) \| ([^|]*) \|$", PAGE.split("| peer | may send |")[1], re.MULTILINE))
    for name, kind in KINDS.items():
        told = set(rows[name].split(", "))
        assert told == {tag for tag, kinds in WHO_MAY_SEND.items() if kind in kinds}, name
