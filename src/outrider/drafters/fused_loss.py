"""The loss of whole vocabularies in chunks of bounded size: `reference_loss` (drafters/loss.py), value and gradients.

    chunk of C rows:  z = h W_d^T + l W2^T,  t = h_t W_d^T  ->  row reduction  ->  z holds dz
                      d_h = dz W_d,  d_l = dz W2,  d_W2 += dz^T l

    fused_loss            draft logits, the target's view of them, terms  ->  loss, acceptance, agreement
    label_probabilities   draft logits  ->  p_d of the labels
    reduce_rows           both logits of a chunk  ->  the terms of each row and d loss / d logits

Two [C, Vd] logit buffers are all there is, whatever N and V are. The gradients are computed in the forward, while the
chunk is there; nothing is recomputed in the backward. C follows from a byte budget, so a vocabulary ten times larger
makes the chunks smaller instead of the memory larger. The LM head W_d is frozen and needs no gradient.

Low precision: both buffers hold logits minus a per-row constant near their maximum, added *before* the product is
rounded. A bfloat16 logit of 22 is wrong by up to 0.06; one that is 0.5 below the row's constant by 0.001. z may lose
any constant (softmax ignores it); t's is kept exactly and added back.

Shapes: N supervised positions, C positions of a chunk, V or Vd draft vocabulary, D target hidden, H draft hidden, r
rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.drafters.loss import ObjectiveConfig, Term, acceptance_probability

CHUNK_BYTES = 2**27  # both logit buffers of a chunk
GPU_CHUNK_BYTES = 2**29  # there a product of more rows is faster
TILE_BYTES = 2**26  # of a head stored in another type than the products', converted tile by tile
_FEWEST_ROWS = 16


class DraftLogits(NamedTuple):
    """Draft logits z = W_d h + W2 l of N positions, without the frozen head W_d; W_d h if there are no latents l."""

    hidden_NH: Tensor
    latent_Nr: Tensor | None = None
    w2_Vr: Tensor | None = None

    def rounded(self, dtype: torch.dtype) -> DraftLogits:
        """The same with W2 in the type of the vocabulary-sized products."""
        return self._replace(w2_Vr=None if self.w2_Vr is None else self.w2_Vr.to(dtype))


@dataclass(frozen=True)
class TargetView:
    """The target's distributions at N positions, without its logits.

    `hidden_ND` normed last hidden states; `lse_N` log-sum-exp of the full-vocabulary logits; `labels_N` the next token
    and `argmax_N` the target's most likely one, as indices into the draft vocabulary (-1: outside it; such a label
    has no cross-entropy); `softcap` as the target's.
    """

    hidden_ND: Tensor
    lse_N: Tensor
    labels_N: Tensor
    argmax_N: Tensor
    softcap: float | None = None

    def log_probs(self, head: HeadProducts, tokens_Nc: Tensor) -> Tensor:
        """log p_t of a few draft tokens per position, [N, c]; leading dimensions are free."""
        return self.log_probs_of(head.logits_at(self.hidden_ND.to(self.lse_N.dtype), tokens_Nc), self.lse_N)

    def log_probs_of(self, logits_Nc: Tensor, lse_N: Tensor) -> Tensor:
        """log p_t [N, c] from the products h_t W_d^T of a few tokens."""
        if self.softcap is not None:
            logits_Nc = torch.tanh(logits_Nc / self.softcap) * self.softcap
        return logits_Nc - lse_N[..., None]


class Candidates(NamedTuple):
    """The likeliest draft tokens of each position, most likely first: `logits_Nc` is differentiable and z up to a
    constant per row; `log_target_Nc` is log p_t."""

    indices_Nc: Tensor
    logits_Nc: Tensor
    log_target_Nc: Tensor


class FusedLoss(NamedTuple):
    """`loss` is differentiable; acceptance and agreement are detached, per position."""

    loss: Tensor
    acceptance_N: Tensor
    agreement_N: Tensor
    candidates: Candidates | None


def fused_loss(
    logits: DraftLogits, head: HeadProducts, target: TargetView, *, terms: Sequence[Term], top: int = 0
) -> FusedLoss:
    """sum_i sum_terms weight_i term_i of p_d = softmax(z), as `reference_loss` has it from whole distributions.

    Args:
        top: how many `candidates` per position to return; 0: none.
    """
    needs_grad = torch.is_grad_enabled()
    with torch.no_grad():
        N, V = len(logits.hidden_NH), len(head.head_VH)
        C = chunk_rows(N, V, head.dtype.itemsize, gpu=logits.hidden_NH.is_cuda)
        z_buffer, t_buffer = (torch.empty(C, V, dtype=head.dtype, device=logits.hidden_NH.device) for _ in range(2))
        gradients = _Gradients(logits, head) if needs_grad else None
        rounded, reduce = logits.rounded(head.dtype), row_reducer(z_buffer)
        weights, none_N = dict(terms), torch.zeros_like(target.lse_N)
        reduced, likeliest = list[tuple[Tensor, ...]](), list[tuple[Tensor, ...]]()
        for start in range(0, N, C):
            part = slice(start, min(start + C, N))
            z, t = z_buffer[: part.stop - start], t_buffer[: part.stop - start]
            shift_C = _target_logits(t, target, part, head=head)
            _shifted_logits(z, rounded, part, token_C=_likely_token(t, target.argmax_N[part]), head=head)
            rows = RowInputs(
                shift_C,
                lse_C=target.lse_N[part],
                labels_C=target.labels_N[part],
                argmax_C=target.argmax_N[part],
                ce_C=weights.get("ce", none_N)[part],
                l1_C=weights.get("l1", none_N)[part],
                kl_C=weights["kl"][part] if "kl" in weights else None,
                soft_C=weights["soft_ce"][part] if "soft_ce" in weights else None,
            )
            if top:
                values_Cc, indices_Cc = z.topk(top, dim=-1)
                products_Cc = t.gather(1, indices_Cc).to(rows.lse_C.dtype) + shift_C[:, None].to(rows.lse_C.dtype)
                log_target_Cc = target.log_probs_of(products_Cc, rows.lse_C)
                likeliest.append((indices_Cc, values_Cc.to(rows.lse_C.dtype), log_target_Cc))
            reduced.append(reduce(z, t, rows, target.softcap, needs_grad))
            if gradients is not None:
                gradients.add(z, rounded, part)
        ce, distance, kl, soft_ce, agreement = map(torch.cat, zip(*reduced, strict=True))
        values = {"ce": ce, "l1": distance, "kl": kl, "soft_ce": soft_ce}
        loss = sum(((weight * values[kind]).sum() for kind, weight in terms), start=distance.new_zeros(()))
    if gradients is not None:
        loss = _WithGradients.apply(loss, gradients.of_leaves, *logits)
    candidates = None
    if top:
        indices_Nc, logits_Nc, log_target_Nc = map(torch.cat, zip(*likeliest, strict=True))
        logits_Nc = _KnownLogits.apply(logits.hidden_NH, logits_Nc, head, indices_Nc)
        candidates = Candidates(indices_Nc, logits_Nc, log_target_Nc)
    return FusedLoss(loss, acceptance_probability(distance), agreement.float(), candidates=candidates)


@torch.no_grad()
def label_probabilities(logits: DraftLogits, head: HeadProducts, labels_N: Tensor) -> tuple[Tensor, Tensor]:
    """p_d of the label at each position [N], 0 for one that cannot be drafted, and whether it is the likeliest token.

    One product with the head, in chunks.
    """
    probabilities, likeliest = [], []
    for part, z in logit_chunks(logits, head, near_N=labels_N.clamp(min=0)):
        label_C, z = labels_N[part], z.to(torch.promote_types(z.dtype, torch.float32))
        log_probs_C = z.gather(1, label_C.clamp(min=0)[:, None])[:, 0] - z.logsumexp(-1)
        probabilities.append(log_probs_C.exp() * (label_C >= 0))
        likeliest.append(z.argmax(-1) == label_C)
    return torch.cat(probabilities), torch.cat(likeliest)


def logit_chunks(logits: DraftLogits, head: HeadProducts, near_N: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Positions of a chunk and their draft logits [C, Vd] minus, per row, the logit of one token.

    Args:
        near_N: tokens with a logit near the largest, which is taken from the others before they are rounded.
    """
    N, V = len(logits.hidden_NH), len(head.head_VH)
    C = chunk_rows(N, V, head.dtype.itemsize, gpu=logits.hidden_NH.is_cuda)
    logits = logits.rounded(head.dtype)
    for start in range(0, N, C):
        part = slice(start, min(start + C, N))
        z = torch.empty(part.stop - start, V, dtype=head.dtype, device=logits.hidden_NH.device)
        _shifted_logits(z, logits, part, token_C=near_N[part], head=head)
        yield part, z


