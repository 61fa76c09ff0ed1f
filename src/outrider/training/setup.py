"""From a recipe to everything a run needs: target, samples, drafter, objective."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from outrider.data.prompts import Prompt, load_prompts
from outrider.data.responses import RegenerationConfig, regenerate
from outrider.data.samples import Sample, join_turns
from outrider.drafters import DFlash, DFlashConfig, DSpark, DSparkConfig
from outrider.target import Target
from outrider.training.drafter import Start, drafter_config, load_start
from outrider.training.features import measure_tap_scale
from outrider.training.initialize import initialize_from_target, rescale_taps
from outrider.training.objective import ObjectiveConfig
from outrider.training.recipe import DataSection, Recipe
from outrider.training.step import BlockObjective
from outrider.training.vocabulary import choose_draft_ids, inverse_ids

_CALIBRATION_SAMPLES = 16


@dataclass
class Run:
    """What the trainer trains, and on what. `draft_ids_Vd` covers the whole vocabulary when it is not `reduced`."""

    target: Target
    drafter: DFlash
    objective: BlockObjective
    draft_ids_Vd: Tensor
    reduced: bool
    samples: list[Sample]
    held_out: list[Sample]
    origin: str = ""  # digest of the checkpoint that training goes on from


def recipe_prompts(data: DataSection) -> list[Prompt]:
    """All prompts of a recipe, the sources interleaved so that an early stop leaves a fair mixture."""
    sources = []
    for source in data.prompts:
        prompts = [
            Prompt(p.id, p.turns[: source.max_turns])
            for p in load_prompts(source.path)
            if source.max_characters is None or len(p.turns[0]) <= source.max_characters
        ]
        sources.append(prompts[: source.limit])
    places = [((i + 0.5) / len(prompts), p) for prompts in sources for i, p in enumerate(prompts)]
    prompts = [p for _, p in sorted(places, key=lambda place: place[0])]
    repeated = len(prompts) - len({p.id for p in prompts})
    if repeated:
        raise ValueError(f"{repeated} prompt ids occur more than once in data.prompts; give every prompt its own id.")
    return prompts


def recipe_samples(
    recipe: Recipe, target: Target, on_progress: Callable[[int, int, int], None] = lambda done, total, tokens: None
) -> tuple[list[Sample], list[Sample]]:
    """(training, held-out) samples, regenerating what is missing.

    Raises:
        ValueError: nothing usable came out.
    """
    data = recipe.data
    path = Path(data.responses) if data.responses else Path(recipe.out) / "responses.jsonl"
    config = RegenerationConfig(
        data.max_new_tokens, data.max_prompt_tokens, data.temperature, data.batch_size, recipe.seed
    )
    deadline = time.monotonic() + data.max_minutes * 60 if data.max_minutes else float("inf")
    # Once training has begun its samples are fixed, or a resumed run would not be the same run.
    begun = (Path(recipe.out) / "state" / "state.json").is_file()
    replies = regenerate(
        target, recipe_prompts(data), config, path, on_progress, stop=lambda: begun or time.monotonic() > deadline
    )
    usable = join_turns(replies)
    # Split by conversation: a sample of later turns contains the earlier responses.
    ids = sorted({s.id for s in usable})
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(recipe.seed)).tolist()
    if len(ids) <= data.held_out:
        raise ValueError(
            f"{path} has responses to {len(ids)} conversations and data.held_out takes {data.held_out} of them; "
            "add prompts or lower data.held_out."
        )
    place = {ids[i]: rank for rank, i in enumerate(order)}
    usable.sort(key=lambda s: place[s.id])
    split = next(i for i, s in enumerate(usable) if place[s.id] >= data.held_out)
    return usable[split:], usable[:split]


def prepare(
    recipe: Recipe, target: Target, on_progress: Callable[[int, int, int], None] = lambda done, total, tokens: None
) -> Run:
    """Samples, drafter and objective of a recipe, ready for the trainer.

    Raises:
        ValueError: the drafter cannot be what the recipe asks for, or there is nothing to train on.
    """
    torch.manual_seed(recipe.seed)
    # First: a mistake here should not cost the responses' minutes.
    start = load_start(recipe.drafter, target, Path(recipe.out)) if recipe.drafter.start_from is not None else None
    config = start.drafter.config if start is not None else drafter_config(recipe.drafter, target)
    longest = recipe.data.max_prompt_tokens + recipe.data.max_new_tokens
    if longest > target.max_context:
        raise ValueError(
            f"data.max_prompt_tokens + data.max_new_tokens is {longest} and {target.name} reads {target.max_context} "
            "tokens; lower one of them."
        )
    samples, held_out = recipe_samples(recipe, target, on_progress)
    if start is None:
        start = _fresh(config, recipe, target, samples)
    else:
        rescale_taps(start.drafter, measure_tap_scale(target, samples[:_CALIBRATION_SAMPLES], config.target_layer_ids))
    ids = start.draft_ids_Vd
    objective = BlockObjective(
        target, ids, inverse_ids(ids, target.vocab_size), ObjectiveConfig(**recipe.objective.model_dump())
    )
    reduced = len(ids) < target.vocab_size
    return Run(target, start.drafter, objective, ids, reduced, samples, held_out, start.origin)


def _fresh(config: DFlashConfig, recipe: Recipe, target: Target, samples: list[Sample]) -> Start:
    drafter = DSpark(config) if isinstance(config, DSparkConfig) else DFlash(config)
    drafter.to(target.device)
    calibration = samples[:_CALIBRATION_SAMPLES]
    drafter.tap_scale_L.copy_(measure_tap_scale(target, calibration, config.target_layer_ids))
    if recipe.drafter.initialize_from_target and target.family.lean:
        initialize_from_target(drafter, target, calibration)
    ids = choose_draft_ids(samples, target.vocab_size, config.draft_vocab_size, target.eos_ids)
    return Start(drafter, ids.to(target.device))
