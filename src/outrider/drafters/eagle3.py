"""EAGLE-3: one decoder layer that drafts token by token from fused target features and its own outputs.

    f_i   = W_fc [H^(low)_i; H^(mid)_i; H^(high)_i]            fused feature of a committed token
    u     = [norm(Emb(x_{i+1})); norm(f_i)]                    the pair (f_i, x_{i+1}): attention reads 2 H
    g     = f_i + W_o attn(u),    h_i = g + MLP(norm(g))       residual from the feature, not from the embedding
    p(x_{i+2}) = softmax(W_head norm(h_i))                     embedding and head are the target's, frozen

For an anchor at position a, draft 1 comes from the pair (f_{a-1}, anchor). The feature of x_1 is not known yet, and h
takes its place: draft k + 1 comes from the pair (h, x_k), where h is the layer's output for draft k *before* the final
norm. Training unrolls exactly this ("training-time test"): every step attends to the keys of the true pairs before
its anchor and to those of its own chain, so the drafter learns on the inputs that it will have.

Context pairs need keys and values only: nobody reads their outputs, because committed tokens have true features. So a
training forward is one product over all context slots and gamma small steps over the anchors' rows.

Choices of the official code that are kept: no bias in `fc`, no q/k norms, the fed-back state before the norm. A pair
stands at its token's position, where the official code counts from its feature: rotary attention sees differences only.
An anchor with nothing before it drafts from a feature of zeros. Checkpoints of other makers differ from it in the six
flags that end the config; they are served and trained as they are.

Source: EAGLE-3, arXiv 2503.01840; parameter names are those of the official checkpoints.
Shapes: S context slots, N anchors, X rows, L taps, H hidden, Q heads, G kv heads, E head dim.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from outrider.drafters.attention import split_attention
from outrider.drafters.dflash import SwiGLU, rope_table
from outrider.drafters.kv import check_heads
from outrider.drafters.method import BlockInputs, DraftModule, DraftRows
from outrider.drafters.projections import Projections


@dataclass(frozen=True)
class Eagle3Config:
    """One layer in the target's shapes, unrolled over `gamma` draft tokens.

    `norm_before_residual`: the residual is norm(f), not f. `norm_before_fc`: all taps are normed together, `fc_norm`:
    each by itself. `norm_output`: h is fed back behind the final norm. `attention_bias`: in all four projections.
    `qk_norm`: queries and keys are normed head by head.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    gamma: int = 7
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 8192
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    attention_bias: bool = False
    qk_norm: bool = False

    def __post_init__(self) -> None:
        if self.gamma < 1:
            raise ValueError(f"gamma {self.gamma} leaves nothing to draft; use at least 1.")
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("norm_before_fc and fc_norm are two norms in one place: set one of them to false.")
        check_heads(self)


class Eagle3Layer(nn.Module):
    """The decoder layer, in the parts that context pairs and drafting rows need."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        H, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = nn.RMSNorm(H, eps=eps)  # of the embedding
        self.hidden_norm = nn.RMSNorm(H, eps=eps)  # of the feature
        self.self_attn = Projections(config, 2 * H, config.qk_norm, config.attention_bias)
        self.post_attention_layernorm = nn.RMSNorm(H, eps=eps)
        self.mlp = SwiGLU(config)
        self.norm_before_residual = config.norm_before_residual

    def pair(self, feature_XH: Tensor, embedded_XH: Tensor) -> Tensor:
        """u [X, 2 H]"""
        return torch.cat((self.input_layernorm(embedded_XH), self.hidden_norm(feature_XH)), dim=-1)

    def finish(self, feature_XH: Tensor, attended_XQE: Tensor) -> Tensor:
        """The rest of the layer: h, before the final norm."""
        residual_XH = self.hidden_norm(feature_XH) if self.norm_before_residual else feature_XH
        g_XH = residual_XH + self.self_attn.o_proj(attended_XQE.flatten(-2))
        return g_XH + self.mlp(self.post_attention_layernorm(g_XH))


class Eagle3(DraftModule):
    """The drafter to train; see Eagle3Drafter for how it serves."""

    algorithm: ClassVar[str] = "eagle3"
    tap_weight: str | None = "fc.weight"
    config: Eagle3Config

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config)
        H = config.hidden_size
        self.fc = nn.Linear(len(config.target_layer_ids) * H, H, bias=False)
        self.midlayer = Eagle3Layer(config)
        self.norm = nn.RMSNorm(H, eps=config.rms_norm_eps)
        L, eps = len(config.target_layer_ids), config.rms_norm_eps
        self.input_norm = nn.RMSNorm(L * H, eps=eps) if config.norm_before_fc else None
        self.fc_norm = nn.ModuleList(nn.RMSNorm(H, eps=eps) for _ in range(L)) if config.fc_norm else None
        if config.norm_before_fc or config.fc_norm:  # taps of any size will do, and `fc` does not read them
            self.tap_weight = None

    def features(self, taps_SLD: Tensor) -> Tensor:
        """f [S, H] of committed tokens; float32 also under autocast, as every residual stream here."""
        if self.fc_norm is not None:
            taps_SLD = torch.stack([norm(taps_SLD[:, i].float()) for i, norm in enumerate(self.fc_norm)], dim=1)
        elif self.input_norm is not None:
            taps_SLD = self.input_norm(taps_SLD.flatten(-2).float())[:, None]
        else:
            taps_SLD = taps_SLD / self.tap_scale_L[:, None]
        return self.fc(taps_SLD.flatten(-2)).float()

    def fed_back(self, state_XH: Tensor, normed_XH: Tensor) -> Tensor:
        """What takes the place of the next feature: h, before or behind the final norm."""
        return normed_XH if self.config.norm_output else state_XH

    def context(self, inputs: BlockInputs) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Features [S, H] of the context slots; keys and values [S, G, E] of their pairs, in one product."""
        feature_SH = self.features(inputs.taps_SLD)
        pairs_SP = self.midlayer.pair(feature_SH, inputs.embed(inputs.next_tokens_S))
        rope_S = rope_table(inputs.layout.positions_S() + 1, self.config.head_dim, self.config.rope_theta)
        return feature_SH, self.midlayer.self_attn.keys_values(pairs_SP, rope_S)

    def rows(self, inputs: BlockInputs) -> DraftRows:
        """Keys of the context pairs in one product, then the anchors' chains step by step."""
        config, layout, layer = self.config, inputs.layout, self.midlayer
        feature_SH, context = self.context(inputs)
        # The slot right before an anchor is the pair that the chain begins with: computed there, not seen again here.
        before = replace(layout, anchors_N=layout.anchors_N - 1)
        state_NH = layout.before_anchors(feature_SH)
        own: list[tuple[Tensor, Tensor]] = []
        hidden = []
        for k in range(config.gamma):
            rope_N = rope_table(layout.anchors_N + k, config.head_dim, config.rope_theta)
            pairs_NP = layer.pair(state_NH, inputs.embed(inputs.previous_NK[:, k]))
            own.append(layer.self_attn.keys_values(pairs_NP, rope_N))
            own_k, own_v = (torch.stack(steps, dim=1) for steps in zip(*own, strict=True))
            query_N1QE = layer.self_attn.queries(pairs_NP, rope_N)[:, None]
            attended = split_attention(query_N1QE, *context, own_k, own_v, before)
            state_NH = layer.finish(state_NH, attended[:, 0])
            hidden.append(self.norm(state_NH))
            state_NH = self.fed_back(state_NH, hidden[-1])
        return DraftRows(torch.stack(hidden, dim=1))
