"""Read and write the Qwen3 layers of block drafters, which z-lab, DeepSpec and speculators share.

Every field that loaders default differently is written, except `is_causal` if layers differ in it: without it a sliding
layer is causal inside its block and a full layer is not (z-lab's and vLLM's models).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from outrider.checkpoints.dialects.base import (
    LARGEST_VOCABULARY,
    LONGEST_CONTEXT,
    MOST_DRAFTS,
    MOST_LAYERS,
    Fields,
    Source,
    TargetFacts,
    draft_mask,
    draft_offsets,
    module_of,
    take_draft_ids,
    target_depth,
)
from outrider.drafters.base import DrafterWeights, DraftModule
from outrider.drafters.dflash import FULL, SLIDING, DFlashConfig
from outrider.drafters.rope import RopeScaling


def layer_fields(config: Any) -> dict[str, Any]:
    """Return the fields of a Llama-like layer, under transformers' names."""
    return {
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        **_write_rope(config),
        "hidden_act": "silu",
    }


def _write_rope(config: Any) -> dict[str, Any]:
    """The base and the scaling, where transformers 5 reads it (rope_parameters) and before (rope_scaling)."""
    theta = config.rope_theta
    if config.rope_scaling is None:
        return {"rope_theta": theta, "rope_parameters": {"rope_type": "default", "rope_theta": theta}}
    scaling = config.rope_scaling.fields()
    return {"rope_theta": theta, "rope_parameters": {**scaling, "rope_theta": theta}, "rope_scaling": scaling}


def write_backbone(config: DFlashConfig) -> dict[str, Any]:
    """Return the fields of the layers, under the names of transformers' Qwen3."""
    layers, sliding = config.num_hidden_layers, config.sliding_window is not None
    uniform = (SLIDING if sliding else FULL,) * layers
    causal = {} if config.is_causal is None else {"is_causal": config.is_causal}
    return {
        "model_type": "qwen3",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": layers,
        **layer_fields(config),
        "attention_bias": False,
        **causal,
        "attention_dropout": 0.0,
        "use_sliding_window": sliding,
        "sliding_window": config.sliding_window,
        "layer_types": list(config.layer_types or uniform),
        "max_window_layers": 0 if sliding else layers,
        "tie_word_embeddings": False,
        "dtype": "float32",
    }


def check_plain_logits(config: DFlashConfig, dialect: str) -> None:
    """Refuse scaled or capped draft logits, which only z-lab's dialect can store.

    Raises:
        ValueError: the config scales or caps them.
    """
    if not config.plain_logits:
        raise ValueError(
            f"output_multiplier {config.output_multiplier:g} and final_logit_softcapping "
            f"{config.final_logit_softcapping} have no place in the {dialect} dialect: use z-lab's, or train a drafter "
            "here, which has neither."
        )


def read_backbone(fields: Fields) -> dict[str, Any]:
    """Read the arguments of a block drafter's config that describe its layers."""
    layers = fields.integer("num_hidden_layers", high=MOST_LAYERS)
    return {**read_shapes(fields), "num_hidden_layers": layers, **_attention(fields, layers)}


