"""From preferences to a directory that ``reward.kind: model`` and transformers load.

    preferences ─▶ pairs, held out or not ─┐
    model ─▶ one logit ────────────────────┴▶ trained ─▶ OUT.partial ── renamed, once whole ──▶ OUT

Invariants
- ``OUT`` is always complete: a training that is killed leaves ``OUT.partial``, which the next one empties.
- One training at a time writes ``OUT.partial``: it holds a lock on a file there, which ends with its process.
- The results, such as the accuracy, stand beside the weights in ``reward_training.json``.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import torch
import transformers

from actors.host.room import no_space
from actors.reward_training.backbone import Backbone, load_backbone
from actors.reward_training.errors import CannotTrain, TrainingFailed
from actors.reward_training.preferences import Pair
from actors.reward_training.training import Encoded, Progress, RewardTrainer, encode, share_ranked_right
from configs.reward_training import RECORD, RewardTraining

_LOCK = "training.lock"
_ONE_THREAD_HIDDEN = 192
"""Hidden size up to which one thread is used: several would wait for each other longer than they compute."""


@dataclass(frozen=True, slots=True)
class TrainingOrder:
    """Says which model to train and how, and where to write it."""

    model: Path
    out: Path
    how: RewardTraining
    seed: int
    device: str = "auto"
    max_tokens: int | None = None


def train_reward_model(
    order: TrainingOrder,
    pairs: Sequence[Pair],
    *,
    named: Callable[[str], str],
    say: Callable[[str], None],
    tell: Callable[[Progress], None],
) -> dict[str, Any]:
    """Train and write; returns the results. ``named``: spells a setting as the user wrote it.

    Raises:
        RewardTrainingError: nothing was trained, and nothing written.
        NoSpaceLeft: the disk is full.
    """
    began_s = monotonic()
    transformers.logging.set_verbosity_error()  # it would warn that the head is not trained yet
    transformers.logging.disable_progress_bar()
    partial = order.out.with_name(f"{order.out.name}.partial")
    lock = _take(partial, order.out)  # fails now, not after hours of training
    try:
        backbone = load_backbone(
            order.model, seed=order.seed, device=order.device, max_tokens=order.max_tokens, named=named
        )
        if getattr(backbone.model.config.get_text_config(), "hidden_size", 1 << 30) <= _ONE_THREAD_HIDDEN:
            torch.set_num_threads(1)
        train, held_out = _split(pairs, backbone, order.how, named, say)
        trainer = RewardTrainer(backbone, train, held_out, order.how, order.seed)
        losses = trainer.run(tell)
        backbone.as_kept()
        rewards = trainer.rewards()
        result: dict[str, Any] = {
            "accuracy_held_out": round(share_ranked_right(rewards), 4),
            "steps": trainer.steps,
            "pairs": len(train.pairs),
            "pairs_held_out": len(held_out.pairs),
            "pairs_left_out": train.alike + held_out.alike,
            "texts_cut": train.cut + held_out.cut,
            "loss": round(statistics.fmean(losses[-max(1, len(losses) // 10) :]), 4),
            "reward_mean": round(statistics.fmean(reward for two in rewards for reward in two), 4),
            "reward_spread": round(statistics.pstdev([reward for two in rewards for reward in two]), 4),
            "seconds": round(monotonic() - began_s, 1),
            "model": str(order.model),
            "max_tokens": backbone.text.longest,
            "seed": order.seed,
        }
        backbone.model.save_pretrained(partial)
        backbone.tokenizer.save_pretrained(partial)
        (partial / RECORD).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        (partial / _LOCK).unlink()
        if order.out.is_dir():
            order.out.rmdir()  # an empty one may be there
        partial.rename(order.out)
    except torch.OutOfMemoryError as error:
        raise TrainingFailed(
            f"there is no room in the memory of {order.device} for one batch: lower {named('batch_tokens')} "
            f"({order.how.batch_tokens}) or {named('max_tokens')}; weights, gradients and AdamW take 16 bytes a weight"
        ) from error
    except Exception as error:
        if (full := no_space(error, partial, "the reward model")) is not None:
            raise full from error
        raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        os.close(lock)
    return result | {"path": str(order.out)}


def _take(partial: Path, out: Path) -> int:
    """Lock and empty ``partial``; returns the lock's descriptor, to be closed once the directory is gone.

    Raises:
        CannotTrain: another training is writing there.
    """
    partial.mkdir(parents=True, exist_ok=True)
    lock = -1
    try:
        lock = os.open(partial / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(lock), (partial / _LOCK).stat()):
            raise BlockingIOError  # its owner has removed it just now
    except (BlockingIOError, FileNotFoundError) as error:
        if lock >= 0:
            os.close(lock)
        raise CannotTrain(
            f"{out}: another training is writing it ({partial}); wait for its end, or name another directory"
        ) from error
    except OSError:
        if lock < 0:
            raise
        # a file system without locks: nobody is kept out
    for left in partial.iterdir():
        if left.name != _LOCK:
            shutil.rmtree(left) if left.is_dir() else left.unlink()
    return lock


def _split(
    pairs: Sequence[Pair],
    backbone: Backbone,
    how: RewardTraining,
    named: Callable[[str], str],
    say: Callable[[str], None],
) -> tuple[Encoded, Encoded]:
    """The encoded pairs to train on, and those held out. Raises CannotTrain if there are none of either."""
    sides = [pair.is_held_out(how.held_out) for pair in pairs]
    train, held_out = (
        encode([pair for pair, held in zip(pairs, sides, strict=True) if held is wanted], backbone)
        for wanted in (False, True)
    )
    if not train.pairs or not held_out.pairs:
        what = "none to train on" if not train.pairs else "none held out"
        if alike := train.alike + held_out.alike:
            longest, was_cut = backbone.text.longest, train.cut + held_out.cut
            raise CannotTrain(
                f"{alike} of {len(pairs)} pairs are left out, since the model would read the same text twice, and "
                f"of the others there are {what}: "
                + (
                    f"it reads only the last {longest} tokens of a text, so raise {named('max_tokens')} as far as the "
                    "model allows, or shorten what the texts end with alike"
                    if was_cut
                    else "give more pairs that differ"
                )
            )
        raise CannotTrain(
            f"{named('held_out')} {how.held_out:g}: of {len(pairs)} pairs, which have "
            f"{len({pair.group for pair in pairs})} prompts, there are {what}: all pairs of a prompt are held out, or "
            "none, so give more prompts, or "
            f"{'lower' if not train.pairs else 'raise'} it"
        )
    if cut := train.cut + held_out.cut:
        say(
            f"{cut} of {2 * len(pairs)} texts are longer than {backbone.text.longest} tokens and lose their beginning; "
            f"raise {named('max_tokens')} as far as the model allows, or shorten them"
        )
    if alike := train.alike + held_out.alike:
        say(f"{alike} of {len(pairs)} pairs are left out: the model would read the same text twice")
    return train, held_out
