"""Samples as the reward worker shows them."""

from __future__ import annotations

from actors.protocol.metrics import ShownSample, ShownTurn


def shown(step: int, *turns: ShownTurn) -> ShownSample:
    return ShownSample(
        step=step, chosen="best", prompt=7, sibling=1, source="", row=3, reward=0.5, reward_parts={"right": 1.0},
        finish="ended", tokens=4, versions=[2, 3], reason="", prompt_text="2+2=", turns=list(turns), answer="4",
    )  # fmt: skip
