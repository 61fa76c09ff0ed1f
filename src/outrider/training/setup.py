"""From a recipe to everything a run needs: target, samples, drafter, objective."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.data.samples import Sample
from outrider.drafters import DFlash, DFlashConfig, DSpark, DSparkConfig
from outrider.formats.dialects import default_taps
from outrider.target import Target
from outrider.training.dataset import recipe_samples
from outrider.training.features import measure_tap_scale
from outrider.training.initialize import initialize_from_target
from outrider.training.objective import ObjectiveConfig
from outrider.training.ranks import ALONE, Ranks
from outrider.training.recipe import DrafterSection, Recipe
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


def drafter_config(section: DrafterSection, target: Target) -> DFlashConfig:
    """The drafter's config: the target's layer shapes, the recipe's choices."""
    theirs = target.config
    rope = getattr(theirs, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)  # Gemma 3 has one set per kind of layer
    taps = section.target_layer_ids or default_taps(target.num_layers, section.num_taps)
    backbone = {
        "hidden_size": target.hidden_size,
        "intermediate_size": theirs.intermediate_size,
        "num_hidden_layers": section.num_hidden_layers,
        "num_attention_heads": theirs.num_attention_heads,
        "num_key_value_heads": theirs.num_key_value_heads,
        "head_dim": getattr(theirs, "head_dim", None) or target.hidden_size // theirs.num_attention_heads,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": min(section.draft_vocab_size or target.vocab_size, target.vocab_size),
        "target_layer_ids": target.check_taps(taps),
        "num_target_layers": target.num_layers,
        "mask_token_id": mask_token_id(target, section.mask_token),
        "block_size": section.block_size,
        "rope_theta": float(rope.get("rope_theta", 10000.0)),
        "rms_norm_eps": theirs.rms_norm_eps,
        "sliding_window": section.sliding_window,
        "max_position_embeddings": target.max_context,
    }
    if section.sample_from_anchor is not None:
        backbone["sample_from_anchor"] = section.sample_from_anchor
    if section.algorithm == "dflash":
        if section.sample_from_anchor:
            raise ValueError(
                "drafter.sample_from_anchor=true has no DFlash checkpoint dialect: leave it null, or use "
                "drafter.algorithm=dspark with drafter.markov_rank=0 and drafter.enable_confidence_head=false."
            )
        return DFlashConfig(**backbone)
    heads = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
    return DSparkConfig(**backbone, **{name: getattr(section, name) for name in heads})


def mask_token_id(target: Target, wanted: str | None) -> int:
    """The id of the mask token: the recipe's, the tokenizer's own, or the last special token chat never uses."""
    tokenizer = target.tokenizer
    assert tokenizer is not None
    if wanted is not None:
        found = tokenizer.convert_tokens_to_ids(wanted)
        if not isinstance(found, int) or (found == tokenizer.unk_token_id and wanted != tokenizer.unk_token):
            raise ValueError(f"drafter.mask_token {wanted!r} is not one token of {target.name}.")
        return found
    if tokenizer.mask_token_id is not None:
        return int(tokenizer.mask_token_id)
    used = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, *target.eos_ids}
    template = tokenizer.chat_template or ""
    special = {
        token: index
        for token, index in tokenizer.get_added_vocab().items()
        if index not in used and token not in template and index < target.vocab_size
    }
    if not special:
        raise ValueError(f"{target.name} has no spare special token; name one with drafter.mask_token.")
    return max(special.values())


def prepare(
    recipe: Recipe,
    target: Target,
    on_progress: Callable[[int, int, int], None] = lambda done, total, tokens: None,
    ranks: Ranks = ALONE,
) -> Run:
    """Samples, drafter and objective of a recipe, ready for the trainer. Only the main rank regenerates responses."""
    torch.manual_seed(recipe.seed)
    config = drafter_config(recipe.drafter, target)  # first: a mistake here should not cost the responses' minutes
    longest = recipe.data.max_prompt_tokens + recipe.data.max_new_tokens
    if longest > target.max_context:
        raise ValueError(
            f"data.max_prompt_tokens + data.max_new_tokens is {longest} and {target.name} reads {target.max_context} "
            "tokens; lower one of them."
        )
    samples, held_out = ranks.from_main(lambda: recipe_samples(recipe, target, on_progress))
    drafter = DSpark(config) if isinstance(config, DSparkConfig) else DFlash(config)
    drafter.to(target.device)
    calibration = samples[:_CALIBRATION_SAMPLES]
    drafter.tap_scale_L.copy_(measure_tap_scale(target, calibration, config.target_layer_ids))
    if recipe.drafter.initialize_from_target and target.family.lean:
        initialize_from_target(drafter, target, calibration)
    reduced = config.draft_vocab_size < target.vocab_size
    ids = choose_draft_ids(samples, target.vocab_size, config.draft_vocab_size, target.eos_ids).to(target.device)
    objective = BlockObjective(
        target,
        ids,
        inverse_ids(ids, target.vocab_size),
        ObjectiveConfig(**recipe.objective.model_dump()),
        recipe.precision,
    )
    return Run(target, drafter, objective, ids, reduced, samples, held_out)
