"""How many rollout workers a job should have, after each step.

StreamRL (arXiv 2504.15930), stage balancing, "dynamic adjustment", and what a running system needs beside it. In words:

- After a step the time in which workers generated, T_gen, is held against that in which the trainer trained, T_train.
  Once the gap is as large as what one more worker would take off T_gen, there should be one more. The paper stops
  here; once generation would be the faster stage with one worker fewer too, by ``margin``, there should be one fewer.
- What a worker more or less changes is not profiled beforehand: it is taken as its share of the work, T_gen/(n + 1).
- **Dead band**: between both rules lies a factor of at least (1 + 1/n)/(1 - margin), so a worker that was just added is
  not what the other rule wants to be rid of.
- **Patience**: both times are means over the last ``patience`` steps, all of one number of workers; a step that began
  with another number than it ended with is not judged. One worker at a time, and then the count begins anew.
- **No swinging**: each time the rule reverses, from adding to removing or back, its patience doubles, up to 32-fold. So
  whatever the figures are, n steps see no more than about log2(n) reversals before that limit, and few after it.
- **A worker has to pay.** One that took off less than half of its share, as where a few long samples are all that is
  left, is the last one until T_gen has risen by a further worker's share. With prices it has to make steps
  cheaper: its price, as part of what everything costs with it, is what it has to take off at least.
- Workers that have not come yet stay asked for while the figures want more than there are, but no further ones are:
  machines take their time to come.
- **Bounds**: never fewer than ``least``, nor more than ``most``; a number outside them is brought inside at once.

Pure: a step's figures in, a number out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

_REVERSALS_MAX = 5
"""Number of times that patience doubles at most."""


@dataclass(frozen=True, slots=True)
class PoolRules:
    """Holds the rules that do not change from step to step."""

    least: int
    most: int
    patience: int = 3
    """Steps that are looked at together."""
    margin: float = 0.15
    """Part by which generation must be faster than training, with a worker fewer, for one to go."""


@dataclass(frozen=True, slots=True)
class StageReport:
    """Holds what a step has measured."""

    gen_s: float
    """Time in which a worker generated, as a mean over the workers."""
    train_s: float
    """Time in which the trainer trained."""
    workers: int
    """Rollout workers at the end of the step."""
    price_share: float | None = None
    """Price of one worker, as part of what all machines and one more worker would cost; None: nothing has a price."""


@dataclass(frozen=True, slots=True)
class PoolSize:
    """Holds how many workers are wanted, and what that was decided from."""

    wanted: int
    workers: int = 0
    """Workers at the end of the step before; 0: there was none."""
    seen: tuple[StageReport, ...] = ()
    """Steps since the last change, the newest last; no more than are looked at together."""
    went: int = 0
    """Direction of the last change, up (1) or down (-1)."""
    reversals: int = 0
    """Number of changes that went another way than the one before."""
    grown_from: StageReport | None = None
    """Mean of the steps before the newest worker, until it is known whether that worker pays."""
    futile_s: float = 0.0
    """T_gen with the last worker that did not pay; 0: none."""


def decide(rules: PoolRules, now: PoolSize, report: StageReport) -> PoolSize:
    """What is wanted after a step."""
    n, inside = report.workers, min(max(now.wanted, rules.least), rules.most)
    if inside != now.wanted or n != now.workers or not rules.least <= n <= rules.most:
        return replace(now, wanted=inside, workers=n, seen=())  # a step of two sizes tells nothing of either
    patience = rules.patience << now.reversals
    now = replace(now, seen=(*now.seen, report)[-patience:])
    if len(now.seen) < patience:
        return now
    mean = _mean(now.seen)
    now = _judged(now, mean)
    asked = _asked(rules, mean)
    if asked > n and mean.gen_s < now.futile_s * (n + 1) / n:
        asked = n
    if n < asked < now.wanted:
        asked = now.wanted  # the missing workers are on their way
    return _changed(now, max(asked, rules.least), mean)


def _asked(rules: PoolRules, mean: StageReport) -> int:
    """One more worker if the gap is at least what that takes off, one fewer if training stays the slower stage."""
    n, gen_s, train_s = mean.workers, mean.gen_s, mean.train_s
    gain_s = gen_s - gen_s * n / (n + 1)
    if n < rules.most and 0 < gain_s <= gen_s - train_s:
        return n + 1
    return n - 1 if n > 1 and gen_s * n / (n - 1) <= train_s * (1 - rules.margin) else n


def _judged(now: PoolSize, mean: StageReport) -> PoolSize:
    """Judge whether the newest worker pays, if that is not known yet."""
    before = now.grown_from
    if before is None or mean.workers <= before.workers:
        return now
    share = 0.5 / mean.workers if mean.price_share is None else mean.price_share
    pays = mean.gen_s <= before.gen_s * (1 - share)
    return replace(now, grown_from=None, futile_s=0.0 if pays else mean.gen_s)


def _changed(now: PoolSize, asked: int, mean: StageReport) -> PoolSize:
    if asked == now.wanted:
        return now
    way = 1 if asked > now.wanted else -1
    reversals = min(now.reversals + (way == -now.went), _REVERSALS_MAX)
    grown_from = mean if asked > mean.workers else None
    return replace(now, wanted=asked, seen=(), went=way, reversals=reversals, grown_from=grown_from)


def _mean(seen: tuple[StageReport, ...]) -> StageReport:
    gen_s, train_s = (sum(getattr(report, name) for report in seen) / len(seen) for name in ("gen_s", "train_s"))
    return replace(seen[-1], gen_s=gen_s, train_s=train_s)
