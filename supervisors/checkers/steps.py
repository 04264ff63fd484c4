"""Checks of steps: consecutive prompts, each sample trained by one step, and commits that name what was granted."""

from __future__ import annotations

from collections.abc import Iterator

from actors.ledger import events as ev
from actors.protocol.evaluations import is_evaluation
from supervisors.checkers.followed import Topic
from supervisors.checkers.history import History, RunState, Violation
from supervisors.checkers.replay import Replay
from supervisors.checkers.samples import complaints

STEPS, FINISH = "steps", "finish"


def check_steps(history: History, replay: Replay) -> Iterator[Violation]:
    """A step's samples are trained once; each commit names exactly what was granted; a replay names the same."""
    yield from complaints(STEPS, replay, Topic.STEP)
    yield from _order(replay)
    yield from _prompts(history, replay)
    yield from _trained_once(replay)
    yield from _as_granted(replay)
    yield from _versions(history)
    yield from _rows(history, replay)


def _order(replay: Replay) -> Iterator[Violation]:
    for place, step in enumerate(replay.commits):
        if step != place:
            what = f"step {place} was never committed, step {step} was" if step > place else f"step {step} came late"
            yield Violation(checker=STEPS, what=what, step=min(place, step))
            return


def _prompts(history: History, replay: Replay) -> Iterator[Violation]:
    """Prompt i of step s has the ordinal s * prompts_per_step + i, so none is passed over and none comes twice.

    If the job filters, a step takes prompts until it has enough, and the next one begins after them.
    """
    count, group = history.job.algorithm.prompts_per_step, history.job.algorithm.group_size
    filtered, end = history.job.algorithm.filter == "spread", -1
    for step, batch in replay.batches.items():
        if is_evaluation(step):
            continue
        expected = list(range(step * count, (step + 1) * count))
        if filtered:
            first = end if end >= 0 else batch.prompts[0]  # the steps before the first may have been pruned
            expected = list(range(first, first + len(batch.prompts)))
            end = expected[-1] + 1
        if batch.prompts != expected:
            wrong = sorted(set(batch.prompts) ^ set(expected)) or batch.prompts
            which = "missing from" if wrong[0] in expected else "of another step in"
            what = f"the batch of step {step} is not the prompts {expected[0]} to {expected[-1]}"
            yield Violation(checker=STEPS, what=f"{what}: prompt {wrong[0]} is {which} it", step=step, prompt=wrong[0])
        if batch.group_size != group:
            what = f"the batch of step {step} has {batch.group_size} siblings a prompt, the job says {group}"
            yield Violation(checker=STEPS, what=what, step=step)


def _trained_once(replay: Replay) -> Iterator[Violation]:
    trained: dict[tuple[int, int], int] = {}
    for step, named in replay.commits.items():
        for prompt, sibling in sorted(named):
            before = trained.setdefault((prompt, sibling), step)
            if before != step:
                what = f"prompt {prompt} sibling {sibling} was trained twice: by step {before} and by step {step}"
                yield Violation(checker=STEPS, what=what, step=step, prompt=prompt, sibling=sibling)


def _as_granted(replay: Replay) -> Iterator[Violation]:
    for step, granted in replay.granted.items():
        named = replay.commits[step]
        for prompt, sibling in sorted(named - granted):
            what = f"the commit of step {step} names prompt {prompt} sibling {sibling}, which was not granted"
            yield Violation(checker=STEPS, what=what, step=step, prompt=prompt, sibling=sibling)
        for prompt, sibling in sorted(granted - named):
            what = f"prompt {prompt} sibling {sibling} was granted to step {step}, whose commit does not name it"
            yield Violation(checker=STEPS, what=what, step=step, prompt=prompt, sibling=sibling)


def _versions(history: History) -> Iterator[Violation]:
    for event in history.ledger:
        if isinstance(event, ev.Committed) and event.policy_version != event.step + 1:
            what = f"step {event.step} made version {event.policy_version}, expected {event.step + 1}"
            yield Violation(checker=STEPS, what=what, step=event.step)


def _rows(history: History, replay: Replay) -> Iterator[Violation]:
    """Rows of metrics.jsonl agree with the commits. A row may be missing after a crash, never wrong or there twice."""
    seen: set[int] = set()
    for row in history.rows:
        step = int(row["step"])
        if step in seen:
            yield Violation(checker=STEPS, what=f"metrics.jsonl has two rows for step {step}", step=step)
        seen.add(step)
        named = replay.commits.get(step)
        if named is None:
            what = f"metrics.jsonl has a row for step {step}, which was never committed"
            yield Violation(checker=STEPS, what=what, step=step)
        elif int(row.get("samples", len(named))) != len(named):
            what = f"metrics.jsonl says {row['samples']} samples for step {step}, its commit names {len(named)}"
            yield Violation(checker=STEPS, what=what, step=step)
    for name in ("prompts_lost", "samples_trained_twice"):
        worst = max(history.rows, key=lambda row: row.get(name, 0), default=None)
        if worst is not None and worst.get(name, 0):
            what = f"metrics.jsonl counts {worst[name]} {name.replace('_', ' ')} at step {worst['step']}"
            yield Violation(checker=STEPS, what=what, step=int(worst["step"]))


def check_finish(history: History, replay: Replay, *, must_finish: bool = False) -> Iterator[Violation]:
    """A finished job has finished all its steps; with ``must_finish``, the job is finished."""
    steps, done = history.job.steps, replay.committed_steps
    if history.state is RunState.FINISHED:
        ended = [int(row["step"]) for row in history.named("data_ended")]
        if done < steps and not ended:
            what = f"the job says that it is finished, but {done} of its {steps} steps are committed"
            yield Violation(checker=FINISH, what=what, step=done)
    elif must_finish:
        yield Violation(
            checker=FINISH, what=f"the job is not finished but {history.state}: {done} of {steps} steps", step=done
        )
    if done > steps and history.state is not RunState.RUNNING:
        yield Violation(checker=FINISH, what=f"{done} steps are committed, the job has {steps}", step=steps)
