"""Read and write the algorithms of the speculators dialect: fields besides the envelope, and names of tensors.

    dflash, dflash2, dspark
                     our names; aux_hidden_state_layer_ids, block_size, mask_token_id, sample_from_anchor, and the
                     fields of the method; sliding_window_non_causal: whether sliding layers are not causal either
    eagle3           layers.0.* for our midlayer.*; eagle_aux_hidden_state_layer_ids and the norm flags
    mtp              mtp_layers.0.*: one module of a Qwen3-shaped target, the whole vocabulary

Aux layers are counted as hidden states, one more than our ids. Source: speculators 0.9.0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from outrider.checkpoints.dialects.base import (
    LARGEST_VOCABULARY,
    MOST_DRAFTS,
    MOST_LAYERS,
    ExportedCheckpoint,
    Fields,
    Source,
    TargetFacts,
    target_depth,
    write_extras,
)
from outrider.checkpoints.dialects.blocks import (
    check_plain_logits,
    layer_fields,
    read_backbone,
    read_shapes,
    read_vocabulary,
    with_target_tensors,
    write_backbone,
    write_vocabulary,
)
from outrider.checkpoints.dialects.deepspec import read_heads, write_heads
from outrider.checkpoints.dialects.eagle3 import FLAGS, LAYERS, read_eagle3, write_eagle3
from outrider.checkpoints.dialects.zlab import read_own, write_own
from outrider.drafters.base import DrafterWeights
from outrider.drafters.dflash import DFlash, DFlashConfig
from outrider.drafters.dflash2 import DFlash2, DFlash2Config
from outrider.drafters.dspark import DSpark, DSparkConfig
from outrider.drafters.eagle3 import Eagle3Config, eagle_aux_layers
from outrider.drafters.mtp import MTP, MTPConfig
from outrider.utils.measure import dtype_name

Fragments = tuple[dict[str, Any], dict[str, Any], dict[str, Tensor]]

_BLOCK_LAYERS = "aux_hidden_state_layer_ids"
_EAGLE_FLAGS = tuple(flag for flag in FLAGS if flag != "attention_bias")  # attention_bias is a field of the layer
_MTP_NAMES = {  # ours (of module 0) -> theirs; the names of the transformer layer are the same
    "enorm.weight": "token_layernorm.weight",
    "hnorm.weight": "hidden_layernorm.weight",
    "eh_proj.weight": "input_proj.weight",
    "norm.weight": "final_layernorm.weight",
}
_OUR_MODULE, _THEIR_MODULE = "depths.0.", "mtp_layers.0."


def _aux_layers(fields: Fields, name: str, depth: int) -> tuple[int, ...]:
    """Read the aux layers as our ids; the library's default if the config has none."""
    if name not in fields:
        return tuple(eagle_aux_layers(depth))
    return tuple(state - 1 for state in fields.integers(name, low=0, high=depth))


def _read_dflash(
    fields: Fields, depth: int, drafts: int | None, tensors: Mapping[str, Tensor], source: Source
) -> DrafterWeights:
    config = DFlashConfig(**_read_block(fields, depth), sample_from_anchor=fields.flag("sample_from_anchor", False))
    return _checked(read_vocabulary(config, tensors, source, kind=DFlash), fields, drafts)


def _read_dflash2(
    fields: Fields, depth: int, drafts: int | None, tensors: Mapping[str, Tensor], source: Source
) -> DrafterWeights:
    extra = read_own(fields) | {"sample_from_anchor": fields.flag("sample_from_anchor", False)}
    config = DFlash2Config(**_read_block(fields, depth, both_ways=True), **extra)
    return _checked(read_vocabulary(config, tensors, source, kind=DFlash2), fields, drafts)


def _read_dspark(
    fields: Fields, depth: int, drafts: int | None, tensors: Mapping[str, Tensor], source: Source
) -> DrafterWeights:
    config = DSparkConfig(**_read_block(fields, depth), **read_heads(fields, confidence=True))
    return _checked(read_vocabulary(config, tensors, source, kind=DSpark), fields, drafts)


