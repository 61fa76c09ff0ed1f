"""One training forward: features and anchors in, objective out. Decoding must agree with it (tests/test_alignment.py).

    embeddings of [anchor, mask...] -> backbone under the block mask -> supervised rows only -> heads -> objective

Shapes: N blocks, K draft positions, M supervised positions, H draft hidden, r rank.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.drafters.dflash import DFlash
from outrider.drafters.dspark import DSpark
from outrider.target import Target
from outrider.training.batches import BlockBatch
from outrider.training.objective import ObjectiveConfig, ObjectiveOutput, TargetView, objective


class BlockObjective:
    """Binds a drafter's frozen surroundings (embedding, head, draft vocabulary) to the objective."""

    def __init__(
        self,
        target: Target,
        draft_ids_Vd: Tensor,
        inverse_V: Tensor,
        config: ObjectiveConfig,
        precision: torch.dtype = torch.float32,
    ) -> None:
        self.embed_VH, self.embed_scale = target.embed_VD, target.embed_scale
        self.head_VH = target.head_VD[draft_ids_Vd].float().contiguous()
        self.inverse_V = inverse_V
        self.softcap = target.softcap
        self.config = config
        self.precision = precision

    def hidden(self, drafter: DFlash, batch: BlockBatch) -> Tensor:
        """The backbone's normed prediction rows [N, K, H]."""
        embedded = F.embedding(drafter.block_tokens(batch.anchor_tokens_N), self.embed_VH).float() * self.embed_scale
        # Taps are stored scaled; the module divides by tap_scale, so hand it raw ones.
        taps = batch.taps_SLD.float() * drafter.tap_scale_L[:, None]
        with torch.autocast(taps.device.type, self.precision, enabled=self.precision != torch.float32):
            return drafter(taps, embedded, batch.layout).float()

    def __call__(self, drafter: DFlash, batch: BlockBatch, total_weight: Tensor | None = None) -> ObjectiveOutput:
        hidden_NKH = self.hidden(drafter, batch)
        keep = batch.supervised_NK
        latent_Mr = w2 = confidence_M = embedding_Mr = None
        if isinstance(drafter, DSpark):
            if drafter.markov_head is not None:
                latent_NKr, embedding_NKr = drafter.markov_head.unroll(batch.previous_NK, hidden_NKH)
                latent_Mr, embedding_Mr = latent_NKr[keep], embedding_NKr[keep]
                w2 = drafter.markov_head.markov_w2.weight
            if drafter.confidence_head is not None:
                confidence_M = drafter.confidence_head(hidden_NKH[keep], embedding_Mr)
        view = TargetView(
            batch.target_hidden_NKD[keep].float(),
            batch.lse_NK[keep],
            self.inverse_V[batch.labels_NK[keep]],
            self.inverse_V[batch.argmax_NK[keep]],
            self.softcap,
        )
        weights_K = self.config.position_weights(keep.shape[1], keep.device)
        weights_M = weights_K.expand_as(keep)[keep]
        return objective(
            hidden_NKH[keep], latent_Mr, w2, confidence_M, self.head_VH, view, weights_M, self.config, total_weight
        )


def scatter(values_M: Tensor, supervised_NK: Tensor) -> Tensor:
    """Per-position values back into [N, K], zero where nothing was supervised."""
    out_NK = torch.zeros(supervised_NK.shape, dtype=values_M.dtype, device=values_M.device)
    out_NK[supervised_NK] = values_M
    return out_NK
