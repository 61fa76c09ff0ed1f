"""Read and write Medusa in vLLM's spelling, which is ours; read that of the FasterDecoding releases.

    vLLM            config model_type "medusa"; blocks.{h}.layers.{l}.{weight, bias}, lm_heads.{h}.weight, token_map
    FasterDecoding  config medusa_num_heads, medusa_num_layers, nothing on sizes;
                    {h}.{l}.linear.{weight, bias}, {h}.{layers}.weight   (weights in medusa_lm_head.safetensors)

Both have an LM head per Medusa head. If all of them are the target's, vLLM's `original_lm_head` is true and the matrix
is stored once, as lm_heads.0.weight. Source: Medusa, arXiv 2401.10774; vLLM 0.32.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from outrider.checkpoints.dialects.base import (
    LARGEST_VOCABULARY,
    MOST_DRAFTS,
    MOST_LAYERS,
    ExportedCheckpoint,
    Fields,
    Source,
    TargetFacts,
    module_of,
    target_depth,
    write_extras,
)
from outrider.checkpoints.dialects.blocks import with_target_tensors
from outrider.drafters.base import DrafterWeights
from outrider.drafters.medusa import Medusa, MedusaConfig

_RELEASED = re.compile(r"(?:medusa_heads?\.)?(\d+)\.(\d+)\.(?:(linear)\.)?(weight|bias)")


class MedusaDialect:
    """The dialect of Medusa checkpoints; reads both spellings, writes vLLM's."""

    name = "Medusa"
    spelling = "model_type medusa"
    methods: tuple[str, ...] = (MedusaConfig.algorithm,)
    prefix = ""

    def reads(self, raw: Mapping[str, Any]) -> bool:
        return raw.get("model_type") == "medusa" or "medusa_num_heads" in raw

    def read(self, raw: Mapping[str, Any], tensors: Mapping[str, Tensor], source: Source) -> DrafterWeights:
        fields = Fields(raw, source.where, self.name)
        rest = {_our_name(name): tensor for name, tensor in tensors.items()}
        old = "medusa_num_heads" in fields
        heads = fields.integer("medusa_num_heads" if old else "num_heads", high=MOST_DRAFTS)
        layers = fields.integer("medusa_num_layers" if old else "num_hidden_layers", high=MOST_LAYERS)
        token_map_k = rest.pop("token_map", None)
        head = _lm_heads(rest, heads, fields.flag("original_lm_head", False), where=source.where)
        vocab = fields.integer("vocab_size", high=LARGEST_VOCABULARY, default=head.shape[-2])
        draft_vocab = fields.integer("truncated_vocab_size", high=LARGEST_VOCABULARY, default=vocab)
        config = MedusaConfig(
            hidden_size=fields.integer("hidden_size", default=head.shape[-1]),
            vocab_size=vocab,
            draft_vocab_size=draft_vocab,
            num_target_layers=target_depth(fields, source),
            num_heads=heads,
            num_layers=layers,
        )
        ids = _token_map(token_map_k, config, source.where)
        if head.shape[-2:] != (draft_vocab, config.hidden_size):
            raise ValueError(
                f"{source.where}: lm_heads have shape {list(head.shape[-2:])}, the config implies "
                f"{[draft_vocab, config.hidden_size]}."
            )
        for name in [name for name in rest if name.startswith("blocks.") and name.endswith(".weight")]:
            # vLLM's layers have no bias unless the config says so; ours always have one.
            rest.setdefault(name.removesuffix("weight") + "bias", rest[name].new_zeros(config.hidden_size))
        return DrafterWeights(module_of(config, rest, source, kind=Medusa), ids, head)

    def write(self, parts: DrafterWeights, target: TargetFacts | None) -> ExportedCheckpoint:
        parts = with_target_tensors(parts, target, embedding=False)
        if parts.head_VdH is None:
            raise ValueError("the Medusa dialect stores the LM head: name the target whose head it is (--target).")
        if parts.embedding_VH is not None:
            raise ValueError("the Medusa dialect has no place for embed_tokens.weight: heads read no token.")
        config, shared = parts.config, parts.head_VdH.dim() == 2
        if not shared and parts.draft_ids_Vd is not None:
            raise ValueError(
                "vLLM's Medusa has no draft_vocab_size for heads with an LM head each: train with "
                "drafter.draft_vocab_size=null."
            )
        fields = {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": config.hidden_size,
            "vocab_size": config.vocab_size,
            "truncated_vocab_size": config.draft_vocab_size,
            "num_heads": config.num_heads,
            "num_hidden_layers": config.num_layers,
            "medusa_fc_bias": True,
            "original_lm_head": shared,
            "max_paths": 64,
            "topk": 10,
            "dtype": "float32",
            **write_extras(config),
        }
        tensors = dict(parts.tensors)
        for h, head_VdH in enumerate(parts.head_VdH[None] if shared else parts.head_VdH):
            tensors[f"lm_heads.{h}.weight"] = head_VdH
        if parts.draft_ids_Vd is not None:
            tensors["token_map"] = parts.draft_ids_Vd
        return ExportedCheckpoint(fields, tensors)


def _our_name(name: str) -> str:
    """Translate FasterDecoding's name of a tensor into vLLM's; keep other names."""
    released = _RELEASED.fullmatch(name)
    if released is None:
        return name
    head, layer, linear, kind = released.groups()
    return f"blocks.{head}.layers.{layer}.{kind}" if linear else f"lm_heads.{head}.{kind}"


def _lm_heads(rest: dict[str, Tensor], heads: int, shared: bool, where: str) -> Tensor:
    """Remove the LM heads from `rest`; return [Vd, H] if shared, else [M, Vd, H] of M heads."""
    names = [f"lm_heads.{h}.weight" for h in range(1 if shared else heads)]
    if shared and "lm_head.weight" in rest:
        names = ["lm_head.weight"]
    tensors = [rest.pop(name, None) for name in names]
    present = [tensor for tensor in tensors if tensor is not None]
    if len(present) != len(names) or any(t.dim() != 2 or t.shape != present[0].shape for t in present):
        shapes = {name: None if t is None else list(t.shape) for name, t in zip(names, tensors, strict=True)}
        raise ValueError(f"{where}: the LM heads must be {len(names)} matrices of one shape, not {shapes}.")
    return present[0] if shared else torch.stack(present)


def _token_map(token_map_k: Tensor | None, config: MedusaConfig, where: str) -> Tensor | None:
    if token_map_k is None and config.draft_vocab_size == config.vocab_size:
        return None
    if (
        token_map_k is None
        or token_map_k.is_floating_point()
        or token_map_k.shape != (config.draft_vocab_size,)
        or not (int(token_map_k.min()) >= 0 and int(token_map_k.max()) < config.vocab_size)
        or len(token_map_k.unique()) != len(token_map_k)
    ):
        raise ValueError(
            f"{where}: token_map must be {config.draft_vocab_size} distinct ids below {config.vocab_size}, as "
            "truncated_vocab_size and vocab_size say."
        )
    return token_map_k.long()
