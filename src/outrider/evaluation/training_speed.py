"""Supervised tokens per second of whole training steps, ours and the straightforward one, in turns (A B A B ...).

    step = forward, objective, backward, clipping, AdamW       features of the samples are computed beforehand
    tokens = supervised positions of the batch, the same for every variant

Every variant trains a drafter of its own from the same weights on the same batches, so their losses can be compared.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from outrider.data.samples import Sample
from outrider.drafters import DFlash
from outrider.drafters.catalogue import method_of
from outrider.drafters.dflash2 import DFlash2
from outrider.evaluation.quartiles import quartiles
from outrider.evaluation.straightforward import StraightforwardObjective
from outrider.target import Target
from outrider.training.batches import BlockBatch, Schedule, build_batch
from outrider.training.drafter import fresh
from outrider.training.features import FeatureSource
from outrider.training.objective import ObjectiveConfig
from outrider.training.optimizer import build_optimizer
from outrider.training.recipe import Recipe
from outrider.training.step import BlockObjective, Precision
from outrider.training.vocabulary import inverse_ids

_WARM_UP = 1


@dataclass(frozen=True)
class StepSpeed:
    """One variant: tokens per second and, against the straightforward step of the same precision, the ratio of each
    pair of steps; both as (lower quartile, median, upper quartile). `losses` of the timed steps."""

    variant: str
    precision: Precision
    draft_vocab: int
    tokens_per_second: tuple[float, float, float]
    ratio: tuple[float, float, float]
    losses: list[float]


def training_speed(
    recipe: Recipe, target: Target, samples: Sequence[Sample], precisions: Sequence[Precision], steps: int
) -> list[StepSpeed]:
    """Time `steps` steps of every variant in the recipe's settings; `samples` should be just enough for them.

    Raises:
        ValueError: too few samples for one step.
    """
    contest = Contest.of(recipe, target, samples)
    drafter, schedule, frozen = contest.drafter, contest.schedule, contest.frozen
    taps = drafter.config.target_layer_ids
    features = FeatureSource(target, samples, taps, drafter.tap_scale_L, 2**40)
    batches = []
    for step in range(_WARM_UP + steps):
        chosen = schedule.step(step)
        batches.append(build_batch(chosen, samples, [features[n] for n, _ in chosen], drafter.config.gamma))
    variants: dict[tuple[str, Precision], Callable[[BlockBatch], float]] = {}
    for precision in precisions:
        theirs, ours = StraightforwardObjective(*frozen, precision), BlockObjective(*frozen, precision)
        variants["straightforward", precision] = stepper(theirs, copy.deepcopy(drafter), recipe)
        variants["outrider", precision] = stepper(partial(block_loss, ours), copy.deepcopy(drafter), recipe)
    return _race(variants, batches, contest.draft_vocab)


@dataclass(frozen=True)
class Contest:
    """What all variants share: the drafter they start from, the schedule, and what surrounds a drafter in training."""

    drafter: DFlash
    schedule: Schedule
    frozen: tuple[Target, Tensor, Tensor, ObjectiveConfig]

    @property
    def draft_vocab(self) -> int:
        return len(self.frozen[1])

    @classmethod
    def of(cls, recipe: Recipe, target: Target, samples: Sequence[Sample]) -> Contest:
        config = recipe.optimizer
        if len(samples) < config.sequences_per_step:
            raise ValueError(
                f"{len(samples)} usable samples, and a step takes optimizer.sequences_per_step="
                f"{config.sequences_per_step}."
            )
        torch.manual_seed(recipe.seed)
        method = method_of(recipe.drafter.algorithm)
        start = fresh(method, method.module(method.configure(recipe.drafter, target)), recipe, target, samples)
        if not isinstance(start.drafter, DFlash) or isinstance(start.drafter, DFlash2):
            raise ValueError(
                f"drafter.algorithm={method.name}: the straightforward step knows block drafters only (dflash, dspark)."
            )
        schedule = Schedule.of(config, samples, recipe.seed, start.drafter.config.gamma)
        ids = start.draft_ids_Vd
        objective = ObjectiveConfig(**recipe.objective.model_dump())
        return cls(start.drafter, schedule, (target, ids, inverse_ids(ids, target.vocab_size), objective))


def block_loss(compute: BlockObjective, drafter: DFlash, batch: BlockBatch) -> Tensor:
    return compute(drafter, batch).loss


def stepper(
    loss_of: Callable[[DFlash, BlockBatch], Tensor], drafter: DFlash, recipe: Recipe
) -> Callable[[BlockBatch], float]:
    """One training step on a drafter of its own, with the trainer's optimizer; returns the loss."""
    config = recipe.optimizer
    optimizer = build_optimizer(drafter, config)

    def step(batch: BlockBatch) -> float:
        loss = loss_of(drafter, batch)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), config.clip)
        optimizer.step()
        return loss.item()

    return step


def _race(
    variants: dict[tuple[str, Precision], Callable[[BlockBatch], float]], batches: list[BlockBatch], draft_vocab: int
) -> list[StepSpeed]:
    rates: dict[tuple[str, Precision], list[float]] = {key: [] for key in variants}
    losses: dict[tuple[str, Precision], list[float]] = {key: [] for key in variants}
    for number, batch in enumerate(batches):
        tokens = int(batch.supervised_NK.sum())
        for key, step in variants.items():
            started = time.perf_counter()
            loss = step(batch)
            seconds = time.perf_counter() - started
            if number >= _WARM_UP:
                rates[key].append(tokens / seconds)
                losses[key].append(loss)
    return [
        StepSpeed(
            variant,
            precision,
            draft_vocab,
            quartiles(rates[variant, precision]),
            quartiles(
                [a / b for a, b in zip(rates[variant, precision], rates["straightforward", precision], strict=True)]
            ),
            losses[variant, precision],
        )
        for variant, precision in variants
    ]
