"""The objective of a block drafter, computed in chunks of positions.

    p_d = softmax(W_d h + W2 l),  p_t = the target's distribution at the same position
    loss = sum_i w_i [ce (-log p_d(x_i)) + tv ||p_d - p_t||_1 + conf BCE(c_i, 1 - ||p_d - p_t||_1 / 2)] / sum_i w_i
    w_i = exp(-(k_i - 1) / g)                                  k_i: position in the block, from 1

One custom autograd function computes the loss *and* the gradients with respect to h, l and W2 inside the forward,
chunk by chunk: two [C, Vd] buffers are alive at a time whatever the number of anchors, and nothing is recomputed in
the backward. The LM head W_d is frozen, so it needs no gradient. ||.||_1 counts the target's mass outside a reduced
draft vocabulary: tokens that can never be drafted are part of the distance.

Source: DSpark, arXiv 2607.05147 (weights 0.1, 0.9, 1.0 and the decay); DFlash, arXiv 2602.06036 (CE with decay).
Shapes: N positions, C positions a chunk, Vd draft vocab, H draft hidden, r rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_CHUNK = 256


@dataclass(frozen=True)
class ObjectiveConfig:
    """Weights of the three terms and the decay length g (positions)."""

    ce: float = 0.1
    tv: float = 0.9
    confidence: float = 1.0
    decay: float = 4.0

    def position_weights(self, gamma: int, device: torch.device) -> Tensor:
        """w_k for k = 1..gamma."""
        return torch.exp(-torch.arange(gamma, device=device, dtype=torch.float32) / self.decay)


@dataclass(frozen=True)
class TargetView:
    """What the objective needs of the target at each supervised position, without its logits.

    `hidden_ND` normed last hidden states; `lse_N` log-sum-exp of the full-vocabulary logits; `labels_N` the next token
    and `argmax_N` the target's most likely one, as indices into the draft vocabulary (-1: outside it; such a label
    has no cross-entropy); `softcap` as the target's.
    """

    hidden_ND: Tensor
    lse_N: Tensor
    labels_N: Tensor
    argmax_N: Tensor
    softcap: float | None = None


@dataclass(frozen=True)
class ObjectiveOutput:
    """`loss` is differentiable; the others are detached, per position [N]."""

    loss: Tensor
    acceptance_N: Tensor  # 1 - ||p_d - p_t||_1 / 2: the exact acceptance probability at temperature 1
    agreement_N: Tensor  # 1.0 where the two most likely tokens are the same: acceptance at temperature 0
    ce_N: Tensor


class _ChunkedDistances(torch.autograd.Function):
    """sum_i weight_i (ce_i + tv_i); gradients for h, l and W2 are ready when the forward ends."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        latent_Nr: Tensor | None,
        w2_Vr: Tensor | None,
        head_VH: Tensor,
        view: TargetView,
        ce_N: Tensor,
        tv_N: Tensor,
        needs_grad: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        N = hidden_NH.shape[0]
        d_hidden = torch.empty_like(hidden_NH) if needs_grad else None
        d_latent = torch.empty_like(latent_Nr) if needs_grad and latent_Nr is not None else None
        d_w2 = torch.zeros_like(w2_Vr) if needs_grad and w2_Vr is not None else None
        total = hidden_NH.new_zeros(())
        losses, distances, agreements = [], [], []
        for start in range(0, N, _CHUNK):
            rows = slice(start, start + _CHUNK)
            z = hidden_NH[rows] @ head_VH.T
            if latent_Nr is not None and w2_Vr is not None:
                z.addmm_(latent_Nr[rows], w2_Vr.T)
            p_t = view.hidden_ND[rows] @ head_VH.T
            if view.softcap is not None:
                p_t = torch.tanh(p_t / view.softcap).mul_(view.softcap)
            agreements.append(z.argmax(-1) == view.argmax_N[rows])
            p_t.sub_(view.lse_N[rows, None]).exp_()
            outside = (1 - p_t.sum(-1)).clamp_(min=0)
            labels = view.labels_N[rows]
            known = labels >= 0
            z_lse = z.logsumexp(-1)
            ce = (z_lse - z.gather(1, labels.clamp(min=0)[:, None])[:, 0]) * known
            p_d = z.sub_(z_lse[:, None]).exp_()
            sign = torch.sub(p_d, p_t, out=p_t)  # p_t's buffer is free now
            distance = sign.abs().sum(-1) + outside
            losses.append(ce)
            distances.append(distance)
            total = total + (ce_N[rows] * ce).sum() + (tv_N[rows] * distance).sum()
            if needs_grad:
                sign.sign_()
                inner = torch.einsum("cv,cv->c", p_d, sign)
                # d tv / dz = p_d (sign - <p_d, sign>),  d ce / dz = p_d - onehot
                grad = sign.sub_(inner[:, None]).mul_(tv_N[rows, None]).add_((ce_N[rows] * known)[:, None]).mul_(p_d)
                grad.scatter_add_(1, labels.clamp(min=0)[:, None], -(ce_N[rows] * known)[:, None])
                assert d_hidden is not None
                torch.mm(grad, head_VH, out=d_hidden[rows])
                if d_latent is not None and d_w2 is not None and latent_Nr is not None and w2_Vr is not None:
                    torch.mm(grad, w2_Vr, out=d_latent[rows])
                    d_w2.addmm_(grad.T, latent_Nr[rows])
        ctx.gradients = (d_hidden, d_latent, d_w2)
        outputs = torch.cat(losses), torch.cat(distances), torch.cat(agreements)
        ctx.mark_non_differentiable(*outputs)
        return (total, *outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        scale = grads[0]
        return (*(None if g is None else g * scale for g in ctx.gradients), None, None, None, None, None)


def objective(
    hidden_NH: Tensor,
    latent_Nr: Tensor | None,
    w2_Vr: Tensor | None,
    confidence_N: Tensor | None,
    head_VH: Tensor,
    view: TargetView,
    weights_N: Tensor,
    config: ObjectiveConfig,
    total_weight: Tensor | None = None,
) -> ObjectiveOutput:
    """The weighted mean loss over N supervised positions.

    Args:
        hidden_NH: normed draft hidden states.
        latent_Nr, w2_Vr: the sequential head's latent and its output matrix; None without one.
        confidence_N: logits of c; None without a confidence head.
        head_VH: the frozen LM head, restricted to the draft vocabulary.
        weights_N: position weights w_i.
        total_weight: the denominator, where these positions are one part of a step; null: their own sum.
    """
    w_N = (weights_N / (weights_N.sum() if total_weight is None else total_weight)).to(hidden_NH.dtype)
    total, ce_N, distance_N, agree_N = _ChunkedDistances.apply(
        hidden_NH, latent_Nr, w2_Vr, head_VH, view, config.ce * w_N, config.tv * w_N, torch.is_grad_enabled()
    )
    acceptance_N = (1 - distance_N / 2).clamp(0, 1)
    if confidence_N is not None:
        bce_N = F.binary_cross_entropy_with_logits(confidence_N, acceptance_N, reduction="none")
        total = total + config.confidence * (w_N * bce_N).sum()
    return ObjectiveOutput(total, acceptance_N, agree_N.float(), ce_N)
