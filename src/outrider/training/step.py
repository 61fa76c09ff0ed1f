"""One training forward: features and anchors in, objective out. Decoding must agree with it (tests/test_alignment.py).

    features, tokens, anchors -> the drafter's rows -> supervised rows only -> confidence -> objective

In bfloat16 precision the rows are computed under autocast (parameters, norms, softmax and the residual stream stay
float32) and the objective's vocabulary-sized products take bfloat16 operands.

Shapes: N blocks, K draft positions, M supervised positions, H draft hidden, r rank.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.drafters.base import BlockInputs, DraftModule, DraftRows
from outrider.target.model import Target
from outrider.training.batches import BlockBatch
from outrider.training.loss import ObjectiveConfig, ObjectiveOutput, TargetView, objective

Precision = Literal["float32", "bfloat16"]


class BlockObjective:
    """Binds a drafter's frozen surroundings (embedding, head, draft vocabulary) to the objective."""

    def __init__(
        self,
        target: Target,
        draft_ids_Vd: Tensor,
        inverse_V: Tensor,
        config: ObjectiveConfig,
        precision: Precision = "float32",
    ) -> None:
        self.embed_VH, self.embed_scale = target.embed_VD, target.embed_scale
        self.products = torch.bfloat16 if precision == "bfloat16" else torch.float32
        reduced = len(draft_ids_Vd) < target.vocab_size
        head_VH = target.head_VD[draft_ids_Vd] if reduced else target.head_VD
        # A whole bfloat16 head is never widened: the objective converts tiles of it where it needs float32.
        self.head_VH = head_VH.to(self.products) if reduced or self.products == torch.bfloat16 else head_VH
        self.inverse_V = inverse_V
        self.softcap = target.softcap
        self.config = config

    def embed(self, tokens: Tensor) -> Tensor:
        """The target's embedding as its first layer sees it, [...] -> [..., D] in float32."""
        return F.embedding(tokens, self.embed_VH).float() * self.embed_scale

    def rows(self, drafter: DraftModule, batch: BlockBatch) -> DraftRows:
        """The drafter's training forward."""
        # Aux hidden states are stored scaled; modules take raw ones and divide by aux_scale themselves.
        aux_SLD = batch.aux_SLD.float() * drafter.aux_scale_L[:, None]
        return drafter.rows(BlockInputs(aux_SLD, batch.next_tokens_S, batch.layout, batch.previous_NK, self.embed))

    def __call__(self, drafter: DraftModule, batch: BlockBatch, total_weight: Tensor | None = None) -> ObjectiveOutput:
        keep = batch.supervised_NK
        with torch.autocast(keep.device.type, torch.bfloat16, enabled=self.products == torch.bfloat16):
            rows = self.rows(drafter, batch)
        hidden_MH = rows.hidden_NKH[keep].float()
        latent_Mr, embedding_Mr = (
            None if part_NKr is None else part_NKr[keep].float() for part_NKr in (rows.latent_NKr, rows.embedding_NKr)
        )
        view = TargetView(
            batch.target_hidden_NKD[keep],
            batch.lse_NK[keep],
            self.inverse_V[batch.labels_NK[keep]],
            self.inverse_V[batch.argmax_NK[keep]],
            self.softcap,
        )
        weights_K = self.config.position_weights(keep.shape[1], keep.device)
        weights_M = weights_K.expand_as(keep)[keep]
        with torch.autocast(keep.device.type, enabled=False):  # the caller's, where there is one
            confidence_M = None if rows.confidence is None else rows.confidence(hidden_MH, embedding_Mr)
            return objective(
                hidden_MH,
                latent_Mr,
                rows.w2_Vr,
                confidence_M,
                self.head_VH,
                view,
                weights_M,
                self.config,
                self.products,
                total_weight,
                rows.candidates,
            )


def scatter(values_M: Tensor, supervised_NK: Tensor) -> Tensor:
    """Per-position values back into [N, K], zero where nothing was supervised."""
    out_NK = torch.zeros(supervised_NK.shape, dtype=values_M.dtype, device=values_M.device)
    out_NK[supervised_NK] = values_M
    return out_NK
