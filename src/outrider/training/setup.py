"""Prepares a training: the drafter of a recipe, new or one to go on from, its samples and its objective.

    start_from: null    config = the method's config.from_target(target, the recipe's fields), weights = noise or the
                        target's
    start_from: DIR     config, weights, draft vocabulary and aux layer order = the checkpoint's; the recipe may repeat
                        its fields and not contradict them; another draft_vocab_size means another draft vocabulary

A target of the same shapes is accepted, so that a base model's drafter can be trained further for a fine-tune. A
checkpoint reads raw aux hidden states; to train it, their scales are measured and folded into its weights, which leaves
its function unchanged:

    W aux = W' (aux / aux_scale)      with W' = W * aux_scale, column by column
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.checkpoints.checkpoint import load_checkpoint
from outrider.checkpoints.registry import method_of
from outrider.data.regenerate import Progress, no_progress
from outrider.data.responses import Sample
from outrider.drafters.base import DraftModule
from outrider.drafters.config import draft_vocabulary
from outrider.target.model import Target, outline_target
from outrider.training.dataset import Dataset, choose_draft_ids, recipe_samples
from outrider.training.features import measure_aux_scale
from outrider.training.objective import BlockObjective, inverse_ids
from outrider.training.parallel import ALONE, Ranks, check_layers
from outrider.training.recipe import Precision, Recipe
from outrider.utils.files import check_space, weight_files

CALIBRATION_SAMPLES = 16  # that aux layer scales and starting weights are measured on
_REMEMBERED = ("target", "step", "samples", "response_tokens", "anchors", "training_seconds")


@dataclass(frozen=True)
class Start:
    """A drafter to train. `origin` identifies the checkpoint it goes on from, `history` says how that was made."""

    drafter: DraftModule
    draft_ids_Vd: Tensor
    origin: str = ""
    history: list[dict[str, Any]] = field(default_factory=list)


def trainings(metadata: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The trainings a checkpoint went through, oldest first: where it began, steps, data and optimizer of each."""
    recipe = metadata.get("recipe", {})
    last = {name: metadata[name] for name in _REMEMBERED if name in metadata}
    last |= {name: recipe[name] for name in ("precision", "optimizer") if name in recipe}
    if recipe.get("initialize_from_target"):
        last["initialize_from_target"] = True
    return [*metadata.get("history", []), last]


def new_drafter(recipe: Recipe, target: Target) -> DraftModule:
    """The recipe's drafter for this target, weights as its module makes them."""
    config = recipe.drafter.config.from_target(target, **recipe.drafter.chosen())
    return method_of(config.algorithm).module(config)


@torch.no_grad()
def fresh(drafter: DraftModule, recipe: Recipe, target: Target, samples: Sequence[Sample]) -> Start:
    """A new drafter: aux layer scales measured, weights from the target where the recipe and the method want that."""
    config, drafter = drafter.config, drafter.to(target.device)
    calibration = samples[:CALIBRATION_SAMPLES]
    drafter.aux_scale_L.copy_(measure_aux_scale(target, calibration, config.target_layer_ids))
    if recipe.initialize_from_target and target.family.fused:
        drafter.initialize_from(target, [sample.tokens for sample in calibration])
    ids = choose_draft_ids(samples, target.vocab_size, config.draft_vocab_size, always=target.eos_ids)
    return Start(drafter, ids.to(target.device))


def _resized(drafter: DraftModule, recipe: Recipe, target: Target) -> DraftModule:
    """The drafter, or a new one like it where the recipe says another number of draft tokens."""
    config, chosen = drafter.config, recipe.drafter.chosen()
    wanted = draft_vocabulary(target, chosen.get("draft_vocab_size"))
    if "draft_vocab_size" not in chosen or wanted == config.draft_vocab_size:
        return drafter
    with target.device:
        return type(drafter)(replace(config, draft_vocab_size=wanted))


@torch.no_grad()
def with_draft_vocabulary(start: Start, recipe: Recipe, target: Target, samples: Sequence[Sample] = ()) -> Start:
    """The drafter with as many draft tokens as the recipe says, where it says another number than the checkpoint.

    They are chosen as for a new drafter; without samples, the checkpoint's come first. Rows of tokens that could be
    drafted before are kept, those of others are a new drafter's.
    """
    drafter, before_Vd = _resized(start.drafter, recipe, target), start.draft_ids_Vd
    if drafter is start.drafter:
        return start
    wanted, always = drafter.config.draft_vocab_size, target.eos_ids
    ids_Vd = choose_draft_ids(samples, target.vocab_size, wanted, always=always, then=before_Vd.tolist())
    ids_Vd = ids_Vd.to(target.device)
    stored, known_Vd = start.drafter.state_dict(), torch.isin(ids_Vd, before_Vd)
    rows_Vd = inverse_ids(before_Vd, target.vocab_size)[ids_Vd[known_Vd]]
    for name, tensor in drafter.state_dict().items():
        if tensor.shape == stored[name].shape:
            tensor.copy_(stored[name])
        else:
            tensor[known_Vd] = stored[name][rows_Vd]
    return replace(start, drafter=drafter, draft_ids_Vd=ids_Vd)


