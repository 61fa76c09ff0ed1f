"""Recipes and runs of the training loop on toy models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from outrider.drafters.dspark import DSpark
from outrider.target.model import Target
from outrider.training.dataset import choose_draft_ids
from outrider.training.features import measure_aux_scale
from outrider.training.loss import BlockObjective
from outrider.training.recipe import ObjectiveConfig, Precision, Recipe
from outrider.training.setup import Run
from tests.toys.targets import toy_config, toy_samples

OPTIMIZER: dict[str, Any] = {"steps": 12, "sequences_per_step": 3, "anchors_per_sequence": 4, "learning_rate": 1e-2}


def recipe(out: Path, **changes: Any) -> Recipe:
    fields: dict[str, Any] = {
        "target": "toy",
        "out": str(out),
        "data": {"prompts": [{"path": "unused"}]},
        "optimizer": OPTIMIZER,
        "log_every": 1,
        "eval_every": 6,
        "save_every": 4,
    }
    return Recipe.model_validate({**fields, **changes})


def going_on(method: str, directory: Path, out: Path) -> Recipe:
    """A recipe that goes on from a drafter of this method."""
    return recipe(out, drafter={"algorithm": method}, start_from=str(directory))


def make_run(target: Target, head: str = "vanilla", precision: Precision = "float32") -> Run:
    samples = toy_samples(14)
    config = toy_config(draft_vocab_size=60, markov_head_type=head)
    torch.manual_seed(0)
    drafter = DSpark(config)
    drafter.aux_scale_L.copy_(measure_aux_scale(target, samples[:3], config.target_layer_ids))
    ids = choose_draft_ids(samples, 97, 60, frozenset({1}))
    objective = BlockObjective(target, ids, ObjectiveConfig(ce=1.0), precision)
    return Run(target, drafter, objective, ids, True, samples[2:], samples[:2])
