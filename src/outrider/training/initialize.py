"""How a drafter's weights begin: from the target's own layers instead of noise, or from a drafter that served.

    draft layer i   <-  target layer (num_layers - n + i): projections, MLP, norms
    q_norm, k_norm  <-  copied where the target has them, else the mean RMS of the target's own queries and keys, so
                        that attention logits start at the target's size
    fc              <-  picks the last tap;  hidden_norm <- the input norm that the copied keys were trained behind

The final norm starts at ones: the target's own makes untrained hidden states overconfident, and the first losses
explode (a prototype saw a cross-entropy of 24-69).

A drafter from a checkpoint takes raw taps (tap_scale folded into fc). To train it, its scales are measured again and

    fc (taps) = fc' (taps / tap_scale)      with fc' = fc * tap_scale, column by column:    the same function
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from outrider.data.samples import Sample
from outrider.drafters.dflash import DFlash, DraftLayer
from outrider.target import Target
from outrider.training.ranks import whole


@torch.no_grad()
def initialize_from_target(drafter: DFlash, target: Target, samples: Sequence[Sample]) -> None:
    """Copy weights in place. The drafter's layer shapes must be the target's (the recipe's default)."""
    source = list(target.model.model.layers)[-len(drafter.layers) :]
    rms = _query_key_rms(target, source, samples)
    for layer, theirs, (q_rms, k_rms) in zip(drafter.layers, source, rms, strict=True):
        assert isinstance(layer, DraftLayer)
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            getattr(layer.self_attn, name).weight.copy_(whole(getattr(theirs.self_attn, name).weight))
        for name in ("gate_proj", "up_proj", "down_proj"):
            getattr(layer.mlp, name).weight.copy_(whole(getattr(theirs.mlp, name).weight))
        layer.input_layernorm.weight.copy_(whole(theirs.input_layernorm.weight))
        layer.post_attention_layernorm.weight.copy_(whole(theirs.post_attention_layernorm.weight))
        if hasattr(theirs.self_attn, "q_norm"):
            layer.self_attn.q_norm.weight.copy_(whole(theirs.self_attn.q_norm.weight))
            layer.self_attn.k_norm.weight.copy_(whole(theirs.self_attn.k_norm.weight))
        else:
            layer.self_attn.q_norm.weight.fill_(q_rms)
            layer.self_attn.k_norm.weight.fill_(k_rms)
    hidden = drafter.config.hidden_size
    drafter.fc.weight.zero_()
    drafter.fc.weight[:, -hidden:].copy_(torch.eye(hidden))
    drafter.hidden_norm.weight.copy_(whole(source[0].input_layernorm.weight))


@torch.no_grad()
def rescale_taps(drafter: DFlash, scale_L: Tensor) -> None:
    """Let the drafter divide its taps by `scale_L` [L], in place, without changing what it computes."""
    factor_L = scale_L / drafter.tap_scale_L
    drafter.fc.weight.mul_(factor_L.repeat_interleave(drafter.config.hidden_size))
    drafter.tap_scale_L.copy_(scale_L)


def _query_key_rms(target: Target, layers: Sequence[Any], samples: Sequence[Sample]) -> list[tuple[float, float]]:
    seen: dict[nn.Module, list[float]] = {}

    def record(module: nn.Module, _args: Any, output: Tensor) -> None:
        heads = output.unflatten(-1, (-1, target.model.model.layers[0].self_attn.head_dim))
        seen.setdefault(module, []).append(heads.square().mean(-1).sqrt().mean().item())

    hooks = [proj.register_forward_hook(record) for layer in layers for proj in _query_key(layer)]
    try:
        with torch.inference_mode():  # like Target.forward: weights that a sharded target gathers remember the mode
            for sample in samples:
                target.model(torch.tensor([sample.tokens], device=target.device), logits_to_keep=1)
    finally:
        for hook in hooks:
            hook.remove()
    means = [[sum(seen[proj]) / len(seen[proj]) for proj in _query_key(layer)] for layer in layers]
    return [(q, k) for q, k in means]


def _query_key(layer: Any) -> tuple[nn.Module, nn.Module]:
    return layer.self_attn.q_proj, layer.self_attn.k_proj
