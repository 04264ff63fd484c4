"""What the Tinker server asks of a sampler of snapshots, and what it makes of the answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from actors.protocol.sampling import SampledSequence, SampleRequest, SampleResult
from actors.serving.samplers import EngineSampler
from actors.tinker import operations as op
from actors.tinker.sampling import SamplingParameters

PROMPT = np.array([5, 6], np.int32)


class FakeSnapshots:
    """Answers with one sequence of two tokens."""

    async def sample(self, request: SampleRequest) -> SampleResult:
        self.asked, k = request, request.top_logprobs
        one = SampledSequence(
            "length", np.array([7, 8], np.int32), np.array([-1.0, -2.0], np.float32),
            np.array([[7, 9, 0]] * 2, np.int32)[:, :k] if k else None,
            np.array([[-1.0, -1.5, -np.inf]] * 2, np.float32)[:, :k] if k else None,
        )  # fmt: skip
        return SampleResult([one])


async def test_the_likeliest_tokens_of_sequences_come_back_through_the_log() -> None:
    snapshots: Any = FakeSnapshots()
    sampler = EngineSampler(snapshots.sample)
    for k in (0, 3):
        parameters = SamplingParameters(max_tokens=2, seed=1, topk=k)
        sampled = await sampler.sample(
            Path("snapshot"), PROMPT, 1, parameters, prompt_logprobs=False, topk_prompt_logprobs=0
        )
        assert (snapshots.asked.top_logprobs, snapshots.asked.snapshot) == (k, "snapshot")
        answer = op.read_answer(op.encode(op.Samples.of(sampled)))
        assert isinstance(answer, op.Samples)
        [one] = answer.sampled().sequences
        assert one.tokens.tolist() == [7, 8] and sampled.prompt_top is None
        if not k:
            assert one.top is None
        else:
            assert one.top is not None and one.top.tokens.tolist() == [[7, 9, 0]] * 2
            np.testing.assert_array_equal(one.top.logprobs, np.array([[-1.0, -1.5, -99999.0]] * 2, np.float32))
