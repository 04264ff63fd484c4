"""What a program of a researcher does, for any client of tinker 0.25 to 0.38: ``python client_story.py BASE``.

It imports the client alone, and runs in an environment that has it (``test_recipes.py``).
"""

from __future__ import annotations

import sys

import tinker

TEXTS = ([5, 6, 7, 8, 9], [10, 11, 12], [13, 14, 15, 16])


def datum(tokens, **inputs):
    inputs = inputs or {"weights": [1.0] * (len(tokens) - 1)}
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs={"target_tokens": tokens[1:], **inputs}
    )


def there(made):
    """A client, which releases give at once or as a future."""
    return made.result() if hasattr(made, "result") else made


def squares(data, logprobs):
    loss = sum((one**2).sum() for one in logprobs)
    return loss, {"squares": float(loss)}


def main(base):
    adam = tinker.AdamParams(learning_rate=1e-2)
    service = tinker.ServiceClient()
    training = there(service.create_lora_training_client(base_model=base, rank=8, seed=0))
    losses = []
    for number in range(10):
        asked = training.forward_backward([datum(TEXTS[0]), datum(TEXTS[1 + number % 2])], "cross_entropy")
        training.optim_step(adam)
        losses.append(asked)
    losses = [one.result().metrics["loss:sum"] for one in losses]
    assert losses[-2:] < losses[:2], losses

    state = training.save_state("state").result().path
    named = training.save_weights_for_sampler("named").result().path
    sampling = there(service.create_sampling_client(model_path=named))
    prompt = tinker.ModelInput.from_ints(TEXTS[0])
    parameters = tinker.SamplingParams(max_tokens=4, seed=1)
    told = sampling.sample(
        prompt=prompt, num_samples=2, sampling_params=parameters, include_prompt_logprobs=True, topk_prompt_logprobs=2
    ).result()
    assert len(told.sequences) == 2
    scored = sampling.compute_logprobs(prompt).result()
    assert scored == told.prompt_logprobs
    newest = there(training.save_weights_and_get_sampling_client())
    assert newest.compute_logprobs(prompt).result() == scored

    ratios = {"logprobs": [-1.0, -2.0, -1.5, -1.0], "advantages": [1.0, -1.0, 0.5, 1.0]}
    for loss in ("importance_sampling", "ppo", "cispo"):
        training.forward_backward([datum(TEXTS[0], **ratios)], loss).result()
    told = training.forward_backward_custom([datum(TEXTS[0])], squares).result()
    assert "squares" in str(told.metrics), told.metrics
    try:
        training.forward_backward([datum([5, 10_000])], "cross_entropy").result()
    except tinker.RequestFailedError as refused:
        assert "not of the vocabulary" in str(refused)
    else:
        raise AssertionError("a token outside of the vocabulary was taken")
    training.optim_step(adam).result()

    again = there(service.create_training_client_from_state_with_optimizer(state))
    resumed = again.forward_backward([datum(TEXTS[0])], "cross_entropy").result()
    again.optim_step(adam).result()
    logprobs = resumed.loss_fn_outputs[0]["logprobs"].tolist()
    assert max(abs(mine - theirs) for mine, theirs in zip(logprobs, scored[1:], strict=True)) < 1e-4
    sys.stdout.write(f"tinker {tinker.__version__}: {losses}\n")


if __name__ == "__main__":
    main(sys.argv[1])
