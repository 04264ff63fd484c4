"""A model whose files are not exactly its tensors is refused by their names, wherever weights are loaded."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from actors.environments.scoring.model_scorer import ModelScorer
from actors.models.whole_model import WeightsNotWhole, load_whole
from actors.ranker.readers import GivenReader
from actors.reward_training.backbone import load_backbone
from actors.rollout.engines.torch.model_loading import load_model as load_engine
from actors.rollout.engines.vllm.weights import Expected
from actors.rollout.errors import ModelUnreadable
from actors.trainer.backend import BackendSpec, CriticSpec
from actors.trainer.backends.torch.causal_lm import load_model
from actors.trainer.backends.torch.critic import load_critic
from actors.trainer.backends.torch.merging import _load as load_base
from configs.checks.model_files import problem_of
from configs.task_schema import Reward
from tests.reward_model import save_reward_model
from tests.tiny_checkpoint import make_tiny_checkpoint

Tensors = dict[str, torch.Tensor]
Place = Callable[[Path, Path], object]
"""Loads the damaged model of the first directory, beside the whole one in the second."""


def rewritten(source: Path, to: Path, change: Callable[[Tensors], Mapping[str, torch.Tensor]]) -> Path:
    shutil.copytree(source, to)
    changed = {name: value.clone() for name, value in change(load_file(source / "model.safetensors")).items()}
    save_file(changed, to / "model.safetensors", metadata={"format": "pt"})
    return to


def without_a_layer(tensors: Tensors) -> Tensors:
    return {name: value for name, value in tensors.items() if "layers.1." not in name}


def with_a_layer_more(tensors: Tensors) -> Tensors:
    more = {name.replace("layers.1.", "layers.2."): value for name, value in tensors.items() if "layers.1." in name}
    return tensors | more


def of_another_shape(tensors: Tensors) -> Tensors:
    return tensors | {"model.layers.0.mlp.up_proj.weight": torch.zeros(3, 5)}


def compiled(tensors: Tensors) -> Tensors:
    return {f"_orig_mod.{name}": value for name, value in tensors.items()}


def in_parallel(tensors: Tensors) -> Tensors:
    return {f"module.{name}": value for name, value in tensors.items()}


DAMAGES = {
    without_a_layer: r"lack (model\.)?layers\.1\.input_layernorm\.weight, .* and \d+ more, which would be drawn at",
    with_a_layer_more: r"hold model\.layers\.2\.input_layernorm\.weight, .* which a model of its config\.json has not",
    of_another_shape: r"layers\.0\.mlp\.up_proj\.weight \(\[3, 5\] in the files, \[64, 32\] in the model\)",
    compiled: r"names of torch\.compile, such as _orig_mod\..*Save model\._orig_mod\.save_pretrained\(DIRECTORY\)",
    in_parallel: r"names of DataParallel or DeepSpeed, .*Save model\.module\.save_pretrained\(DIRECTORY\)",
}

PLACES: dict[str, Place] = {
    "policy, reference and the base of an adapter": lambda path, _: load_model(path, BackendSpec(model_path=path)),
    "engine": lambda path, _: load_engine(path, "float32", torch.device("cpu")),
    "critic": lambda path, whole: load_critic(BackendSpec(model_path=whole), CriticSpec(model_path=path)),
    "model that a reward model starts from": lambda path, _: load_backbone(
        path, seed=0, device="cpu", max_tokens=None, named=str
    ),
    "ranker": lambda path, whole: GivenReader(path, whole),
    "base of a merge": lambda path, _: load_base(path),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("whole"), tied=False)


@pytest.mark.parametrize("place", PLACES)
def test_weights_that_lack_something_or_hold_more_are_refused_by_name(whole: Path, tmp_path: Path, place: str) -> None:
    PLACES[place](whole, whole)
    for damage, says in DAMAGES.items():
        path = rewritten(whole, tmp_path / damage.__name__, damage)
        with pytest.raises(Exception, match=says) as raised:
            PLACES[place](path, whole)
        assert getattr(raised.value, "permanent", True) and type(raised.value).__module__.startswith("actors.")


@pytest.mark.parametrize("damage", [without_a_layer, of_another_shape, compiled, in_parallel])
def test_vllm_is_given_no_such_model(whole: Path, tmp_path: Path, damage: Callable[[Tensors], Tensors]) -> None:
    """It looks itself for tensors that are left over, and for whole matrices that it fuses with none that is there."""
    Expected.of_checkpoint(whole, "float32")
    with pytest.raises(ModelUnreadable, match=DAMAGES[damage]):
        Expected.of_checkpoint(rewritten(whole, tmp_path / "damaged", damage), "float32")


def test_what_older_versions_of_transformers_have_saved_is_no_surprise(tmp_path: Path) -> None:
    """A buffer of each layer, which is computed today."""
    path = make_tiny_checkpoint(tmp_path / "whole", architecture="llama")
    buffers = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(4) for i in range(2)}
    load_model(rewritten(path, tmp_path / "older", lambda tensors: tensors | buffers), BackendSpec(model_path=path))


def test_a_head_of_its_own_that_is_missing_is_refused_and_one_that_is_the_embedding_is_not(
    whole: Path, tmp_path: Path
) -> None:
    def headless(tensors: Tensors) -> Tensors:
        return {name: value for name, value in tensors.items() if name != "lm_head.weight"}

    path = rewritten(whole, tmp_path / "headless", headless)
    with pytest.raises(Exception, match=r"lack lm_head\.weight, which would be drawn at random"):
        load_model(path, BackendSpec(model_path=path))
    tied = make_tiny_checkpoint(tmp_path / "tied", tied=True)
    load_model(tied, BackendSpec(model_path=tied))
    load_critic(BackendSpec(model_path=whole), CriticSpec(model_path=path))  # its head is replaced anyway


def test_a_reward_model_is_refused_in_the_same_words(tmp_path: Path) -> None:
    save_reward_model(tmp_path / "whole")
    path = rewritten(tmp_path / "whole", tmp_path / "more", lambda all_: all_ | {"v_head.weight": torch.zeros(1, 16)})
    with pytest.raises(Exception, match=r"hold v_head\.weight, which a model of its config\.json has not"):
        ModelScorer("reward", Reward(kind="model", path=str(path), device="cpu"))


def test_models_that_are_loaded_at_once_are_loaded_one_after_the_other(tmp_path: Path) -> None:
    """transformers ties heads by what all threads share: of two at once, one is said to lack its tied head."""
    inside, most = list[int](), 0

    class Auto:
        base_model_prefix = ""

        @classmethod
        def from_pretrained(cls, *_: object, **__: object) -> tuple[Auto, dict[str, Any]]:
            nonlocal most
            inside.append(1)
            most = max(most, len(inside))
            time.sleep(0.005)
            inside.pop()
            return cls(), {"missing_keys": [], "unexpected_keys": [], "mismatched_keys": []}

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: load_whole(Auto, tmp_path), range(4)))
    assert most == 1


@pytest.mark.parametrize("family", ["gpt2", "opt", "gpt_neox", "llama"])
def test_families_are_whole_however_they_name_their_parts(tmp_path: Path, family: str) -> None:
    """Also where the names are those of the body alone, as ``AutoModel`` saves it, since transformers finds them."""
    from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

    path = make_tiny_checkpoint(tmp_path / family, architecture=family, kv_heads=4)
    load_whole(AutoModelForCausalLM, path)
    for auto in (AutoModel, AutoModelForSequenceClassification):
        load_whole(auto, path, new_head=True)
    body: Any = AutoModel.from_pretrained(path)
    body.save_pretrained(tmp_path / "body")
    load_whole(AutoModelForCausalLM, tmp_path / "body")
    with pytest.raises(WeightsNotWhole, match=r"lack score\.weight"):
        load_whole(AutoModelForSequenceClassification, path)


def test_names_of_a_wrapper_are_seen_before_anything_starts(whole: Path, tmp_path: Path) -> None:
    assert problem_of(whole, "M", weights=True) is None
    for damage, wrapper in ((compiled, "torch.compile"), (in_parallel, "DataParallel or DeepSpeed")):
        found = problem_of(rewritten(whole, tmp_path / wrapper, damage), "M", weights=True)
        assert found is not None and f"its weights have the names of {wrapper}" in found[0]
