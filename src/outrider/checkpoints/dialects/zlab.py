"""z-lab's DFlash: `architectures: ["DFlashDraftModel"]`, aux layers and mask token in `dflash_config`.

    tensors   fc, hidden_norm, norm, layers.{i}.*: our own names; lm_head and d2t only where they are not the target's
    block     1 anchor + (block_size - 1) masks; a mask predicts the token at its own position

Embeddings are multiplied by `input_embedding_scale`: sqrt(hidden_size) for Gemma targets, 1 for others. It is written
where the target is known, and must be the target's where a checkpoint states it. A checkpoint without it leaves it to
the target here. The package then takes 1 in PyTorch, and Gemma 4's own factor in MLX (where a stated one comes on top).

Source: the `dflash` package, version 0.1.0. Newer checkpoints keep block_size in `dflash_config`, and SGLang looks
there first for every field of the block; fields that are in both places must agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from outrider.checkpoints.dialects.base import MOST_DRAFTS, ExportedCheckpoint, Fields, Source, TargetFacts
from outrider.checkpoints.dialects.blocks import (
    BlockFields,
    check_plain_logits,
    read_backbone,
    read_vocabulary,
    write_backbone,
    write_vocabulary,
)
from outrider.drafters.base import DrafterWeights
from outrider.drafters.dflash import DFlashConfig, default_aux_layers
from outrider.drafters.dflash2 import DFlash2Config
from outrider.drafters.domino import DominoConfig
from outrider.drafters.jetspec import JetSpecConfig
from outrider.drafters.lilicorr import LiLiCorrConfig

OWN_FIELDS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")  # of DFlash 2


def _read_block(fields: BlockFields) -> dict[str, Any]:
    """The arguments of DFlash's config."""
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


def _embedding_scale(fields: BlockFields) -> float | None:
    return fields.number("input_embedding_scale") if "input_embedding_scale" in fields else None


def _written(parts: DrafterWeights, target: TargetFacts | None, spelling: str) -> ExportedCheckpoint:
    """The checkpoint of the backbone and its block, and of all tensors."""
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


class ZLab:
    """DFlash as z-lab publishes it."""

    name = "z-lab"
    spelling = "DFlashDraftModel"
    methods: tuple[str, ...] = (DFlashConfig.algorithm,)
    prefix = ""

    def reads(self, raw: Mapping[str, Any]) -> bool:
        return self.spelling in (raw.get("architectures") or []) and not _is_domino(raw) and not _is_jetspec(raw)

    def read(self, raw: Mapping[str, Any], tensors: Mapping[str, Tensor], source: Source) -> DrafterWeights:
        fields = BlockFields(raw, source, self.name, nested="dflash_config")
        weights = read_vocabulary(DFlashConfig(**_read_block(fields)), tensors, source)
        return replace(weights, embedding_scale=_embedding_scale(fields))

    def write(self, parts: DrafterWeights, target: TargetFacts | None) -> ExportedCheckpoint:
        config = parts.config
        if config.sample_from_anchor:
            raise ValueError(
                "the z-lab dialect has one block layout, anchor + masks: train with "
                "drafter.sample_from_anchor=false, or with drafter.algorithm=dspark."
            )
        return _written(parts, target, self.spelling)


# ----------------------------------------------------------------------------
# z-lab's DFlash 2: `architectures: ["DFlash2DraftModel"]`, z-lab's DFlash with four more fields in `dflash_config`.
#
#     conv_kernel_size, conv_group_size, selector_rank, selector_top_k
#
# Tensor names are our own. With a reduced draft vocabulary the successor codebook has its rows only. Nobody but us
# reads
# that: no reader of DFlash 2 has a draft vocabulary, and backends/base.py refuses to export one.
#
# Source: the package `dflash` 0.1.0.
# ----------------------------------------------------------------------------


def read_own(fields: Fields) -> dict[str, Any]:
    """What DFlash 2 has beside DFlash's fields, as the arguments of its config."""
    return {name: fields.integer(name) for name in OWN_FIELDS}


def write_own(config: DFlash2Config) -> dict[str, int]:
    """The same fields, all of them."""
    return {name: getattr(config, name) for name in OWN_FIELDS}


class ZLab2:
    """What DFlash 2 adds to z-lab's DFlash."""

    name = "z-lab"
    spelling = "DFlash2DraftModel"
    methods: tuple[str, ...] = (DFlash2Config.algorithm,)
    prefix = ""

    def __init__(self) -> None:
        self._zlab = ZLab()

    def reads(self, raw: Mapping[str, Any]) -> bool:
        """The speculators library gives its own envelope the same architecture."""
        return self.spelling in (raw.get("architectures") or []) and "speculators_model_type" not in raw

    def read(self, raw: Mapping[str, Any], tensors: Mapping[str, Tensor], source: Source) -> DrafterWeights:
        own = read_own(Fields(raw, source.where, self.name).section("dflash_config"))
        fields = BlockFields(raw, source, self.name, nested="dflash_config")
        weights = read_vocabulary(DFlash2Config(**_read_block(fields), **own), tensors, source)
        return replace(weights, embedding_scale=_embedding_scale(fields))

    def write(self, parts: DrafterWeights, target: TargetFacts | None) -> ExportedCheckpoint:
        written = self._zlab.write(parts, target)
        nested = {**written.config["dflash_config"], **write_own(parts.config)}
        return replace(written, config={**written.config, "architectures": [self.spelling], "dflash_config": nested})


