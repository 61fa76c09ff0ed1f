"""P-EAGLE: EAGLE-3's layer drafts all tokens in one pass; what is not known yet is masked.

    row 1       the pair (f_{a-1}, anchor)               as in EAGLE-3
    row k > 1   the pair (f_mask, Emb(mask token))       f_mask = W_fc m,  m learned, in place of the aux hidden states
    h_1 .. h_K = layer(rows), causal: row k sees the context pairs and rows 1 .. k;     p_k = softmax(W_head norm(h_k))

Rows stand at a, a + 1, .., and nothing but that and causality tells them apart, so drafts do not see each other: one
pass instead of K, as in DFlash, for the price of a guess at what EAGLE-3 reads off its own drafts.

Departures from the paper: one layer, EAGLE-3's, where it stacks several (deeper layers would need context pairs in full
instead of keys alone); the mask token's embedding is the target's, frozen; every anchor of a step trains all of its
rows, where the paper thins out deep ones to bound memory (the anchors of a step bound it here).

Source: P-EAGLE, arXiv 2602.01469; the learned aux hidden states as in speculators' `mask_hidden`.
Shapes: S context slots, N anchors, K = gamma rows, L aux layers, H hidden, Q heads, E head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from outrider.drafters.base import (
    BlockInputs,
    DraftCall,
    DraftRows,
    Method,
    MethodSection,
    Serving,
    longest_draft,
    mask_token_id,
)
from outrider.drafters.chain import sample_chain
from outrider.drafters.draft import Draft
from outrider.drafters.eagle3 import Eagle3, Eagle3Config, Eagle3Drafter, Eagle3Session, eagle_aux_layers
from outrider.drafters.layers import layer_shapes, rope_table, split_attention
from outrider.target.model import Target


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
        # In units of aux_scale: learned at the same pace whatever the size of the aux hidden states.
        self.mask_hidden = nn.Parameter(torch.randn(len(config.target_layer_ids), config.hidden_size))

    def masked(self) -> Tensor:
        """f_mask [H]"""
        return self.features((self.mask_hidden * self.aux_scale_L[:, None])[None])[0]

    def folded_state_dict(self) -> dict[str, Tensor]:
        state = super().folded_state_dict()
        return {**state, "mask_hidden": state["mask_hidden"] * self.aux_scale_L[:, None]}

    @torch.no_grad()
    def rescale_aux(self, scale_L: Tensor) -> None:
        self.mask_hidden.mul_((self.aux_scale_L / scale_L)[:, None])
        super().rescale_aux(scale_L)

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


# ----------------------------------------------------------------------------
# P-EAGLE ready to serve: EAGLE-3's cache of committed pairs, and one pass for the whole draft.
#
#     committed pairs | (f_{c-1}, anchor) (f_mask, mask) .. (f_mask, mask)      written behind them and forgotten
#
# Shapes: R requests, K rows of one request, H hidden.
# ----------------------------------------------------------------------------


class PEagleDrafter(Eagle3Drafter):
    """Serves one drafter for one target. Weights are copied; train the module, then build this again."""

    def __init__(self, module: PEagle, target: Target, serving: Serving) -> None:
        super().__init__(module, target, serving)
        self.mask_token_id = module.config.mask_token_id
        self.masked_H = self.features(module.folded_state_dict()["mask_hidden"].to(target.device)[None])[0]

    def propose(self, calls: Sequence[DraftCall], min_confidence: float = 0.0) -> list[Draft]:
        """A chain of up to gamma tokens per call, while their confidence is at least `min_confidence`.

        Only an estimator could give one, and `outrider calibrate` fits none for this method: `min_confidence` is idle
        as yet.
        """
        sessions: list[Eagle3Session] = [call.session for call in calls]
        R, K = len(calls), longest_draft(calls, self.gamma)
        first_RH = torch.stack([session.waiting_H for session in sessions])
        state_RKH = torch.cat((first_RH[:, None], self.masked_H.expand(R, K - 1, -1)), dim=1)
        tokens = [token for call in calls for token in (call.anchor, *[self.mask_token_id] * (K - 1))]
        causal_RKK = torch.ones(K, K, dtype=torch.bool, device=state_RKH.device).tril().expand(R, -1, -1)
        h_XH = self.advance(sessions, state_RKH.flatten(0, 1), tokens, 0, 0, causal_RKK, spacing=1)
        return sample_chain(self.head, self.normed(h_XH).view(R, K, -1), calls, self.heads, min_confidence)


# ----------------------------------------------------------------------------
# P-EAGLE as a method: EAGLE-3's choices and a mask token. Weights begin as noise, as in EAGLE-3.
# ----------------------------------------------------------------------------


class PEagleSection(MethodSection):
    """A recipe's choices."""

    automatic: ClassVar[frozenset[str]] = frozenset({"target_layer_ids", "mask_token"})

    algorithm: Literal["peagle"] = "peagle"
    gamma: int = Field(7, ge=2)  # draft tokens of one pass
    target_layer_ids: list[int] | None = None  # null: an early, a middle and a late layer
    mask_token: str | None = None  # null: a special token that no chat template uses

    def comparable_fields(self, config: Any, target: Target) -> dict[str, tuple[object, object]]:
        pairs = super().comparable_fields(config, target)
        if "mask_token" in pairs:
            pairs["mask_token"] = (mask_token_id(target, self.mask_token), config.mask_token_id)
        return pairs


def configure(section: PEagleSection, target: Target) -> PEagleConfig:
    """The target's layer shapes, the recipe's choices."""
    return PEagleConfig(
        **layer_shapes(target),
        draft_vocab_size=section.draft_vocab(target),
        target_layer_ids=target.check_aux_layers(section.target_layer_ids or eagle_aux_layers(target.num_layers)),
        gamma=section.gamma,
        mask_token_id=mask_token_id(target, section.mask_token),
    )


PEAGLE = Method("peagle", PEagleSection, configure, PEagleConfig, PEagle, PEagleDrafter)
