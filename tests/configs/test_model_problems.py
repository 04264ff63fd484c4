"""Model directories that can never be trained are refused from their small files and headers, each in one sentence."""

from __future__ import annotations

import json
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from configs.checks.model_files import problem_of


def tensors(*ends: int, body_bytes: int | None = None) -> bytes:
    entries = {f"w{end}": {"dtype": "U8", "shape": [end], "data_offsets": [0, end]} for end in ends}
    header = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    return struct.pack("<Q", len(header)) + header + b"x" * (max(ends) if body_bytes is None else body_bytes)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A whole model, as far as its files go."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6}')
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(tensors(16, 64))
    return tmp_path


def problem(model: Path, *, weights: bool = True) -> str:
    found = problem_of(model, "MODEL", weights=weights)
    return "" if found is None else ". ".join(found)


def config(**values: object) -> Callable[[Path], object]:
    return lambda model: (model / "config.json").write_text(json.dumps({"model_type": "qwen2", **values}))


def write(name: str, content: bytes | str) -> Callable[[Path], object]:
    data = content.encode() if isinstance(content, str) else content
    return lambda model: (model / name).write_bytes(data)


def remove(name: str) -> Callable[[Path], object]:
    return lambda model: (model / name).unlink()


def test_a_whole_model_has_no_problem(model: Path) -> None:
    assert problem(model) == ""


LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 123\n"


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (write("model.safetensors", LFS), "model.safetensors is a git-lfs pointer. Run `git lfs pull`"),
        (write("tokenizer.json", LFS), "tokenizer.json is a git-lfs pointer"),
        (write("adapter_config.json", "{}"), "is a LoRA adapter (it has an adapter_config.json)"),
        (config(quantization_config={"quant_method": "fp8"}), "is quantised (fp8, by quantization_config"),
        (config(quantization_config={}), "is quantised (of an unnamed method"),
        (config(model_type="mymodel", auto_map={"AutoConfig": "a.B"}), "brings code of its own (auto_map)"),
        (config(model_type="of-next-year"), "has model_type 'of-next-year', which this transformers does not know."),
        (write("generation_config.json", "{eos: 1}"), "holds a generation_config.json that is no JSON"),
        (write("generation_config.json", b"\xff\xfe{}"), "holds a generation_config.json that is no JSON"),
        (write("config.json", "[1]"), "holds a config.json that is no JSON object but list"),
        (write("tokenizer_config.json", ""), "holds a tokenizer_config.json that is no JSON"),
        (remove("tokenizer.json"), "has no tokenizer: no tokenizer.json"),
        (remove("model.safetensors"), "has no weights: none of model.safetensors, "),
        (write("model.safetensors", tensors(64, body_bytes=20)), "holds a model.safetensors that is cut short: "),
        (write("model.safetensors", tensors(64)[:40]), "is no safetensors file, or cut short (40 bytes)"),
        (write("model.safetensors", b""), "is no safetensors file, or cut short (0 bytes)"),
        (write("model.safetensors", struct.pack("<Q", 4) + b"no!}"), "its header cannot be read"),
        (write("model.safetensors", struct.pack("<Q", 1 << 62)), "is no safetensors file, or cut short (8 bytes)"),
    ],
)  # fmt: skip
def test_what_can_never_be_trained_is_named(model: Path, damage: Callable[[Path], object], says: str) -> None:
    damage(model)
    assert says in problem(model)


def test_weights_are_not_looked_at_where_nobody_loads_them(model: Path) -> None:
    (model / "model.safetensors").unlink()
    assert problem(model, weights=False) == ""


def test_shards_are_looked_for_by_their_index(model: Path) -> None:
    (model / "model.safetensors").unlink()
    shards = {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-2.safetensors"}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    (model / "model-1.safetensors").write_bytes(tensors(8))
    assert "lacks model-2.safetensors, which model.safetensors.index.json names" in problem(model)
    (model / "model-2.safetensors").write_bytes(tensors(8, 16, body_bytes=9))
    assert "model-2.safetensors that is cut short" in problem(model)
    (model / "model-2.safetensors").write_bytes(tensors(8, 16))
    assert problem(model) == ""
    (model / "model.safetensors.index.json").write_text("{}")
    assert "without a weight_map" in problem(model)


def test_a_torch_file_is_enough_unless_it_is_cut_short(model: Path) -> None:
    (model / "model.safetensors").unlink()
    file = model / "pytorch_model.bin"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", b"x" * 500)
    assert problem(model) == ""
    file.write_bytes(file.read_bytes()[:-100])
    assert "pytorch_model.bin that is cut short" in problem(model)
    file.write_bytes(b"\x80\x02an old pickle")
    assert problem(model) == ""


def test_a_slow_tokenizer_is_one(model: Path) -> None:
    (model / "tokenizer.json").rename(model / "tokenizer.model")
    assert problem(model) == ""


def test_a_directory_that_cannot_be_read_is_a_problem_not_a_traceback(tmp_path: Path) -> None:
    assert "cannot be read" in problem(tmp_path / "gone")
