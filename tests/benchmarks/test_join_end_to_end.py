"""``headrace bench join`` on real processes, as short as it can be."""

from __future__ import annotations

import json

import pytest

from benchmarks.data_plane import join

SETTINGS = (
    "model.hidden=32", "model.layers=1", "model.warm_start_steps=0", "algorithm.prompts_per_step=8",
    "reward={kind: function, function: 'benchmarks._harm:spread_reward'}", "limits.lease_s=3.0",
    "rollout.engine=simulated", "rollout.engine_options={base_s: 0.05, mean_tokens: 12}", "trainer.backend=simulated",
)  # fmt: skip


@pytest.mark.long
@pytest.mark.timeout(300)
def test_bench_join_ends_with_what_a_cold_and_a_warm_worker_need_until_their_first_token(
    capfd: pytest.CaptureFixture[str],
) -> None:
    sets = [word for setting in SETTINGS for word in ("--set", setting)]
    assert join.main(["--times", "1", *sets, "--json"]) == 0
    told = json.loads(capfd.readouterr().out)
    from_registration = ("registered_to_version", "version_to_token")
    for kind, parts in (("cold", ("start", "engine", *from_registration)), ("warm", from_registration)):
        assert told[f"{kind}_total_s"] == pytest.approx(sum(told[f"{kind}_{part}_s"] for part in parts), abs=0.01)
        assert told[f"{kind}_version_to_token_s"] > 0
        assert told[f"{kind}_pull_s"] >= 0, "the loop's clock counts milliseconds, and this version is mapped in less"
    assert told["cold_start_s"] > 0 and not {"warm_start_s", "warm_engine_s"} & told.keys()
    assert (told["prompts_lost"], told["samples_trained_twice"]) == (0, 0)
