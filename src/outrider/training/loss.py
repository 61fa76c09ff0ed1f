"""What the objective needs of the target at each supervised position, without its logits."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.drafters.dflash2 import candidate_scores


@dataclass(frozen=True)
class TargetView:
    """Rows of N supervised positions.

    `hidden_ND` normed last hidden states; `lse_N` log-sum-exp of the full-vocabulary logits; `labels_N` the next token
    and `argmax_N` the target's most likely one, as indices into the draft vocabulary (-1: outside it; such a label
    has no cross-entropy); `softcap` as the target's.
    """

    hidden_ND: Tensor
    lse_N: Tensor
    labels_N: Tensor
    argmax_N: Tensor
    softcap: float | None = None


# ----------------------------------------------------------------------------
# Softmax, distance and gradient of one chunk of logits, in place; the reference of the Triton kernel.
#
#     p_d = softmax(z),  p_t = exp(t - lse)                       rows of [C, Vd]; p_t may lack the mass outside Vd
#     ||p_d - p_t||_1 (outside mass included) = 2 sum_v (p_d - p_t)_+          because both distributions sum to one
#     b = [p_d > p_t],  d tv / dz = 2 p_d (b - <p_d, b>),  d ce / dz = p_d - onehot
#
# The identity saves the sum of |.| and of p_t. Softmax of either side is one pass (`torch.softmax` walks a row while it
# is in cache), and the maximum of its result gives the log-sum-exp back: max(z) - log(max(p_d)).
#
# Shapes: C rows, Vd draft vocabulary.
# ----------------------------------------------------------------------------


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


# ----------------------------------------------------------------------------
# The objective of a distribution over a position's likeliest tokens (drafters/dflash2.py).
#
#     C_i = the c likeliest tokens of U_i,   s_i(v) = U_i(v) + <l_i, W2[v]>,   p_d = softmax(s_i), zero outside C_i
#     ||p_d - p_t||_1 = 2 sum_{v in C_i} (p_d - p_t)_+        both sum to one, and p_d has no mass elsewhere
#     CE = -log p_d(x_i) where x_i is in C_i, else none
#
# C_i is a choice and has no gradient; s_i has, towards U_i too. Everything here is [C, c]: plain autograd will do.
#
# Shapes: C rows of a chunk, V draft vocabulary, c candidates, r rank.
# ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Candidates:
    """The candidates of a chunk, taken from both logit buffers before these are reduced: indices, U and p_t, [C, c]."""

    indices: Tensor
    unary: Tensor
    p_t: Tensor

    @staticmethod
    def of(z_CV: Tensor, t_CV: Tensor, rows: RowInputs, softcap: float | None, count: int) -> Candidates:
        """From draft logits z, up to a constant per row, and the target's, `t + rows.shift_C`."""
        wide = torch.promote_types(z_CV.dtype, torch.float32)
        unary, indices = z_CV.topk(count, dim=-1)
        logits = t_CV.gather(1, indices).to(wide) + rows.shift_C[:, None].to(wide)
        if softcap is not None:
            logits = torch.tanh(logits / softcap) * softcap
        return Candidates(indices, unary.to(wide), (logits - rows.lse_C[:, None]).exp())

    def reduce(
        self, rows: RowInputs, latent_Cr: Tensor, w2_Vr: Tensor, needs_grad: bool
    ) -> tuple[RowOutputs, CandidateGradients | None]:
        """Per-row results; with `needs_grad` also the gradients of sum_i ce_i CE_i + tv_i distance_i."""
        with torch.enable_grad():
            unary, latent, codes = (
                x.detach().requires_grad_(needs_grad) for x in (self.unary, latent_Cr, w2_Vr[self.indices])
            )
            log_p_d = candidate_scores(unary, codes, latent).log_softmax(-1)
            labelled = self.indices == rows.labels_C[:, None]
            ce_C = -log_p_d.masked_fill(~labelled, 0.0).sum(-1)
            distance_C = 2 * (log_p_d.exp() - self.p_t).clamp(min=0).sum(-1)
            loss = (rows.ce_C * ce_C + rows.tv_C * distance_C).sum()
        likeliest_C = self.indices.gather(1, log_p_d.argmax(-1, keepdim=True))[:, 0]
        outputs = RowOutputs(ce_C.detach(), distance_C.detach(), likeliest_C == rows.argmax_C)
        if not needs_grad:
            return outputs, None
        return outputs, CandidateGradients(*torch.autograd.grad(loss, (unary, latent, codes)))


