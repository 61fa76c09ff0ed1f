"""DFlash's backbone in MLX: the same parameters under the same names as drafters/dflash.py, for serving.

    context   H_ctx = RMSNorm(W_c taps) -> K, V of every layer -> appended to its cache
    block     [anchor, mask, ..] attends over [context KV ; block KV]; the block's own rows are forgotten afterwards

Source: DFlash, arXiv 2602.06036. Shapes: a leading 1 for the batch, T new tokens, K block rows, S slots, H draft
hidden, F = taps x H, G kv heads, E head dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache

from outrider.drafters.attention import Sight, serving_mask
from outrider.drafters.dflash import DFlashConfig
from outrider.mlx.arrays import to_mlx


class _Attention(nn.Module):
    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        H, E = config.hidden_size, config.head_dim
        self.head_dim, self.theta = E, config.rope_theta
        self.q_proj = nn.Linear(H, config.num_attention_heads * E, bias=False)
        self.k_proj = nn.Linear(H, config.num_key_value_heads * E, bias=False)
        self.v_proj = nn.Linear(H, config.num_key_value_heads * E, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * E, H, bias=False)
        self.q_norm = nn.RMSNorm(E, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(E, eps=config.rms_norm_eps)

    def _heads(self, x: mx.array) -> mx.array:
        """[1, T, heads * E] -> [1, heads, T, E]"""
        return x.reshape(1, x.shape[1], -1, self.head_dim).transpose(0, 2, 1, 3)

    def _rotated(self, x: mx.array, start: int) -> mx.array:
        return mx.fast.rope(x, self.head_dim, traditional=False, base=self.theta, scale=1.0, offset=start)

    def append(self, x_1TH: mx.array, cache: KVCache) -> tuple[mx.array, mx.array]:
        """Rows go behind what the cache has; returns all keys and values, [1, G, S, E] each."""
        k = self._rotated(self.k_norm(self._heads(self.k_proj(x_1TH))), cache.offset)
        return cache.update_and_fetch(k, self._heads(self.v_proj(x_1TH)))

    def __call__(self, x_1KH: mx.array, cache: KVCache, visible_KS: mx.array | None) -> mx.array:
        q = self._rotated(self.q_norm(self._heads(self.q_proj(x_1KH))), cache.offset)
        keys, values = self.append(x_1KH, cache)
        cache.trim(x_1KH.shape[1])  # written behind the context, forgotten at once
        out = mx.fast.scaled_dot_product_attention(q, keys, values, scale=self.head_dim**-0.5, mask=visible_KS)
        return self.o_proj(out.transpose(0, 2, 1, 3).reshape(1, x_1KH.shape[1], -1))


class _SwiGLU(nn.Module):
    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(nn.silu(self.gate_proj(x)) * self.up_proj(x))


class _Layer(nn.Module):
    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = _Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = _SwiGLU(config)

    def __call__(self, x_1KH: mx.array, cache: KVCache, visible_KS: mx.array | None) -> mx.array:
        x_1KH = x_1KH + self.self_attn(self.input_layernorm(x_1KH), cache, visible_KS)
        return x_1KH + self.mlp(self.post_attention_layernorm(x_1KH))


class Backbone(nn.Module):
    """The parallel part of DFlash and DSpark. A session is one `KVCache` per layer."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.sights, self.gamma = config.sights, config.gamma
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = [_Layer(config) for _ in range(config.num_hidden_layers)]
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def extend(self, caches: Sequence[KVCache], taps_1TF: mx.array) -> None:
        """Append the features of committed tokens, raw taps side by side."""
        context_1TH = self.hidden_norm(self.fc(taps_1TF))
        for layer, cache in zip(self.layers, caches, strict=True):
            layer.self_attn.append(context_1TH, cache)

    def __call__(self, caches: Sequence[KVCache], embedded_1KH: mx.array) -> mx.array:
        """One block after the context: normed hidden states of the prediction rows, [1, gamma, H]. No cache grows."""
        start, rows = caches[0].offset, embedded_1KH.shape[1]
        visible = {sight: _visible(sight, start, rows) for sight in set(self.sights)}
        x_1KH = embedded_1KH
        for layer, cache, sight in zip(self.layers, caches, self.sights, strict=True):
            x_1KH = layer(x_1KH, cache, visible[sight])
        return self.norm(x_1KH[:, -self.gamma :])


def _visible(sight: Sight, length: int, rows: int) -> mx.array | None:
    """What the rows of a block see, [K, S]; None: everything."""
    visible_KS = serving_mask(sight, length, rows)
    return None if visible_KS is None else to_mlx(visible_KS)