# ----------------------------------------------------------------------------
# What a method's loss is given: the supervised positions of a batch, and the products with the frozen head.
# ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Supervision:
    """The supervised positions of a batch, their weights and the target's view of them.

    Attributes:
        config: weights of the terms.
        head: products with the frozen LM head over the draft vocabulary, whose ids are `draft_ids_Vd`.
        view: the target's view of all draft positions of N blocks, [N, K].
        supervised_NK: the positions that count; `supervised_M`: their indices into [N * K], filled up with zeros.
        positions: how many of `supervised_M` are no filling.
        weights_NK: w_i, 0 where not supervised; `total_weight`: their sum over the whole step.
        base_share: share of the loss that the parallel logits have in place of a sequential head's.
    """

    config: ObjectiveConfig
    head: HeadProducts
    draft_ids_Vd: Tensor
    view: TargetView
    supervised_NK: Tensor
    supervised_M: Tensor
    positions: int
    weights_NK: Tensor
    total_weight: Tensor
    base_share: float = 0.0

    def of(self, x_NKX: Tensor) -> Tensor:
        """The supervised positions of values per draft position, [M, ...]."""
        return x_NKX.flatten(0, 1)[self.supervised_M]

    def wide(self, x_NKX: Tensor) -> Tensor:
        """As `of`, in float32 if the values are narrower."""
        return self.of(x_NKX).to(torch.promote_types(x_NKX.dtype, torch.float32))

    @cached_property
    def target(self) -> TargetView:
        """The target's view of the supervised positions."""
        return TargetView(
            hidden_ND=self.of(self.view.hidden_ND),
            lse_N=self.of(self.view.lse_N),
            labels_N=self.of(self.view.labels_N),
            argmax_N=self.of(self.view.argmax_N),
            softcap=self.view.softcap,
        )

    @cached_property
    def weights_M(self) -> Tensor:
        """w_i / sum_i w_i of the supervised positions, 0 for the filling."""
        is_first_M = torch.arange(len(self.supervised_M), device=self.supervised_M.device) < self.positions
        return (self.of(self.weights_NK) * is_first_M / self.total_weight).to(self.view.lse_N.dtype)

    def terms(self, share: float = 1.0) -> list[Term]:
        """The terms between distributions, with weights share w_i / sum_i w_i at the supervised positions."""
        return self.config.terms(share * self.weights_M)


