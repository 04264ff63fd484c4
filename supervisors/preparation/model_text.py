"""Reads from a model's files, before anything starts, its positions, its chat template, and how a response ends.

    config.json ──▶ does rollout.max_tokens fit? how long may a prompt be?
    a chat template ─▶ a process with transformers writes a chat: the token after the answer ends a response, too

Only a model with a chat template costs that process, about a second; the head itself never imports transformers.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from actors.host.import_guard import import_transformers_without_torch
from actors.host.parent_death import die_with_parent
from actors.host.whole_file import write_whole
from actors.jobs.stop_tokens import Claim, EndToken, end_tokens
from configs.model_files import ModelFileBroken, has_chat_template, positions, prompt_tokens_max, why_too_long
from configs.run_files import LOGS
from configs.schema import JobConfig
from supervisors.machine.processes.helper_process import run_helper
from supervisors.tree.errors import ModelTextUnusable

_ANSWER = "ANSWER"
_ENDS_SAID = 4
"""Number of end tokens that are listed to people; some models have dozens."""


async def look_at_text(job: JobConfig, model_path: Path, run_dir: Path) -> tuple[tuple[EndToken, ...], list[str]]:
    """The tokens that end a response, and sentences for people.

    Raises:
        ModelTextUnusable: responses do not fit the model, a file is broken, or transformers loads no tokenizer.
        BadStopToken: there is no end token, or ``rollout.stop`` names none.
    """
    try:
        if found := why_too_long(job, model_path):
            field, wrong, fix = found
            raise ModelTextUnusable(f"{field}: {wrong}. {fix}")
        further = await _ask(job, model_path, run_dir) if job.data.chat or has_chat_template(model_path) else []
        longest, limit = prompt_tokens_max(job, model_path), positions(model_path)
    except ModelFileBroken as error:
        raise ModelTextUnusable(f"model.path: {error}") from error
    ends = end_tokens(model_path, job.rollout.stop, further)
    said = [f"a response ends at {_listed(ends)}"]
    if limit is not None and longest < job.data.max_prompt_tokens:
        said.append(
            f"prompts may have up to {longest} tokens: the model has {limit.count} positions ({limit.key}),"
            f" of which rollout.max_tokens takes {job.rollout.max_tokens}; longer ones are left out"
        )
    return ends, said


def _listed(ends: Sequence[EndToken]) -> str:
    more = f" or at one of {len(ends) - _ENDS_SAID} more" if len(ends) > _ENDS_SAID else ""
    return " or at ".join(map(str, ends[:_ENDS_SAID])) + more


async def _ask(job: JobConfig, model_path: Path, run_dir: Path) -> list[Claim]:
    answer, log = run_dir / "model_text.json", run_dir / LOGS / "model.log"
    answer.unlink(missing_ok=True)
    order = json.dumps({"job": job.model_dump(mode="json"), "model": str(model_path), "answer": str(answer)})
    limits = job.limits
    try:
        end = await run_helper(
            "supervisors.preparation.model_text", log, limits, limits.ready_timeout_s, stdin=order.encode()
        )
    except TimeoutError as error:
        raise ModelTextUnusable(
            "model.path: transformers has not loaded the tokenizer within limits.ready_timeout_s"
            f" ({limits.ready_timeout_s:g} s); raise it"
        ) from error
    if not answer.exists():
        raise ModelTextUnusable(f"the model's tokenizer could not be tried {end}")
    reply: dict[str, Any] = json.loads(answer.read_text("utf-8"))
    answer.unlink()
    if "error" in reply:
        raise ModelTextUnusable(reply["error"])
    return [(int(id_), str(source)) for id_, source in reply["ends"]]


def ends_of_template(tokenizer: Any, kwargs: dict[str, Any]) -> list[Claim]:
    """The tokens that end a response: the tokenizer's, and the first special one that the template puts after it."""
    claims: list[Claim] = []
    if isinstance(tokenizer.eos_token_id, int):
        claims.append((tokenizer.eos_token_id, "eos_token of the tokenizer"))
    chat = [{"role": "user", "content": "QUESTION"}, {"role": "assistant", "content": _ANSWER}]
    try:
        text: str = tokenizer.apply_chat_template(chat, tokenize=False, **kwargs)
    except Exception:  # noqa: BLE001  a template may refuse our example for any reason; the job may still be fine
        return claims
    behind = text.rpartition(_ANSWER)[2]
    ids: list[int] = tokenizer(behind, add_special_tokens=False, verbose=False)["input_ids"] if behind else []
    end = next((id_ for id_ in ids if id_ in tokenizer.added_tokens_decoder), None)
    return claims if end is None else [*claims, (end, "the chat template")]


def _answer(order: dict[str, Any]) -> dict[str, Any]:
    import_transformers_without_torch()
    from actors.environments.errors import SourceUnreadable
    from actors.environments.prompts.tokenizer import TextCodec

    data = JobConfig.model_validate(order["job"]).data
    try:
        codec = TextCodec(Path(order["model"]), data)
        codec.check_vocabulary()
    except SourceUnreadable as error:
        return {"error": str(error)}
    has_template = bool(codec.tokenizer.chat_template)
    return {"ends": ends_of_template(codec.tokenizer, data.chat_template_kwargs) if has_template else []}


if __name__ == "__main__":
    die_with_parent()
    _order = json.load(sys.stdin)
    write_whole(Path(_order["answer"]), json.dumps(_answer(_order)))
