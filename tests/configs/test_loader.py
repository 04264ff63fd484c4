"""Job files: what is right loads, what is wrong fails with one message that names the field and the fix."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from configs.errors import ConfigError
from configs.loader import dump_job, job_from_mapping, load_job, read_job, schema_keys
from configs.scenario import Scenario, load_scenario
from configs.schema import JobConfig

CONFIGS = Path(__file__).parents[2] / "configs"
QUICKSTART = CONFIGS / "quickstart.yaml"


def fails(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_job(path, list(overrides))
    return str(caught.value)


SCENARIOS = {"chaos", "critic", "episodes_sim", "functions", "planned", "shared_trainer"}
"""Files for ``headrace simulate``; the others are jobs."""


def test_every_preset_fits_the_schema() -> None:
    scenarios = {"chaos", "seeding", "combined"}
    presets = sorted(preset for preset in CONFIGS.glob("*.yaml") if preset.stem not in scenarios)
    assert {"quickstart", "async", "gpu_qwen", "cluster"} <= {preset.stem for preset in presets}
    for preset in presets:
        if preset.stem in SCENARIOS:
            assert isinstance(load_scenario(preset), Scenario)
        else:
            assert isinstance(read_job(preset), JobConfig)


@pytest.mark.parametrize("name", ["quickstart", "async", "cluster"])
def test_a_preset_for_any_machine_passes_the_checks_of_this_one(name: str) -> None:
    load_job(CONFIGS / f"{name}.yaml")


def test_the_job_keys_of_the_contract_exist() -> None:
    contract = """name seed steps model.source model.path data.source data.task data.path reward.kind algorithm.name
        algorithm.group_size algorithm.prompts_per_step rollout.engine rollout.workers rollout.max_tokens
        rollout.temperature trainer.backend trainer.lr trainer.micro_batch_tokens sync.mode sync.max_staleness
        checkpoint.every"""
    assert set(contract.split()) <= set(schema_keys())


def test_the_schema_is_frozen() -> None:
    """A new key is a decision: add it to tests/configs/schema_keys.txt together with its docstring."""
    frozen = (Path(__file__).parent / "schema_keys.txt").read_text(encoding="utf-8").split()
    assert [key for key in schema_keys() if not key.startswith("limits.")] == frozen


def test_an_override_reaches_its_field_with_its_yaml_type() -> None:
    job = load_job(
        QUICKSTART, ["rollout.workers=5", "trainer.lr=3e-5", "rollout.stop=[a, b]", "data.task_args={min_word_len: 3}"]
    )
    assert job.rollout.workers == 5
    assert job.trainer.lr == pytest.approx(3e-5)
    assert job.rollout.stop == ["a", "b"]
    assert job.data.task_args == {"min_word_len": 3}


def test_a_later_override_wins_and_a_section_may_be_new() -> None:
    job = load_job(QUICKSTART, ["limits.lease_s=3", "limits.lease_s=4.5"])
    assert job.limits.lease_s == 4.5


def test_an_override_reaches_an_item_of_a_list_by_the_place_that_messages_name(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "2+2", "answer": "4"}\n')
    mix = f"data={{mix: [{{name: a, path: {tmp_path / 'rows.jsonl'}}}, {{name: b, path: {tmp_path / 'rows.jsonl'}}}]}}"
    parts = "[{kind: exact_match, name: a}, {kind: math_verify, name: b}]"
    for reward in (f"reward={parts}", f"reward={{parts: {parts}}}"):
        job = load_job(QUICKSTART, [mix, "data.mix.1.weight=3", reward, "reward.parts.1.weight=0.5"])
        assert [source.weight for source in job.data.mix] == [1.0, 3.0]
        assert [part.weight for part in job.reward.parts] == [1.0, 0.5]
        said = fails(QUICKSTART, reward, "reward.parts.0.kind=foo")
        assert said.startswith("--set reward.parts.0.kind=foo: reward.parts.0.kind: ")
    assert "data.mix is a list, and its items are 0 to 1" in fails(QUICKSTART, mix, "data.mix.2.weight=3")
    assert "Write the number of an item" in fails(QUICKSTART, mix, "data.mix.a.weight=3")
    assert "data.mix is no list here" in fails(QUICKSTART, "data.mix.0.weight=3")
    assert ", not a section. Set steps itself" in fails(QUICKSTART, "steps.0=3")


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("model.adapter.targets=q_proj", '"q_proj" is neither all-linear nor a list. Write it as a list: [q_proj]'),
        ("model.adapter.targets=all_linear", "Did you mean 'all-linear'?"),
        ("model.adapter.targets=[]", "model.adapter.targets: [] is not allowed: expected at least one item"),
        ("model.adapter.targets=[1]", "model.adapter.targets.0: 1 is not allowed: expected a valid string"),
        ("eval={data: {source: reasoning_gym, task: leg_counting}, path: x}", "Did you mean 'eval.data.path'?"),
    ],
)
def test_a_wrong_value_is_one_sentence_without_names_of_types(override: str, says: str) -> None:
    said = fails(QUICKSTART, override)
    assert says in said and "\n" not in said and "list[" not in said and "literal[" not in said


def test_the_resolved_job_loads_to_itself(tmp_path: Path) -> None:
    job = load_job(QUICKSTART, ["rollout.workers=3", "sync.mode=async"])
    (tmp_path / "job.yaml").write_text(dump_job(job))
    assert load_job(tmp_path / "job.yaml") == job


def test_keys_of_older_jobs_that_went_without_a_loss_are_passed_over() -> None:
    former = ["limits.result_cache_entries=9", "limits.result_cache_s=1.5", "rollout.top_k=0"]
    assert load_job(QUICKSTART, former) == load_job(QUICKSTART)


def test_paths_are_taken_from_the_working_directory_or_from_beside_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "jobs").mkdir()
    rows = '{"prompt": "2+2=", "answer": "4"}\n'
    (tmp_path / "jobs" / "beside.jsonl").write_text(rows)
    (tmp_path / "here.jsonl").write_text(rows)
    job = yaml.safe_load(QUICKSTART.read_text()) | {"reward": {"kind": "exact_match"}}
    monkeypatch.chdir(tmp_path)
    for name, found in (("beside.jsonl", tmp_path / "jobs" / "beside.jsonl"), ("here.jsonl", tmp_path / "here.jsonl")):
        file = tmp_path / "jobs" / "job.yaml"
        file.write_text(yaml.safe_dump(job | {"data": {"source": "jsonl", "path": name}}))
        assert load_job(file).data.path == str(found)


def test_the_message_names_file_and_line(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(QUICKSTART.read_text().replace("workers: 2", "wokers: 2"))
    line = file.read_text().splitlines().index("  wokers: 2") + 1
    assert fails(file).startswith(f"{file}:{line}: rollout.wokers: ")


def test_several_problems_are_one_message_with_a_line_each() -> None:
    message = fails(QUICKSTART, "steps=0", "rollout.wokers=3", "sync.mode=asink")
    assert len(message.splitlines()) == 3
    assert "Did you mean 'async'?" in message


def test_a_key_in_the_wrong_section_is_sent_home() -> None:
    assert "Did you mean 'trainer.lr'?" in fails(QUICKSTART, "algorithm.lr=1")


def test_a_key_given_twice_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("name: a\nsteps: 1\nsteps: 2\n")
    assert "given twice" in fails(file)


def _aliases() -> str:
    """Some lines that name 9 to the power of 9 values."""
    lines = ["k0: &k0 [x]", *(f"k{i}: &k{i} [{', '.join([f'*k{i - 1}'] * 9)}]" for i in range(1, 10))]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (_aliases(), "values"),
        ("name: &a [*a]\n", "holds itself"),
        ("name: " + "[" * 100_000, "nested"),
        ("name: " + "x" * 300_000, "longer than"),
    ],
    ids=["aliases of aliases", "an alias of itself", "brackets", "length"],
)
def test_a_file_that_grows_when_it_is_read_is_refused_at_once(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "job.yaml").write_text(text)
    with pytest.raises(ConfigError, match=why):
        read_job(tmp_path / "job.yaml")


def test_the_directory_of_a_reward_model_is_found_beside_the_job_file(tmp_path: Path) -> None:
    (tmp_path / "rm").mkdir()
    job = {"name": "j", "steps": 1, "model": {"source": "tiny"}, "data": {"path": "x.jsonl"}}
    (tmp_path / "one.yaml").write_text(yaml.safe_dump({**job, "reward": {"kind": "model", "path": "rm"}}))
    (tmp_path / "two.yaml").write_text(yaml.safe_dump({**job, "reward": [{"kind": "model", "path": "rm"}]}))
    rewards = [read_job(tmp_path / name).reward for name in ("one.yaml", "two.yaml")]
    assert rewards[0].path == rewards[1].parts[0].path == str(tmp_path / "rm")


def test_a_reward_function_beside_the_shell_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rewards_for_test.py").write_text(
        "raise RuntimeError('never imported')\ndef score(p, r, a): return 1.0\n"
    )
    monkeypatch.chdir(tmp_path)
    override = ["reward.kind=function", "reward.function=my_rewards_for_test:score"]
    assert load_job(QUICKSTART, override).reward.function == "my_rewards_for_test:score"
    assert "my_rewards_for_test:score?" in fails(
        QUICKSTART, "reward.kind=function", "reward.function=my_rewards_for_test:scor"
    )


def test_an_hf_model_directory_and_data_set_are_accepted(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    (tmp_path / "model" / "pytorch_model.bin").write_bytes(b"an old pickle")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps({"features": {"prompt": {}, "answer": {}}}))
    job = load_job(
        QUICKSTART,
        ["model.source=hf", f"model.path={tmp_path}/model", "data.source=hf_dataset", f"data.path={tmp_path}/data",
         "reward.kind=exact_match"],
    )  # fmt: skip
    assert job.model.path == f"{tmp_path}/model"
    wrong = fails(
        QUICKSTART,
        "data.source=hf_dataset",
        f"data.path={tmp_path}/data",
        "data.prompt_key=promt",
        "reward.kind=exact_match",
    )
    assert "Did you mean 'prompt'?" in wrong


def test_a_job_over_the_socket_is_checked_in_the_same_way() -> None:
    values = yaml.safe_load(QUICKSTART.read_text())
    assert job_from_mapping(values).name == "quickstart"
    with pytest.raises(ConfigError, match=r"request: rollout\.wokers: .*rollout\.workers"):
        job_from_mapping(values | {"rollout": {"wokers": 1}}, "request")


@given(st.text(max_size=60))
def test_any_text_loads_or_fails_with_a_config_error(text: str) -> None:
    import tempfile

    with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8", errors="surrogatepass") as file:
        file.write(text)
        file.flush()
        with pytest.raises(ConfigError):
            read_job(file.name)


@given(
    st.sampled_from(schema_keys()),
    st.sampled_from(["null", "-1", "0", "1.5", "true", "x", "[]", "{}", ".nan", "''", "a: b", "99999999999999999999"]),
)
def test_any_override_of_any_key_loads_or_fails_with_its_name(key: str, value: str) -> None:
    try:
        read_job(QUICKSTART, [f"{key}={value}"])
    except ConfigError as error:
        assert key.partition(".")[0] in str(error)


@pytest.mark.parametrize(("former", "now"), [(True, "whole"), (False, "none")])
def test_the_former_key_of_recomputation_is_read(tmp_path: Path, former: bool, now: str) -> None:
    job = yaml.safe_load(QUICKSTART.read_text())
    job["trainer"] = job.get("trainer", {}) | {"gradient_checkpointing": former}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    assert read_job(tmp_path / "job.yaml").trainer.recompute == now


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"gradient_checkpointing": []}, r"trainer\.recompute"),
        ({"gradient_checkpointing": {}}, r"trainer\.recompute"),
        ({"gradient_checkpointing": False, "recompute": "selective"}, r"trainer\.gradient_checkpointing.*its name now"),
    ],
)
def test_a_former_key_with_a_wrong_value_or_beside_its_new_name_is_refused(
    tmp_path: Path, changes: dict[str, object], wrong: str
) -> None:
    job = yaml.safe_load(QUICKSTART.read_text())
    job["trainer"] = job.get("trainer", {}) | changes
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    with pytest.raises(ConfigError, match=wrong):
        read_job(tmp_path / "job.yaml")
