"""Recipes and runs of the training loop on toy models, and training until something is reached.

How far a number of steps gets depends on the processor: the last bits of its sums make another training of it. A test
that needs a trained drafter therefore trains until it has one, within a generous number of steps.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from outrider.data.responses import Sample
from outrider.decoding.generate import generate
from outrider.decoding.request import StopRules
from outrider.drafters.dspark import DSpark
from outrider.drafters.loss import ObjectiveConfig
from outrider.target.model import Target
from outrider.training.dataset import choose_draft_ids
from outrider.training.features import measure_aux_scale
from outrider.training.objective import BlockObjective
from outrider.training.recipe import Precision, Recipe
from outrider.training.setup import Run, fresh, new_drafter
from outrider.training.trainer import Trainer
from tests.toys.targets import toy_config, toy_samples, with_mask_token

OPTIMIZER: dict[str, Any] = {"steps": 12, "sequences_per_step": 3, "anchors_per_sequence": 4, "learning_rate": 1e-2}
# Fields of a small drafter of each method.
SECTIONS: dict[str, dict[str, Any]] = {
    "dspark": {"num_aux_layers": 2, "markov_rank": 6, "block_size": 4},
    "dflash": {"num_aux_layers": 2, "block_size": 4},
    "dflash2": {"num_aux_layers": 2, "block_size": 4, "selector_top_k": 8, "selector_rank": 8},
    "eagle3": {"gamma": 3},
    "peagle": {"gamma": 3},
    "mtp": {"gamma": 3},
    "medusa": {"num_heads": 3},
    "hydra": {"num_heads": 3},
}
EXPERTS = {"num_aux_layers": 2, "markov_rank": 6, "block_size": 4, "n_routed_experts": 6}  # of dspark_v4


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


def fresh_trainer(method: str, out: Path, target: Target, **changes: Any) -> Trainer:
    """A trainer of four steps of a fresh drafter of this method, whose fields `drafter` adds to `SECTIONS`."""
    optimizer = {"steps": 4, "sequences_per_step": 4, "anchors_per_sequence": 5, "learning_rate": 1e-2}
    own = (EXPERTS if method == "dspark_v4" else SECTIONS.get(method, {})) | changes.pop("drafter", {})
    fields: dict[str, Any] = {"optimizer": optimizer, "eval_every": 2, "save_every": 2, "watch": {"decode_every": None}}
    chosen = {"algorithm": method, "draft_vocab_size": 60, **own}
    plan, samples, target = recipe(out, drafter=chosen, **(fields | changes)), toy_samples(14), with_mask_token(target)
    torch.manual_seed(0)
    start = fresh(new_drafter(plan, target), plan, target, samples)
    objective = BlockObjective(target, start.draft_ids_Vd, plan.objective)
    return Trainer(plan, Run(target, start.drafter, objective, start.draft_ids_Vd, True, samples[2:], samples[:2]))


def on_policy_samples(target: Target, count: int, tokens: int = 16) -> list[Sample]:
    """Random prompts, each with the target's own greedy response, which a drafter can learn to foresee."""
    generator = torch.Generator().manual_seed(0)
    samples = []
    for i in range(count):
        prompt = torch.randint(4, 97, (3 + i % 5,), generator=generator).tolist()
        response = generate(target, prompt, rules=StopRules(tokens, stop_ids=())).tokens
        samples.append(Sample(f"s{i}", prompt + response, ((len(prompt), len(prompt) + len(response)),)))
    return samples


def train_until(
    reached: Callable[[dict[str, float]], bool], recipe: Recipe, run: Run, *, part: int = 20
) -> dict[str, float]:
    """Train `part` steps at a time, resuming, until the held-out metrics are as asked, and return these.

    Raises:
        AssertionError: all of the recipe's steps do not get there.
    """
    metrics: dict[str, float] = {}
    for steps in range(part, recipe.optimizer.steps + 1, part):
        metrics = Trainer(recipe, run).train(stop_after=steps)
        if reached(metrics):
            return metrics
    raise AssertionError(f"not reached in {recipe.optimizer.steps} steps: {metrics}")


def lower_loss(step: Callable[[], float], *, to: float, most: int = 400) -> None:
    """Call `step`, which takes one step of training and returns its loss, until that is below `to` x the first one.

    Raises:
        AssertionError: `most` steps do not get there.
    """
    losses = [step()]
    while losses[-1] >= to * losses[0]:
        assert len(losses) < most, f"{losses[0]:.4f} at first, {losses[-1]:.4f} after {most} steps"
        losses.append(step())
