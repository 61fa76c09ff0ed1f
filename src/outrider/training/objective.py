"""The loss of a drafter on a batch: the method's training forward, then its loss at the supervised positions.

    batch -> BlockInputs -> DraftModule.rows -> DraftRows.loss(Supervision) -> DraftLoss

The formulas are in drafters/loss.py, which of them a method is trained by in the method's file.
Shapes: N blocks, K draft positions, M supervised positions, V target vocabulary, Vd draft vocabulary, H draft hidden.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.drafters.base import BlockInputs, DraftModule, DraftRows
from outrider.drafters.fused_loss import HeadProducts, Supervision, TargetView
from outrider.drafters.loss import DraftLoss, ObjectiveConfig, dpace_weights
from outrider.target.model import Target
from outrider.training.batches import BlockBatch
from outrider.training.recipe import Precision


def inverse_ids(draft_ids_Vd: Tensor, vocab_size: int) -> Tensor:
    """[V] index into the draft vocabulary, -1 outside it."""
    inverse_V = torch.full((vocab_size,), -1, dtype=torch.long, device=draft_ids_Vd.device)
    inverse_V[draft_ids_Vd] = torch.arange(len(draft_ids_Vd), device=draft_ids_Vd.device)
    return inverse_V


def scatter(values_M: Tensor, supervised_NK: Tensor) -> Tensor:
    """Per-position values back into [N, K], zero where nothing was supervised."""
    row_NK = (supervised_NK.flatten().cumsum(0) - 1).view_as(supervised_NK)  # a mask as index would wait for a GPU
    return torch.where(supervised_NK, values_M[row_NK.clamp(min=0)], 0)


class BlockObjective:
    """The loss of a drafter on a batch, with the target's frozen embedding and head and the draft vocabulary.

    In bfloat16 precision the drafter's rows are computed under autocast (parameters, norms, softmax and the residual
    stream stay float32) and the vocabulary-sized products of the loss take bfloat16 operands. Decoding must agree with
    the rows (tests/drafters/test_alignment.py).
    """

    def __init__(
        self, target: Target, draft_ids_Vd: Tensor, config: ObjectiveConfig, precision: Precision = "float32"
    ) -> None:
        self.embed_VH, self.embed_scale = target.embed_VD, target.embed_scale
        self.products = torch.bfloat16 if precision == "bfloat16" else torch.float32
        reduced = len(draft_ids_Vd) < target.vocab_size
        head_VH = target.head_VD[draft_ids_Vd] if reduced else target.head_VD
        # A whole bfloat16 head is never widened: the loss converts tiles of it where it needs float32.
        self.head_VH = head_VH.to(self.products) if reduced or self.products == torch.bfloat16 else head_VH
        self.draft_ids_Vd, self.inverse_V = draft_ids_Vd, inverse_ids(draft_ids_Vd, target.vocab_size)
        self.softcap = target.softcap
        self.config = config

    def embed(self, tokens: Tensor) -> Tensor:
        """The target's embedding as its first layer sees it, [...] -> [..., D] in float32."""
        return F.embedding(tokens, self.embed_VH).float() * self.embed_scale

    def rows(self, drafter: DraftModule, batch: BlockBatch) -> DraftRows:
        """The drafter's training forward."""
        # Aux hidden states are stored scaled; modules take raw ones and divide by aux_scale themselves.
        aux_SLD = batch.aux_SLD.float() * drafter.aux_scale_L[:, None]
        inputs = BlockInputs(
            aux_SLD,
            tokens_S=batch.tokens_S,
            next_tokens_S=batch.next_tokens_S,
            layout=batch.layout,
            previous_NK=batch.previous_NK,
            embed=self.embed,
        )
        return drafter.rows(inputs)

    def supervision(self, batch: BlockBatch, total_weight: Tensor | None = None, progress: float = 1.0) -> Supervision:
        """What the loss of a method's rows reads of a batch; arguments as in `__call__`."""
        weights_K = self.config.position_weights(batch.supervised_NK.shape[1], batch.supervised_NK.device)
        weights_NK = weights_K * batch.supervised_NK
        view = TargetView(
            hidden_ND=batch.target_hidden_NKD,
            lse_N=batch.lse_NK,
            labels_N=self.inverse_V[batch.labels_NK],
            argmax_N=self.inverse_V[batch.argmax_NK],
            softcap=self.softcap,
        )
        return Supervision(
            self.config,
            HeadProducts(self.head_VH, self.products),
            self.draft_ids_Vd,
            view=view,
            supervised_NK=batch.supervised_NK,
            supervised_M=batch.supervised_M,
            positions=batch.positions,
            weights_NK=weights_NK,
            total_weight=weights_NK.sum() if total_weight is None else total_weight,
            base_share=self.config.base_share(progress),
        )

    def __call__(
        self, drafter: DraftModule, batch: BlockBatch, total_weight: Tensor | None = None, progress: float = 1.0
    ) -> DraftLoss:
        """Loss of the supervised positions; acceptance and agreement of each of them.

        Args:
            total_weight: the denominator if these positions are one part of a step: the sum of the config's position
                weights over the step, before those of D-PACE; None: of this batch.
            progress: the part of the run's steps that are done, which the share of the parallel logits follows.
        """
        device = batch.supervised_NK.device
        with torch.autocast(device.type, torch.bfloat16, enabled=self.products == torch.bfloat16):
            rows = self.rows(drafter, batch)
        supervision = self.supervision(batch, total_weight, progress)
        with torch.autocast(device.type, enabled=False):  # the caller's, if there is one
            if self.config.dpace is not None:
                likely_M, _ = rows.label_probabilities(supervision)
                own_NK = dpace_weights(
                    scatter(likely_M, batch.supervised_NK), batch.supervised_NK, alpha=self.config.dpace
                )
                supervision = replace(supervision, weights_NK=supervision.weights_NK * own_NK)
            loss = rows.loss(supervision)
        return DraftLoss(loss.loss, *(figures_M[: batch.positions] for figures_M in loss[1:]))

    @torch.no_grad()
    def labels(self, drafter: DraftModule, batch: BlockBatch) -> tuple[Tensor, Tensor]:
        """[N, K] p_d of the labels, and whether they are the drafter's likeliest tokens; zeros where not supervised."""
        likely_M, first_M = self.rows(drafter, batch).drafted_labels(self.supervision(batch))
        return scatter(likely_M, batch.supervised_NK), scatter(first_M.float(), batch.supervised_NK)