def load_start(recipe: Recipe, target: Target) -> Start:
    """The drafter in `start_from`, ready to train; its aux hidden states are raw still (`rescale_aux`), its draft
    vocabulary is the checkpoint's (`with_draft_vocabulary`).

    Raises:
        ValueError: not a drafter, made for another target, contradicted by the recipe, or what this run writes.
    """
    assert recipe.start_from is not None
    directory, out = Path(recipe.start_from), Path(recipe.out)
    if directory.resolve() in ((out / "drafter").resolve(), (out / "best").resolve()):
        raise ValueError(f"start_from {directory} would be overwritten by this run; choose another out.")
    checkpoint = load_checkpoint(directory, target.device, target.num_layers)
    drafter = checkpoint.weights.module.requires_grad_(True).train()
    drafter.check_target(target)
    _check_agrees(recipe, drafter, target)
    ids = checkpoint.weights.draft_ids_Vd
    own = checkpoint.weights.for_target(target)
    if own.head_VdH is not None or own.embedding_VH is not None:
        raise ValueError(
            f"start_from {directory} has an LM head or embedding of its own, and drafters are trained with the "
            "target's: serve it as it is, or train a new one."
        )
    if not getattr(drafter.config, "plain_logits", True):
        raise ValueError(
            f"start_from {directory}: its logits are multiplied or capped (output_multiplier, "
            "final_logit_softcapping), and such drafters are served here, not trained."
        )
    ids = torch.arange(target.vocab_size, device=target.device) if ids is None else ids
    files = [path.read_bytes() for path in (directory / "config.json", *weight_files(directory))]
    return Start(drafter, ids, hashlib.sha256(b"".join(files)).hexdigest(), history=trainings(checkpoint.metadata))


def _check_agrees(recipe: Recipe, drafter: DraftModule, target: Target) -> None:
    """Fields that the recipe sets are those of the checkpoint."""
    section = recipe.drafter
    if "algorithm" not in section.model_fields_set:
        # The recipe was read as one of the default method, and has that method's terms and defaults of the loss.
        kind, defaults = drafter.config.objective, drafter.config.default_objective(section.chosen())
        unknown = kind.model_fields.keys() - type(recipe.objective).model_fields.keys()
        if unset := sorted((defaults.keys() | unknown) - recipe.objective.model_fields_set):
            raise ValueError(
                f"start_from {recipe.start_from} is a {drafter.algorithm} drafter, whose loss has other defaults "
                f"({', '.join(unset)}): set drafter.algorithm={drafter.algorithm} for them."
            )
    if "algorithm" in section.model_fields_set and section.algorithm != drafter.algorithm:
        pairs: dict[str, tuple[object, object]] = {"algorithm": (section.algorithm, drafter.algorithm)}
    else:
        chosen = {name: value for name, value in section.chosen().items() if name != "draft_vocab_size"}
        pairs = drafter.config.comparable_fields(chosen, target)
    if "initialize_from_target" in recipe.model_fields_set:
        pairs["initialize_from_target"] = (recipe.initialize_from_target, False)
    different = [f"{name} is {asked}, there {stored}" for name, (asked, stored) in pairs.items() if asked != stored]
    if different:
        raise ValueError(
            f"the recipe contradicts {recipe.start_from}: {'; '.join(sorted(different))}. "
            "Leave these fields out to take the checkpoint's."
        )


# ----------------------------------------------------------------------------
# From a recipe to everything a run needs: target, samples, drafter, objective.
# ----------------------------------------------------------------------------


@dataclass
class Run:
    """What the trainer trains, and on what. `draft_ids_Vd` covers the whole vocabulary when it is not `reduced`."""

    target: Target
    drafter: DraftModule
    objective: BlockObjective
    draft_ids_Vd: Tensor
    reduced: bool
    samples: list[Sample]
    held_out: list[Sample]
    responses: dict[str, Any] = field(default_factory=dict)  # settings of the responses file
    origin: str = ""  # digest of the checkpoint that training goes on from
    history: list[dict[str, Any]] = field(default_factory=list)  # the trainings behind that checkpoint


