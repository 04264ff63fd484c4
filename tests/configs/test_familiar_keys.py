"""Names of other trainers lead to keys that exist, and no key of ours is taken for one of theirs."""

from __future__ import annotations

from configs.familiar_keys import _OURS, key_by_meaning
from configs.loader import schema_keys


def test_every_name_leads_to_a_key_of_the_job_file() -> None:
    known = schema_keys()
    assert [name for name, (ours, _) in _OURS.items() if ours not in known] == []


def test_no_name_is_a_key_of_ours_itself_but_for_one_that_belongs_elsewhere() -> None:
    """``epochs`` in another section is told that it is ``data.epochs``; all others are foreign throughout."""
    ours = {key.rpartition(".")[2] for key in schema_keys()}
    assert {name for name in _OURS if name in ours} == {"epochs"}


def test_a_name_is_said_only_where_our_key_exists() -> None:
    assert key_by_meaning("learning_rate", ["trainer.lr"]) == "Here it is 'trainer.lr'"
    assert key_by_meaning("Warmup_Ratio", schema_keys()) == "Here it is 'trainer.warmup_steps': a number of steps"
    assert key_by_meaning("learning_rate", ["jobs", "faults"]) is None  # a scenario has no such key
    assert key_by_meaning("no such thing", schema_keys()) is None