# ----------------------------------------------------------------------------
# SpecForge's Domino: z-lab's DFlash with `projector_type: domino` and the fields of the head in `dflash_config`.
#
#     gru_hidden_dim, emb_dim     emb_dim may stand at the top, as in SpecForge's own configs
#     pure_draft_prefix_len       0 where it is left out
#     shift_label                 sample_from_anchor: every row predicts the token after its own; false where left out
#     prefix_gru.weight_{ih,hh}_l0, embed_proj.{0,2}.weight      tensors beside DFlash's, names our own
#
# A block with shift_label has block_size rows that predict, and all are drafted from here; SpecForge and SGLang train
# them all and draft from all but the last. Published checkpoints are called DFlashDraftModel, which SGLang loads;
# SpecForge has come to write DominoDraftModel, which is read too.
#
# Source: SpecForge (modeling/draft/domino.py, configs/qwen3-8b-domino.json), SGLang 0.5.23 (models/dflash.py).
# ----------------------------------------------------------------------------


_DOMINO = "domino"


def _is_domino(raw: Mapping[str, Any]) -> bool:
    section = raw.get("dflash_config")
    nested = section.get("projector_type") if isinstance(section, Mapping) else None
    return _DOMINO in (nested, raw.get("projector_type"))


class SpecForgeDomino:
    """Domino as its authors publish it."""

    name = "SpecForge"
    spelling = ZLab.spelling
    methods: tuple[str, ...] = (DominoConfig.algorithm,)
    prefix = ""

    def reads(self, raw: Mapping[str, Any]) -> bool:
        names = raw.get("architectures") or []
        return "DominoDraftModel" in names or (self.spelling in names and _is_domino(raw))

    def read(self, raw: Mapping[str, Any], tensors: Mapping[str, Tensor], source: Source) -> DrafterWeights:
        fields = BlockFields(raw, source, self.name, nested="dflash_config")
        own = {
            "sample_from_anchor": fields.flag("shift_label", False),
            "gru_hidden_dim": fields.integer("gru_hidden_dim"),
            "emb_dim": fields.integer("emb_dim"),
            "pure_draft_prefix_len": fields.integer("pure_draft_prefix_len", low=0, high=MOST_DRAFTS, default=0),
        }
        config = DominoConfig(**{**_read_block(fields), **own})
        check_plain_logits(config, self.name)
        return replace(read_vocabulary(config, tensors, source), embedding_scale=_embedding_scale(fields))

    def write(self, parts: DrafterWeights, target: TargetFacts | None) -> ExportedCheckpoint:
        config = parts.config
        check_plain_logits(config, self.name)
        written = _written(parts, target, self.spelling)
        own = {"projector_type": _DOMINO, "shift_label": config.sample_from_anchor}
        own |= {name: getattr(config, name) for name in ("gru_hidden_dim", "emb_dim", "pure_draft_prefix_len")}
        section = {**written.config["dflash_config"], **own}
        return replace(written, config={**written.config, "dflash_config": section})


# ----------------------------------------------------------------------------
# JetSpec: z-lab's DFlash with `causal_head: true` in `dflash_config`, which `is_causal: true` stands beside here, for
# readers of DFlash that know that field alone.
#
# Source: hao-ai-lab/JetSpec (models/draft_head.py), which reads it with `from_pretrained`.
# ----------------------------------------------------------------------------


def _is_jetspec(raw: Mapping[str, Any]) -> bool:
    section = raw.get("dflash_config")
    return isinstance(section, Mapping) and section.get("causal_head") is True


class JetSpecDialect:
    """What JetSpec adds to z-lab's DFlash."""

    name = "z-lab"
    spelling = ZLab.spelling
    methods: tuple[str, ...] = (JetSpecConfig.algorithm,)
    prefix = ""

    def reads(self, raw: Mapping[str, Any]) -> bool:
        return self.spelling in (raw.get("architectures") or []) and _is_jetspec(raw) and not _is_domino(raw)

    def read(self, raw: Mapping[str, Any], tensors: Mapping[str, Tensor], source: Source) -> DrafterWeights:
        fields = BlockFields(raw, source, self.name, nested="dflash_config")
        config = JetSpecConfig(**{**_read_block(fields), "is_causal": fields.flag("is_causal", True)})
        check_plain_logits(config, self.name)
        return replace(read_vocabulary(config, tensors, source), embedding_scale=_embedding_scale(fields))

    def write(self, parts: DrafterWeights, target: TargetFacts | None) -> ExportedCheckpoint:
        check_plain_logits(parts.config, self.name)
        written = _written(parts, target, self.spelling)
        section = {**written.config["dflash_config"], "causal_head": True}
        return replace(written, config={**written.config, "dflash_config": section})