def training_precision(recipe: Recipe, target: Target) -> Precision:
    """The recipe's precision; the loaded target's where that is auto."""
    if recipe.precision != "auto":
        return recipe.precision
    return "bfloat16" if target.dtype == torch.bfloat16 else "float32"


# Of a parameter on disk, at most at one time: float32 in OUT/drafter and OUT/best, weight and two moments in OUT/state,
# which is written beside the former one.
_CHECKPOINT_BYTES = 2 * 4 + 2 * 12


def checkpoint_bytes(drafter: DraftModule) -> int:
    """Bytes that checkpoints and state of a run take on disk, at most at one time."""
    return _CHECKPOINT_BYTES * sum(p.numel() for p in drafter.parameters())


def check_recipe(recipe: Recipe) -> DraftModule:
    """Refuse what the target's config, the drafter to go on from and the free disk rule out, before a model is loaded.

    Returns the drafter without its weights.

    Raises:
        ValueError: as `prepare`, or checkpoints would not fit on the disk.
    """
    target = outline_target(recipe.target)
    if recipe.start_from is None:
        with torch.device("meta"):
            drafter = new_drafter(recipe, target)
    else:
        drafter = _resized(load_start(recipe, target).drafter, recipe, target)
    _check_drafter(recipe, target, drafter)
    check_space(
        Path(recipe.out),
        checkpoint_bytes(drafter),
        "training, for its checkpoints,",
        remedy="Free some, or choose another out.",
    )
    return drafter


def _check_drafter(recipe: Recipe, target: Target, drafter: DraftModule) -> None:
    check_layers(drafter, recipe)
    longest = recipe.data.max_prompt_tokens + recipe.data.max_new_tokens
    if longest > target.max_context:
        raise ValueError(
            f"data.max_prompt_tokens + data.max_new_tokens is {longest} and {target.name} reads {target.max_context} "
            "tokens; lower one of them."
        )


def begin(recipe: Recipe, target: Target) -> Start:
    """The drafter that a recipe asks for, before its samples are known: a mistake here does not cost the responses."""
    torch.manual_seed(recipe.seed)
    if recipe.start_from is not None:
        start = load_start(recipe, target)
    else:
        drafter = new_drafter(recipe, target)
        start = Start(drafter, torch.arange(drafter.config.draft_vocab_size))
    _check_drafter(recipe, target, start.drafter)
    return start


def assemble(
    recipe: Recipe, target: Target, start: Start, dataset: Dataset, say: Callable[[str], None] = lambda line: None
) -> Run:
    """The run of a drafter (`begin`) on samples: aux scales measured, draft vocabulary chosen, objective built."""
    samples = dataset.samples
    if recipe.start_from is None:
        start = fresh(start.drafter, recipe, target, samples=samples)
    else:
        stored, start = len(start.draft_ids_Vd), with_draft_vocabulary(start, recipe, target, samples=samples)
        if len(start.draft_ids_Vd) != stored:
            say(f"draft vocabulary: {len(start.draft_ids_Vd):,} tokens, {stored:,} in {recipe.start_from}")
        layers = start.drafter.config.target_layer_ids
        start.drafter.rescale_aux(measure_aux_scale(target, samples[:CALIBRATION_SAMPLES], layers))
    ids = start.draft_ids_Vd
    return Run(
        target=target,
        drafter=start.drafter,
        objective=BlockObjective(target, ids, recipe.objective, precision=training_precision(recipe, target)),
        draft_ids_Vd=ids,
        reduced=len(ids) < target.vocab_size,
        samples=samples,
        held_out=dataset.held_out,
        responses=dataset.responses,
        origin=start.origin,
        history=start.history,
    )


def prepare(
    recipe: Recipe,
    target: Target,
    on_progress: Progress = no_progress,
    ranks: Ranks = ALONE,
    say: Callable[[str], None] = lambda line: None,
) -> Run:
    """Samples, drafter and objective of a recipe, ready for the trainer. Only the main rank regenerates responses,
    and reports to `on_progress` and `say` (see `regenerate`).

    Raises:
        ValueError: the drafter cannot be what the recipe asks for, or there is nothing to train on.
    """
    start = begin(recipe, target)
    dataset = ranks.from_main(lambda: recipe_samples(recipe, target, on_progress, say=say))
    return assemble(recipe, target, start, dataset=dataset, say=say)
