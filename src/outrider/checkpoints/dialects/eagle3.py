"""Read and write EAGLE-3 as SafeAILab, AngelSlim, SpecForge and DeepSpec publish it, with vLLM's class names.

    tensors   midlayer.* (ours too) or layers.0.*, fc, norm, lm_head (trained, the drafter's own), d2t, t2d,
              input_norm or fc_norm.{i}, embed_tokens if it differs from the target's
    aux layers
              eagle_aux_hidden_state_layer_ids at the top level counts hidden states (vLLM), one more than our ids;
              inside `eagle_config` it counts layer outputs (SGLang adds one), as our ids do;
              target_layer_ids (DeepSpec's Qwen3Eagle3Model) counts layer outputs too;
              none of them: the inputs of layers 2, L / 2 and L - 3

The engine chooses the number of drafts; `outrider.gamma` and DeepSpec's `ttt_length` state the number it was trained
for. DeepSpec's EAGLE-3 for Gemma 4 has that family's layers, which are not supported.
Sources: EAGLE-3, arXiv 2503.01840, and its code; DeepSpec's code; vLLM 0.32 and SGLang for the two conventions.
"""

from __future__ import annotations

from collections.abc import Mapping
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
    draft_length,
    target_depth,
    write_extras,
)
from outrider.checkpoints.dialects.blocks import (
    layer_fields,
    raised,
    read_shapes,
    read_vocabulary,
    with_target_tensors,
    write_vocabulary,
)
from outrider.drafters.base import DrafterWeights
from outrider.drafters.eagle3 import Eagle3, Eagle3Config, eagle_aux_layers

FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "attention_bias")
LAYERS, PLAIN = "eagle_aux_hidden_state_layer_ids", "target_layer_ids"
_DEEPSPEC = "Qwen3Eagle3Model"
_OURS, _OTHERS = "midlayer.", "layers.0."


class Eagle3Dialect:
    """The dialect of EAGLE-3 checkpoints."""

    name = "EAGLE-3"
    spelling = "LlamaForCausalLMEagle3"
    methods: tuple[str, ...] = (Eagle3Config.algorithm,)
    prefix = ""

    def reads(self, raw: Mapping[str, Any]) -> bool:
        named = raw.get("architectures") or []
        if any(
            name == _DEEPSPEC or name.endswith("Eagle3") or (name.startswith("Eagle3") and "CausalLM" in name)
            for name in named
        ):
            return True
        # The official training code keeps the base model's architecture name.
        base = "LlamaForCausalLM" in named and raw.get("model_type") == "llama" and raw.get("num_hidden_layers") == 1
        return base and "draft_vocab_size" in raw

    def read(self, raw: Mapping[str, Any], tensors: Mapping[str, Tensor], source: Source) -> DrafterWeights:
        nested = ("norm_before_fc", "use_aux_hidden_state")
        fields = Fields(
            raised(raw, "eagle_config", nested, where=source.where, dialect=self.name), source.where, self.name
        )
        if not fields.flag("use_aux_hidden_state", True):
            raise fields.refuse("use_aux_hidden_state", "true: EAGLE-3 drafts from aux hidden states")
        depth = target_depth(fields, source)
        trained_for = fields.integer("ttt_length", high=MOST_DRAFTS, default=Eagle3Config.gamma)
        gamma = draft_length(fields, trained_for)
        return read_eagle3(fields, _aux_layers(fields, depth), depth, gamma=gamma, tensors=tensors, source=source)

    def write(self, parts: DrafterWeights, target: TargetFacts | None) -> ExportedCheckpoint:
        parts = with_target_tensors(parts, target, embedding=False)
        if parts.head_VdH is None:
            raise ValueError("the EAGLE-3 dialect stores lm_head.weight: name the target whose head it is (--target).")
        config = parts.config
        aux_layers = list(config.target_layer_ids)
        fields = {
            **write_eagle3(config),
            "architectures": ["Eagle3Qwen3ForCausalLM" if config.qk_norm else self.spelling],
            "draft_vocab_size": config.draft_vocab_size,
            **{name: getattr(config, name) for name in FLAGS},
            "target_hidden_size": config.hidden_size,
            "num_aux_hidden_states": len(aux_layers),
            LAYERS: [aux_layer + 1 for aux_layer in aux_layers],
            "eagle_config": {
                LAYERS: aux_layers,
                "use_aux_hidden_state": True,
                "norm_before_fc": config.norm_before_fc,
            },
            **write_extras(config),
        }
        return ExportedCheckpoint(fields, write_vocabulary(parts, mask=True))


