"""Measure supervised tokens per second of whole training steps, against the straightforward step, in turns (A B A B).

    python -m benchmarks.training RECIPE --responses FILE.jsonl --out FILE.json

    step = forward, objective, backward, clipping, AdamW       features of the samples are computed beforehand
    tokens = supervised positions of the batch, the same for every variant

Every variant trains a drafter of its own from the same weights on the same batches, so their losses can be compared.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, cast

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from benchmarks.straightforward import StraightforwardObjective
from outrider.contrib.domino import Domino
from outrider.data.responses import Sample, join_turns
from outrider.drafters.dflash import DFlash
from outrider.drafters.dflash2 import DFlash2
from outrider.drafters.loss import ObjectiveConfig
from outrider.target.model import Target, load_target
from outrider.training.batches import BlockBatch, Schedule, build_batch
from outrider.training.dataset import existing_responses, responses_path
from outrider.training.features import FeatureSource
from outrider.training.machine import training_dtype
from outrider.training.objective import BlockObjective
from outrider.training.recipe import Precision, Recipe, load_recipe
from outrider.training.setup import fresh, new_drafter
from outrider.training.trainer import build_optimizer
from outrider.utils.measure import default_dtype, machine, quartiles, set_up, usable_device, versions

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
    setup = Setup.of(recipe, target, samples)
    drafter, schedule, frozen = setup.drafter, setup.schedule, setup.frozen
    aux_layers = drafter.config.target_layer_ids
    features = FeatureSource(target, samples, aux_layers, drafter.aux_scale_L, 2**40)
    batches = []
    for step in range(_WARM_UP + steps):
        chosen = schedule.step(step)
        batches.append(build_batch(chosen, samples, [features[n] for n, _ in chosen], drafter.config.gamma))
    variants: dict[tuple[str, Precision], Callable[[BlockBatch], float]] = {}
    for precision in precisions:
        theirs, ours = StraightforwardObjective(*frozen, precision), BlockObjective(*frozen, precision)
        variants["straightforward", precision] = stepper(theirs, copy.deepcopy(drafter), recipe)
        variants["outrider", precision] = stepper(partial(block_loss, ours), copy.deepcopy(drafter), recipe)
    return _race(variants, batches, setup.draft_vocab)


@dataclass(frozen=True)
class Setup:
    """The initial drafter, the schedule and the arguments of `BlockObjective` that all variants share."""

    drafter: DFlash
    schedule: Schedule
    frozen: tuple[Target, Tensor, ObjectiveConfig]

    @property
    def draft_vocab(self) -> int:
        return len(self.frozen[1])

    @classmethod
    def of(cls, recipe: Recipe, target: Target, samples: Sequence[Sample]) -> Setup:
        config = recipe.optimizer
        if len(samples) < config.sequences_per_step:
            raise ValueError(
                f"{len(samples)} usable samples, and a step takes optimizer.sequences_per_step="
                f"{config.sequences_per_step}."
            )
        torch.manual_seed(recipe.seed)
        start = fresh(new_drafter(recipe, target), recipe, target, samples)
        if not isinstance(start.drafter, DFlash) or isinstance(start.drafter, (DFlash2, Domino)):
            raise ValueError(
                f"drafter.algorithm={recipe.drafter.algorithm}: the straightforward step knows block drafters only "
                "(dflash, dspark)."
            )
        schedule = Schedule.of(config, samples, recipe.seed, start.drafter.config.gamma)
        ids = start.draft_ids_Vd
        return cls(start.drafter, schedule, (target, ids, recipe.objective))


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


# ----------------------------------------------------------------------------
# Supervised tokens per second of online training, target included: ours and the straightforward one, in turns.
#
#     straightforward   each step: the target on its sequences, padded to the longest, through transformers;
#                       then the step of benchmarks/straightforward.py
#     ours              each step: features of its samples (packed prefill, once; from memory in later epochs); then
#     ours
#
# The straightforward side is spared its target's logits where nothing is supervised: its objective computes the others.
# ----------------------------------------------------------------------------


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
    setup = Setup.of(recipe, target, samples)
    aux_layers, scale_L = setup.drafter.config.target_layer_ids, setup.drafter.aux_scale_L
    memory = FeatureSource(target, samples, aux_layers, scale_L, 2**40)
    known = FeatureSource(target, samples, aux_layers, scale_L, 2**40)  # for the other side's batches, not timed
    theirs = stepper(StraightforwardObjective(*setup.frozen, precision), copy.deepcopy(setup.drafter), recipe)
    ours = stepper(partial(block_loss, BlockObjective(*setup.frozen, precision)), copy.deepcopy(setup.drafter), recipe)
    steps = len(samples) // setup.schedule.sequences_per_step
    seconds = {name: [0.0] * epochs for name in ("straightforward", "outrider")}
    tokens = [0] * epochs
    for step in range(steps * epochs):
        chosen, epoch = setup.schedule.step(step), step // steps
        indices = [i for i, _ in chosen]
        batch = build_batch(chosen, samples, known.gather(indices), setup.drafter.config.gamma)
        tokens[epoch] += int(batch.supervised_NK.sum())
        started = time.perf_counter()
        _padded_forward(target, [samples[i] for i in indices])
        theirs(batch)
        seconds["straightforward"][epoch] += time.perf_counter() - started
        started = time.perf_counter()
        ours(build_batch(chosen, samples, memory.gather(indices), setup.drafter.config.gamma))
        seconds["outrider"][epoch] += time.perf_counter() - started
    whole = {name: sum(tokens) / sum(taken) for name, taken in seconds.items()}
    return [
        RunSpeed(
            name,
            precision,
            setup.draft_vocab,
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


_PRECISIONS = ("float32", "bfloat16")


def _precisions(names: list[str]) -> list[Precision]:
    unknown = [name for name in names if name not in _PRECISIONS]
    if unknown:
        raise ValueError(f"precision {unknown[0]!r} is not one of: {', '.join(_PRECISIONS)}.")
    return cast("list[Precision]", names)


def main(
    recipe: Annotated[Path, typer.Argument(help="a recipe: drafter, objective and optimizer settings")],
    overrides: Annotated[list[str] | None, typer.Argument(help="fields to change, as for train")] = None,
    responses: Annotated[Path | None, typer.Option(help="a responses file; the recipe's own by default")] = None,
    precision: Annotated[
        list[str] | None, typer.Option(help="float32, bfloat16 or both (where bfloat16 is faster)")
    ] = None,
    steps: Annotated[int, typer.Option(min=2)] = 7,
    epochs: Annotated[int, typer.Option(min=0, help="of online training, the target included; 0 for none")] = 4,
    full_vocabulary: Annotated[bool, typer.Option(help="measure the target's whole vocabulary too")] = True,
    out: Annotated[Path | None, typer.Option(help="JSON file for the figures")] = None,
    threads: Annotated[int | None, typer.Option(min=1)] = None,
) -> None:
    """Supervised tokens per second of whole training steps, ours and the straightforward one taking turns."""
    chosen = load_recipe(recipe, overrides or [])
    set_up(threads or chosen.threads)
    fast, _ = training_dtype(usable_device(chosen.device))
    precisions = _precisions(precision or list(_PRECISIONS[:1] if fast == torch.float32 else _PRECISIONS))
    target = load_target(chosen.target, default_dtype(chosen.device), chosen.device)
    _, replies = existing_responses(responses or responses_path(chosen), target)
    samples = join_turns(reply for reply, _ in replies)[: (steps + 1) * chosen.optimizer.sequences_per_step]
    found = training_speed(chosen, target, samples, precisions, steps)
    if full_vocabulary and found[0].draft_vocab < target.vocab_size:
        whole = chosen.drafter.model_copy(update={"draft_vocab_size": None})
        found += training_speed(chosen.model_copy(update={"drafter": whole}), target, samples, precisions, steps)
    Console().print(_speed_table(found))
    runs: list[RunSpeed] = []
    for each in precisions if epochs else []:
        loaded = target if each == "float32" else load_target(chosen.target, torch.bfloat16, chosen.device)
        runs += run_speed(chosen, loaded, samples, each, epochs)
    if runs:
        Console().print(_run_table(runs))
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        settings = {
            "steps": steps,
            "drafter": chosen.drafter.model_dump(),
            "optimizer": chosen.optimizer.model_dump(),
            "objective": chosen.objective.model_dump(),
        }
        figures = {
            "results": [asdict(speed) for speed in found],
            "runs": [asdict(speed) for speed in runs],
            "settings": settings,
        }
        out.write_text(json.dumps({**figures, "machine": machine(), "versions": versions()}, indent=1) + "\n")


def _run_table(runs: list[RunSpeed]) -> Table:
    view = Table(title="online training, target included: supervised tokens per second")
    for heading in ("variant", "precision", "by epoch", "whole run", "against straightforward"):
        view.add_column(heading, justify="right", no_wrap=True)
    for run in runs:
        by_epoch = ", ".join(f"{rate:.0f}" for rate in run.epochs)
        view.add_row(run.variant, run.precision, by_epoch, f"{run.whole:.0f}", f"{run.ratio:.2f}x")
    return view


def _speed_table(found: list[StepSpeed]) -> Table:
    view = Table(title="training steps: supervised tokens per second, median (quartiles)")
    for heading in ("draft vocabulary", "variant", "precision", "tokens/s", "against straightforward", "first loss"):
        view.add_column(heading, justify="right", no_wrap=True)
    for speed in found:
        low, middle, high = speed.tokens_per_second
        ratio = f"{speed.ratio[1]:.2f}x ({speed.ratio[0]:.2f}-{speed.ratio[2]:.2f})"
        rate = f"{middle:.0f} ({low:.0f}-{high:.0f})"
        cells = str(speed.draft_vocab), speed.variant, speed.precision, rate, ratio, f"{speed.losses[0]:.4f}"
        view.add_row(*cells)
    return view


if __name__ == "__main__":
    typer.run(main)
