"""What of a repository is needed, and whether a directory is a whole model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisors.preparation.hub_files import lacking_files, lacking_kinds, needed_files

SMALL = ["config.json", "generation_config.json", "merges.txt", "tokenizer.json", "tokenizer.model", "vocab.json"]
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("weights", "chosen"),
    [
        (["model.safetensors", "pytorch_model.bin", "tf_model.h5", "model.fp16.safetensors"], ["model.safetensors"]),
        ([*SHARDS, INDEX, "consolidated.safetensors", "model.gguf"], [*SHARDS, INDEX]),
        ([*SHARDS, INDEX, "pytorch_model.bin.index.json", "pytorch_model-00001-of-00001.bin"], [*SHARDS, INDEX]),
        (["pytorch_model.bin", "training_args.bin", "optimizer.bin"], ["pytorch_model.bin"]),
        (["onnx/model.onnx", "x/model.safetensors", "x/a.json", "model.safetensors"], ["model.safetensors"]),
    ],
    ids=["whole", "sharded", "sharded twice", "no safetensors", "folders"],
)  # fmt: skip
def test_weights_are_fetched_in_one_format_and_all_small_files(weights: list[str], chosen: list[str]) -> None:
    assert needed_files([*SMALL, "README.md", ".gitattributes", "modeling.py", *weights]) == sorted([*SMALL, *chosen])


@given(st.sets(st.sampled_from([*SMALL, *SHARDS, INDEX, "model.safetensors", "pytorch_model.bin", "x/config.json"])))
def test_what_is_chosen_of_a_usable_repository_is_a_model(names: set[str]) -> None:
    chosen = needed_files(names)
    assert set(chosen) <= names
    assert not any("/" in name for name in chosen)
    assert lacking_kinds(chosen) == lacking_kinds(names)
    kinds = {Path(name).suffix for name in chosen} & {".safetensors", ".bin"}
    assert len(kinds) <= 1


def whole(directory: Path) -> Path:
    for name in (*SMALL, *SHARDS):
        (directory / name).write_text("{}")
    (directory / INDEX).write_text(json.dumps({"weight_map": {"a": SHARDS[0], "b": SHARDS[1]}}))
    return directory


def test_a_directory_is_whole_when_each_shard_that_the_index_names_is_there(tmp_path: Path) -> None:
    assert lacking_files(whole(tmp_path)) == []
    (tmp_path / SHARDS[1]).unlink()
    (tmp_path / SHARDS[1]).symlink_to(tmp_path / "gone")  # a blob that somebody has cleared away
    assert lacking_files(tmp_path) == [SHARDS[1]]
    (tmp_path / "tokenizer.json").unlink()
    assert lacking_files(tmp_path) == ["tokenizer.json", SHARDS[1]]
    (tmp_path / INDEX).write_text("{")
    assert f"a readable {INDEX}" in lacking_files(tmp_path)
    assert lacking_files(tmp_path / "nowhere") == ["config.json", "tokenizer.json", "model.safetensors"]
