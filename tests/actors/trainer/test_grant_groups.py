"""Several groups in one message: they come out as they went in, and columns that do not fit are named."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from actors.protocol.groups import GrantGroups, GroupGrant
from actors.trainer.batching import split
from actors.trainer.errors import BadGrant
from tests.actors.trainer.trainer_world import grant, grants, prompts_of


def same(ours: GroupGrant, theirs: GroupGrant) -> bool:
    return all(np.array_equal(getattr(ours, name), getattr(theirs, name)) for name in ours.__struct_fields__)


def test_groups_come_out_of_a_message_as_they_went_in() -> None:
    groups = [grant(3, prompt) for prompt in prompts_of(3)]
    for ours, theirs in zip(split(grants(*groups)), groups, strict=True):
        assert same(ours, theirs)


@pytest.mark.parametrize(
    "column",
    ["prompt_lengths", "prompt_ids", "sizes", "siblings", "lengths", "tokens", "logprobs", "versions", "finished",
     "rewards"],
)  # fmt: skip
def test_a_column_that_does_not_fit_the_others_is_refused(column: str) -> None:
    message = grants(*[grant(0, prompt) for prompt in prompts_of(0)])
    broken = msgspec.structs.replace(message, **{column: getattr(message, column)[:-1]})
    with pytest.raises(BadGrant, match=r"has .* entries, expected"):
        split(broken)


def test_negative_counts_are_refused_although_their_sums_fit() -> None:
    message: GrantGroups = grants(grant(0, 0), grant(0, 1))
    sizes = np.array([len(message.siblings) + 1, -1], np.int32)
    with pytest.raises(BadGrant, match="sizes has a negative entry"):
        split(msgspec.structs.replace(message, sizes=sizes))
