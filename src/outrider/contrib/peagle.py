"""P-EAGLE: EAGLE-3's layer drafts all tokens in one pass; what is not known yet is masked.

    row 1       the pair (f_{a-1}, anchor)               as in EAGLE-3
    row k > 1   the pair (f_mask, Emb(mask token))       f_mask = W_fc m,  m learned, in place of the aux hidden states
    h_1 .. h_K = layer(rows), causal: row k sees the context pairs and rows 1 .. k;     p_k = softmax(W_head norm(h_k))

Rows stand at a, a + 1, .., and nothing but that and causality tells them apart, so drafts do not see each other: one
pass instead of K, as in DFlash, for the price of a guess at what EAGLE-3 reads off its own drafts.

Departures from the paper: one layer, EAGLE-3's, where it stacks several (deeper layers would need context pairs in full
instead of keys alone); the mask token's embedding is the target's, frozen; every anchor of a step trains all of its
rows, where the paper thins out deep ones to bound memory (the anchors of a step bound it here).

Training: ce CE + l1 ||p_d - p_t||_1 at every draft position, a weighted mean (`DraftRows.loss`, drafters/base.py).

Source: P-EAGLE, arXiv 2602.01469; the learned aux hidden states as in speculators' `mask_hidden`.
Shapes: S context slots, N anchors, K = gamma rows, L aux layers, H hidden, Q heads, E head dim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from outrider.checkpoints.registry import Method
from outrider.drafters import layers
from outrider.drafters.base import (
    BlockInputs,
    DraftCall,
    Drafter,
    DraftRows,
    longest_draft,
)
from outrider.drafters.cache import DraftSession
from outrider.drafters.chain import sample_chain
from outrider.drafters.config import MaskToken, NotInRecipe, check_mask_token, mask_token_id
from outrider.drafters.draft import Draft
from outrider.drafters.eagle3 import ChainKeys, Eagle3, Eagle3Config, Eagle3Drafter
from outrider.drafters.layers import Attention, AttentionPattern, block_attention, split_attention
from outrider.target.model import Target
from outrider.utils.measure import on_device


@dataclass(frozen=True, kw_only=True)
class PEagleConfig(Eagle3Config):
    """EAGLE-3's layer over `gamma` rows, all but the first of which hold the mask token."""

    algorithm: ClassVar[str] = "peagle"

    gamma: Annotated[int, Field(ge=2, description="Draft tokens of a round.")] = 7
    mask_token_id: NotInRecipe[int] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_mask_token(self.mask_token_id, self.vocab_size)

    @classmethod
    def from_target(cls, target: Target, *, mask_token: MaskToken = None, **chosen: Any) -> PEagleConfig:
        """EAGLE-3's choices and a mask token; None: a special token that no chat template uses."""
        return super().from_target(target, mask_token_id=mask_token_id(target, mask_token), **chosen)

    @classmethod
    def default_objective(cls, chosen: Mapping[str, Any]) -> dict[str, float]:
        return {}  # EAGLE-3's belongs to its unrolled steps

    def comparable_fields(self, chosen: Mapping[str, Any], target: Target) -> dict[str, tuple[object, object]]:
        pairs = super().comparable_fields(chosen, target)
        if "mask_token" in pairs:
            pairs["mask_token"] = (mask_token_id(target, chosen["mask_token"]), self.mask_token_id)
        return pairs


class RowKeys(ChainKeys):
    """The key source of training: row k sees the context before its anchor and rows 1 .. k."""

    def attend(self, attention: Attention, q_NKQE: Tensor, k_NKGE: Tensor, v_NKGE: Tensor) -> Tensor:
        if layers.kernel_of(q_NKQE.device) is not split_attention:
            return block_attention(q_NKQE, *self.context, k_NKGE, v_NKGE, self.layout, attention.pattern)
        ends = range(1, q_NKQE.shape[1] + 1)
        attended = [
            split_attention(q_NKQE[:, end - 1 : end], *self.context, k_NKGE[:, :end], v_NKGE[:, :end], self.layout)
            for end in ends
        ]
        return torch.cat(attended, dim=1)


class PEagle(Eagle3):
    """The drafter to train; see PEagleDrafter for how it serves."""

    pattern = AttentionPattern(causal=True)
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
        mask = state["mask_hidden"]
        return {**state, "mask_hidden": (mask * self.aux_scale_L[:, None]).to(mask.dtype)}

    @torch.no_grad()
    def rescale_aux(self, scale_L: Tensor) -> None:
        self.mask_hidden.mul_((self.aux_scale_L / scale_L)[:, None])
        super().rescale_aux(scale_L)

    def tokens(self, anchors_N: Tensor, rows: int) -> Tensor:
        """[N] anchor tokens -> [N, rows]: the anchor, then masks."""
        masks = anchors_N.new_full((len(anchors_N), rows - 1), self.config.mask_token_id)
        return torch.cat((anchors_N[:, None], masks), dim=1)

    def states(self, first_NH: Tensor, rows: int) -> Tensor:
        """[N, H] features before the anchors -> [N, rows, H]: the feature, then f_mask."""
        return torch.cat((first_NH[:, None], self.masked().expand(len(first_NH), rows - 1, -1)), dim=1)

    def rows(self, inputs: BlockInputs) -> DraftRows:
        """Keys of the context pairs in one product, then all rows of all anchors at once."""
        first_NH, context = self.training_context(inputs)
        K = self.config.gamma
        embedded_NKH = inputs.embed(self.tokens(inputs.previous_NK[:, 0], K))
        rope = self.rope(inputs.layout.block_positions_NK(K))
        source = RowKeys(context, inputs.layout)
        return DraftRows(self.step(self.states(first_NH, K), embedded_NKH, rope, source=source)[0])

    @staticmethod
    def drafter() -> type[Drafter]:
        return PEagleDrafter


# ----------------------------------------------------------------------------
# P-EAGLE ready to serve: EAGLE-3's cache of committed pairs, and one pass for the whole draft.
#
#     committed pairs | (f_{c-1}, anchor) (f_mask, mask) .. (f_mask, mask)      written behind them and forgotten
#
# Shapes: R requests, K rows of one request, H hidden.
# ----------------------------------------------------------------------------


class PEagleDrafter(Eagle3Drafter):
    """Serves one P-EAGLE drafter for one target."""

    with_trees = Drafter.with_trees  # its rows do not read each other's tokens: chains only
    module: PEagle

    def propose(self, calls: Sequence[DraftCall], min_confidence: float = 0.0) -> list[Draft]:
        """A chain of up to gamma tokens per call, while their confidence is at least `min_confidence`.

        Only an estimator could give one, and `outrider calibrate` fits none for this method: `min_confidence` is idle
        as yet.
        """
        sessions: list[DraftSession] = [call.session for call in calls]
        K = longest_draft(calls, self.gamma)
        states_RKH = self.module.states(torch.cat([session.waiting[0] for session in sessions]), K)
        tokens_RK = self.module.tokens(on_device([call.anchor for call in calls], self.device), K)
        hidden_XH, _ = self.advance(sessions, states_RKH.flatten(0, 1), tokens_RK.flatten().tolist(), spacing=1)
        return sample_chain(
            self.head, hidden_XH.view_as(states_RKH), calls, heads=self.heads, min_confidence=min_confidence
        )


METHOD = Method(PEagleConfig, PEagle)