def _read_block(fields: Fields, depth: int, both_ways: bool = False) -> dict[str, Any]:
    _same_hidden_size(fields)
    both_ways = fields.flag("sliding_window_non_causal", both_ways)  # full layers are never causal
    layers = fields.section("transformer_layer_config").replaced({"is_causal": False if both_ways else None})
    backbone = read_backbone(layers)
    return {
        **backbone,
        "draft_vocab_size": fields.integer("draft_vocab_size", high=LARGEST_VOCABULARY),
        "block_size": fields.integer("block_size", high=MOST_DRAFTS),
        "mask_token_id": fields.integer("mask_token_id", low=0, high=backbone["vocab_size"] - 1),
        "target_layer_ids": _aux_layers(fields, _BLOCK_LAYERS, depth),
        "num_target_layers": depth,
    }


def _checked(parts: DrafterWeights, fields: Fields, drafts: int | None) -> DrafterWeights:
    """Check that the envelope proposes no more drafts than the block has; the block decides their number."""
    gamma = parts.config.gamma
    if drafts is not None and drafts > gamma:
        raise ValueError(
            f"{fields.where}: speculators_config proposes {drafts} tokens, but block_size "
            f"{parts.config.block_size} with sample_from_anchor {parts.config.sample_from_anchor} gives {gamma}."
        )
    return parts


def _same_hidden_size(fields: Fields) -> None:
    hidden = fields.section("transformer_layer_config").raw("hidden_size")
    if "target_hidden_size" in fields and fields.raw("target_hidden_size") != hidden:
        raise fields.refuse("target_hidden_size", f"hidden_size {hidden}: a drafter here has its target's hidden size")


def _write_dflash(parts: DrafterWeights) -> Fragments:
    config = parts.config
    return {**_write_block(config), "sample_from_anchor": config.sample_from_anchor}, *_layers(parts)


def _write_dflash2(parts: DrafterWeights) -> Fragments:
    """Write DFlash 2; the library requires the whole vocabulary and drafts from masks alone."""
    config = parts.config
    for name, wanted in (("draft_vocab_size", config.vocab_size), ("sample_from_anchor", False)):
        if getattr(config, name) != wanted:
            raise ValueError(
                f"{name} {getattr(config, name)} has no place in the speculators dialect of DFlash 2: train with "
                f"drafter.{name}={wanted}."
            )
    fields, layers, tensors = _write_dflash(parts)
    return {**fields, **write_own(config)}, layers, tensors


def _write_dspark(parts: DrafterWeights) -> Fragments:
    return {**_write_block(parts.config), **write_heads(parts.config)}, *_layers(parts)


def _layers(parts: DrafterWeights) -> tuple[dict[str, Any], dict[str, Tensor]]:
    return write_backbone(parts.config), write_vocabulary(parts, mask=True)


def _write_block(config: DFlashConfig) -> dict[str, Any]:
    check_plain_logits(config, "speculators")
    return {
        "draft_vocab_size": config.draft_vocab_size,
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "target_hidden_size": config.hidden_size,
        _BLOCK_LAYERS: [aux_layer + 1 for aux_layer in config.target_layer_ids],
        "sliding_window_non_causal": not _sliding_is_causal(config),
    }


def _sliding_is_causal(config: DFlashConfig) -> bool:
    if any(pattern.causal and pattern.window is None for pattern in config.attention_patterns):
        raise ValueError(
            "is_causal true has no place in the speculators dialect, whose full layers are never causal: train with "
            "drafter.is_causal=false."
        )
    return any(pattern.causal for pattern in config.attention_patterns)


def _read_eagle3(
    fields: Fields, depth: int, drafts: int | None, tensors: Mapping[str, Tensor], source: Source
) -> DrafterWeights:
    _same_hidden_size(fields)
    outer: dict[str, Any] = {name: fields.flag(name, False) for name in _EAGLE_FLAGS}
    outer["draft_vocab_size"] = fields.integer("draft_vocab_size", high=LARGEST_VOCABULARY)
    layers = fields.section("transformer_layer_config").replaced(outer)
    gamma = Eagle3Config.gamma if drafts is None else drafts
    return read_eagle3(layers, _aux_layers(fields, LAYERS, depth), depth, gamma=gamma, tensors=tensors, source=source)


