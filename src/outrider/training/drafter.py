"""Which drafter a recipe asks for: a new one in the target's shapes, or one to go on from.

    start_from: null    config = the target's layer shapes + the recipe's choices
    start_from: DIR     config, weights, draft vocabulary and tap order = the checkpoint's; the recipe may repeat
                        what it says, not contradict it

A target of the same shapes is accepted as the drafter's own: going on from a base model's drafter on a fine-tuned
target is what this is for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.drafters import DFlash, DFlashConfig, DSparkConfig
from outrider.drafters.packed import check_fits
from outrider.formats import load_drafter
from outrider.formats.dialects import default_taps
from outrider.target import Target
from outrider.training.recipe import DrafterSection

_HEADS = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
_REMEMBERED = ("step", "samples", "response_tokens", "anchors", "training_seconds")
_AUTOMATIC = {"sample_from_anchor", "target_layer_ids", "mask_token"}  # null leaves these open


@dataclass(frozen=True)
class Start:
    """A drafter to train. `origin` identifies the checkpoint it goes on from, `history` says how that was made."""

    drafter: DFlash
    draft_ids_Vd: Tensor
    origin: str = ""
    history: list[dict[str, Any]] = field(default_factory=list)


def earlier(metadata: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The trainings a checkpoint went through, oldest first: steps, data and optimizer of each."""
    recipe = metadata.get("recipe", {})
    last = {name: metadata[name] for name in _REMEMBERED if name in metadata}
    last |= {name: recipe[name] for name in ("precision", "optimizer") if name in recipe}
    return [*metadata.get("history", []), last]


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
    return DSparkConfig(**backbone, **{name: getattr(section, name) for name in _HEADS})


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


def load_start(section: DrafterSection, target: Target, out: Path) -> Start:
    """The drafter in `section.start_from`, ready to train; its taps are raw still (see `rescale_taps`).

    Raises:
        ValueError: not a drafter, made for another target, contradicted by the recipe, or what this run writes.
    """
    assert section.start_from is not None
    directory = Path(section.start_from)
    if directory.resolve() in ((out / "drafter").resolve(), (out / "best").resolve()):
        raise ValueError(f"drafter.start_from {directory} would be overwritten by this run; choose another out.")
    checkpoint = load_drafter(directory, target.device)
    drafter = checkpoint.drafter.requires_grad_(True).train()
    check_fits(drafter.config, target)
    _check_agrees(section, drafter, target)
    ids = checkpoint.draft_ids_Vd
    ids = torch.arange(target.vocab_size, device=target.device) if ids is None else ids
    files = [(directory / name).read_bytes() for name in ("config.json", "model.safetensors")]
    return Start(drafter, ids, hashlib.sha256(b"".join(files)).hexdigest(), earlier(checkpoint.metadata))


def _check_agrees(section: DrafterSection, drafter: DFlash, target: Target) -> None:
    """Fields that the recipe sets are those of the checkpoint."""
    config = drafter.config
    stored: dict[str, object] = {
        "algorithm": drafter.algorithm,
        "target_layer_ids": sorted(config.target_layer_ids),
        "num_taps": len(config.target_layer_ids),
        "draft_vocab_size": config.draft_vocab_size,
        "mask_token": config.mask_token_id,
        "initialize_from_target": False,
    }
    for name in ("num_hidden_layers", "block_size", "sample_from_anchor", "sliding_window", *_HEADS):
        stored[name] = getattr(config, name, None)
    asked = {name: getattr(section, name) for name in section.model_fields_set - {"start_from"}}
    asked = {name: value for name, value in asked.items() if value is not None or name not in _AUTOMATIC}
    if "target_layer_ids" in asked:
        asked["target_layer_ids"] = sorted(asked["target_layer_ids"])
    if "draft_vocab_size" in asked:
        asked["draft_vocab_size"] = min(asked["draft_vocab_size"] or target.vocab_size, target.vocab_size)
    if "mask_token" in asked:
        asked["mask_token"] = mask_token_id(target, asked["mask_token"])
    different = [f"{name} is {value}, there {stored[name]}" for name, value in asked.items() if value != stored[name]]
    if different:
        raise ValueError(
            f"the recipe's drafter section contradicts {section.start_from}: {'; '.join(sorted(different))}. "
            "Leave these fields out to take the checkpoint's."
        )
