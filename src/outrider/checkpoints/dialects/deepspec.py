"""DeepSpec's DSpark: `architectures: ["Qwen3DSparkModel"]`, aux layers and mask token at the top level.

    tensors   z-lab's and markov_head.*, confidence_head.proj.*, embed_tokens, lm_head
    block     the anchor is the first prediction position; `sample_from_anchor: false` is z-lab's layout

SpecForge writes `DSparkDraftModel` and keeps the block and the heads in `dflash_config`, where SGLang looks first.
`markov_rank: 0` without a confidence head is DeepSpec's spelling of DFlash; it is read as what it is, a DSpark
drafter without heads. `d2t` of a reduced draft vocabulary is ours and llama.cpp's: DeepSpec and SGLang have none, and
`widened` makes a drafter for them. Source: DSpark, arXiv 2607.05147, its checkpoints and code; SGLang's dspark.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from outrider.checkpoints.dialects.base import (
    WIDEST,
    ExportedCheckpoint,
    Fields,
    Source,
    TargetFacts,
    module_of,
)
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
from outrider.drafters.dspark import DSpark, DSparkConfig


def read_heads(fields: Fields, confidence: bool = False) -> dict[str, Any]:
    """Read the fields of a DSpark config that describe its heads.

    Args:
        confidence: whether a confidence head is the default.
    """
    return {
        "sample_from_anchor": fields.flag("sample_from_anchor", True),
        "markov_rank": fields.integer("markov_rank", low=0, high=WIDEST, default=256),
        "markov_head_type": fields.text("markov_head_type", "vanilla"),
        "enable_confidence_head": fields.flag("enable_confidence_head", confidence),
        "confidence_head_with_markov": fields.flag("confidence_head_with_markov", True),
    }


def write_heads(config: DSparkConfig) -> dict[str, Any]:
    """Return all fields that `read_heads` reads."""
    return {
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.sample_from_anchor,
        "markov_rank": config.markov_rank,
        "markov_head_type": config.markov_head_type,
        "enable_confidence_head": config.enable_confidence_head,
        "confidence_head_with_markov": config.confidence_head_with_markov,
    }


class DeepSpec:
    """The dialect of DeepSpec's DSpark checkpoints."""

    name = "DeepSpec"
    spelling = "Qwen3DSparkModel"
    methods: tuple[str, ...] = (DSparkConfig.algorithm,)
    prefix = ""

    def reads(self, raw: Mapping[str, Any]) -> bool:
        named = raw.get("architectures") or []
        return self.spelling in named or ("DSparkDraftModel" in named and raw.get("model_type") == "qwen3")

    def read(self, raw: Mapping[str, Any], tensors: Mapping[str, Tensor], source: Source) -> DrafterWeights:
        fields = BlockFields(raw, source, self.name, nested="dflash_config")
        backbone = read_backbone(fields)
        for name in ("output_multiplier", "final_logit_softcapping"):
            if fields.raw(name) not in (None, 0, 1):
                raise fields.refuse(name, "absent: this dialect does not scale or cap draft logits")
        config = DSparkConfig(
            **backbone,
            **fields.block(backbone["vocab_size"]),
            **read_heads(fields),
            target_layer_ids=fields.aux_layers(),
            num_target_layers=fields.depth,
        )
        return read_vocabulary(config, tensors, source, kind=DSpark)

    def write(self, parts: DrafterWeights, target: TargetFacts | None) -> ExportedCheckpoint:
        """Write the checkpoint; with a target also its embedding and head, which DeepSpec's loader requires."""
        config = parts.config
        check_plain_logits(config, self.name)
        fields = {
            **write_backbone(config),
            "architectures": [self.spelling],
            "draft_vocab_size": config.draft_vocab_size,
            "block_size": config.block_size,
            "num_anchors": 512,  # for its training step; its class requires it
            "num_target_layers": config.num_target_layers,
            "target_layer_ids": list(config.target_layer_ids),
            **write_heads(config),
        }
        return ExportedCheckpoint(fields, write_vocabulary(with_target_tensors(parts, target)))