@dataclass(frozen=True)
class CandidateGradients:
    """Of the candidates' logits [C, c], of the latents [C, r] and of the candidates' rows of W2 [C, c, r]."""

    unary: Tensor
    latent: Tensor
    codes: Tensor


# ----------------------------------------------------------------------------
# Distances of the objective over chunks of positions: two [C, Vd] logit buffers, whatever N and V are.
#
#     chunk of C rows:  z = h W_d^T + l W2^T,  t = h_t W_d^T  ->  row reduction  ->  z holds dz
#                       d_h = dz W_d,  d_l = dz W2,  d_W2 += dz^T l
#
# The gradients are computed in the forward, while the chunk is there; nothing is recomputed in the backward. C follows
# from a byte budget, so a vocabulary ten times larger makes the chunks smaller instead of the memory larger.
#
# Low precision: both buffers hold logits minus a per-row constant near their maximum, added *before* the product is
# rounded. A bfloat16 logit of 22 is wrong by up to 0.06; one that is 0.5 below the row's constant by 0.001. z may lose
# any constant (softmax ignores it); t's is kept exactly and added back.
#
# Shapes: N positions, C positions a chunk, Vd draft vocabulary, H hidden, r rank.
# ----------------------------------------------------------------------------


CHUNK_BYTES = 2**27  # both logit buffers of a chunk
TILE_BYTES = 2**26  # of a head stored in another type than the products', converted tile by tile
_FEWEST_ROWS = 16


