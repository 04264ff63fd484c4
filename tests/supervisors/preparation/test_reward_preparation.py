"""The reward models of a job: trained once, found again, fetched from a hub, and what is said when that fails."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import psutil
import pytest

from actors.environments.scoring.batches import Asked
from actors.environments.scoring.examples import Example
from actors.environments.scoring.model_scorer import ModelScorer
from configs.schema import JobConfig
from supervisors.preparation.model_cache import ModelCache, reward_model_key
from supervisors.preparation.phase import Phase
from supervisors.preparation.reward_preparation import Trained, prepare_rewards
from supervisors.tree.errors import ModelNotFetched, RewardModelNotMade
from tests.reward_model import save_reward_model
from tests.smallest_job import smallest_job
from tests.supervisors.jobs.hub_server import HubServer, Repository

TRAIN: dict[str, Any] = {"preferences": "answers", "pairs": 60, "steps": 4, "lr": 1e-3, "held_out": 0.3}
PARTS: list[dict[str, Any]] = [
    {"kind": "model", "name": "learned", "device": "cpu", "train": TRAIN},
    {"kind": "exact_match", "weight": 0},
]


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    return Path(save_reward_model(tmp_path / "policy", head=False))


def a_job(tmp_path: Path, reward: Any = PARTS, **changes: Any) -> JobConfig:
    rows = tmp_path / "rows.jsonl"
    if not rows.exists():
        rows.write_text("".join(json.dumps({"prompt": f"{n}+1=", "answer": str(n + 1)}) + "\n" for n in range(60)))
    return smallest_job(data={"path": str(rows)}, reward=reward, **changes)


async def prepare(job: JobConfig, run_dir: Path, policy: Path) -> tuple[JobConfig, list[Trained], list[str]]:
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    said, shown = list[str](), list[Phase]()
    prepared, trained = await prepare_rewards(job, run_dir, policy, said.append, shown.append)
    assert {(phase.name, phase.total) for phase in shown} <= {("training the reward model", 4)}
    return prepared, trained, said


async def test_a_model_is_trained_once_and_later_runs_and_lives_find_it(
    tmp_path: Path, cache: Path, policy: Path
) -> None:
    job = a_job(tmp_path)
    prepared, (first,), said = await prepare(job, tmp_path / "first", policy)
    directory = tmp_path / "first" / "reward_model-learned"
    assert (prepared.reward.parts[0].path, prepared.reward.parts[0].train) == (str(directory), None)
    assert prepared.reward.parts[1] == job.reward.parts[1]
    assert (first["reward"], first["made"], first["steps"]) == ("learned", "trained", 4)
    assert f"ranks {first['accuracy_held_out']:.1%} of {first['pairs_held_out']} held-out pairs right" in said[-1]
    scorer = ModelScorer("reward", prepared.reward.parts[0])
    (found,) = scorer.score([Asked("2", Example("1+1=", "2", 0, {}), job.data)], lambda: None)
    assert found.reward is not None
    _, (again,), _ = await prepare(job, tmp_path / "first", policy)
    _, (second,), _ = await prepare(job, tmp_path / "second", policy)
    assert (again["made"], second["made"]) == ("kept", "cache")
    assert again | {"made": ""} == second | {"made": ""} == first | {"made": ""}
    assert [entry.name for entry in cache.iterdir()] == [reward_model_key(job, job.reward.parts[0], policy)]


def test_whatever_determines_a_reward_model_is_in_its_key(tmp_path: Path, policy: Path) -> None:
    def key(reward: dict[str, Any] = PARTS[0], **changes: Any) -> str:
        job = a_job(tmp_path, [reward, PARTS[1]], **changes)
        return reward_model_key(job, job.reward.parts[0], policy)

    prefs = tmp_path / "prefs.jsonl"
    prefs.write_text("first")
    filed = PARTS[0] | {"train": TRAIN | {"preferences": str(prefs)}}
    keys = [key(), key(seed=1), key(PARTS[0] | {"max_tokens": 64}), key(PARTS[0] | {"train": TRAIN | {"lr": 0.1}})]
    assert keys[0] == key(PARTS[0] | {"name": "other", "weight": 2.0}, steps=9)
    keys.append(key(filed))
    prefs.write_text("longer now")
    keys.append(key(filed))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    keys.append(key())
    (policy / "model.safetensors").write_bytes(b"other weights")
    keys.append(key())
    assert len(set(keys)) == len(keys)


async def test_what_is_wrong_with_preferences_is_said_as_it_stands_in_the_job(tmp_path: Path, policy: Path) -> None:
    prefs = tmp_path / "prefs.jsonl"
    prefs.write_text('{"chosen": "a", "rejected": "b"}\n{"chosen": "a"}\n')
    job = a_job(tmp_path, [PARTS[0] | {"train": TRAIN | {"preferences": str(prefs)}}])
    with pytest.raises(RewardModelNotMade) as found:
        await prepare(job, tmp_path / "run", policy)
    named = f"reward.parts.0.train.preferences {prefs}, row 1 (line 2): no column 'rejected'"
    assert str(found.value).startswith(named)
    with pytest.raises(RewardModelNotMade, match=r"reward\.max_tokens 500: the model in .* takes 128; lower it"):
        await prepare(
            a_job(tmp_path, {"kind": "model", "device": "cpu", "train": TRAIN, "max_tokens": 500}),
            tmp_path / "run",
            policy,
        )
    assert not (tmp_path / "run" / "reward_model").exists()


@pytest.mark.parametrize("alone", [False, pytest.param(True, marks=pytest.mark.long)])
async def test_a_critic_begins_as_the_reward_model_that_the_job_trains(
    tmp_path: Path, policy: Path, alone: bool
) -> None:
    reward = {"kind": "model", "device": "cpu", "train": TRAIN} if alone else PARTS
    critic = {"reward": "model" if alone else "learned", "lr": 1e-3}
    job = a_job(tmp_path, reward, critic=critic, algorithm={"name": "ppo"})
    prepared, _, _ = await prepare(job, tmp_path / "run", policy)
    assert prepared.critic.path == next(reward.path for _, reward in prepared.reward.each if reward.kind == "model")
    assert prepared.critic.reward is None
    assert prepared.critic.lr == 1e-3


async def test_a_reward_model_of_another_tokenizer_is_no_critic_and_that_is_said(tmp_path: Path, policy: Path) -> None:
    other = Path(save_reward_model(tmp_path / "other"))
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"vocab_size": 7}))
    reward = {"kind": "model", "device": "cpu", "path": str(other)}
    job = a_job(tmp_path, reward, critic={"reward": "model"}, algorithm={"name": "ppo"})
    with pytest.raises(ModelNotFetched, match=r"critic\.reward: .* knows 7 tokens"):
        await prepare(job, tmp_path / "run", policy)


@pytest.mark.long
async def test_a_cache_that_answers_too_late_touches_no_directory_of_the_trainer(
    tmp_path: Path, cache: Path, policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places: list[Path] = []

    def late(_self: ModelCache, _key: str, directory: Path) -> bool:
        places.append(directory)
        return False

    monkeypatch.setattr(ModelCache, "take", late)
    await prepare(a_job(tmp_path), tmp_path / "run", policy)
    assert places == [tmp_path / "run" / "reward_model-learned.cached"]
    assert places[0] != tmp_path / "run" / "reward_model-learned.partial", "which train_reward_model writes"


async def test_one_whose_process_is_killed_is_told_and_one_that_is_given_up_leaves_nothing(
    tmp_path: Path, policy: Path
) -> None:
    job, me = a_job(tmp_path, [PARTS[0] | {"train": TRAIN | {"steps": 1_000_000}}]), psutil.Process()

    async def next_child(working: asyncio.Task[Any], but: int = 0) -> psutil.Process:
        while True:
            assert not working.done(), working.exception()
            for one in me.children():
                if one.pid != but and "supervisors.preparation.reward_model" in one.cmdline():
                    return one
            await asyncio.sleep(0.02)

    async def begun() -> tuple[asyncio.Task[Any], psutil.Process]:
        working = asyncio.create_task(prepare(job, tmp_path / "run", policy))
        return working, await next_child(working)

    working, child = await begun()
    child.kill()
    (await next_child(working, but=child.pid)).kill()  # a helper that is killed is started once more
    with pytest.raises(RewardModelNotMade, match=r"reward\.parts\.0\.train: the training has ended"):
        await working
    working, child = await begun()
    working.cancel()  # what ctrl-C does to it
    with pytest.raises(asyncio.CancelledError):
        await working
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
    assert not (tmp_path / "run" / "reward_model-learned").exists()


async def test_a_hub_name_is_fetched_and_a_resumed_run_keeps_its_commit(
    tmp_path: Path, policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = HubServer()
    monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    for name in ("HF_TOKEN", "HF_HUB_CACHE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    liked, three = (
        {file.name: file.read_bytes() for file in Path(path).iterdir()}
        for path in (save_reward_model(tmp_path / "liked"), save_reward_model(tmp_path / "three", labels=3))
    )
    try:
        repository = hub.repositories["acme/judge"] = Repository()
        commit = repository.commit(liked)
        job = a_job(tmp_path, {"kind": "model", "path": "acme/judge", "device": "cpu"})
        prepared, trained, said = await prepare(job, tmp_path / "run", policy)
        assert trained == [] and said[0] == "looking for the model acme/judge"
        assert prepared.reward.path is not None and Path(prepared.reward.path).name == commit
        repository.commit(three)
        again, _, _ = await prepare(job, tmp_path / "run", policy)
        assert again == prepared
        with pytest.raises(ModelNotFetched, match=r"reward\.path: .* has 3 labels, and a reward model has one"):
            await prepare(job, tmp_path / "new", policy)
        nothing = a_job(tmp_path, {"kind": "model", "path": "acme/none", "device": "cpu"})
        with pytest.raises(ModelNotFetched, match=r"reward\.path: 'acme/none' .* set reward\.path to DIR"):
            await prepare(nothing, tmp_path / "new", policy)
    finally:
        hub.close()