# ----------------------------------------------------------------------------
# NVIDIA's LiLiCorr: `architectures: ["LiLiCorrDraftModel"]`, z-lab's DFlash with the head's fields in `dflash_config`.
#
#     lilicorr_*                           all stated: two of them change no shape, and readers have no defaults
#     conv_kernel_size, conv_group_size    both, or neither, as without convolutions
#     lilicorr.*                           tensors beside DFlash's; attn.in_proj_{weight,bias} as torch's own attention
#
# Model Optimizer has written the MLPs as sequences (feature_mlp.0, .1 and .3, mlp.0 and .2), which SGLang and we read
# too; vLLM reads the names that are written here.
#
# Source: Model Optimizer's code and export tests (torch/speculative/plugins), models/lilicorr.py of vLLM and SGLang.
# ----------------------------------------------------------------------------


_LILICORR_COUNTS = ("candidate_topk", "num_layers", "num_heads", "factor_dim")
_LILICORR_NUMBERS = ("mlp_ratio", "vector_eps", "logit_scale")
_LILICORR_NAMES = (  # ours, theirs, or what theirs were
    (".attn.in_proj.", ".attn.in_proj_"),
    ("lilicorr.feature_norm.", "lilicorr.feature_mlp.0."),
    ("lilicorr.feature_mlp.up_proj.", "lilicorr.feature_mlp.1."),
    ("lilicorr.feature_mlp.down_proj.", "lilicorr.feature_mlp.3."),
    (".mlp.up_proj.", ".mlp.0."),
    (".mlp.down_proj.", ".mlp.2."),
)


class LiLiCorrDialect:
    """LiLiCorr as NVIDIA's Model Optimizer exports it."""

    name = "ModelOpt"
    spelling = "LiLiCorrDraftModel"
    methods: tuple[str, ...] = (LiLiCorrConfig.algorithm,)
    prefix = ""

    def __init__(self) -> None:
        self._zlab = ZLab()

    def reads(self, raw: Mapping[str, Any]) -> bool:
        return self.spelling in (raw.get("architectures") or [])

    def read(self, raw: Mapping[str, Any], tensors: Mapping[str, Tensor], source: Source) -> DrafterWeights:
        section = Fields(raw, source.where, self.name).section("dflash_config")
        if not section.flag("lilicorr_enabled", True):
            raise section.refuse("lilicorr_enabled", "true where the architecture is LiLiCorr's")
        own: dict[str, Any] = {f"lilicorr_{name}": section.integer(f"lilicorr_{name}") for name in _LILICORR_COUNTS}
        own |= {f"lilicorr_{name}": section.number(f"lilicorr_{name}") for name in _LILICORR_NUMBERS}
        own["lilicorr_hidden_size"] = section.integer("lilicorr_hidden_size", low=0)
        for name in ("conv_kernel_size", "conv_group_size"):
            own[name] = section.integer(name, low=0, default=0)
        fields = BlockFields(raw, source, self.name, nested="dflash_config")
        found = {_renamed(name): tensor for name, tensor in tensors.items()}
        weights = read_vocabulary(LiLiCorrConfig(**_read_block(fields), **own), found, source)
        return replace(weights, embedding_scale=_embedding_scale(fields))

    def write(self, parts: DrafterWeights, target: TargetFacts | None) -> ExportedCheckpoint:
        written, config = self._zlab.write(parts, target), parts.config
        counts = ("hidden_size", *_LILICORR_COUNTS, *_LILICORR_NUMBERS)
        own = {"projector_type": "lilicorr", "lilicorr_enabled": True}
        own |= {f"lilicorr_{name}": getattr(config, f"lilicorr_{name}") for name in counts}
        if config.conv_kernel_size:
            own |= {name: getattr(config, name) for name in ("conv_kernel_size", "conv_group_size")}
        section = {**written.config["dflash_config"], **own}
        ours, theirs = _LILICORR_NAMES[0]
        return replace(
            written,
            config={**written.config, "architectures": [self.spelling], "dflash_config": section},
            tensors={name.replace(ours, theirs): tensor for name, tensor in written.tensors.items()},
        )


def _renamed(name: str) -> str:
    """Our name of a tensor of the head."""
    if name.startswith("lilicorr."):
        for ours, theirs in _LILICORR_NAMES:
            name = name.replace(theirs, ours)
    return name
