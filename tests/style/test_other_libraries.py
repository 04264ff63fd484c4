"""What others may change without a word is not used, and what they may change with a release is bounded.

A private name of a library is gone one day, and a run ends; so is a name that a test replaces by a fake of ours. The
libraries that a job may do without are therefore tested as they are: TensorBoard and Weights & Biases in
``tests/actors/metrics/sinks``, PEFT, MCP, OpenEnv, verifiers, lightkube and math-verify beside what speaks with them.
"""

from __future__ import annotations

import ast
import tomllib
from typing import Final

import pytest
from packaging.requirements import Requirement

from tests.style.product_files import LAYERS, PRODUCT, ROOT, tree_of

PROJECT: Final = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
USED_BEHIND_A_KEY: Final = {
    "tensorboardX",
    "prometheus-client",
    "math-verify",
    "reasoning-gym",
    "torch",
    "transformers",
}
"""Libraries that are always installed, and that the job file chooses to use, or whose every release changes much."""

PRIVATE: Final = {
    "torch._C": "the module of the next line",
    "torch._C._distributed_c10d": "stores, with the types of all; torch is bounded to what is tested",
    "torch.distributed.tensor._utils": "no public function says where a shard lies; as above",
    "torch.distributed.tensor._utils._compute_local_shape_and_global_offset": "nor one where another rank's lies",
    "transformers.integrations.moe._grouped_mm": "experts with an adapter take the kernel that they have without one",
    "torch.utils._python_dispatch": "torch's only way to see which operations a model calls; torch is bounded",
    "torch._dynamo.config": "vLLM's start, on releases of both that are bounded",
    "torch._dynamo.exc": "no public class says that torch could not compile; as above",
    "torch._functorch.config": "no option of torch.compile says when the backward pass is compiled; as above",
    "torch.fx.experimental._config": "nor that lengths which are equal may differ later; as above",
}
"""Private module → why it is used all the same."""


def test_no_private_name_of_a_library_is_imported() -> None:
    found: set[str] = set()
    for path in PRODUCT.values():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                private = [f"{node.module}.{alias.name}" for alias in node.names if alias.name.startswith("_")]
                names = [node.module, *private]
            else:
                continue
            found |= {name for name in names if "._" in name and name.partition(".")[0] not in LAYERS}
    assert found == set(PRIVATE)


@pytest.mark.parametrize("extra", [*PROJECT["optional-dependencies"], ""])
def test_a_library_that_a_job_may_do_without_has_a_lowest_and_a_highest_version(extra: str) -> None:
    """Tools of the tests have no highest one: they fail where they are used, which is here."""
    if extra in ("test", "fuzz"):
        wanted = [one for one in asked_for("test") if one.name in {each.name for each in optional()}]
    elif extra:
        wanted = asked_for(extra)
    else:
        wanted = [one for one in map(Requirement, PROJECT["dependencies"]) if one.name in USED_BEHIND_A_KEY]
        assert {one.name for one in wanted} == USED_BEHIND_A_KEY
    for one in wanted:
        operators = {each.operator for each in one.specifier}
        assert operators in ({"=="}, {">=", "<"}), f"{one}: expected NAME>=LOWEST,<HIGHEST"
        if extra == "test":
            assert one.specifier in [each.specifier for each in optional() if each.name == one.name], str(one)


def asked_for(extra: str) -> list[Requirement]:
    return [Requirement(text) for text in PROJECT["optional-dependencies"][extra]]


def optional() -> list[Requirement]:
    return [one for extra in ("kubernetes", "wandb", "peft", "tinker") for one in asked_for(extra)]