def chunk_rows(positions: int, vocabulary: int, itemsize: int) -> int:
    """C: as many rows as the budget holds, chunks of equal size."""
    fitting = max(_FEWEST_ROWS, CHUNK_BYTES // (2 * vocabulary * itemsize))
    return math.ceil(positions / math.ceil(positions / fitting))


class HeadProducts:
    """Products with the frozen head [Vd, H] in one type; a head stored in another is never copied whole."""

    def __init__(self, head_VH: Tensor, dtype: torch.dtype) -> None:
        self.head_VH, self.dtype = head_VH, dtype
        V, H = head_VH.shape
        tile = V if head_VH.dtype == dtype else max(1, TILE_BYTES // (H * dtype.itemsize))
        self.tiles = [slice(start, min(start + tile, V)) for start in range(0, V, tile)]

    def add_logits(self, out_CV: Tensor, x_CH: Tensor) -> None:
        """out += x W^T."""
        for tile in self.tiles:
            out_CV[:, tile].addmm_(x_CH, self.head_VH[tile].to(self.dtype).T)

    def pull_back(self, grad_CV: Tensor) -> Tensor:
        """dz W, [C, H]."""
        parts = (grad_CV[:, tile] @ self.head_VH[tile].to(self.dtype) for tile in self.tiles)
        total = next(parts)
        for part in parts:
            total += part
        return total

    def at(self, x_CH: Tensor, token_C: Tensor) -> Tensor:
        """One logit per row, [C]."""
        return (x_CH * self.head_VH[token_C].to(x_CH.dtype)).sum(-1)


def row_reducer(logits_CV: Tensor) -> Callable[..., RowOutputs]:
    """The fused kernel where it can run, else the torch one; they agree (tests/test_objective_triton.py)."""
    if logits_CV.is_cuda and logits_CV.dtype != torch.float64 and find_spec("triton") is not None:
        from outrider.training.loss_triton import reduce_rows_triton

        return reduce_rows_triton
    return reduce_rows


class ChunkedDistances(torch.autograd.Function):
    """sum_i ce_i CE_i + tv_i ||p_d - p_t||_1 with CE, distance and agreement per position [N].

    With `candidates` this is the sum of two: of softmax(U), whose CE is returned, and of the distribution over
    the candidates, whose distance and agreement are returned.
    """

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
        dtype: torch.dtype,
        needs_grad: bool,
        candidates: int | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        N, V = len(hidden_NH), len(head_VH)
        C = chunk_rows(N, V, dtype.itemsize)
        head = HeadProducts(head_VH, dtype)
        # Where candidates are chosen, z is the parallel drafter's alone; latents and W2 meet among the candidates.
        everywhere = candidates is None
        w2 = None if w2_Vr is None or not everywhere else w2_Vr.to(dtype)
        d_hidden = torch.empty_like(hidden_NH) if needs_grad else None
        d_latent = None if latent_Nr is None or not needs_grad else torch.empty_like(latent_Nr)
        d_w2 = None if w2_Vr is None or not needs_grad else torch.zeros_like(w2_Vr)
        z_buffer, t_buffer = (torch.empty(C, V, dtype=dtype, device=hidden_NH.device) for _ in range(2))
        reduce = row_reducer(z_buffer)
        found, chosen = list[RowOutputs](), list[RowOutputs]()
        for start in range(0, N, C):
            part = slice(start, min(start + C, N))
            z, t = z_buffer[: part.stop - start], t_buffer[: part.stop - start]
            latent = None if latent_Nr is None or not everywhere else latent_Nr[part].to(dtype)
            shift_C = _target_logits(t, view, part, head)
            _draft_logits(z, t, hidden_NH[part], latent, w2, view.argmax_N[part], head)
            rows = RowInputs(
                shift_C, view.lse_N[part], view.labels_N[part], view.argmax_N[part], ce_N[part], tv_N[part]
            )
            among = None if candidates is None else Candidates.of(z, t, rows, view.softcap, candidates)
            found.append(reduce(z, t, rows, view.softcap, needs_grad))
            if among is not None:
                assert latent_Nr is not None and w2_Vr is not None, "candidates are scored by latents and W2"
                outputs, gradients = among.reduce(rows, latent_Nr[part], w2_Vr, needs_grad)
                chosen.append(outputs)
                if gradients is not None and d_latent is not None and d_w2 is not None:
                    z.scatter_add_(1, among.indices, gradients.unary.to(z.dtype))
                    d_latent[part] = gradients.latent
                    d_w2.index_add_(0, among.indices.flatten(), gradients.codes.flatten(0, 1))
            if d_hidden is not None:
                d_hidden[part] = head.pull_back(z)
            if d_latent is not None and d_w2 is not None and latent is not None and w2 is not None:
                d_latent[part] = z @ w2
                if dtype == d_w2.dtype:
                    d_w2.addmm_(z.T, latent)
                else:
                    d_w2 += z.T @ latent
        ctx.gradients = (d_hidden, d_latent, d_w2)
        ce, distance, agreement = _joined(found)
        loss = (ce_N * ce).sum() + (tv_N * distance).sum()
        if chosen:  # what is drafted is drawn among the candidates
            selected_ce, distance, agreement = _joined(chosen)
            loss = loss + (ce_N * selected_ce).sum() + (tv_N * distance).sum()
        ctx.mark_non_differentiable(ce, distance, agreement)
        return loss, ce, distance, agreement

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (*(None if g is None else g.mul(grads[0]) for g in ctx.gradients), *(None,) * 7)


def _joined(parts: list[RowOutputs]) -> tuple[Tensor, Tensor, Tensor]:
    """Cross-entropy, distance and agreement of all chunks, [N] each."""
    ce, distance, agreement = zip(*((part.ce_C, part.distance_C, part.agreement_C) for part in parts), strict=True)
    return torch.cat(ce), torch.cat(distance), torch.cat(agreement)


def _target_logits(t_CV: Tensor, view: TargetView, part: slice, head: HeadProducts) -> Tensor:
    """Fill t with the target's logits minus a constant per row; returns the constant [C]."""
    shift_C = view.lse_N[part]
    if view.softcap is not None:  # the product's own size, before the cap
        shift_C = view.softcap * torch.atanh((shift_C / view.softcap).clamp(-0.99, 0.99))
    shift_C = shift_C.to(t_CV.dtype)
    t_CV.copy_(-shift_C[:, None])
    head.add_logits(t_CV, view.hidden_ND[part].to(t_CV.dtype))
    return shift_C


def _draft_logits(
    z_CV: Tensor,
    t_CV: Tensor,
    hidden_CH: Tensor,
    latent_Cr: Tensor | None,
    w2_Vr: Tensor | None,
    argmax_C: Tensor,
    head: HeadProducts,
) -> None:
    """Fill z with the drafter's logits minus, per row, the one of the target's most likely draftable token."""
    token_C = argmax_C.clone()
    missing_C = token_C < 0
    token_C[missing_C] = t_CV[missing_C].argmax(-1)
    shift_C = head.at(hidden_CH, token_C)
    if latent_Cr is not None and w2_Vr is not None:
        shift_C = shift_C + (latent_Cr.to(shift_C.dtype) * w2_Vr[token_C].to(shift_C.dtype)).sum(-1)
    z_CV.copy_(-shift_C.to(z_CV.dtype)[:, None])
    head.add_logits(z_CV, hidden_CH.to(z_CV.dtype))
    if latent_Cr is not None and w2_Vr is not None:
        z_CV.addmm_(latent_Cr, w2_Vr.T)


# ----------------------------------------------------------------------------
# The objective of a block drafter.
#
#     p_d = softmax(W_d h + W2 l),  p_t = the target's distribution at the same position
#     loss = sum_i w_i [ce (-log p_d(x_i)) + tv ||p_d - p_t||_1 + conf BCE(c_i, 1 - ||p_d - p_t||_1 / 2)] / sum_i w_i
#     w_i = exp(-(k_i - 1) / g)                                  k_i: position in the block, from 1
#
# The vocabulary-sized part runs in chunks of bounded bytes (training/loss.py). The LM head W_d is frozen, so
# it needs no gradient. ||.||_1 counts the target's mass outside a reduced draft vocabulary: tokens that can never be
# drafted are part of the distance.
#
# Source: DSpark, arXiv 2607.05147 (weights 0.1, 0.9, 1.0 and the decay); DFlash, arXiv 2602.06036 (CE with decay).
# Shapes: N positions, Vd draft vocab, H draft hidden, r rank.
# ----------------------------------------------------------------------------


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
class ObjectiveOutput:
    """`loss` is differentiable; the others are detached, per position [N]."""

    loss: Tensor
    acceptance_N: Tensor  # 1 - ||p_d - p_t||_1 / 2: the exact acceptance probability at temperature 1
    agreement_N: Tensor  # 1.0 where the two most likely tokens are the same: acceptance at temperature 0
    ce_N: Tensor  # of softmax(W_d h) where the draft is drawn among candidates


def objective(
    hidden_NH: Tensor,
    latent_Nr: Tensor | None,
    w2_Vr: Tensor | None,
    confidence_N: Tensor | None,
    head_VH: Tensor,
    view: TargetView,
    weights_N: Tensor,
    config: ObjectiveConfig,
    products: torch.dtype | None = None,
    total_weight: Tensor | None = None,
    candidates: int | None = None,
) -> ObjectiveOutput:
    """The weighted mean loss over N supervised positions.

    Args:
        hidden_NH: normed draft hidden states.
        latent_Nr, w2_Vr: the sequential head's latent and its output matrix; None without one.
        confidence_N: logits of c; None without a confidence head.
        head_VH: the frozen LM head, restricted to the draft vocabulary.
        weights_N: position weights w_i.
        products: type of the vocabulary-sized matrix products and of the logit buffers, bfloat16 for speed; softmax
            and distances are float32 all the same. None: the type of `hidden_NH`.
        total_weight: the denominator, where these positions are one part of a step; None: their own sum.
        candidates: latents and w2 rescore so many likeliest tokens of W_d h, the only ones that can be drafted. Both
            softmax(W_d h) and p_d over the candidates then have a loss (training/loss.py).
    """
    w_N = (weights_N / (weights_N.sum() if total_weight is None else total_weight)).to(view.lse_N.dtype)
    total, ce_N, distance_N, agree_N = ChunkedDistances.apply(
        hidden_NH,
        latent_Nr,
        w2_Vr,
        head_VH,
        view,
        config.ce * w_N,
        config.tv * w_N,
        products or hidden_NH.dtype,
        torch.is_grad_enabled(),
        candidates,
    )
    acceptance_N = (1 - distance_N / 2).clamp(0, 1)
    if confidence_N is not None:
        bce_N = F.binary_cross_entropy_with_logits(confidence_N, acceptance_N, reduction="none")
        total = total + config.confidence * (w_N * bce_N).sum()
    return ObjectiveOutput(total, acceptance_N, agree_N.float(), ce_N)