# ----------------------------------------------------------------------------
# A DSpark drafter of a reduced draft vocabulary over the target's whole one.
#
#     logits_k = U_k + W2 l_k                  U_k, W2: rows of all V tokens; l_k has one more entry, which is always 1
#     W2[i] = [W2[i], 0]       a token that could be drafted: its logit is what it was
#     W2[j] = [0, -2^14]       another one: softmax gives it a probability of exactly 0, since exp(-104) is 0 in float32
#
# The entry is 1 as W1[x] = 1 in a vanilla head, as W1[x] = 1 behind a gate of sigmoid(100) = 1 in a gated one, and as
# tanh(100) = 1 in a recurrent one; all of these and 2^14 are exact in bfloat16 and float16, too. Tokens, their
# probabilities and their confidences are those of the drafter before. Shapes: V target vocab, Vd draft vocab, H draft
# hidden, r rank.
# ----------------------------------------------------------------------------

_LOWER, _SATURATED = 2.0**14, 100.0
_HEAD, _CONFIDENCE = "markov_head.", "confidence_head.proj.weight"


def widened(parts: DrafterWeights) -> DrafterWeights:
    """Extend the reduced draft vocabulary of a DSpark drafter to the target's; its drafts stay the same.

    The sequential head gains one rank (from 0 to 1 if it has none); the drafter's LM head, if any, gains rows of zeros.
    """
    ids_Vd, config, old = parts.draft_ids_Vd, parts.config, parts.tensors
    assert ids_Vd is not None, "the whole vocabulary cannot be widened"
    r, V, H = config.markov_rank, config.vocab_size, config.hidden_size
    new = {name: tensor for name, tensor in old.items() if not name.startswith(_HEAD)}
    like = old["fc.weight"]
    w1_Vr, w2_Vr = like.new_ones(V, r + 1), like.new_zeros(V, r + 1)
    w2_Vr[:, r] = -_LOWER
    w2_Vr[ids_Vd, r] = 0
    if r:
        w1_Vr[:, :r] = old[_HEAD + "markov_w1.weight"]
        w2_Vr[ids_Vd, :r] = old[_HEAD + "markov_w2.weight"]
    new |= {_HEAD + "markov_w1.weight": w1_Vr, _HEAD + "markov_w2.weight": w2_Vr}
    if _HEAD + "gate_proj.weight" in old:  # reads [hidden state, embedding]
        weight, bias = like.new_zeros(r + 1, H + r + 1), like.new_full((r + 1,), _SATURATED)
        weight[:r, : H + r], bias[:r] = old[_HEAD + "gate_proj.weight"], old[_HEAD + "gate_proj.bias"]
        new |= {_HEAD + "gate_proj.weight": weight, _HEAD + "gate_proj.bias": bias}
    if _HEAD + "joint_proj.weight" in old:  # [state, embedding, hidden state] -> [gate, candidate, output]
        weight, bias = like.new_zeros(3, r + 1, 2 * (r + 1) + H), like.new_full((3, r + 1), _SATURATED)
        kept = [*range(r), *range(r + 1, 2 * r + 1), *range(2 * r + 2, 2 * r + 2 + H)]
        weight[:, :r, kept] = old[_HEAD + "joint_proj.weight"].view(3, r, 2 * r + H)
        bias[:, :r] = old[_HEAD + "joint_proj.bias"].view(3, r)
        new |= {_HEAD + "joint_proj.weight": weight.flatten(0, 1), _HEAD + "joint_proj.bias": bias.flatten()}
    if config.enable_confidence_head and config.confidence_head_with_markov:  # reads [hidden state, embedding]
        new[_CONFIDENCE] = torch.cat([old[_CONFIDENCE], like.new_zeros(1, 1)], dim=-1)
    head_VH = parts.head_VdH
    if head_VH is not None:
        head_VH = like.new_zeros(V, H).index_copy(0, ids_Vd, head_VH)
    kind = config.markov_head_type if r else "vanilla"
    config = replace(config, draft_vocab_size=V, markov_rank=r + 1, markov_head_type=kind)
    return replace(
        parts,
        module=module_of(config, new, Source("widened"), kind=type(parts.module)),
        draft_ids_Vd=None,
        head_VdH=head_VH,
    )
