"""Run Llama-shaped decoders from fused weights, packed on a CPU.

    h <- h + W_o attn(rope(qknorm(W_qkv norm(h))));   h <- h + W_down (silu(g) * u),  [g; u] = W_gu norm(h)

The same arithmetic as `transformers`' Llama and Qwen3 (parity: tests/target/test_target.py), with q/k/v and gate/up
fused into one matrix each and no framework between the operations. Grouped-query attention folds the query group
into the rows of its key head ([kv_heads, group * T, head_dim]), so keys are never repeated.

Shapes: B sequences, T new tokens, S slots, D hidden, K kv heads, G queries per kv head, E head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.target.attention import Branches, additive
from outrider.target.cache import KVCache, KVLayer
from outrider.target.kernels import (
    Cache,
    FewRows,
    LayerKernels,
    Norms,
    WholeStep,
    few,
    rms_norm,
)
from outrider.target.linear import PackedLinear, padded_size
from outrider.target.paged import RaggedStep
from outrider.target.paged_attention import Reader, bits_of
from outrider.utils.measure import on_device

AuxOutput = tuple[Tensor, dict[int, Tensor]]  # normed last hidden states [B, T, D], {aux layer: [B, T, D]}
# (layer, q [B, K * G, T, E], k [B, K, T, E], v [B, K, T, E]) -> [B, K * G, T, E]
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class Operators:
    """A layer around its attention in PyTorch's operators; replaces `LayerKernels` if there are no kernels."""

    def __init__(
        self,
        qkv: PackedLinear,
        o: PackedLinear,
        gate_up: PackedLinear,
        down: PackedLinear,
        *,
        norms: Norms,
        heads: tuple[int, int],
    ) -> None:
        self.qkv, self.o, self.gate_up, self.down = qkv, o, gate_up, down
        self.norms, self.heads = norms, heads

    def before_attention(self, hidden_TD: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> tuple[Tensor, Tensor]:
        T, E = cos_TE.shape
        H, K = self.heads
        norms = self.norms
        qkv = self.qkv(rms_norm(hidden_TD, norms.input, norms.eps)).view(T, -1, E)
        q, k, v = qkv.split((H, K, K), dim=1)
        if norms.q is not None and norms.k is not None:
            q, k = F.rms_norm(q, (E,), norms.q, norms.eps), F.rms_norm(k, (E,), norms.k, norms.eps)
        return rotate(torch.cat((q, k), dim=1), cos_TE[:, None], sin_TE[:, None]), v

    def after_attention(self, attention_TD: Tensor, hidden_TD: Tensor) -> None:
        hidden_TD += self.o(attention_TD)
        normed = rms_norm(hidden_TD, self.norms.post, self.norms.eps)
        gate, up = self.gate_up(normed).chunk(2, dim=-1)
        hidden_TD += self.down(F.silu(gate).mul_(up))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary embeddings in half-split layout; `sin` comes from `signed_sin`."""
    half = x.shape[-1] // 2
    return torch.addcmul(x * cos, torch.cat((x[..., half:], x[..., :half]), dim=-1), sin)


def signed_sin(sin: Tensor) -> Tensor:
    """Negate the first half of the last axis, for `rotate`."""
    half = sin.shape[-1] // 2
    return torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)


def visibility_mask(
    past: int, new: int, *, groups: int, dtype: torch.dtype, device: torch.device, branches: Branches | None = None
) -> Tensor | None:
    """Return the additive mask of `new` tokens after `past` cached ones, [1, 1, groups * new, past + new]; None: all
    are visible.
    """
    if branches is not None:
        visible = on_device(branches.visible(past), device)
    elif new == 1:
        return None
    else:
        visible = torch.ones(new, past + new, dtype=torch.bool, device=device).tril_(past)
    return additive(visible, dtype).repeat(groups, 1)[None, None]


class FusedDecoder:
    """Runs the decoder stack of a Hugging Face Llama or Qwen3 model from its weights, fused and, on a CPU, packed."""

    def __init__(self, model: Any) -> None:
        decoder, config = model.model, model.config
        self.rotary = decoder.rotary_emb
        self.embed = decoder.embed_tokens.weight.detach()
        self.eps = config.rms_norm_eps
        self.kv_heads = config.num_key_value_heads
        self.groups = config.num_attention_heads // config.num_key_value_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.norm = decoder.norm.weight.detach()
        self.layers = [self._pack(layer) for layer in decoder.layers]
        self.compiled = all(isinstance(layer, LayerKernels) for layer in self.layers)
        # On a CPU oneDNN multiplies the other matrices, and builds a kernel for every number of rows.
        self.builds_by_rows = self.embed.device.type == "cpu" and not self.compiled

    def _pack(self, layer: Any) -> LayerKernels | Operators:
        attn, mlp = layer.self_attn, layer.mlp
        linears = (
            PackedLinear.fused(attn.q_proj, attn.k_proj, attn.v_proj),
            PackedLinear.fused(attn.o_proj),
            PackedLinear.fused(mlp.gate_proj, mlp.up_proj),
            PackedLinear.fused(mlp.down_proj),
        )
        norms = Norms(
            input=layer.input_layernorm.weight.detach(),
            post=layer.post_attention_layernorm.weight.detach(),
            q=attn.q_norm.weight.detach() if hasattr(attn, "q_norm") else None,
            k=attn.k_norm.weight.detach() if hasattr(attn, "k_norm") else None,
            eps=self.eps,
        )
        heads = self.kv_heads * self.groups, self.kv_heads
        matrices = [linear.matrix for linear in linears if linear.matrix is not None]
        if matrices:
            return LayerKernels(*matrices, norms=norms, heads=heads)
        return Operators(*linears, norms=norms, heads=heads)

    def forward(
        self,
        tokens_BT: Tensor,
        cache: KVCache,
        positions_BT: Tensor,
        aux_layers: tuple[int, ...],
        branches: Branches | None = None,
    ) -> AuxOutput:
        """Run T new tokens after those in `cache`; the last layer's aux hidden state is normed."""
        B, T = tokens_BT.shape
        G, K, E = self.groups, self.kv_heads, self.head_dim
        if self.compiled and B == 1 and few(T, tree=branches is not None):
            # Compute as the engine does, with one page for the whole cache.
            start, slots_T = cache.length, torch.arange(cache.length, cache.length + T)
            sees_T = None if branches is None else bits_of(branches)
            depths = range(T) if branches is None else branches.depths_T.tolist()
            positions = [start + depth for depth in depths]
            rows = FewRows([Reader(start, positions, [0], sees_T=sees_T)], page_size=start + T)

            new_1KTE = self.embed.new_empty(1, K, T, E)

            def reserved(index: int) -> Cache:
                keys, values = self._store(cache, index).reserve(new_1KTE, new_1KTE)
                return Cache(keys[0], values[0], slots_T)

            return self.run(tokens_BT, positions_BT, aux_layers, whole=WholeStep(rows, reserved))
        past, dtype, device = cache.length, self.embed.dtype, tokens_BT.device
        mask = visibility_mask(past, T, groups=G, dtype=dtype, device=device, branches=branches)

        def attend(index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self._store(cache, index).update(k, v)
            out = F.scaled_dot_product_attention(q.reshape(B, K, G * T, E), keys, values, attn_mask=mask)
            return out.view(B, K * G, T, E)

        return self.run(tokens_BT, positions_BT, aux_layers, attention=attend)

    @staticmethod
    def _store(cache: KVCache, index: int) -> KVLayer:
        store = cache.layers[index]
        assert isinstance(store, KVLayer)
        return store

    def forward_packed(self, tokens_T: Tensor, lengths: Sequence[int], aux_layers: tuple[int, ...]) -> AuxOutput:
        """Run concatenated documents of `lengths` tokens; each sees only itself, from position 0. As `forward`, B = 1.

        Only attention runs document by document, in the same shapes whatever is packed. The matrix product of a row
        does not depend on the number of rows, so the results are equal to the last bit. Filler rows attend to nothing
        and are dropped.
        """
        T = len(tokens_T)
        filler = padded_size(T) - T if self.builds_by_rows else 0

        def attend(_index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            *documents, _ = zip(*(x.split([*lengths, filler], dim=2) for x in (q, k, v)), strict=True)
            seen = [
                F.scaled_dot_product_attention(d[0], d[1], d[2], is_causal=True, enable_gqa=True) for d in documents
            ]
            return torch.cat([*seen, q.new_zeros(*q.shape[:2], filler, q.shape[3])], dim=2)

        positions = [torch.arange(length, device=tokens_T.device) for length in (*lengths, filler)]
        tokens_1T, positions_1T = F.pad(tokens_T, (0, filler))[None], torch.cat(positions)[None]
        normed, captured = self.run(tokens_1T, positions_1T, aux_layers, attention=attend)
        return normed[:, :T], {layer: x[:, :T] for layer, x in captured.items()}

    def forward_ragged(self, step: RaggedStep, aux_layers: tuple[int, ...]) -> AuxOutput:
        """Run the rows of many requests with the attention of `step`. As `forward`, B = 1."""
        whole = step.whole() if self.compiled else None
        return self.run(step.tokens_1T, step.positions_1T, aux_layers, attention=step.attend, whole=whole)

    def run(
        self,
        tokens_BT: Tensor,
        positions_BT: Tensor,
        aux_layers: tuple[int, ...],
        attention: Attend | None = None,
        whole: WholeStep | None = None,
    ) -> AuxOutput:
        """Run all layers with this attention, or as whole layers in compiled kernels; see `forward`."""
        B, T = tokens_BT.shape
        G, K, E = self.groups, self.kv_heads, self.head_dim
        hidden = F.embedding(tokens_BT.reshape(-1), self.embed)
        cos, sin = self.rotary(hidden, positions_BT)  # [1 or B, T, E]
        cos_TE, sin_TE = (x.expand(B, T, E).reshape(B * T, E) for x in (cos, signed_sin(sin)))
        captured: dict[int, Tensor] = {}
        if -1 in aux_layers:
            captured[-1] = hidden.view(B, T, -1).clone()
        for index, layer in enumerate(self.layers):
            if whole is not None:
                assert isinstance(layer, LayerKernels)
                layer.forward(hidden, cos_TE, sin_TE, rows=whole.rows, cache=whole.cache(index))
            else:
                assert attention is not None
                parts = layer.before_attention(hidden, cos_TE, sin_TE)
                queries_keys, v = (part.unflatten(0, (B, T)).transpose(1, 2) for part in parts)
                q, k = queries_keys.split((G * K, K), dim=1)
                out = attention(index, q, k, v).transpose(1, 2).reshape(B * T, G * K * E)
                layer.after_attention(out, hidden)
            if index in aux_layers:
                captured[index] = hidden.view(B, T, -1).clone()
        normed = rms_norm(hidden, self.norm, self.eps).view(B, T, -1)
        if len(self.layers) - 1 in aux_layers:
            captured[len(self.layers) - 1] = normed
        return normed, captured