def _aux_layers(fields: Fields, depth: int) -> tuple[int, ...]:
    """Read the aux layers as our ids, in any of the three conventions."""
    nested = fields.section("eagle_config", {})
    outputs = nested.integers(LAYERS, -1, depth - 1) if nested.raw(LAYERS) else None
    states = tuple(i - 1 for i in fields.integers(LAYERS, 0, depth)) if fields.raw(LAYERS) else None
    if outputs is not None and states is not None and outputs != states:
        raise fields.refuse(
            LAYERS, f"{[aux_layer + 1 for aux_layer in outputs]}, one more than eagle_config's layer outputs"
        )
    aux_layers = outputs or states
    plain = fields.integers(PLAIN, -1, depth - 1) if fields.raw(PLAIN) else None
    if aux_layers is not None and plain is not None and plain != aux_layers:
        raise fields.refuse(PLAIN, f"{list(aux_layers)}, the layer outputs that {LAYERS} means")
    return aux_layers or plain or tuple(eagle_aux_layers(depth))


def write_eagle3(config: Eagle3Config) -> dict[str, Any]:
    """Return the fields of the layer, under the names of transformers' Llama, or Qwen3 with query and key norms."""
    return {
        "model_type": "qwen3" if config.qk_norm else "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        **layer_fields(config),
        "attention_bias": config.attention_bias,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "sliding_window": None,
        "use_sliding_window": False,
        "layer_types": ["full_attention"],
        "tie_word_embeddings": False,
        "dtype": "float32",
    }


def read_eagle3(
    fields: Fields, aux_layers: tuple[int, ...], depth: int, gamma: int, tensors: Mapping[str, Tensor], source: Source
) -> DrafterWeights:
    """Read the drafter from fields of the layer and flags at one level, given its aux layers."""
    if fields.integer("num_hidden_layers", high=MOST_LAYERS, default=1) != 1:
        raise fields.refuse("num_hidden_layers", "1: EAGLE-3 drafters have one layer here")
    if set(fields.texts("layer_types", ("full_attention",))) != {"full_attention"}:
        raise fields.refuse("layer_types", "full_attention: EAGLE-3 drafters have no sliding window here")
    shapes = read_shapes(fields, biases=True, llama_defaults=True)
    for name, wanted in (("target_hidden_size", shapes["hidden_size"]), ("num_aux_hidden_states", len(aux_layers))):
        if fields.integer(name, default=wanted) != wanted:
            raise fields.refuse(name, str(wanted))
    if fields.flag("bias", False):
        raise fields.refuse("bias", "false: `fc` has no bias here")
    renamed = {
        _OURS + name.removeprefix(_OTHERS) if name.startswith(_OTHERS) else name: t for name, t in tensors.items()
    }
    if len(renamed) != len(tensors):
        raise ValueError(f"{source.where}: the tensors have the layer twice, as midlayer.* and as layers.0.*.")
    flags: dict[str, Any] = {name: fields.flag(name, False) for name in FLAGS}
    config = Eagle3Config(
        **shapes,
        draft_vocab_size=fields.integer("draft_vocab_size", high=LARGEST_VOCABULARY, default=shapes["vocab_size"]),
        target_layer_ids=aux_layers,
        num_target_layers=depth,
        gamma=gamma,
        **flags,
        qk_norm=_OURS + "self_attn.q_norm.weight" in renamed,
    )
    return read_vocabulary(config, renamed, source, kind=Eagle3)