# ----------------------------------------------------------------------------
# Products with the head, and the logits of a chunk.
# ----------------------------------------------------------------------------


def chunk_rows(positions: int, vocabulary: int, itemsize: int, gpu: bool = False) -> int:
    """C: as many rows as the budget holds, chunks of equal size."""
    fitting = max(_FEWEST_ROWS, (GPU_CHUNK_BYTES if gpu else CHUNK_BYTES) // (2 * vocabulary * itemsize))
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

    def logits_at(self, x_XH: Tensor, tokens_Xc: Tensor) -> Tensor:
        """Logits of a few tokens per row, [..., c], in the type of `x_XH`; rows of the head are copied in parts."""
        x_NH, tokens_Nc = x_XH.flatten(0, -2), tokens_Xc.flatten(0, -2)
        rows = self._few(x_NH, tokens_Nc)
        return torch.cat([(head @ x_NH[part][..., None])[..., 0] for part, head in rows]).view(tokens_Xc.shape)

    def pull_back_at(self, grad_Nc: Tensor, tokens_Nc: Tensor) -> Tensor:
        """sum_i grad_i W[token_i], [N, H]."""
        if grad_Nc.dtype == self.head_VH.dtype:
            return F.embedding_bag(tokens_Nc, self.head_VH, per_sample_weights=grad_Nc, mode="sum")
        rows = self._few(grad_Nc, tokens_Nc)
        return torch.cat([(grad_Nc[part][:, None] @ head)[:, 0] for part, head in rows])

    def _few(self, like_NX: Tensor, tokens_Nc: Tensor) -> Iterator[tuple[slice, Tensor]]:
        step = max(1, TILE_BYTES // (tokens_Nc.shape[1] * self.head_VH.shape[1] * like_NX.dtype.itemsize))
        for start in range(0, len(tokens_Nc), step):
            part = slice(start, start + step)
            yield part, self.head_VH[tokens_Nc[part]].to(like_NX.dtype)


class _KnownLogits(torch.autograd.Function):
    """Logits of a few tokens per row that are known already; d logit / dh are the tokens' rows of the head."""

    @staticmethod
    def forward(ctx: Any, hidden_NH: Tensor, logits_Nc: Tensor, head: HeadProducts, tokens_Nc: Tensor) -> Tensor:
        ctx.head, ctx.dtype = head, hidden_NH.dtype
        ctx.save_for_backward(tokens_Nc)
        return logits_Nc.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (tokens_Nc,) = ctx.saved_tensors
        return ctx.head.pull_back_at(grads[0], tokens_Nc).to(ctx.dtype), None, None, None


class _WithGradients(torch.autograd.Function):
    """A value whose gradients towards the leaves are known already."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: tuple[Tensor | None, ...], *leaves: Tensor | None) -> Tensor:
        ctx.gradients = gradients
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, *(None if g is None else g.mul(grads[0]) for g in ctx.gradients))


class _Gradients:
    """d loss / d (hidden, latents, W2), collected chunk by chunk from d loss / dz."""

    def __init__(self, logits: DraftLogits, head: HeadProducts) -> None:
        hidden_NH, latent_Nr, w2_Vr = logits
        self.head, self.hidden_NH = head, torch.empty_like(hidden_NH)
        self.latent_Nr = None if latent_Nr is None else torch.empty_like(latent_Nr)
        self.w2_Vr = None if w2_Vr is None else torch.zeros_like(w2_Vr)

    def add(self, dz_CV: Tensor, logits: DraftLogits, part: slice) -> None:
        self.hidden_NH[part] = self.head.pull_back(dz_CV)
        if logits.latent_Nr is None or logits.w2_Vr is None or self.latent_Nr is None or self.w2_Vr is None:
            return
        self.latent_Nr[part] = dz_CV @ logits.w2_Vr
        latent_Cr = logits.latent_Nr[part].to(dz_CV.dtype)
        if dz_CV.dtype == self.w2_Vr.dtype:
            self.w2_Vr.addmm_(dz_CV.T, latent_Cr)
        else:
            self.w2_Vr += dz_CV.T @ latent_Cr

    @property
    def of_leaves(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        return self.hidden_NH, self.latent_Nr, self.w2_Vr


def _target_logits(t_CV: Tensor, view: TargetView, part: slice, head: HeadProducts) -> Tensor:
    """Fill t with the target's logits minus a constant per row; returns the constant [C]."""
    shift_C = view.lse_N[part]
    if view.softcap is not None:  # the product's own size, before the cap
        shift_C = view.softcap * torch.atanh((shift_C / view.softcap).clamp(-0.99, 0.99))
    shift_C = shift_C.to(t_CV.dtype)
    t_CV.copy_(-shift_C[:, None])
    head.add_logits(t_CV, view.hidden_ND[part].to(t_CV.dtype))
    return shift_C


def _likely_token(t_CV: Tensor, argmax_C: Tensor) -> Tensor:
    """The target's most likely draft token per row; `argmax_C` is -1 if its most likely token is none."""
    missing_C = argmax_C < 0
    if t_CV.is_cuda:  # the maximum of all rows costs less than waiting for how many there are
        return torch.where(missing_C, t_CV.argmax(-1), argmax_C)
    token_C = argmax_C.clone()
    token_C[missing_C] = t_CV[missing_C].argmax(-1)
    return token_C


def _shifted_logits(z_CV: Tensor, logits: DraftLogits, part: slice, *, token_C: Tensor, head: HeadProducts) -> None:
    """Fill z with the draft logits minus, per row, that of one token: bfloat16 is exact near zero alone."""
    hidden_CH, latent_Cr, w2_Vr = logits.hidden_NH[part], None, None
    shift_C = head.at(hidden_CH, token_C)
    if logits.latent_Nr is not None and logits.w2_Vr is not None:
        latent_Cr, w2_Vr = logits.latent_Nr[part].to(z_CV.dtype), logits.w2_Vr
        shift_C = shift_C + (latent_Cr.to(shift_C.dtype) * w2_Vr[token_C].to(shift_C.dtype)).sum(-1)
    z_CV.copy_(-shift_C.to(z_CV.dtype)[:, None])
    head.add_logits(z_CV, hidden_CH.to(z_CV.dtype))
    if latent_Cr is not None and w2_Vr is not None:
        z_CV.addmm_(latent_Cr, w2_Vr.T)


# ----------------------------------------------------------------------------
# Softmax, distance and gradient of the logits of a chunk, in place; the reference of the Triton kernel.
#
#     p_d = softmax(z),  p_t = exp(t - lse)                       rows of [C, Vd]; p_t may lack the mass outside Vd
#     ||p_d - p_t||_1 (outside mass included) = 2 sum_v (p_d - p_t)_+          because both distributions sum to one
#     b = [p_d > p_t],  d ||.||_1 / dz = 2 p_d (b - <p_d, b>),  d ce / dz = p_d - onehot
#     KL(p_t || p_d) = sum_v p_t (log p_t - log p_d),  d KL / dz = (sum_v p_t) p_d - p_t                 v in Vd
#     soft CE = -sum_v p_s log p_d,  p_s = p_t / sum_v p_t,  d soft CE / dz = p_d - p_s     0 if argmax p_t not in Vd
#
# The identity saves the sum of |.| and of p_t. Softmax of either side is one pass (`torch.softmax` reads a row while it
# is in cache), and the maximum of its result gives the log-sum-exp back: max(z) - log(max(p_d)).
# ----------------------------------------------------------------------------


_SCRATCH_BYTES = 2**21  # one buffer of the rows in work: small enough for a core's cache


class RowInputs(NamedTuple):
    """The scalars of each row, [C]; the target's logits are `t + shift`, their log-sum-exp over its vocabulary `lse`.

    `labels` and `argmax` index the draft vocabulary, -1 outside it; `ce`, `l1`, `kl` and `soft` (the soft
    cross-entropy) are the weights of the terms, the last two None for none.
    """

    shift_C: Tensor
    lse_C: Tensor
    labels_C: Tensor
    argmax_C: Tensor
    ce_C: Tensor
    l1_C: Tensor
    kl_C: Tensor | None = None
    soft_C: Tensor | None = None


def row_reducer(logits_CV: Tensor) -> Callable[..., tuple[Tensor, ...]]:
    """The Triton kernel on a GPU, else `reduce_rows`; they agree (tests/training/test_objective_triton.py)."""
    if logits_CV.is_cuda and logits_CV.dtype != torch.float64 and find_spec("triton") is not None:
        from outrider.drafters.fused_loss_triton import reduce_rows_triton

        return reduce_rows_triton
    return reduce_rows


def reduce_rows(
    z_CV: Tensor, t_CV: Tensor, rows: RowInputs, softcap: float | None, needs_grad: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Cross-entropy (0 without a label), ||p_d - p_t||_1, KL(p_t || p_d) and soft cross-entropy (0 where they have no
    weight) and whether the most likely tokens agree, per row [C].

    Both logit buffers are overwritten; with `needs_grad`, z then holds the derivative of the weighted sum by z.

    Arithmetic is in float32 for bfloat16 logits, a few rows at a time, else in the logits' own type.
    """
    step = max(1, _SCRATCH_BYTES // (4 * z_CV.shape[1]))
    dtype = torch.promote_types(z_CV.dtype, torch.float32)
    outputs = []
    for start in range(0, len(z_CV), step):
        part = slice(start, start + step)
        shift_C, lse_C, labels_C, argmax_C, ce_weight_C, l1_C = (values[part] for values in rows[:6])
        p_d, gap = z_CV[part].to(dtype), t_CV[part].to(dtype)  # the buffers themselves unless they are narrower
        label_C = labels_C.clamp(min=0)[:, None]
        top_C = p_d.amax(-1)
        agreement_C = (p_d.gather(1, argmax_C.clamp(min=0)[:, None])[:, 0] >= top_C) & (argmax_C >= 0)
        label_logit_C = p_d.gather(1, label_C)[:, 0]
        torch.softmax(p_d, -1, out=p_d)
        total_C = p_d.sum(-1)  # not quite one: softmax adds up plainly, which is off by 1e-5 over 150,000 terms
        p_d.div_(total_C[:, None])
        known_C = (labels_C >= 0).to(dtype)
        ce_C = (top_C - p_d.amax(-1).log() - label_logit_C) * known_C

        # gap = p_d - p_t, where p_t is its own softmax scaled to what the full vocabulary leaves of it
        shift_C = shift_C.to(dtype)
        if softcap is not None:
            gap.add_(shift_C[:, None]).div_(softcap).tanh_().mul_(softcap)
            shift_C = torch.zeros_like(shift_C)
        target_top_C = gap.amax(-1) + shift_C
        torch.softmax(gap, -1, out=gap)
        inside_C = (target_top_C - lse_C).exp() / gap.amax(-1)
        soft_C = torch.zeros_like(ce_C)
        soft_weight_C = None if rows.soft_C is None else (rows.soft_C[part] * (argmax_C >= 0)).to(dtype)
        if soft_weight_C is not None:
            log_p_d = p_d.clamp(min=torch.finfo(dtype).tiny).log_()
            soft_C = -(gap * log_p_d).sum(-1).masked_fill(argmax_C < 0, 0.0)
        towards_soft = gap * soft_weight_C[:, None] if needs_grad and soft_weight_C is not None else None
        kl_C, towards_kl = torch.zeros_like(ce_C), None
        if rows.kl_C is not None:
            p_t = gap * inside_C[:, None]
            kl_C = (torch.xlogy(p_t, p_t) - torch.xlogy(p_t, p_d.clamp(min=torch.finfo(dtype).tiny))).sum(-1)
            if needs_grad:
                mass_C = p_t.sum(-1)
                towards_kl = torch.addcmul(p_t.neg_(), p_d, mass_C[:, None]).mul_(rows.kl_C[part].to(dtype)[:, None])
        torch.addcmul(p_d, gap, inside_C[:, None], value=-1, out=gap)
        gap.clamp_(min=0)
        outputs.append((ce_C, 2 * gap.sum(-1), kl_C, soft_C, agreement_C))
        if needs_grad:
            above = gap.sign_().mul_(p_d)  # p_d b
            inner_C = above.sum(-1)
            scale_C = (ce_weight_C * known_C).to(dtype)
            above.mul_(2 * l1_C[:, None])
            towards_p_d = scale_C - 2 * l1_C * inner_C
            if soft_weight_C is not None:
                towards_p_d = towards_p_d + soft_weight_C
            grad = torch.addcmul(above, p_d, towards_p_d[:, None], out=p_d)
            grad.scatter_add_(1, label_C, -scale_C[:, None])
            if towards_kl is not None:
                grad.add_(towards_kl)
            if towards_soft is not None:
                grad.sub_(towards_soft)
            if grad.dtype != z_CV.dtype:
                z_CV[part].copy_(grad)
    ce_C, distance_C, kl_C, soft_C, agreement_C = map(torch.cat, zip(*outputs, strict=True))
    return ce_C, distance_C, kl_C, soft_C, agreement_C
