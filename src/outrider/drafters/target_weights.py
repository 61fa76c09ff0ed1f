"""Draft layers in the target's shapes, and with its weights to begin with if the target is Llama-shaped.

draft layer i   <-  target layer (num_layers - n + i): projections, MLP, norms
q_norm, k_norm  <-  copied if the target has them, else the mean RMS of the target's own queries and keys, so that
                    attention logits start at the target's size
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

import torch
from torch import Tensor, nn

from outrider.drafters.rope import RopeScaling, RopeType
from outrider.target.model import Target, full_tensor
from outrider.utils.measure import on_device


def layer_shapes(target: Target) -> dict[str, Any]:
    """The fields of a drafter's config that follow from the target alone, in config.json's words.

    Where layers differ, the first one with attention counts (Gemma 4: a sliding one, with the smaller heads).
    """
    theirs = target.config
    rope = getattr(theirs, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope.get("main", rope))  # Gemma 3 and DeepSeek-V4 have one per kind of layer
    attention = next(layer.self_attn for layer in target.decoder.layers if hasattr(layer, "self_attn"))
    active = getattr(theirs, "intermediate_size", None) or theirs.moe_intermediate_size * theirs.num_experts_per_tok
    return {
        "hidden_size": target.hidden_size,
        "intermediate_size": active,
        "num_attention_heads": theirs.num_attention_heads,
        "num_key_value_heads": theirs.num_attention_heads // attention.num_key_value_groups,
        "head_dim": getattr(attention, "head_dim", None) or target.hidden_size // theirs.num_attention_heads,
        "vocab_size": target.vocab_size,
        "num_target_layers": target.num_layers,
        "rope_theta": float(rope.get("rope_theta", 10000.0)),
        "rope_scaling": _rope_scaling(rope, target.max_context),
        "rms_norm_eps": theirs.rms_norm_eps,
        "max_position_embeddings": target.max_context,
    }


def _rope_scaling(rope: Mapping[str, Any], longest: int) -> RopeScaling | None:
    """The target's scaling, so that draft layers see far positions as its own do. Draft layers without the kind that it
    has (longrope, dynamic and others) are unscaled: a drafter's rotations are its own.
    """
    if rope.get("rope_type") not in get_args(RopeType):
        return None
    return RopeScaling.of({name: value for name, value in rope.items() if name != "partial_rotary_factor"}, longest)


@torch.no_grad()
def copy_target_layers(layers: Iterable[nn.Module], target: Target, documents: Sequence[Sequence[int]]) -> list[Any]:
    """Copy the weights of the target's last layers into draft layers of the same shapes and names, in place.

    A draft layer may lack q_norm and k_norm. Returns the target's layers, in order.

    Args:
        documents: token sequences on which the size of queries and keys is measured.
    """
    drafted: list[Any] = list(layers)
    source = list(target.decoder.layers)[-len(drafted) :]
    rms = _query_key_rms(target, source, documents)
    for layer, theirs, (q_rms, k_rms) in zip(drafted, source, rms, strict=True):
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            getattr(layer.self_attn, name).weight.copy_(full_tensor(getattr(theirs.self_attn, name).weight))
        for name in ("gate_proj", "up_proj", "down_proj"):
            getattr(layer.mlp, name).weight.copy_(full_tensor(getattr(theirs.mlp, name).weight))
        layer.input_layernorm.weight.copy_(full_tensor(theirs.input_layernorm.weight))
        layer.post_attention_layernorm.weight.copy_(full_tensor(theirs.post_attention_layernorm.weight))
        if hasattr(layer.self_attn, "q_norm") and hasattr(theirs.self_attn, "q_norm"):
            layer.self_attn.q_norm.weight.copy_(full_tensor(theirs.self_attn.q_norm.weight))
            layer.self_attn.k_norm.weight.copy_(full_tensor(theirs.self_attn.k_norm.weight))
        elif hasattr(layer.self_attn, "q_norm"):
            layer.self_attn.q_norm.weight.fill_(q_rms)
            layer.self_attn.k_norm.weight.fill_(k_rms)
    return source


def _query_key_rms(
    target: Target, layers: Sequence[Any], documents: Sequence[Sequence[int]]
) -> list[tuple[float, float]]:
    seen: dict[nn.Module, list[float]] = {}

    def record(module: nn.Module, _args: Any, output: Tensor) -> None:
        heads = output.unflatten(-1, (-1, target.decoder.layers[0].self_attn.head_dim))
        seen.setdefault(module, []).append(heads.square().mean(-1).sqrt().mean().item())

    hooks = [proj.register_forward_hook(record) for layer in layers for proj in _query_key(layer)]
    try:
        with torch.inference_mode():  # like Target.forward: weights that a sharded target gathers remember the mode
            for document in documents:
                target.model(on_device([list(document)], target.device), logits_to_keep=1)
    finally:
        for hook in hooks:
            hook.remove()
    means = [[sum(seen[proj]) / len(seen[proj]) for proj in _query_key(layer)] for layer in layers]
    return [(q, k) for q, k in means]


def _query_key(layer: Any) -> tuple[nn.Module, nn.Module]:
    return layer.self_attn.q_proj, layer.self_attn.k_proj
