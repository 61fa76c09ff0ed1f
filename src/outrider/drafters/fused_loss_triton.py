"""The row reduction of the training loss (`reduce_rows`) as one Triton kernel: a program per row.

Three passes over the vocabulary:

    1  z        running maximum m and sum of exp(z - m)  ->  p_d = exp(z - m) / sum
    2  z, t     sum (p_d - p_t)_+  and  <p_d, b>,  b = [p_d > p_t];  with a KL or soft cross-entropy its value, and
                m = sum p_t
    3  z, t     dz = 2 l1 p_d (b - <p_d, b>) + ce (p_d - onehot) + kl (m p_d - p_t) + soft (p_d - p_t / m), over z

Nothing but [C] scalars is allocated; a chunk's rows stay in the GPU's L2 cache between passes. A gradient needs
<p_d, b> of the whole row before its first entry, and b the sum of exp: fewer passes would mean another [C, Vd] buffer.

Formulas: drafters/fused_loss.py, whose `reduce_rows` is the reference; z is overwritten, t is not.
Shapes: C rows, V draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096
_WARPS = 8


@triton.jit
def _target_logit(t, shift, softcap, CAPPED: tl.constexpr):  # type: ignore[no-untyped-def]
    """The target's logit as its own softmax saw it: shifted back, soft-capped where the family does."""
    t = t + shift
    if CAPPED:
        # tanh(x) = 2 sigmoid(2 x) - 1
        t = softcap * (2.0 / (1.0 + tl.exp(-2.0 * t / softcap)) - 1.0)
    return t


@triton.jit
def _rows(  # type: ignore[no-untyped-def]
    z_ptr,
    t_ptr,
    shift_ptr,
    lse_ptr,
    label_ptr,
    argmax_ptr,
    ce_weight_ptr,
    l1_weight_ptr,
    kl_weight_ptr,
    soft_weight_ptr,
    ce_ptr,
    distance_ptr,
    kl_ptr,
    soft_ptr,
    agreement_ptr,
    V,
    softcap,
    CAPPED: tl.constexpr,
    DIVERGENCE: tl.constexpr,
    SOFT: tl.constexpr,
    NEEDS_GRAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    z_ptr += row * V
    t_ptr += row * V
    lane = tl.arange(0, BLOCK)
    shift = tl.load(shift_ptr + row).to(tl.float32)
    lse = tl.load(lse_ptr + row).to(tl.float32)
    label = tl.load(label_ptr + row)
    argmax = tl.load(argmax_ptr + row)
    known = label >= 0

    label_logit = tl.load(z_ptr + tl.maximum(label, 0)).to(tl.float32)
    their_top = tl.load(z_ptr + tl.maximum(argmax, 0)).to(tl.float32)

    top = -float("inf")
    total = 0.0
    for start in range(0, V, BLOCK):
        inside = start + lane < V
        z = tl.load(z_ptr + start + lane, mask=inside, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(z, 0))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(z - higher), 0)
        top = higher
    z_lse = top + tl.log(total)

    excess = 0.0
    inner = 0.0
    divergence = 0.0
    cross = 0.0
    mass = 0.0
    for start in range(0, V, BLOCK):
        inside = start + lane < V
        z = tl.load(z_ptr + start + lane, mask=inside, other=-float("inf")).to(tl.float32)
        t = tl.load(t_ptr + start + lane, mask=inside, other=0.0).to(tl.float32)
        p_d = tl.exp(z - z_lse)
        log_p_t = _target_logit(t, shift, softcap, CAPPED=CAPPED) - lse
        p_t = tl.exp(log_p_t)
        gap = p_d - p_t
        above = inside & (gap > 0)
        if DIVERGENCE:
            divergence += tl.sum(tl.where(inside, p_t * (log_p_t - (z - z_lse)), 0.0), 0)
        if SOFT:
            cross -= tl.sum(tl.where(inside, p_t * (z - z_lse), 0.0), 0)
        if DIVERGENCE or SOFT:
            mass += tl.sum(tl.where(inside, p_t, 0.0), 0)
        excess += tl.sum(tl.where(above, gap, 0.0), 0)
        inner += tl.sum(tl.where(above, p_d, 0.0), 0)

    tl.store(ce_ptr + row, tl.where(known, z_lse - label_logit, 0.0))
    tl.store(distance_ptr + row, 2.0 * excess)
    tl.store(kl_ptr + row, divergence)
    drafts_top = argmax >= 0  # m is then at least 1 / V
    tl.store(soft_ptr + row, tl.where(drafts_top, cross / tl.where(drafts_top, mass, 1.0), 0.0))
    tl.store(agreement_ptr + row, ((argmax >= 0) & (their_top >= top)).to(tl.int8))

    if NEEDS_GRAD:
        ce = tl.where(known, tl.load(ce_weight_ptr + row).to(tl.float32), 0.0)
        l1 = tl.load(l1_weight_ptr + row).to(tl.float32)
        kl = 0.0
        if DIVERGENCE:
            kl = tl.load(kl_weight_ptr + row).to(tl.float32)
        soft = 0.0
        if SOFT:
            soft = tl.where(drafts_top, tl.load(soft_weight_ptr + row).to(tl.float32), 0.0)
        for start in range(0, V, BLOCK):
            inside = start + lane < V
            z = tl.load(z_ptr + start + lane, mask=inside, other=-float("inf")).to(tl.float32)
            t = tl.load(t_ptr + start + lane, mask=inside, other=0.0).to(tl.float32)
            p_d = tl.exp(z - z_lse)
            p_t = tl.exp(_target_logit(t, shift, softcap, CAPPED=CAPPED) - lse)
            grad = p_d * (tl.where(p_d > p_t, 2.0 * l1, 0.0) - 2.0 * l1 * inner + ce)
            grad -= tl.where(start + lane == label, ce, 0.0)
            if DIVERGENCE:
                grad += kl * (mass * p_d - p_t)
            if SOFT:
                grad += soft * (p_d - p_t / tl.where(drafts_top, mass, 1.0))
            tl.store(z_ptr + start + lane, grad.to(z_ptr.dtype.element_ty), mask=inside)


def reduce_rows_triton(
    z_CV: Tensor, t_CV: Tensor, rows: Sequence[Tensor | None], softcap: float | None, needs_grad: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As `reduce_rows`, for contiguous float32 or bfloat16 logits; t is left as it was."""
    *_, l1_C, kl_C, soft_C = rows
    assert l1_C is not None
    C, V = z_CV.shape
    assert z_CV.is_contiguous() and t_CV.is_contiguous()
    ce, distance, kl, soft = (torch.empty(C, dtype=torch.float32, device=z_CV.device) for _ in range(4))
    agreement = torch.empty(C, dtype=torch.int8, device=z_CV.device)
    _rows[(C,)](
        z_CV,
        t_CV,
        *((l1_C if values is None else values).contiguous() for values in rows),
        ce,
        distance,
        kl,
        soft,
        agreement,
        V,
        softcap or 1.0,
        CAPPED=softcap is not None,
        DIVERGENCE=kl_C is not None,
        SOFT=soft_C is not None,
        NEEDS_GRAD=needs_grad,
        BLOCK=min(_BLOCK, triton.next_power_of_2(V)),
        num_warps=_WARPS,
    )
    return ce, distance, kl, soft, agreement.bool()
