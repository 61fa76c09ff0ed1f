"""The loss of training/objective.py from whole logits, with plain autograd: several [N, V] buffers at a time.

    loss = sum_i w_i [ce CE_i + tv ||p_d - p_t||_1 + conf BCE(c_i, 1 - ||p_d - p_t||_1 / 2)] / sum_i w_i

Shapes: N positions, V target vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.training.objective import ObjectiveConfig


def full_logit_objective(
    logits_NVd: Tensor,
    target_logits_NV: Tensor,
    draft_ids_Vd: Tensor | None,
    labels_N: Tensor,
    confidence_N: Tensor | None,
    weights_N: Tensor,
    config: ObjectiveConfig,
) -> Tensor:
    """The weighted mean; labels index the draft vocabulary (None: the whole one), -1 outside it."""
    with torch.no_grad():
        target_logits_NV = target_logits_NV.to(torch.promote_types(target_logits_NV.dtype, torch.float32))
        p_t = (target_logits_NV - target_logits_NV.logsumexp(-1, keepdim=True)).exp_()
        if draft_ids_Vd is not None:
            p_t = p_t[:, draft_ids_Vd]
        del target_logits_NV
        outside = 1 - p_t.sum(-1)
    logits_NVd = logits_NVd.to(torch.promote_types(logits_NVd.dtype, torch.float32))
    # As precise as log_softmax is not: it sums plainly on a CPU, off by 1e-5 over 150,000 terms.
    log_p_d = logits_NVd - logits_NVd.logsumexp(-1, keepdim=True)
    del logits_NVd
    ce = -log_p_d.gather(1, labels_N.clamp(min=0)[:, None])[:, 0] * (labels_N >= 0)
    distance = (log_p_d.exp() - p_t).abs().sum(-1) + outside
    loss = config.ce * ce + config.tv * distance
    if confidence_N is not None:
        label = (1 - distance.detach() / 2).clamp(0, 1)
        loss = loss + config.confidence * F.binary_cross_entropy_with_logits(confidence_N, label, reduction="none")
    return (weights_N * loss).sum() / weights_N.sum()