def read_shapes(fields: Fields, biases: bool = False, llama_defaults: bool = False) -> dict[str, Any]:
    """Read the shapes that decoder layers of every dialect have.

    Args:
        biases: whether the caller supports attention biases.
        llama_defaults: whether absent fields take transformers' defaults for Llama, for hand-written configs.

    Raises:
        ValueError: the layers have unsupported rotations, biases or an unsupported activation.
    """
    if fields.text("hidden_act", "silu") != "silu":
        raise fields.refuse("hidden_act", "silu")
    if fields.flag("attention_bias", False) and not biases:
        raise fields.refuse("attention_bias", "false: drafters of this kind have no biases here")
    if fields.flag("mlp_bias", False):
        raise fields.refuse("mlp_bias", "false: drafters have no biases in their MLPs here")
    heads, hidden = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    defaults: dict[str, Any] = {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048} if llama_defaults else {}
    fields = fields.with_defaults(defaults)
    longest = fields.integer("max_position_embeddings", high=LONGEST_CONTEXT)
    theta = _rope_theta(fields, {"rope_theta": 10000.0} if llama_defaults else {})
    return {
        "hidden_size": hidden,
        "intermediate_size": fields.integer("intermediate_size"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.integer("num_key_value_heads", default=heads),
        "head_dim": fields.integer("head_dim", default=max(1, hidden // heads)),
        "vocab_size": fields.integer("vocab_size", high=LARGEST_VOCABULARY),
        "max_position_embeddings": longest,
        "rms_norm_eps": fields.number("rms_norm_eps"),
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(fields, theta, longest),
    }


def _rope_scaling(fields: Fields, theta: float, longest: int) -> RopeScaling | None:
    """Read the scaling; two sections that have one must agree."""
    if fields.raw("partial_rotary_factor") not in (None, 1):
        raise fields.refuse("partial_rotary_factor", "1: draft layers rotate whole heads here")
    named = [name for name in ("rope_parameters", "rope_scaling") if name in fields]
    found = [read_scaling(fields.section(name), longest) for name in named]
    if len(set(found)) > 1:
        one, other = ({} if scaling is None else scaling.fields() for scaling in found)
        apart = sorted(name for name in one | other if one.get(name) != other.get(name))
        raise fields.refuse("rope_scaling", f"the scaling of rope_parameters: they differ in {', '.join(apart)}")
    scaling = found[0] if found else None
    if scaling is not None and scaling.rope_type == "yarn" and theta <= 1:
        raise ValueError(f"{fields.where}: rope_theta is {theta:g}; it must be above 1: yarn divides by its logarithm.")
    return scaling


def read_scaling(rope: Fields, longest: int | None = None) -> RopeScaling | None:
    """Read the scaling of one section; `longest` as in `RopeScaling.of`.

    Raises:
        ValueError: naming the field that draft layers do not have, or that is wrong.
    """
    try:
        return RopeScaling.of(rope.everything, longest)
    except ValueError as error:
        raise ValueError(f"{rope.where}: {rope.path}{error}") from error


def _rope_theta(fields: Fields, default: dict[str, Any]) -> float:
    """Read the base of rotary positions; transformers keeps it at the top level or, since version 5, in a section."""
    sections = [(name, fields.section(name)) for name in ("rope_parameters", "rope_scaling") if name in fields]
    for name, rope in sections:
        if "rope_theta" in rope:
            theta = rope.number("rope_theta")
            if "rope_theta" in fields and fields.number("rope_theta") != theta:
                raise fields.refuse("rope_theta", f"{theta:g}, as in {name}")
            return theta
    return fields.with_defaults(default).number("rope_theta")


def _attention(fields: Fields, layers: int) -> dict[str, Any]:
    """Read windows, layer types, and whether attention inside a block is causal."""
    types = fields.texts("layer_types", (FULL,) * layers)
    if len(types) != layers:
        raise fields.refuse("layer_types", f"one kind for each of the {layers} layers")
    if unknown := set(types) - {FULL, SLIDING}:
        raise fields.refuse("layer_types", f"{FULL} or {SLIDING}, not {', '.join(sorted(unknown))}")
    sliding, mixed = SLIDING in types, len(set(types)) > 1
    switched = fields.flag("use_sliding_window", False)  # if it is off, transformers drops the window
    if sliding and not switched:
        raise fields.refuse("use_sliding_window", "true where layers are sliding: without it they have no window")
    if switched and "sliding_window" in fields and "layer_types" not in fields:
        raise fields.refuse("layer_types", "present if there is a window: readers differ on which layers have it")
    stated = fields.flag("is_causal") if "is_causal" in fields else None
    return {
        "sliding_window": fields.integer("sliding_window", high=LONGEST_CONTEXT) if sliding else None,
        "layer_types": types if mixed else (),
        "is_causal": sliding if stated is None and not mixed else stated,
    }


# ----------------------------------------------------------------------------
# Fields of the draft block, wherever a dialect keeps them, and the tensors of a vocabulary.
#
# A field is read from the nested section, then from the top level; if it is in both, they must agree.
# ----------------------------------------------------------------------------


_ANYWHERE = (
    "block_size",
    "mask_token_id",
    "target_layer_ids",
    "sample_from_anchor",
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
    "input_embedding_scale",
    "output_multiplier",
    "final_logit_softcapping",
    "projector_type",
    "gru_hidden_dim",
    "emb_dim",
    "pure_draft_prefix_len",
    "shift_label",
)


class BlockFields(Fields):
    """config.json of a block drafter, with the fields of its block moved from a section to the top level."""

    def __init__(self, raw: Mapping[str, Any], source: Source, dialect: str, nested: str) -> None:
        super().__init__(raised(raw, nested, _ANYWHERE, where=source.where, dialect=dialect), source.where, dialect)
        self.depth = target_depth(self, source)

    def block(self, vocab_size: int) -> dict[str, Any]:
        """Read block_size, mask_token_id and draft_vocab_size, under the names of our configs."""
        return {
            "block_size": self.integer("block_size", high=MOST_DRAFTS),
            "mask_token_id": self.integer("mask_token_id", low=0, high=vocab_size - 1),
            "draft_vocab_size": self.integer("draft_vocab_size", high=LARGEST_VOCABULARY, default=vocab_size),
        }

    def aux_layers(self, default: Callable[[int, int], Sequence[int]] | None = None, count: int = 0) -> tuple[int, ...]:
        """Read target_layer_ids; if absent, `default` makes `count` of them for the target's depth."""
        if default is not None and "target_layer_ids" not in self:
            return tuple(default(self.depth, count))
        return self.integers("target_layer_ids", low=-1, high=self.depth - 1)


def raised(raw: Mapping[str, Any], nested: str, names: Sequence[str], where: str, dialect: str) -> dict[str, Any]:
    """Move fields of a section of config.json to the top level.

    Raises:
        ValueError: a field is in both places with different values.
    """
    section = Fields(raw, where, dialect).section(nested, {})
    merged = dict(raw)
    for name in names:
        inner, outer = section.raw(name), raw.get(name)
        if inner is not None and outer is not None and inner != outer:
            raise ValueError(
                f"{where}: {name} is {outer!r}, {nested}.{name} is {inner!r}: make them agree, because engines read "
                "one or the other."
            )
        merged[name] = outer if inner is None else inner
    return merged


def read_vocabulary(
    config: Any, tensors: Mapping[str, Tensor], source: Source, kind: type[DraftModule]
) -> DrafterWeights:
    """Build the module, and read draft vocabulary, LM head and embedding from the tensors."""
    rest = dict(tensors)
    ids_Vd = take_draft_ids(rest, config.vocab_size, config.draft_vocab_size, where=source.where)
    sizes = {"lm_head.weight": config.draft_vocab_size, "embed_tokens.weight": config.vocab_size}
    stored = {name: rest.pop(name, None) for name in sizes}
    for name, rows in sizes.items():
        tensor, wanted = stored[name], (rows, config.hidden_size)
        if tensor is not None and tensor.shape != wanted:
            raise ValueError(
                f"{source.where}: {name} has shape {list(tensor.shape)}, config.json implies {list(wanted)}."
            )
    return DrafterWeights(
        module_of(config, rest, source, kind=kind),
        ids_Vd,
        stored["lm_head.weight"],
        embedding_VH=stored["embed_tokens.weight"],
    )


def write_vocabulary(parts: DrafterWeights, mask: bool = False) -> dict[str, Tensor]:
    """Return the module's tensors, with head, embedding and draft vocabulary if they differ from the target's.

    Args:
        mask: whether to write `t2d` as well as `d2t`.
    """
    tensors = dict(parts.tensors)
    if parts.head_VdH is not None:
        tensors["lm_head.weight"] = parts.head_VdH
    if parts.embedding_VH is not None:
        tensors["embed_tokens.weight"] = parts.embedding_VH
    if parts.draft_ids_Vd is not None:
        tensors["d2t"] = draft_offsets(parts.draft_ids_Vd)
        if mask:
            tensors["t2d"] = draft_mask(parts.draft_ids_Vd, parts.config.vocab_size)
    return tensors


def with_target_tensors(parts: DrafterWeights, target: TargetFacts | None, embedding: bool = True) -> DrafterWeights:
    """Fill in the target's head (and embedding) if the drafter has none."""
    if target is None:
        return parts
    ids = parts.draft_ids_Vd
    head_VdH = target.head_VH if ids is None else target.head_VH[ids.to(target.head_VH.device)]
    embedding_VH = target.embedding_VH if parts.embedding_VH is None and embedding else parts.embedding_VH
    return replace(parts, head_VdH=head_VdH if parts.head_VdH is None else parts.head_VdH, embedding_VH=embedding_VH)
