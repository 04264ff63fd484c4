"""Versions as a server maps them: once, and in the pages that were prepared for them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from actors.weights.mapped import MappedVersions

NEWEST, NEXT = "headrace-ab-v1", "headrace-ab-v2"


def inode(path: Path) -> int:
    return path.stat().st_ino


@pytest.fixture
def newest(tmp_path: Path) -> Path:
    path = tmp_path / NEWEST
    path.write_bytes(b"1" * 4096)
    return path


@pytest.fixture
def spare(tmp_path: Path) -> Path:
    path = tmp_path / f"headrace-ab-{os.getpid()}-spare"
    path.write_bytes(bytes(4096))
    return path


def test_a_version_that_is_written_to_the_spare_is_served_from_its_mapping(newest: Path, spare: Path) -> None:
    mapped = MappedVersions()
    coming = mapped.coming(newest)
    assert coming is not None
    segment = spare.rename(newest.with_name(NEXT))
    segment.write_bytes(b"2" * 4096)
    mapped.adopt(2, inode(segment))
    assert mapped.of(2, segment) is coming
    assert bytes(coming.view[:3]) == b"222"


def test_a_version_that_is_written_elsewhere_is_mapped_by_itself_and_the_spare_let_go(
    newest: Path, spare: Path
) -> None:
    mapped = MappedVersions()
    coming = mapped.coming(newest)
    segment = newest.with_name(NEXT)
    segment.write_bytes(b"2" * 4096)
    mapped.adopt(2, inode(segment))
    assert mapped.let_go(held={2}) == [coming]
    assert bytes(mapped.of(2, segment).view[:3]) == b"222"
    assert mapped.coming(newest) is not None, "the spare is still there for the version after it"


def test_a_spare_of_another_size_or_of_a_puller_is_not_mapped(newest: Path) -> None:
    newest.with_name(f"headrace-ab-{os.getpid()}-spare").write_bytes(bytes(8192))
    newest.with_name(f"headrace-ab-pulled-{os.getpid()}-spare").write_bytes(bytes(4096))
    assert MappedVersions().coming(newest) is None


def test_a_spare_is_mapped_once(newest: Path, spare: Path) -> None:
    mapped = MappedVersions()
    assert mapped.coming(newest) is not None
    assert mapped.coming(newest) is None


def test_versions_that_are_not_held_any_more_are_let_go_and_the_others_stay(newest: Path) -> None:
    mapped = MappedVersions()
    first, second = mapped.of(1, newest), mapped.of(2, newest)
    assert mapped.let_go(held=[2]) == [first]
    assert mapped.of(2, newest) is second
    assert mapped.let_go(held=[2]) == []
