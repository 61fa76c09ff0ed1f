"""P-EAGLE: EAGLE-3's layer drafts all tokens in one pass; what is not known yet is masked.

    row 1       the pair (f_{a-1}, anchor)               as in EAGLE-3
    row k > 1   the pair (f_mask, Emb(mask token))       f_mask = W_fc m,  m learned, in place of the taps
    h_1 .. h_K = layer(rows), causal: row k sees the context pairs and rows 1 .. k;     p_k = softmax(W_head norm(h_k))

Rows stand at a, a + 1, .., and nothing but that and causality tells them apart, so drafts do not see each other: one
pass instead of K, as in DFlash, for the price of a guess at what EAGLE-3 reads off its own drafts.

Departures from the paper: one layer, EAGLE-3's, where it stacks several (deeper layers would need context pairs in full
instead of keys alone); the mask token's embedding is the target's, frozen; every anchor of a step trains all of its
rows, where the paper thins out deep ones to bound memory (the anchors of a step bound it here).

Source: P-EAGLE, arXiv 2602.01469; the learned taps as in speculators' `mask_hidden`.
Shapes: S context slots, N anchors, K = gamma rows, L taps, H hidden, Q heads, E head dim.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from outrider.drafters.attention import split_attention
from outrider.drafters.dflash import rope_table
from outrider.drafters.eagle3 import Eagle3, Eagle3Config
from outrider.drafters.method import BlockInputs, DraftRows


@dataclass(frozen=True)
class PEagleConfig(Eagle3Config):
    """EAGLE-3's layer over `gamma` rows, all but the first of which hold the mask token."""

    mask_token_id: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gamma < 2:
            raise ValueError(f"gamma {self.gamma} leaves nothing to mask; use at least 2, or eagle3.")
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(f"mask_token_id {self.mask_token_id} is outside the vocabulary of {self.vocab_size}.")


class PEagle(Eagle3):
    """The drafter to train; see PEagleDrafter for how it serves."""

    algorithm: ClassVar[str] = "peagle"
    config: PEagleConfig

    def __init__(self, config: PEagleConfig) -> None:
        super().__init__(config)
        # In units of tap_scale: learned at the same pace whatever the size of the taps.
        self.mask_hidden = nn.Parameter(torch.randn(len(config.target_layer_ids), config.hidden_size))

    def masked(self) -> Tensor:
        """f_mask [H]"""
        return self.features((self.mask_hidden * self.tap_scale_L[:, None])[None])[0]

    def folded_state_dict(self) -> dict[str, Tensor]:
        state = super().folded_state_dict()
        return {**state, "mask_hidden": state["mask_hidden"] * self.tap_scale_L[:, None]}

    @torch.no_grad()
    def rescale_taps(self, scale_L: Tensor) -> None:
        self.mask_hidden.mul_((self.tap_scale_L / scale_L)[:, None])
        super().rescale_taps(scale_L)

    def rows(self, inputs: BlockInputs) -> DraftRows:
        """Keys of the context pairs in one product, then all rows of all anchors at once."""
        config, layout, layer = self.config, inputs.layout, self.midlayer
        feature_SH, context = self.context(inputs)
        N, K = inputs.previous_NK.shape
        first_NH = layout.before_anchors(feature_SH)
        state_NKH = torch.cat((first_NH[:, None], self.masked().expand(N, K - 1, -1)), dim=1)
        masks_NK = inputs.previous_NK[:, 1:].new_full((N, K - 1), config.mask_token_id)
        tokens_NK = torch.cat((inputs.previous_NK[:, :1], masks_NK), dim=1)
        pairs_NKP = layer.pair(state_NKH, inputs.embed(tokens_NK))
        rope_NK = rope_table(layout.block_positions_NK(K), config.head_dim, config.rope_theta)
        q_NKQE = layer.self_attn.queries(pairs_NKP, rope_NK)
        own_k, own_v = layer.self_attn.keys_values(pairs_NKP, rope_NK)
        # The slot right before an anchor is the pair that its rows begin with.
        before = replace(layout, anchors_N=layout.anchors_N - 1)
        attended = [
            split_attention(q_NKQE[:, k : k + 1], *context, own_k[:, : k + 1], own_v[:, : k + 1], before)
            for k in range(K)
        ]
        return DraftRows(self.norm(layer.finish(state_NKH, torch.cat(attended, dim=1))))
