"""Judges whether a simulated run kept its promises: runs the checkers of real runs over the recorded history.

After all faults have healed every job must finish. The checkers are those of ``supervisors/checkers``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import xxhash

from actors.ledger.committed import CommittedSample
from actors.ledger.events import BatchIssued, decode_event
from actors.protocol.work import SamplingParams
from actors.rollout.engine import EngineSpec, GenerationRequest
from actors.rollout.engines.simulated_engine import whole_response
from actors.rollout.worker_spec import engine_spec
from configs.schema import JobConfig
from supervisors.checkers.checks import check
from supervisors.checkers.history import History, RunState
from supervisors.checkers.service_calls import check_services
from supervisors.simulation.cluster.context import END_TOKEN
from supervisors.simulation.cluster.game import Game
from supervisors.simulation.cluster.world import World


def judge(world: World) -> list[str]:
    """One sentence for each violation; empty for a good run."""
    wrong: list[str] = []
    for job in world.jobs:
        summary = world.record(job.name).summary
        counters = [name for name in ("prompts_lost", "samples_trained_twice") if summary.get(name)]
        wrong += [f"{job.name}: {name} is {summary[name]}" for name in counters]
        if summary.get("error"):
            wrong.append(f"{job.name}: {summary['error']}")
        wrong += [f"{job.name}: rewards: {sentence}" for sentence in _rewards(world, job)]
        wrong += [f"{job.name}: responses: {sentence}" for sentence in _responses(world, job)]
        report = check(history_of(world, job), must_finish=True)
        wrong += [f"{job.name}: {violation.checker}: {violation.what}" for violation in report.violations]
    shared = check_services(world.services.record)
    return wrong + [f"services: {violation.checker}: {violation.what}" for violation in shared]


def _rewards(world: World, job: JobConfig) -> Iterator[str]:
    """Each sample that was trained on has a reward that a verifier gave for exactly its tokens."""
    given = world.record(job.name).verdicts
    for sample in world.machines["head"].journal_file(job.name).samples:
        if sample.state == "committed" and (sample.prompt, sample.tokens_hash, sample.reward) not in given:
            yield f"step {sample.step} prompt {sample.prompt} sibling {sample.sibling} has {sample.reward} from nobody"


def _responses(world: World, job: JobConfig) -> Iterator[str]:
    """Each sample has the tokens that one engine would have given without a fault."""
    file, spec = world.machines["head"].journal_file(job.name), engine_spec(job, "")
    if job.has_episodes:
        yield from _episodes(world, job, file.samples, spec)
        return
    batches = {
        event.step: (event, np.split(event.prompt_ids, np.cumsum(event.prompt_lengths)[:-1]))
        for kind, body in file.history
        if kind == "batch_issued" and isinstance(event := decode_event(body), BatchIssued)
    }
    for sample in file.samples:
        if sample.state != "committed":
            continue
        issued, prompts = batches[sample.step]
        prompt_ids = prompts[int(np.searchsorted(issued.prompts, sample.prompt))]
        request = GenerationRequest(
            request=0, prompt=sample.prompt, sibling=sample.sibling, prompt_ids=prompt_ids,
            generated=np.empty(0, np.int32), sampling=issued.sampling,
        )  # fmt: skip
        tokens = whole_response(request, spec.options, spec.max_context_tokens)
        if xxhash.xxh3_128_hexdigest(np.array(tokens, "<i4").tobytes()) != sample.tokens_hash:
            name = f"step {sample.step} prompt {sample.prompt} sibling {sample.sibling}"
            yield f"{name} has {sample.n_tokens} tokens that are not the {len(tokens)} that its engine would have given"


def _episodes(world: World, job: JobConfig, samples: Sequence[CommittedSample], spec: EngineSpec) -> Iterator[str]:
    """Episodes of deterministic environments have the row of an undisturbed game, and no token was discarded."""
    simulated = world.simulated_job(job.name)
    if simulated.drift:
        return
    for sample in samples:
        if sample.state != "committed":
            continue
        row = undisturbed_row(job, spec, sample.prompt, sample.sibling)
        if xxhash.xxh3_128_hexdigest(np.array(row, "<i4").tobytes()) != sample.tokens_hash:
            name = f"step {sample.step} prompt {sample.prompt} sibling {sample.sibling}"
            yield f"{name} has {sample.n_tokens} tokens that are not the {len(row)} of an undisturbed game"
    if discarded := world.record(job.name).summary.get("tokens_discarded"):
        yield f"{discarded} tokens were discarded, though its environments repeat themselves"


def undisturbed_row(job: JobConfig, spec: EngineSpec, prompt: int, sibling: int) -> list[int]:
    """The row of an episode that no fault disturbs."""
    sampling = SamplingParams(max_tokens=job.rollout.max_tokens, stop_token_ids=(END_TOKEN,), seed=job.seed)
    most = min(job.environment.turn_tokens or sampling.max_tokens, sampling.max_tokens)
    game = Game(job.seed, prompt, sibling, job.environment.turns_max)
    row, turns, first, left = list[int](), list[np.ndarray](), 0, sampling.max_tokens
    while (word := game.say(turns, 1)) is not None:
        end = len(row) + len(word.tokens)
        room = min(left, most, job.episode_tokens - end)
        if room < 1:
            break
        start = len(row) if word.fresh else first
        row += word.tokens.tolist()
        request = GenerationRequest(
            request=0, prompt=prompt, sibling=sibling, prompt_ids=np.array(row[start:], np.int32),
            generated=np.empty(0, np.int32), sampling=sampling, first=end, limit=end + room,
        )  # fmt: skip
        turn = whole_response(request, spec.options, spec.max_context_tokens)
        row += turn
        first, left = start, left - len(turn)
        turns.append(np.array(turn, np.int32))
    return row


def learned(world: World, job: JobConfig) -> str:
    """A hash of the result of ``job``: its newest weights, and the samples and tokens that made them."""
    digest = xxhash.xxh3_128()
    for name, data in sorted(world.published(job.name).final.items()):
        digest.update(name.encode())
        digest.update(data)
    for sample in world.machines["head"].journal_file(job.name).samples:
        told = (sample.step, sample.prompt, sample.sibling, sample.state, sample.tokens_hash, sample.reward)
        digest.update(repr(told).encode())
    return digest.hexdigest()


def history_of(world: World, job: JobConfig) -> History:
    """All that was recorded of ``job``, including pruned events of its journal."""
    record, file = world.record(job.name), world.machines["head"].journal_file(job.name)
    state = record.summary.get("state")
    return History(
        job=job,
        state=RunState.RUNNING if state is None else RunState(state) if state in set(RunState) else RunState.CRASHED,
        ledger=[decode_event(body) for _, body in file.history],
        samples=file.samples,
        events=[*record.events],
        rows=[*record.rows],
    )