def _write_eagle3(parts: DrafterWeights) -> Fragments:
    """Write EAGLE-3; vLLM reads `num_aux_hidden_states` from the layer's config."""
    config = parts.config
    fields = {
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.hidden_size,
        LAYERS: [aux_layer + 1 for aux_layer in config.target_layer_ids],
        "embed_requires_grad": False,
        **{name: getattr(config, name) for name in _EAGLE_FLAGS},
    }
    layers = {**write_eagle3(config), "num_aux_hidden_states": len(config.target_layer_ids)}
    tensors = {
        name.replace("midlayer.", "layers.0.", 1): tensor for name, tensor in write_vocabulary(parts, mask=True).items()
    }
    return fields, layers, tensors


def _read_mtp(
    fields: Fields, depth: int, drafts: int | None, tensors: Mapping[str, Tensor], source: Source
) -> DrafterWeights:
    layers = fields.section("transformer_layer_config")
    if layers.text("model_type") != "qwen3":
        raise layers.refuse("model_type", "qwen3: MTP modules with other layers are not supported")
    if fields.integer("num_nextn_predict_layers", high=MOST_LAYERS, default=1) != 1:
        raise fields.refuse("num_nextn_predict_layers", "1, as in this dialect")
    shapes = read_shapes(layers)
    config = MTPConfig(
        **shapes,
        draft_vocab_size=shapes["vocab_size"],
        target_layer_ids=(depth - 1,),
        num_target_layers=depth,
        gamma=1 if drafts is None else drafts,
        qk_norm=True,
    )
    return read_vocabulary(config, _renamed(tensors, to_ours=True), source, kind=MTP)


def _write_mtp(parts: DrafterWeights) -> Fragments:
    config = parts.config
    for name, wanted in (("num_modules", 1), ("qk_norm", True), ("draft_vocab_size", config.vocab_size)):
        if getattr(config, name) != wanted:
            raise ValueError(
                f"{name} {getattr(config, name)} has no place in the speculators dialect of MTP (one module of a "
                f"Qwen3-shaped target, the whole vocabulary): train with {name} {wanted}."
            )
    if parts.head_VdH is not None or parts.embedding_VH is not None:
        raise ValueError(
            "lm_head.weight and embed_tokens.weight have no place in the speculators dialect of MTP: train a drafter "
            "here, which uses the target's."
        )
    layers = {
        "model_type": "qwen3",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_target_layers,  # the library reads the output of this layer
        **layer_fields(config),
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "sliding_window": None,
        "layer_types": ["full_attention"] * config.num_target_layers,
        "tie_word_embeddings": False,
        "dtype": "float32",
    }
    return {"num_nextn_predict_layers": 1}, layers, _renamed(parts.tensors, to_ours=False)


def _renamed(tensors: Mapping[str, Tensor], to_ours: bool) -> dict[str, Tensor]:
    pairs = {_OUR_MODULE + ours: _THEIR_MODULE + theirs for ours, theirs in _MTP_NAMES.items()}
    before, after = _OUR_MODULE, _THEIR_MODULE
    if to_ours:
        pairs = {theirs: ours for ours, theirs in pairs.items()}
        before, after = after, before
    return {
        pairs.get(name, after + name.removeprefix(before) if name.startswith(before) else name): tensor
        for name, tensor in tensors.items()
    }


# ----------------------------------------------------------------------------
# speculators 0.9: one envelope for several algorithms; vLLM reads it without further options.
#
#     speculators_model_type    eagle3, dflash, dflash2, dspark, mtp
#     transformer_layer_config  the draft layers, under transformers' names
#     speculators_config        algorithm, how many tokens to propose, and the verifier (the target)
#     aux layers                counted as hidden states, one more than our ids
#
# The library and vLLM default several fields differently, so every field is written. Embedding and head come from the
# verifier, except the head of EAGLE-3 and that of a reduced draft vocabulary, which are stored.
# Sources: speculators 0.9.0; vLLM 0.32.
# ----------------------------------------------------------------------------


VERSION = "0.9.0"


