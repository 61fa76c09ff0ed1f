"""Softmax, distance and gradient of one chunk of logits, in place; the reference of the Triton kernel.

    p_d = softmax(z),  p_t = exp(t - lse)                       rows of [C, Vd]; p_t may lack the mass outside Vd
    ||p_d - p_t||_1 (outside mass included) = 2 sum_v (p_d - p_t)_+          because both distributions sum to one
    b = [p_d > p_t],  d tv / dz = 2 p_d (b - <p_d, b>),  d ce / dz = p_d - onehot

The identity saves the sum of |.| and of p_t. Softmax of either side is one pass (`torch.softmax` walks a row while it
is in cache), and the maximum of its result gives the log-sum-exp back: max(z) - log(max(p_d)).

Shapes: C rows, Vd draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_SCRATCH_BYTES = 2**21  # one buffer of the rows in work: small enough for a core's cache


@dataclass(frozen=True)
class RowInputs:
    """Per-row scalars [C]. The target's logits are `t + shift`, its log-sum-exp over the full vocabulary `lse`.

    `labels` and `argmax` index the draft vocabulary, -1 outside it; `ce` and `tv` are the weights of the two terms.
    """

    shift_C: Tensor
    lse_C: Tensor
    labels_C: Tensor
    argmax_C: Tensor
    ce_C: Tensor
    tv_C: Tensor

    def __getitem__(self, rows: slice) -> RowInputs:
        return RowInputs(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))


@dataclass(frozen=True)
class RowOutputs:
    """Per row [C]: cross-entropy (0 without a label), ||p_d - p_t||_1, and whether the most likely tokens agree."""

    ce_C: Tensor
    distance_C: Tensor
    agreement_C: Tensor


def reduce_rows(z_CV: Tensor, t_CV: Tensor, rows: RowInputs, softcap: float | None, needs_grad: bool) -> RowOutputs:
    """Reduce both logit buffers; with `needs_grad`, z then holds d(ce * CE + tv * distance) / dz. Both are overwritten.

    Arithmetic is in float32 for bfloat16 logits, a few rows at a time, else in the logits' own type.
    """
    step = max(1, _SCRATCH_BYTES // (4 * z_CV.shape[1]))
    outputs = []
    for start in range(0, len(z_CV), step):
        part = slice(start, start + step)
        outputs.append(_reduce(z_CV[part], t_CV[part], rows[part], softcap, needs_grad))
    ce, distance, agreement = (torch.cat(column) for column in zip(*outputs, strict=True))
    return RowOutputs(ce, distance, agreement)


def _reduce(
    z_CV: Tensor, t_CV: Tensor, rows: RowInputs, softcap: float | None, needs_grad: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = torch.promote_types(z_CV.dtype, torch.float32)
    p_d, gap = z_CV.to(dtype), t_CV.to(dtype)  # the buffers themselves unless they are narrower
    label_C = rows.labels_C.clamp(min=0)[:, None]
    top_C = p_d.amax(-1)
    agreement_C = (p_d.gather(1, rows.argmax_C.clamp(min=0)[:, None])[:, 0] >= top_C) & (rows.argmax_C >= 0)
    label_logit_C = p_d.gather(1, label_C)[:, 0]
    torch.softmax(p_d, -1, out=p_d)
    total_C = p_d.sum(-1)  # not quite one: softmax adds up plainly, which is off by 1e-5 over 150,000 terms
    p_d.div_(total_C[:, None])
    known_C = (rows.labels_C >= 0).to(dtype)
    ce_C = (top_C - p_d.amax(-1).log() - label_logit_C) * known_C
    _subtract_target(p_d, gap, rows, softcap)
    gap.clamp_(min=0)
    distance_C = 2 * gap.sum(-1)
    if needs_grad:
        above = gap.sign_().mul_(p_d)  # p_d b
        inner_C = above.sum(-1)
        scale_C = (rows.ce_C * known_C).to(dtype)
        above.mul_(2 * rows.tv_C[:, None])
        grad = torch.addcmul(above, p_d, (scale_C - 2 * rows.tv_C * inner_C)[:, None], out=p_d)
        grad.scatter_add_(1, label_C, -scale_C[:, None])
        if grad.dtype != z_CV.dtype:
            z_CV.copy_(grad)
    return ce_C, distance_C, agreement_C


def _subtract_target(p_d: Tensor, t: Tensor, rows: RowInputs, softcap: float | None) -> None:
    """t becomes p_d - p_t. p_t is its own softmax scaled to what the full vocabulary leaves of it."""
    shift_C = rows.shift_C.to(t.dtype)
    if softcap is not None:
        t.add_(shift_C[:, None]).div_(softcap).tanh_().mul_(softcap)
        shift_C = torch.zeros_like(shift_C)
    top_C = t.amax(-1) + shift_C
    torch.softmax(t, -1, out=t)
    inside_C = (top_C - rows.lse_C).exp() / t.amax(-1)
    torch.addcmul(p_d, t, inside_C[:, None], value=-1, out=t)
