"""Supervised tokens per second of online training, target included: ours and the straightforward one, in turns.

    straightforward   each step: the target on its sequences, padded to the longest, through transformers;
                      then the step of evaluation/straightforward.py
    ours              each step: features of its samples (packed prefill, once; from memory in later epochs); then ours

The straightforward side is spared its target's logits where nothing is supervised: its objective computes the others.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn.utils.rnn import pad_sequence

from outrider.data.samples import Sample
from outrider.evaluation.straightforward import StraightforwardObjective
from outrider.evaluation.training_speed import Contest, block_loss, stepper
from outrider.target import Target
from outrider.training.batches import build_batch
from outrider.training.features import FeatureSource
from outrider.training.recipe import Recipe
from outrider.training.step import BlockObjective, Precision


@dataclass(frozen=True)
class RunSpeed:
    """One side of a run: tokens per second by epoch and in all, and the latter against the straightforward side."""

    variant: str
    precision: Precision
    draft_vocab: int
    epochs: list[float]
    whole: float
    ratio: float


def run_speed(
    recipe: Recipe, target: Target, samples: Sequence[Sample], precision: Precision, epochs: int
) -> list[RunSpeed]:
    """Time `epochs` epochs over `samples`; the target should be loaded in the same precision.

    Raises:
        ValueError: too few samples for one step.
    """
    contest = Contest.of(recipe, target, samples)
    taps, scale_L = contest.drafter.config.target_layer_ids, contest.drafter.tap_scale_L
    memory = FeatureSource(target, samples, taps, scale_L, 2**40)
    known = FeatureSource(target, samples, taps, scale_L, 2**40)  # for the other side's batches, not timed
    theirs = stepper(StraightforwardObjective(*contest.frozen, precision), copy.deepcopy(contest.drafter), recipe)
    ours = stepper(
        partial(block_loss, BlockObjective(*contest.frozen, precision)), copy.deepcopy(contest.drafter), recipe
    )
    steps = len(samples) // contest.schedule.sequences_per_step
    seconds = {name: [0.0] * epochs for name in ("straightforward", "outrider")}
    tokens = [0] * epochs
    for step in range(steps * epochs):
        chosen, epoch = contest.schedule.step(step), step // steps
        indices = [i for i, _ in chosen]
        batch = build_batch(chosen, samples, known.gather(indices), contest.drafter.config.gamma)
        tokens[epoch] += int(batch.supervised_NK.sum())
        started = time.perf_counter()
        _padded_forward(target, [samples[i] for i in indices])
        theirs(batch)
        seconds["straightforward"][epoch] += time.perf_counter() - started
        started = time.perf_counter()
        ours(build_batch(chosen, samples, memory.gather(indices), contest.drafter.config.gamma))
        seconds["outrider"][epoch] += time.perf_counter() - started
    whole = {name: sum(tokens) / sum(taken) for name, taken in seconds.items()}
    return [
        RunSpeed(
            name,
            precision,
            contest.draft_vocab,
            [count / second for count, second in zip(tokens, taken, strict=True)],
            whole[name],
            whole[name] / whole["straightforward"],
        )
        for name, taken in seconds.items()
    ]


@torch.inference_mode()
def _padded_forward(target: Target, samples: Sequence[Sample]) -> object:
    """Hidden states of all layers of a right-padded batch, as a training script asks transformers for them."""
    tokens = [torch.tensor(s.tokens[:-1], device=target.device) for s in samples]
    tokens_BT = pad_sequence(tokens, batch_first=True)
    mask_BT = pad_sequence([torch.ones_like(t) for t in tokens], batch_first=True)
    return target.model.model(
        input_ids=tokens_BT, attention_mask=mask_BT, output_hidden_states=True, use_cache=False
    ).hidden_states
