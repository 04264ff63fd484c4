"""What is refused before anything is computed: by field, value and expectation."""

from __future__ import annotations

import numpy as np
import pytest

from actors.protocol.sampling import SampleRequest
from actors.sampling.errors import BadSampleRequest
from actors.sampling.requests import Bounds, check_request
from configs.limits import Limits

BOUNDS = Bounds(vocab=100, context_tokens=16, limits=Limits(sampling_samples=8, sampling_stops=3))
PROMPT = np.array([3, 4], np.int32)

WRONG = [
    ({"prompt": np.zeros(0, np.int32)}, "prompt is 0 tokens: expected 1 to 15"),
    ({"prompt": np.zeros(16, np.int32)}, "prompt is 16 tokens: expected 1 to 15"),
    ({"prompt": np.array([3, 100], np.int32)}, "prompt is the token id 100: .* 0 to 99"),
    ({"prompt": np.array([3, -1], np.int32)}, "prompt is the token id -1"),
    ({"prompt": np.array([3.0])}, r"prompt is float64\[1\]: expected token ids"),
    ({"prompt": np.zeros((1, 2), np.int32)}, r"prompt is int32\[1, 2\]"),
    ({"samples": 0}, "samples is 0: expected 1 to 8"),
    ({"samples": 9}, "samples is 9"),
    ({"max_tokens": 0}, "max_tokens is 0: expected at least 1"),
    ({"temperature": -0.1}, "temperature is -0.1: expected 0 for the likeliest token"),
    ({"temperature": float("nan")}, "temperature is nan"),
    ({"temperature": float("inf")}, "temperature is inf"),
    ({"temperature": 1e-300}, "temperature is 1e-300"),
    ({"top_k": 0}, "top_k is 0: expected -1 for no limit, or 1 to"),
    ({"top_k": -2}, "top_k is -2"),
    ({"top_k": 1 << 70}, "top_k is"),
    ({"top_p": 0.0}, "top_p is 0.0: expected above 0"),
    ({"top_p": 1.1}, "top_p is 1.1"),
    ({"top_p": float("nan")}, "top_p is nan"),
    ({"seed": 1 << 63}, "seed is"),
    ({"stop": (100,)}, "stop is 100: expected 0 to 99"),
    ({"stop": (-1,)}, "stop is -1"),
    ({"stop": ("",)}, "stop is a text of 0 characters"),
    ({"stop": ("a" * 1001,)}, "stop is a text of 1001 characters: expected 1 to 1000"),
    ({"stop": (5, "a")}, "stop is ids and texts: expected either"),
    ({"stop": (1, 2, 3, 4)}, r"stop is 4 entries: expected at most 3 \(limits.sampling_stops\)"),
    ({"top_prompt_logprobs": -1}, "top_prompt_logprobs is -1: expected 0 to 100"),
    ({"top_prompt_logprobs": 101}, "top_prompt_logprobs is 101"),
]


@pytest.mark.parametrize(("fields", "said"), WRONG, ids=[said for _, said in WRONG])
def test_a_field_that_cannot_be_served_is_named_with_its_value_and_what_is_expected(
    fields: dict[str, object], said: str
) -> None:
    request = SampleRequest(**({"prompt": PROMPT} | fields))  # type: ignore[arg-type]
    with pytest.raises(BadSampleRequest, match=said):
        check_request(request, BOUNDS)
    assert BadSampleRequest.permanent


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"prompt": np.arange(15, dtype=np.int64), "samples": 8, "max_tokens": 10**12},
        {"temperature": 0, "top_k": 10**6, "top_p": 1e-9, "seed": -5},
        {"stop": ()},
        {"stop": (0, 99)},
        {"stop": ("a", "bc")},
        {"prompt_logprobs": True, "top_prompt_logprobs": 100},
    ],
)
def test_what_can_be_served_is(fields: dict[str, object]) -> None:
    check_request(SampleRequest(**({"prompt": PROMPT} | fields)), BOUNDS)  # type: ignore[arg-type]
