"""DeepSpec's DSpark: `architectures: ["Qwen3DSparkModel"]`, aux layers and mask token at the top level.

    tensors   z-lab's and markov_head.*, confidence_head.proj.*, embed_tokens, lm_head
    block     the anchor is the first prediction position; `sample_from_anchor: false` is z-lab's layout

SpecForge writes `DSparkDraftModel` and keeps the block and the heads in `dflash_config`, where SGLang looks first.
`markov_rank: 0` without a confidence head is DeepSpec's spelling of DFlash; it is read as what it is, a DSpark
drafter without heads. Source: DSpark, arXiv 2607.05147, and its checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from torch import Tensor

from outrider.checkpoints.dialects.base import WIDEST, ExportedCheckpoint, Fields, Source, TargetFacts
from outrider.checkpoints.dialects.blocks import (
    BlockFields,
    check_plain_logits,
    read_backbone,
    read_vocabulary,
    with_target_tensors,
    write_backbone,
    write_vocabulary,
)
from outrider.drafters.base import DrafterWeights
from outrider.drafters.dflash import DFlashConfig
from outrider.drafters.dspark import DSparkConfig


def read_heads(fields: Fields, confidence: bool = False) -> dict[str, Any]:
    """The fields of a DSpark config that say what stands on the backbone.

    Args:
        confidence: whether there is a confidence head where the field is absent.
    """
    return {
        "sample_from_anchor": fields.flag("sample_from_anchor", True),
        "markov_rank": fields.integer("markov_rank", low=0, high=WIDEST, default=256),
        "markov_head_type": fields.text("markov_head_type", "vanilla"),
        "enable_confidence_head": fields.flag("enable_confidence_head", confidence),
        "confidence_head_with_markov": fields.flag("confidence_head_with_markov", True),
    }


def write_heads(config: DSparkConfig) -> dict[str, Any]:
    """The same fields, all of them."""
    return {
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.sample_from_anchor,
        "markov_rank": config.markov_rank,
        "markov_head_type": config.markov_head_type,
        "enable_confidence_head": config.enable_confidence_head,
        "confidence_head_with_markov": config.confidence_head_with_markov,
    }


def as_dspark(config: DFlashConfig) -> DSparkConfig:
    """A DFlash drafter as a DSpark drafter without heads, which drafts the same; a DSpark drafter as it is."""
    without = {"markov_rank": 0, "enable_confidence_head": False, "confidence_head_with_markov": False}
    return DSparkConfig(**{**without, **asdict(config)})


class DeepSpec:
    """DSpark as DeepSpec publishes it."""

    name = "DeepSpec"
    spelling = "Qwen3DSparkModel"
    methods: tuple[str, ...] = (DSparkConfig.algorithm, DFlashConfig.algorithm)

    def reads(self, raw: Mapping[str, Any]) -> bool:
        named = raw.get("architectures") or []
        return self.spelling in named or ("DSparkDraftModel" in named and raw.get("model_type") == "qwen3")

    def read(self, raw: Mapping[str, Any], tensors: Mapping[str, Tensor], source: Source) -> DrafterWeights:
        fields = BlockFields(raw, source, self.name, nested="dflash_config")
        backbone = read_backbone(fields)
        for name in ("output_multiplier", "final_logit_softcapping"):
            if fields.raw(name) not in (None, 0, 1):
                raise fields.refuse(name, "absent: draft logits are the head's own in this dialect")
        config = DSparkConfig(
            **backbone,
            **fields.block(backbone["vocab_size"]),
            **read_heads(fields),
            target_layer_ids=fields.aux_layers(),
            num_target_layers=fields.depth,
        )
        return read_vocabulary(config, tensors, source)

    def write(self, parts: DrafterWeights, target: TargetFacts | None) -> ExportedCheckpoint:
        """With a target, embedding and head are written too: DeepSpec's own loader has them as parameters."""
        config = as_dspark(parts.config)
        check_plain_logits(config, self.name)
        fields = {
            **write_backbone(config),
            "architectures": [self.spelling],
            "draft_vocab_size": config.draft_vocab_size,
            "block_size": config.block_size,
            "num_anchors": 512,  # of its training step; its class asks for it
            "num_target_layers": config.num_target_layers,
            "target_layer_ids": list(config.target_layer_ids),
            **write_heads(config),
        }
        return ExportedCheckpoint(fields, write_vocabulary(with_target_tensors(parts, target)))
