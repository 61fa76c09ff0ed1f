"""Read and write z-lab's DFlash: `architectures: ["DFlashDraftModel"]`, block fields in `dflash_config`.

    tensors   fc, hidden_norm, norm, layers.{i}.*: our names; lm_head and d2t only if they are not the target's
    block     1 anchor + (block_size - 1) masks; a mask predicts the token at its own position

Embeddings are multiplied by `input_embedding_scale`: sqrt(hidden_size) for Gemma targets, 1 for others. It is written
if the target is known, and a stated one must equal the target's. Without it the target's factor is used here; the
package then uses 1 in PyTorch, and Gemma 4's factor in MLX (which multiplies a stated one on top).

Source: the `dflash` package, version 0.1.0. Newer checkpoints keep block_size in `dflash_config`, and SGLang looks
there first for every field of the block; fields that are in both places must agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from outrider.checkpoints.dialects.base import ExportedCheckpoint, Fields, Source, TargetFacts
from outrider.checkpoints.dialects.blocks import (
    BlockFields,
    read_backbone,
    read_vocabulary,
    write_backbone,
    write_vocabulary,
)
from outrider.drafters.base import DrafterWeights
from outrider.drafters.dflash import DFlash, DFlashConfig, default_aux_layers
from outrider.drafters.dflash2 import DFlash2, DFlash2Config

OWN_FIELDS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")  # of DFlash 2


def read_block(fields: BlockFields) -> dict[str, Any]:
    """Read the arguments of DFlash's config."""
    backbone = read_backbone(fields)
    cap = fields.number("final_logit_softcapping") if fields.raw("final_logit_softcapping") else None  # 0: none
    return {
        **backbone,
        **fields.block(backbone["vocab_size"]),
        "target_layer_ids": fields.aux_layers(default_aux_layers, backbone["num_hidden_layers"]),
        "num_target_layers": fields.depth,
        "sample_from_anchor": False,
        "output_multiplier": fields.number("output_multiplier", 1.0),
        "final_logit_softcapping": cap,
    }


def embedding_scale(fields: BlockFields) -> float | None:
    return fields.number("input_embedding_scale") if "input_embedding_scale" in fields else None


def written_block(parts: DrafterWeights, target: TargetFacts | None, spelling: str) -> ExportedCheckpoint:
    """Write the fields of the backbone and its block, and all tensors."""
    config = parts.config
    section: dict[str, Any] = {"mask_token_id": config.mask_token_id}
    section |= {"target_layer_ids": list(config.target_layer_ids), "output_multiplier": config.output_multiplier}
    section |= {"final_logit_softcapping": config.final_logit_softcapping}
    scale = parts.embedding_scale if target is None else target.embedding_scale
    fields = {
        **write_backbone(config),
        "architectures": [spelling],
        "draft_vocab_size": config.draft_vocab_size,
        "block_size": config.block_size,
        "num_target_layers": config.num_target_layers,
        "dflash_config": section if scale is None else {**section, "input_embedding_scale": scale},
    }
    return ExportedCheckpoint(fields, write_vocabulary(parts))


def is_plain(raw: Mapping[str, Any]) -> bool:
    """Return whether `dflash_config` names no head of another method on this backbone."""
    section = raw.get("dflash_config")
    nested = section if isinstance(section, Mapping) else {}
    return not nested.get("projector_type") and not raw.get("projector_type") and nested.get("causal_head") is not True


class ZLab:
    """The dialect of z-lab's DFlash checkpoints."""

    name = "z-lab"
    spelling = "DFlashDraftModel"
    methods: tuple[str, ...] = (DFlashConfig.algorithm,)
    prefix = ""

    def reads(self, raw: Mapping[str, Any]) -> bool:
        return self.spelling in (raw.get("architectures") or []) and is_plain(raw)

    def read(self, raw: Mapping[str, Any], tensors: Mapping[str, Tensor], source: Source) -> DrafterWeights:
        fields = BlockFields(raw, source, self.name, nested="dflash_config")
        weights = read_vocabulary(DFlashConfig(**read_block(fields)), tensors, source, kind=DFlash)
        return replace(weights, embedding_scale=embedding_scale(fields))

    def write(self, parts: DrafterWeights, target: TargetFacts | None) -> ExportedCheckpoint:
        config = parts.config
        if config.sample_from_anchor:
            raise ValueError(
                "sample_from_anchor true has no place in the z-lab dialect: train with "
                "drafter.sample_from_anchor=false, or with drafter.algorithm=dspark."
            )
        return written_block(parts, target, self.spelling)


# ----------------------------------------------------------------------------
# z-lab's DFlash 2: `architectures: ["DFlash2DraftModel"]`, z-lab's DFlash with four more fields in `dflash_config`.
#
#     conv_kernel_size, conv_group_size, selector_rank, selector_top_k
#
# Tensor names are ours. With a reduced draft vocabulary the successor codebook has only its rows. Only Outrider reads
# that: other readers of DFlash 2 have no draft vocabulary, and backends/base.py refuses to export one.
#
# Source: the package `dflash` 0.1.0.
# ----------------------------------------------------------------------------


def read_own(fields: Fields) -> dict[str, Any]:
    """Read the fields that DFlash 2 adds to DFlash's."""
    return {name: fields.integer(name) for name in OWN_FIELDS}


def write_own(config: DFlash2Config) -> dict[str, int]:
    """Return all fields that `read_own` reads."""
    return {name: getattr(config, name) for name in OWN_FIELDS}


class ZLab2:
    """The dialect of z-lab's DFlash 2 checkpoints."""

    name = "z-lab"
    spelling = "DFlash2DraftModel"
    methods: tuple[str, ...] = (DFlash2Config.algorithm,)
    prefix = ""

    def __init__(self) -> None:
        self._zlab = ZLab()

    def reads(self, raw: Mapping[str, Any]) -> bool:
        """Recognise the architecture, except in the envelope of the speculators library, which has the same one."""
        return self.spelling in (raw.get("architectures") or []) and "speculators_model_type" not in raw

    def read(self, raw: Mapping[str, Any], tensors: Mapping[str, Tensor], source: Source) -> DrafterWeights:
        extra = read_own(Fields(raw, source.where, self.name).section("dflash_config"))
        fields = BlockFields(raw, source, self.name, nested="dflash_config")
        weights = read_vocabulary(DFlash2Config(**read_block(fields), **extra), tensors, source, kind=DFlash2)
        return replace(weights, embedding_scale=embedding_scale(fields))

    def write(self, parts: DrafterWeights, target: TargetFacts | None) -> ExportedCheckpoint:
        written = self._zlab.write(parts, target)
        nested = {**written.config["dflash_config"], **write_own(parts.config)}
        return replace(written, config={**written.config, "architectures": [self.spelling], "dflash_config": nested})
