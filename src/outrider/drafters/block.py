"""DFlash and DSpark as methods: what a recipe says of a block drafter, its config, and where its weights begin.

fc           <- picks the last tap;   hidden_norm <- the input norm that the copied keys were trained behind
final norm   <- ones: the target's own makes untrained hidden states overconfident, and the first losses explode
draft layers <- the target's last ones (drafters/target_layers.py)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field

from outrider.drafters.dflash import DFlash, DFlashConfig
from outrider.drafters.dspark import DSpark, DSparkConfig
from outrider.drafters.method import Method, MethodSection
from outrider.drafters.packed import PackedDrafter
from outrider.drafters.target_layers import copy_target_layers, layer_shapes
from outrider.target import Target
from outrider.target.sharded import whole


class BlockSection(MethodSection):
    """What recipes may set for every block drafter."""

    automatic: ClassVar[frozenset[str]] = frozenset({"sample_from_anchor", "target_layer_ids", "mask_token"})

    num_hidden_layers: int = Field(2, ge=1)
    block_size: int = Field(7, ge=1)
    sample_from_anchor: bool | None = None  # null: the algorithm's own layout
    target_layer_ids: list[int] | None = None  # null: num_taps evenly spaced
    num_taps: int = Field(4, ge=1)
    mask_token: str | None = None  # null: a special token that no chat template uses
    sliding_window: int | None = Field(None, ge=1)
    layer_types: list[Literal["full_attention", "sliding_attention"]] | None = None  # null: all alike
    is_causal: bool | None = False  # whether block rows see those before them only; null: in sliding layers

    def beside(self, config: Any, target: Target) -> dict[str, tuple[object, object]]:
        pairs = super().beside(config, target)
        if "num_taps" in pairs:
            pairs["num_taps"] = (self.num_taps, len(config.target_layer_ids))
        if "mask_token" in pairs:
            pairs["mask_token"] = (mask_token_id(target, self.mask_token), config.mask_token_id)
        if "layer_types" in pairs:
            pairs["layer_types"] = (tuple(self.layer_types or ()), config.layer_types)
        return pairs


class DFlashSection(BlockSection):
    algorithm: Literal["dflash"] = "dflash"


class DSparkSection(BlockSection):
    algorithm: Literal["dspark"] = "dspark"
    markov_rank: int = Field(64, ge=0)
    markov_head_type: Literal["vanilla", "gated", "rnn"] = "vanilla"
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True


_HEADS = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")


def default_taps(num_target_layers: int, count: int) -> list[int]:
    """z-lab's choice: one tap in the middle, or `count` evenly spaced over [1, layers - 3], rounded."""
    if count == 1:
        return [num_target_layers // 2]
    first, last = 1, num_target_layers - 3
    return [round(first + i * (last - first) / (count - 1)) for i in range(count)]


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


def backbone_fields(section: BlockSection, target: Target) -> dict[str, Any]:
    """The fields of every block drafter's config."""
    taps = section.target_layer_ids or default_taps(target.num_layers, section.num_taps)
    backbone = {
        **layer_shapes(target),
        "num_hidden_layers": section.num_hidden_layers,
        "draft_vocab_size": section.draft_vocab(target),
        "target_layer_ids": target.check_taps(taps),
        "mask_token_id": mask_token_id(target, section.mask_token),
        "block_size": section.block_size,
        "sliding_window": section.sliding_window,
        "layer_types": tuple(section.layer_types or ()),
        "is_causal": section.is_causal,
    }
    if section.sample_from_anchor is not None:
        backbone["sample_from_anchor"] = section.sample_from_anchor
    return backbone


def _dflash_config(section: DFlashSection, target: Target) -> DFlashConfig:
    config = DFlashConfig(**backbone_fields(section, target))
    check_layout(config)
    return config


def check_layout(config: DFlashConfig) -> None:
    """z-lab's dialects have one layout, anchor + masks.

    Raises:
        ValueError: the config has the other.
    """
    if config.sample_from_anchor:
        raise ValueError(
            "drafter.sample_from_anchor=true has no DFlash checkpoint dialect: leave it null, or use "
            "drafter.algorithm=dspark with drafter.markov_rank=0 and drafter.enable_confidence_head=false."
        )


def _dspark_config(section: DSparkSection, target: Target) -> DSparkConfig:
    return DSparkConfig(**backbone_fields(section, target), **{name: getattr(section, name) for name in _HEADS})


@torch.no_grad()
def initialize_block(drafter: DFlash, target: Target, documents: Sequence[Sequence[int]]) -> None:
    """Copy weights in place. The drafter's layer shapes must be the target's (the recipe's default)."""
    source = copy_target_layers(drafter.layers, target, documents)
    hidden = drafter.config.hidden_size
    drafter.fc.weight.zero_()
    drafter.fc.weight[:, -hidden:].copy_(torch.eye(hidden))
    drafter.hidden_norm.weight.copy_(whole(source[0].input_layernorm.weight))


DFLASH = Method("dflash", DFlashSection, _dflash_config, DFlashConfig, DFlash, PackedDrafter, initialize_block)
DSPARK = Method("dspark", DSparkSection, _dspark_config, DSparkConfig, DSpark, PackedDrafter, initialize_block)
