"""The made model: once for all runs of a user that want the same one, and made where no cache can be had."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from configs.schema import JobConfig
from supervisors.preparation import model_cache
from supervisors.preparation.model_cache import ModelCache, cache_key
from supervisors.preparation.model_preparation import prepare_model
from supervisors.preparation.phase import Phase
from supervisors.preparation.tiny_model import make_tiny_model
from supervisors.tree.errors import ModelNotMade
from tests.smallest_job import smallest_job

TINY: dict[str, Any] = {"source": "tiny", "hidden": 32, "layers": 1, "warm_start_steps": 3}


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


def a_job(tmp_path: Path, **changes: Any) -> JobConfig:
    prompts = tmp_path / "prompts.jsonl"
    if not prompts.exists():
        prompts.write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "2+2=", "answer": "4"}\n')
    return smallest_job(**({"model": TINY, "data": {"source": "jsonl", "path": str(prompts)}} | changes))


def a_run_dir(tmp_path: Path, name: str) -> Path:
    (tmp_path / name / "logs").mkdir(parents=True)
    return tmp_path / name


def contents(directory: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.iterdir()}


async def test_a_model_is_made_once_and_each_run_has_its_own_copy(tmp_path: Path, cache: Path) -> None:
    shown, said = list[Phase](), list[str]()
    first = await prepare_model(a_job(tmp_path), a_run_dir(tmp_path, "first"), said.append, shown.append)
    assert said == []
    assert {(phase.name, phase.total, phase.unit) for phase in shown} <= {("making the model", 3, "steps")}
    (entry,) = cache.iterdir()
    assert contents(entry) == contents(first)
    assert entry.stat().st_mode & 0o077 == 0
    second = await prepare_model(a_job(tmp_path), a_run_dir(tmp_path, "second"), said.append)
    assert said == ["the model is one that was made before, from the cache"]
    assert second == tmp_path / "second" / "model"
    assert contents(second) == contents(first)
    shutil.rmtree(cache)  # no run needs it once it has begun
    assert await prepare_model(a_job(tmp_path), tmp_path / "second") == second


async def test_a_model_of_mixed_sources_knows_the_letters_of_each(tmp_path: Path) -> None:
    (tmp_path / "greek.jsonl").write_text('{"prompt": "αβγ", "answer": "δ"}\n')
    a_job(tmp_path)
    mix = [
        {"name": "sums", "path": str(tmp_path / "prompts.jsonl"), "template": "{prompt}±"},
        {"name": "greek", "path": str(tmp_path / "greek.jsonl")},
    ]
    directory = await prepare_model(a_job(tmp_path, data={"mix": mix}), a_run_dir(tmp_path, "run"))
    words = (directory / "tokenizer.json").read_text()
    assert all(letter in words for letter in "αβγδ±")


def test_a_warm_start_may_have_any_number_of_steps(tmp_path: Path) -> None:
    make_tiny_model(a_job(tmp_path, model=TINY | {"warm_start_steps": 10}), tmp_path / "model")
    assert (tmp_path / "model" / "model.safetensors").exists()


def test_whatever_determines_a_model_is_in_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = a_job(tmp_path).data.path
    keys = [
        cache_key(a_job(tmp_path)),
        cache_key(a_job(tmp_path, seed=1)),
        cache_key(a_job(tmp_path, model=TINY | {"hidden": 64})),
        cache_key(a_job(tmp_path, model=TINY | {"warm_start_noise": 0.9})),
        cache_key(a_job(tmp_path, rollout={"max_tokens": 4000})),
        cache_key(a_job(tmp_path, eval={"data": {"path": "held_out.jsonl"}, "max_tokens": 5000})),
        cache_key(a_job(tmp_path, data={"source": "jsonl", "path": prompts, "template": "Q: {prompt}"})),
    ]
    assert keys[0] == cache_key(a_job(tmp_path, steps=7, trainer={"lr": 0.5}))
    assert keys[0] == cache_key(a_job(tmp_path, model=TINY | {"path": str(tmp_path / "elsewhere")}))
    Path(str(prompts)).write_text('{"prompt": "1+1=", "answer": "3"}\n')
    keys.append(cache_key(a_job(tmp_path)))
    monkeypatch.setattr(model_cache, "_version", lambda _: "9.9")
    keys.append(cache_key(a_job(tmp_path)))
    monkeypatch.setattr(model_cache, "_MAKERS", ("supervisors/preparation/model_cache.py",))
    keys.append(cache_key(a_job(tmp_path)))
    assert len(set(keys)) == len(keys)


@pytest.mark.long
async def test_where_the_cache_cannot_be_written_the_model_is_made_in_the_run_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", "/proc/nowhere")
    made = await prepare_model(a_job(tmp_path), a_run_dir(tmp_path, "run"))
    assert (made / "model.safetensors").is_file()


async def test_a_cache_in_the_place_of_which_there_is_a_file_or_a_stranger_s_directory_is_left_alone(
    tmp_path: Path, cache: Path
) -> None:
    made = a_run_dir(tmp_path, "made")
    (made / "config.json").write_text("{}")
    cache.parent.write_text("a file")
    ModelCache.of_user().keep("key", made)
    assert not ModelCache.of_user().take("key", tmp_path / "taken")
    cache.parent.unlink()
    cache.mkdir(parents=True)
    cache.chmod(0o777)  # whoever may write here could put a model under our name
    ModelCache.of_user().keep("key", made)
    assert list(cache.iterdir()) == []
    shutil.copytree(made, cache / "key")
    assert not ModelCache.of_user().take("key", tmp_path / "taken")
    cache.chmod(0o700)
    assert ModelCache.of_user().take("key", tmp_path / "taken")


def test_the_cache_has_its_place_by_the_rules_of_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("HEADRACE_CACHE")
    made = a_run_dir(tmp_path, "made")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for value, place in (
        (str(tmp_path / "xdg"), tmp_path / "xdg"),
        ("relative", tmp_path / "home" / ".cache"),
        ("", tmp_path / "home" / ".cache"),
    ):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        ModelCache.of_user().keep("key", made)
        assert (place / "headrace" / "models" / "key").is_dir()
        shutil.rmtree(place)


def test_a_cache_keeps_what_was_used_last(tmp_path: Path) -> None:
    cache = ModelCache(tmp_path / "small", entries_max=2)
    made = a_run_dir(tmp_path, "made")
    (made / "config.json").write_text("{}")
    for number, key in enumerate("abc"):
        cache.keep(key, made)
        if (tmp_path / "small" / key).exists():
            os.utime(tmp_path / "small" / key, (number, number))
        if key == "b":
            assert cache.take("a", tmp_path / "taken")
    assert sorted(entry.name for entry in (tmp_path / "small").iterdir()) == ["a", "c"]


async def test_a_maker_that_fails_is_told_with_its_last_words_and_nothing_is_kept(tmp_path: Path, cache: Path) -> None:
    job = a_job(tmp_path)
    Path(str(job.data.path)).write_text("no JSON\n")
    with pytest.raises(ModelNotMade, match="SourceUnreadable"):
        await prepare_model(job, a_run_dir(tmp_path, "run"))
    assert not (tmp_path / "run" / "model").exists()
    assert not cache.exists()


async def test_what_a_folder_of_the_user_is_called_does_not_matter_to_the_maker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("supervisors", "configs", "actors"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('the wrong package')")
    monkeypatch.chdir(tmp_path)
    made = await prepare_model(a_job(tmp_path), a_run_dir(tmp_path, "run"))
    assert (made / "config.json").is_file()