@dataclass(frozen=True)
class _Algorithm:
    """Reader and writer of one `speculators_model_type`.

    Attributes:
        read: (fields, target depth, drafts per block, tensors, source) -> weights.
        write: weights, with the target's tensors if stored -> (fields, transformer_layer_config, tensors).
        stores_head: whether the checkpoint always has lm_head.weight.
        layers_are_the_targets: whether transformer_layer_config counts the target's layers instead of the drafter's.
    """

    architecture: str
    read: Callable[[Fields, int, int | None, Mapping[str, Tensor], Source], DrafterWeights]
    write: Callable[[DrafterWeights], tuple[dict[str, Any], dict[str, Any], dict[str, Tensor]]]
    stores_head: bool = False
    layers_are_the_targets: bool = False


_ALGORITHMS = {
    "eagle3": _Algorithm("Eagle3Speculator", _read_eagle3, _write_eagle3, stores_head=True),
    "dflash": _Algorithm("DFlashSpeculator", _read_dflash, _write_dflash),
    "dflash2": _Algorithm("DFlash2DraftModel", _read_dflash2, _write_dflash2),
    "dspark": _Algorithm("DSparkSpeculator", _read_dspark, _write_dspark),
    "mtp": _Algorithm("MTPDraftModel", _read_mtp, _write_mtp, layers_are_the_targets=True),
}


class Speculators:
    """The dialect of the speculators library; its algorithms have the names of our methods."""

    name = "speculators"
    spelling = "speculators_model_type"
    methods: tuple[str, ...] = tuple(_ALGORITHMS)
    prefix = ""

    def reads(self, raw: Mapping[str, Any]) -> bool:
        return "speculators_model_type" in raw

    def read(self, raw: Mapping[str, Any], tensors: Mapping[str, Tensor], source: Source) -> DrafterWeights:
        fields = Fields(raw, source.where, self.name)
        algorithm = _ALGORITHMS.get(fields.text("speculators_model_type"))
        if algorithm is None:
            raise fields.refuse("speculators_model_type", f"one of {', '.join(_ALGORITHMS)}")
        if algorithm.layers_are_the_targets and source.num_target_layers is None:
            depth = fields.section("transformer_layer_config").integer("num_hidden_layers", high=MOST_LAYERS)
            source = replace(source, num_target_layers=depth)
        return algorithm.read(fields, target_depth(fields, source), _proposed(fields), tensors, source)

    def write(self, parts: DrafterWeights, target: TargetFacts | None) -> ExportedCheckpoint:
        algorithm, config = _ALGORITHMS[parts.algorithm], parts.config
        if target is None:
            raise ValueError("the speculators dialect stores the name of the target: name it (--target).")
        if algorithm.stores_head or parts.draft_ids_Vd is not None:
            parts = with_target_tensors(parts, target, embedding=False)
        fields, layers, tensors = algorithm.write(parts)
        dtype = dtype_name(next(iter(parts.tensors.values())).dtype)
        proposal = {"proposal_type": "greedy", "speculative_tokens": config.gamma, "verifier_accept_k": 1}
        proposal["accept_tolerance"] = 0.0
        envelope = {
            "architectures": [algorithm.architecture],
            "speculators_model_type": parts.algorithm,
            "speculators_version": VERSION,
            "speculators_config": {
                "algorithm": parts.algorithm,
                "default_proposal_method": "greedy",
                "proposal_methods": [proposal],
                "verifier": {"name_or_path": target.name_or_path, "architectures": list(target.architectures)},
            },
            "transformer_layer_config": {**layers, "dtype": dtype},
            "tie_word_embeddings": False,
            "dtype": dtype,
        }
        return ExportedCheckpoint({**envelope, **fields, **write_extras(config)}, tensors)


def _proposed(fields: Fields) -> int | None:
    """Return how many tokens a round proposes; None if the config does not state it."""
    methods = fields.section("speculators_config", {}).raw("proposal_methods")
    if methods is None:
        return None
    if not isinstance(methods, list) or not methods or not isinstance(methods[0], Mapping):
        raise ValueError(
            f"{fields.where}: speculators_config.proposal_methods is {methods!r}; it must be a list of mappings."
        )
    first = Fields(methods[0], fields.where, fields.dialect, path="speculators_config.proposal_methods[0].")
    return first.integer("speculative_tokens", high=MOST_DRAFTS)
