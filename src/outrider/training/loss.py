"""The training loss of a draft model: cross-entropy, distance to the target (1-norm, KL divergence), and confidence.

    p_d = softmax(W_d h + W2 l),  p_t = the target's distribution at the same position
    loss = sum_i w_i [ce (-log p_d(x_i)) + l1 ||p_d - p_t||_1 + kl KL(p_t || p_d)
                      + confidence BCE(c_i, a_i)] / sum_i w_i
    a_i = 1 - ||p_d - p_t||_1 / 2                              the acceptance probability
    w_i = exp(-(k_i - 1) / decay)                              k_i: position in the block, from 1
    with `dpace`:  w_k = sum_{j >= k} prod_{i <= j} (alpha + (1 - alpha) p_d(x_i)), detached; divided by the positions
    with `base`:   (1 - b) loss + b loss of softmax(W_d h),  b falls to 0; the BCE has its whole weight

    BlockObjective   drafter and batch  ->  rows of the supervised positions  ->  loss
    objective        rows and the target's view of them  ->  loss, acceptance, agreement
    _distances       the same positions in chunks of bounded size  ->  cross-entropy, distance and gradients
    lattice_loss     scores of the steps between candidates  ->  their own terms (LiLiCorr)
    reduce_rows      the logits of a chunk, drafter and target  ->  cross-entropy, p_d - p_t and d loss / d logits

The LM head W_d is frozen and needs no gradient. ||.||_1 counts the target's mass outside a reduced draft vocabulary:
tokens that can never be drafted are part of the distance. The KL divergence is over the draft vocabulary.

Source: DSpark, arXiv 2607.05147 (weights 0.1, 0.9, 1.0 and the decay); DFlash, arXiv 2602.06036 (CE with decay);
D-PACE, arXiv 2605.18810 (`dpace`, there for DFlash's CE); Domino, arXiv 2605.29707 (`base`); JetSpec, arXiv 2606.18394
(`kl`, there at a temperature of distillation, which is 1 here).
Shapes: N supervised positions, C positions of a chunk, K draft positions of a block, V target vocabulary, Vd draft
vocabulary, D target hidden, H draft hidden, r rank, c candidates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.drafters.base import BlockInputs, DraftModule, DraftRows
from outrider.drafters.dflash2 import candidate_scores
from outrider.target.model import Target
from outrider.training.batches import BlockBatch
from outrider.training.recipe import LatticeTerms, ObjectiveConfig, Precision


@dataclass(frozen=True)
class TargetView:
    """What the loss needs of the target at N supervised positions, without its logits.

    `hidden_ND` normed last hidden states; `lse_N` log-sum-exp of the full-vocabulary logits; `labels_N` the next token
    and `argmax_N` the target's most likely one, as indices into the draft vocabulary (-1: outside it; such a label
    has no cross-entropy); `softcap` as the target's.
    """

    hidden_ND: Tensor
    lse_N: Tensor
    labels_N: Tensor
    argmax_N: Tensor
    softcap: float | None = None


class ObjectiveOutput(NamedTuple):
    """`loss` is differentiable; the others are detached, per position [N]."""

    loss: Tensor
    acceptance_N: Tensor  # 1 - ||p_d - p_t||_1 / 2: the exact acceptance probability at temperature 1
    agreement_N: Tensor  # 1.0 where the two most likely tokens are the same: acceptance at temperature 0
    ce_N: Tensor  # of softmax(W_d h) where the draft is drawn among candidates


def inverse_ids(draft_ids_Vd: Tensor, vocab_size: int) -> Tensor:
    """[V] index into the draft vocabulary, -1 outside it."""
    inverse_V = torch.full((vocab_size,), -1, dtype=torch.long, device=draft_ids_Vd.device)
    inverse_V[draft_ids_Vd] = torch.arange(len(draft_ids_Vd), device=draft_ids_Vd.device)
    return inverse_V


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

    def __call__(
        self, drafter: DraftModule, batch: BlockBatch, total_weight: Tensor | None = None, progress: float = 1.0
    ) -> ObjectiveOutput:
        """Loss of the supervised positions.

        Args:
            total_weight: as in `objective`; of the position weights of the config, before those of D-PACE.
            progress: the part of the run's steps that are done, which the share of the parallel logits follows.
        """
        keep_NK = batch.supervised_NK
        device = keep_NK.device
        with torch.autocast(device.type, torch.bfloat16, enabled=self.products == torch.bfloat16):
            rows = self.rows(drafter, batch)

        def supervised(x_NK: Tensor) -> Tensor:
            return x_NK.flatten(0, 1)[batch.supervised_M]

        hidden_NH = supervised(rows.hidden_NKH).float()
        read_NH = hidden_NH if rows.confidence_NKH is None else supervised(rows.confidence_NKH).float()
        latent_Nr, embedding_Nr = (
            None if part_NKr is None else supervised(part_NKr).float()
            for part_NKr in (rows.latent_NKr, rows.embedding_NKr)
        )
        view = TargetView(
            hidden_ND=supervised(batch.target_hidden_NKD),
            lse_N=supervised(batch.lse_NK),
            labels_N=self.inverse_V[supervised(batch.labels_NK)],
            argmax_N=self.inverse_V[supervised(batch.argmax_NK)],
            softcap=self.softcap,
        )
        weights_NK = self.config.position_weights(keep_NK.shape[1], device) * keep_NK
        if total_weight is None:
            total_weight = weights_NK.sum()
        with torch.autocast(device.type, enabled=False):  # the caller's, where there is one
            if self.config.dpace is not None:
                likely_N, _ = label_probabilities(
                    (hidden_NH, latent_Nr, rows.w2_Vr),
                    HeadProducts(self.head_VH, self.products),
                    view.labels_N,
                    candidates=rows.candidates,
                )
                weights_NK = weights_NK * dpace_weights(scatter(likely_N, keep_NK), keep_NK, self.config.dpace)
            is_first_N = torch.arange(len(batch.supervised_M), device=device) < batch.positions
            found = objective(
                hidden_NH,
                self.head_VH,
                view,
                config=self.config,
                weights_N=supervised(weights_NK) * is_first_N,
                latent_Nr=latent_Nr,
                w2_Vr=rows.w2_Vr,
                confidence_N=self._confidence(rows, read_NH, embedding_Nr),
                products=self.products,
                total_weight=total_weight,
                candidates=None if rows.lattice is not None else rows.candidates,
                base_share=self.config.base_share(progress),
            )
        found = ObjectiveOutput(found.loss, *(figures_N[: batch.positions] for figures_N in found[1:]))
        if rows.lattice is None:
            return found
        loss, acceptance_NK, agreement_NK = self._lattice(rows, batch, weights_NK, total_weight=total_weight)
        return found._replace(
            loss=found.loss + loss,
            acceptance_N=supervised(acceptance_NK)[: batch.positions],
            agreement_N=supervised(agreement_NK)[: batch.positions].float(),
        )

    @torch.no_grad()
    def labels(self, drafter: DraftModule, batch: BlockBatch) -> tuple[Tensor, Tensor]:
        """[N, K] p_d of the labels, and whether they are the drafter's likeliest tokens; zeros where not supervised.

        Of a lattice, whose distributions follow from the candidates before, the second stands for both.
        """
        rows = self.rows(drafter, batch)
        if rows.lattice is not None:
            found = self(drafter, replace(batch, argmax_NK=batch.labels_NK))
            agreement_NK = scatter(found.agreement_N, batch.supervised_NK)
            return agreement_NK, agreement_NK
        hidden_NH, latent_Nr, labels_N = (
            None if x_NKX is None else x_NKX.flatten(0, 1)[batch.supervised_M]
            for x_NKX in (rows.hidden_NKH.float(), rows.latent_NKr, batch.labels_NK)
        )
        assert hidden_NH is not None and labels_N is not None
        likely_N, first_N = label_probabilities(
            (hidden_NH, latent_Nr, rows.w2_Vr),
            HeadProducts(self.head_VH, self.products),
            self.inverse_V[labels_N],
            candidates=rows.candidates,
        )
        return scatter(likely_N, batch.supervised_NK), scatter(first_N.float(), batch.supervised_NK)

    def _confidence(self, rows: DraftRows, hidden_NH: Tensor, embedding_Nr: Tensor | None) -> Tensor | None:
        """Logits of the confidences [N]; None without a confidence head."""
        if rows.confidence is None:
            return None
        if not self.config.confidence_gradient:
            hidden_NH, embedding_Nr = hidden_NH.detach(), None if embedding_Nr is None else embedding_Nr.detach()
        return rows.confidence(hidden_NH, embedding_Nr)

    def _lattice(
        self, rows: DraftRows, batch: BlockBatch, weights_NK: Tensor, total_weight: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Loss, acceptance and agreement [N, K] of draft tokens that are drawn by the scores of a lattice."""
        assert rows.lattice is not None and rows.candidates is not None
        keep_NK, device = batch.supervised_NK, batch.supervised_NK.device
        head = HeadProducts(self.head_VH, self.products)
        argmax_NK = self.inverse_V[batch.argmax_NK]
        with torch.autocast(device.type, enabled=False):
            indices_NKc, log_probs_NKc = candidate_log_probs(
                rows.hidden_NKH.float(), head, argmax_NK.clamp(min=0), count=rows.candidates
            )
            targets_NKc = head.logits_at(batch.target_hidden_NKD.float(), indices_NKc)
            if self.softcap is not None:
                targets_NKc = torch.tanh(targets_NKc / self.softcap) * self.softcap
        with torch.autocast(device.type, torch.bfloat16, enabled=self.products == torch.bfloat16):
            start_Nc, pairs_NJcc = rows.lattice(self.draft_ids_Vd[indices_NKc], log_probs_NKc)
        labels_NK = torch.where(keep_NK, self.inverse_V[batch.labels_NK], -1)
        return lattice_loss(
            (start_Nc, pairs_NJcc),
            indices_NKc == labels_NK[..., None],
            targets_NKc - batch.lse_NK[..., None],
            config=self.config.lattice,
            weights_NK=weights_NK / total_weight,
            is_argmax_NKc=indices_NKc == argmax_NK[..., None],
        )


def dpace_weights(likely_NK: Tensor, supervised_NK: Tensor, alpha: float) -> Tensor:
    """D-PACE's weights [N, K]: d (expected accepted drafts) / d log of each smoothed probability.

        s_i = alpha + (1 - alpha) q_i,   S = sum_j prod_{i <= j} s_i
        w_k = dS / d log s_k = sum_{j >= k} prod_{i <= j} s_i

    Args:
        likely_NK: q, the drafter's probability of the response's token, detached.
        supervised_NK: the positions that count, the first ones of each block.
        alpha: the least that a probability counts as; with 0, one unlikely token would end the weights of its block.
    """
    smoothed_NK = torch.where(supervised_NK, alpha + (1 - alpha) * likely_NK, 1.0)
    reached_NK = smoothed_NK.cumprod(-1) * supervised_NK
    return reached_NK.flip(-1).cumsum(-1).flip(-1)


def scatter(values_M: Tensor, supervised_NK: Tensor) -> Tensor:
    """Per-position values back into [N, K], zero where nothing was supervised."""
    row_NK = (supervised_NK.flatten().cumsum(0) - 1).view_as(supervised_NK)  # a mask as index would wait for a GPU
    return torch.where(supervised_NK, values_M[row_NK.clamp(min=0)], 0)


def objective(
    hidden_NH: Tensor,
    head_VH: Tensor,
    view: TargetView,
    config: ObjectiveConfig,
    *,
    weights_N: Tensor,
    latent_Nr: Tensor | None = None,
    w2_Vr: Tensor | None = None,
    confidence_N: Tensor | None = None,
    products: torch.dtype | None = None,
    total_weight: Tensor | None = None,
    candidates: int | None = None,
    base_share: float = 0.0,
) -> ObjectiveOutput:
    """The weighted mean loss over N supervised positions.

    Args:
        hidden_NH: normed draft hidden states.
        head_VH: the frozen LM head, restricted to the draft vocabulary.
        weights_N: position weights w_i.
        latent_Nr, w2_Vr: the sequential head's latent and its output matrix; None without one.
        confidence_N: logits of c; None without a confidence head.
        products: type of the vocabulary-sized matrix products and of the logit buffers, bfloat16 for speed; softmax
            and distances are float32 all the same. None: the type of `hidden_NH`.
        total_weight: the denominator, where these positions are one part of a step; None: their own sum.
        candidates: number of top tokens of W_d h that latents and w2 rescore, the only ones that can be drafted. Both
            softmax(W_d h) and p_d over the candidates then have a loss; acceptance and agreement are the latter's.
        base_share: b, the share of the loss that softmax(W_d h) has in place of p_d, for another pass over the logits.
            Without latents the two are one, and with candidates both have a whole loss as it is.

    Raises:
        ValueError: a KL term with candidates.
    """
    if config.kl and candidates is not None:
        raise ValueError("objective.kl is for drafters that draw from the whole draft vocabulary: leave it 0 here.")
    w_N = (weights_N / (weights_N.sum() if total_weight is None else total_weight)).to(view.lse_N.dtype)
    head = HeadProducts(head_VH, products or hidden_NH.dtype)
    share = base_share if latent_Nr is not None and candidates is None else 0.0
    total, ce_N, distance_N, agreement_N = _distances(
        (hidden_NH, latent_Nr, w2_Vr),
        head,
        view,
        weights=TermWeights.of(config, (1 - share) * w_N),
        candidates=candidates,
    )
    if share:
        parallel = (hidden_NH, None, None)
        weights = TermWeights.of(config, share * w_N)
        total = total + _distances(parallel, head, view, weights=weights, candidates=None)[0]
    acceptance_N = (1 - distance_N / 2).clamp(0, 1)
    if confidence_N is not None:
        bce_N = F.binary_cross_entropy_with_logits(confidence_N, acceptance_N, reduction="none")
        total = total + config.confidence * (w_N * bce_N).sum()
    return ObjectiveOutput(total, acceptance_N, agreement_N.float(), ce_N=ce_N)


# ----------------------------------------------------------------------------
# The vocabulary-sized part in chunks of positions: two [C, Vd] logit buffers, whatever N and V are.
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
# ----------------------------------------------------------------------------


CHUNK_BYTES = 2**27  # both logit buffers of a chunk
GPU_CHUNK_BYTES = 2**29  # there a product of more rows is faster
TILE_BYTES = 2**26  # of a head stored in another type than the products', converted tile by tile
_FEWEST_ROWS = 16


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
        rows = self._few(grad_Nc, tokens_Nc)
        return torch.cat([(grad_Nc[part][:, None] @ head)[:, 0] for part, head in rows])

    def _few(self, like_NX: Tensor, tokens_Nc: Tensor) -> Iterator[tuple[slice, Tensor]]:
        step = max(1, TILE_BYTES // (tokens_Nc.shape[1] * self.head_VH.shape[1] * like_NX.dtype.itemsize))
        for start in range(0, len(tokens_Nc), step):
            part = slice(start, start + step)
            yield part, self.head_VH[tokens_Nc[part]].to(like_NX.dtype)


class TermWeights(NamedTuple):
    """The weights of the terms at each position [N]; `kl` is None where there is no such term."""

    ce_N: Tensor
    l1_N: Tensor
    kl_N: Tensor | None

    @classmethod
    def of(cls, config: ObjectiveConfig, weights_N: Tensor) -> TermWeights:
        return cls(config.ce * weights_N, config.l1 * weights_N, config.kl * weights_N if config.kl else None)


class RowInputs(NamedTuple):
    """Per-row scalars [C]. The target's logits are `t + shift`, its log-sum-exp over the full vocabulary `lse`.

    `labels` and `argmax` index the draft vocabulary, -1 outside it; `ce`, `l1` and `kl` are the weights of the terms,
    `kl` None for none.
    """

    shift_C: Tensor
    lse_C: Tensor
    labels_C: Tensor
    argmax_C: Tensor
    ce_C: Tensor
    l1_C: Tensor
    kl_C: Tensor | None = None


class RowOutputs(NamedTuple):
    """Per row [C]: cross-entropy (0 without a label), ||p_d - p_t||_1, KL(p_t || p_d) (0 where it has no weight), and
    whether the most likely tokens agree.
    """

    ce_C: Tensor
    distance_C: Tensor
    kl_C: Tensor
    agreement_C: Tensor


class _WithGradients(torch.autograd.Function):
    """A value whose gradients towards the leaves are known already."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: tuple[Tensor | None, ...], *leaves: Tensor | None) -> Tensor:
        ctx.gradients = gradients
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, *(None if g is None else g.mul(grads[0]) for g in ctx.gradients))


def _distances(
    trained: tuple[Tensor, Tensor | None, Tensor | None],
    head: HeadProducts,
    view: TargetView,
    *,
    weights: TermWeights,
    candidates: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """sum_i ce_i CE_i + l1_i ||p_d - p_t||_1 + kl_i KL_i with CE, distance and agreement per position [N].

    `trained` is (hidden_NH, latent_Nr, w2_Vr). With `candidates` this is the sum of two: of softmax(W_d h), whose CE is
    returned, and of the distribution over the candidates, whose distance and agreement are returned.
    """
    needs_grad = torch.is_grad_enabled()
    hidden_NH, latent_Nr, w2_Vr = trained
    with torch.no_grad():
        N, V = len(hidden_NH), len(head.head_VH)
        C = chunk_rows(N, V, head.dtype.itemsize, gpu=hidden_NH.is_cuda)
        # Where candidates are chosen, z is the parallel drafter's alone; latents and W2 rescore the candidates only.
        sequential = candidates is None and latent_Nr is not None
        w2 = w2_Vr.to(head.dtype) if sequential and w2_Vr is not None else None
        d_hidden = torch.empty_like(hidden_NH) if needs_grad else None
        d_latent = None if latent_Nr is None or not needs_grad else torch.empty_like(latent_Nr)
        d_w2 = None if w2_Vr is None or not needs_grad else torch.zeros_like(w2_Vr)
        z_buffer, t_buffer = (torch.empty(C, V, dtype=head.dtype, device=hidden_NH.device) for _ in range(2))
        reduce = row_reducer(z_buffer)
        found, rescored = list[RowOutputs](), list[RowOutputs]()
        for start in range(0, N, C):
            part = slice(start, min(start + C, N))
            z, t = z_buffer[: part.stop - start], t_buffer[: part.stop - start]
            latent = latent_Nr[part].to(head.dtype) if sequential and latent_Nr is not None else None
            shift_C = _target_logits(t, view, part, head=head)
            _draft_logits(z, t, hidden_NH[part], latent_Cr=latent, w2_Vr=w2, argmax_C=view.argmax_N[part], head=head)
            scalars = (view.lse_N, view.labels_N, view.argmax_N, weights.ce_N, weights.l1_N)
            rows = RowInputs(shift_C, *(values[part] for values in scalars))
            if weights.kl_N is not None:
                rows = rows._replace(kl_C=weights.kl_N[part])
            if candidates is not None:  # before the reduction, which overwrites both buffers
                assert latent_Nr is not None and w2_Vr is not None, "candidates are scored by latents and W2"
                indices, outputs, gradients = _reduce_candidates(
                    z,
                    t,
                    rows,
                    softcap=view.softcap,
                    count=candidates,
                    latent_Cr=latent_Nr[part],
                    w2_Vr=w2_Vr,
                    needs_grad=needs_grad,
                )
                rescored.append(outputs)
            found.append(reduce(z, t, rows, view.softcap, needs_grad))
            if candidates is not None and gradients and d_latent is not None and d_w2 is not None:
                z.scatter_add_(1, indices, gradients[0].to(z.dtype))
                d_latent[part] = gradients[1]
                d_w2.index_add_(0, indices.flatten(), gradients[2].flatten(0, 1))
            if d_hidden is not None:
                d_hidden[part] = head.pull_back(z)
            if d_latent is not None and d_w2 is not None and latent is not None and w2 is not None:
                d_latent[part] = z @ w2
                if head.dtype == d_w2.dtype:
                    d_w2.addmm_(z.T, latent)
                else:
                    d_w2 += z.T @ latent
        ce, distance, kl, agreement = map(torch.cat, zip(*found, strict=True))
        loss = (weights.ce_N * ce).sum() + (weights.l1_N * distance).sum()
        if weights.kl_N is not None:
            loss = loss + (weights.kl_N * kl).sum()
        if rescored:  # what is drafted is drawn among the candidates
            selected_ce, distance, _, agreement = map(torch.cat, zip(*rescored, strict=True))
            loss = loss + (weights.ce_N * selected_ce).sum() + (weights.l1_N * distance).sum()
    if needs_grad:
        loss = _WithGradients.apply(loss, (d_hidden, d_latent, d_w2), *trained)
    return loss, ce, distance, agreement


@torch.no_grad()
def label_probabilities(
    trained: tuple[Tensor, Tensor | None, Tensor | None],
    head: HeadProducts,
    labels_N: Tensor,
    candidates: int | None = None,
) -> tuple[Tensor, Tensor]:
    """p_d of the label at each position [N], 0 for one that cannot be drafted, and whether it is the likeliest token.

    One product with the head, in chunks. Without latents p_d is softmax(W_d h), also where a lattice rescores the
    candidates.
    """
    hidden_NH, latent_Nr, w2_Vr = trained
    N, V = len(hidden_NH), len(head.head_VH)
    C = chunk_rows(N, V, head.dtype.itemsize, gpu=hidden_NH.is_cuda)
    found, likeliest = [], []
    for start in range(0, N, C):
        part = slice(start, start + C)
        z = torch.empty(len(hidden_NH[part]), V, dtype=head.dtype, device=hidden_NH.device)
        label_C, wide = labels_N[part], torch.promote_types(z.dtype, torch.float32)
        latent_Cr, w2 = None, None
        if candidates is None and latent_Nr is not None and w2_Vr is not None:
            latent_Cr, w2 = latent_Nr[part].to(head.dtype), w2_Vr.to(head.dtype)
        _shifted_logits(z, hidden_NH[part], latent_Cr=latent_Cr, w2_Vr=w2, token_C=label_C.clamp(min=0), head=head)
        if latent_Nr is not None and w2_Vr is not None and candidates is not None:
            top, indices = z.topk(candidates, dim=-1)
            scores = candidate_scores(top.to(wide), w2_Vr[indices], latent_Nr[part])
            found.append((scores.softmax(-1) * (indices == label_C[:, None])).sum(-1))
            likeliest.append(indices.gather(-1, scores.argmax(-1, keepdim=True))[:, 0] == label_C)
            continue
        z = z.to(wide)
        likeliest.append(z.argmax(-1) == label_C)
        log_probs_C = z.gather(1, label_C.clamp(min=0)[:, None])[:, 0] - z.logsumexp(-1)
        found.append(log_probs_C.exp() * (label_C >= 0))
    return torch.cat(found), torch.cat(likeliest)


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
    *,
    argmax_C: Tensor,
    head: HeadProducts,
) -> None:
    """Fill z with the drafter's logits minus, per row, the one of the target's most likely draftable token."""
    missing_C = argmax_C < 0
    if t_CV.is_cuda:  # the maximum of all rows costs less than waiting for how many there are
        token_C = torch.where(missing_C, t_CV.argmax(-1), argmax_C)
    else:
        token_C = argmax_C.clone()
        token_C[missing_C] = t_CV[missing_C].argmax(-1)
    _shifted_logits(z_CV, hidden_CH, latent_Cr=latent_Cr, w2_Vr=w2_Vr, token_C=token_C, head=head)


def _shifted_logits(
    z_CV: Tensor,
    hidden_CH: Tensor,
    *,
    latent_Cr: Tensor | None,
    w2_Vr: Tensor | None,
    token_C: Tensor,
    head: HeadProducts,
) -> None:
    """Fill z with the drafter's logits minus, per row, that of one token: bfloat16 is exact near zero alone."""
    shift_C = head.at(hidden_CH, token_C)
    if latent_Cr is not None and w2_Vr is not None:
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
#
# The identity saves the sum of |.| and of p_t. Softmax of either side is one pass (`torch.softmax` reads a row while it
# is in cache), and the maximum of its result gives the log-sum-exp back: max(z) - log(max(p_d)).
# ----------------------------------------------------------------------------


_SCRATCH_BYTES = 2**21  # one buffer of the rows in work: small enough for a core's cache


def row_reducer(logits_CV: Tensor) -> Callable[..., RowOutputs]:
    """The fused kernel where it can run, else the torch one; they agree (tests/training/test_objective_triton.py)."""
    if logits_CV.is_cuda and logits_CV.dtype != torch.float64 and find_spec("triton") is not None:
        from outrider.training.loss_triton import reduce_rows_triton

        return reduce_rows_triton
    return reduce_rows


def reduce_rows(z_CV: Tensor, t_CV: Tensor, rows: RowInputs, softcap: float | None, needs_grad: bool) -> RowOutputs:
    """Reduce both logit buffers; with `needs_grad`, z then holds d(ce CE + l1 distance + kl KL) / dz. Both are
    overwritten.

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
        kl_C, towards_kl = torch.zeros_like(ce_C), None
        if rows.kl_C is not None:
            p_t = gap * inside_C[:, None]
            kl_C = (torch.xlogy(p_t, p_t) - torch.xlogy(p_t, p_d.clamp(min=torch.finfo(dtype).tiny))).sum(-1)
            if needs_grad:
                mass_C = p_t.sum(-1)
                towards_kl = torch.addcmul(p_t.neg_(), p_d, mass_C[:, None]).mul_(rows.kl_C[part].to(dtype)[:, None])
        torch.addcmul(p_d, gap, inside_C[:, None], value=-1, out=gap)
        gap.clamp_(min=0)
        outputs.append(RowOutputs(ce_C, 2 * gap.sum(-1), kl_C, agreement_C=agreement_C))
        if needs_grad:
            above = gap.sign_().mul_(p_d)  # p_d b
            inner_C = above.sum(-1)
            scale_C = (ce_weight_C * known_C).to(dtype)
            above.mul_(2 * l1_C[:, None])
            grad = torch.addcmul(above, p_d, (scale_C - 2 * l1_C * inner_C)[:, None], out=p_d)
            grad.scatter_add_(1, label_C, -scale_C[:, None])
            if towards_kl is not None:
                grad.add_(towards_kl)
            if grad.dtype != z_CV.dtype:
                z_CV[part].copy_(grad)
    return RowOutputs(*map(torch.cat, zip(*outputs, strict=True)))


# ----------------------------------------------------------------------------
# The loss of a distribution over a position's top tokens (drafters/dflash2.py).
#
#     C_i = the c likeliest tokens of U_i,   s_i(v) = U_i(v) + <l_i, W2[v]>,   p_d = softmax(s_i), zero outside C_i
#     ||p_d - p_t||_1 = 2 sum_{v in C_i} (p_d - p_t)_+        both sum to one, and p_d has no mass elsewhere
#     CE = -log p_d(x_i) where x_i is in C_i, else none
#
# C_i is a choice and has no gradient; s_i has, towards U_i too. Everything here is [C, c]: plain autograd will do.
# ----------------------------------------------------------------------------


def _reduce_candidates(
    z_CV: Tensor,
    t_CV: Tensor,
    rows: RowInputs,
    softcap: float | None,
    count: int,
    *,
    latent_Cr: Tensor,
    w2_Vr: Tensor,
    needs_grad: bool,
) -> tuple[Tensor, RowOutputs, tuple[Tensor, ...]]:
    """Indices of the candidates [C, c], their results per row and, with `needs_grad`, gradients of ce CE + l1 distance.

    The gradients are those of the candidates' logits [C, c], of the latents [C, r] and of the candidates' rows of W2
    [C, c, r]. z is the drafter's logits up to a constant per row, `t_CV + rows.shift_C` the target's; both are read.
    """
    wide = torch.promote_types(z_CV.dtype, torch.float32)
    top, indices = z_CV.topk(count, dim=-1)
    logits = t_CV.gather(1, indices).to(wide) + rows.shift_C[:, None].to(wide)
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    p_t = (logits - rows.lse_C[:, None]).exp()
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_(needs_grad) for x in (top.to(wide), latent_Cr, w2_Vr[indices])]
        unary, latent, codes = leaves
        log_p_d = candidate_scores(unary, codes, latent).log_softmax(-1)
        ce_C = -log_p_d.masked_fill(indices != rows.labels_C[:, None], 0.0).sum(-1)
        distance_C = 2 * (log_p_d.exp() - p_t).clamp(min=0).sum(-1)
        loss = (rows.ce_C * ce_C + rows.l1_C * distance_C).sum()
    likeliest_C = indices.gather(1, log_p_d.argmax(-1, keepdim=True))[:, 0]
    found = ce_C.detach(), distance_C.detach()
    outputs = RowOutputs(*found, torch.zeros_like(found[0]), likeliest_C == rows.argmax_C)
    return indices, outputs, torch.autograd.grad(loss, leaves) if needs_grad else ()


# ----------------------------------------------------------------------------
# The loss of scores of steps between candidates (contrib/lilicorr.py).
#
#     q_k = softmax(s_k), s_k the scores of the steps from the true x_{k-1} to C_k
#     L_k = ce (-log q_k(x_k)) + margin [m - s_k(x_k) + max_{j != x_k} s_k(j)]_+
#           + penalty sum_j q_k(j) [t_k(x_k) - t_k(j)]_+                                     t_k: the target's logits
#
# The penalty costs little where the target finds the other candidate likely, too. Position k counts while x_1 .. x_k
# are all candidates; otherwise no draft gets there along the text, and the acceptance behind is 0. The objective of the
# parallel logits is beside this, with the same position weights.
#
# Source: LiLiCorr, arXiv 2608.20530, in NVIDIA's Model Optimizer, which has no position weights here, divides by the
# number of positions that count, and leaves out blocks that reach beyond the response.
# Shapes: N blocks, K positions, J = K - 1, c candidates.
# ----------------------------------------------------------------------------


class _LogProbs(torch.autograd.Function):
    """log p [M, c] of candidates. d log p_i / dh = W[v_i] - E_p W, of which the forward brings E_p W [M, H]."""

    @staticmethod
    def forward(
        ctx: Any, hidden_MH: Tensor, head: HeadProducts, indices_Mc: Tensor, lse_M: Tensor, mean_MH: Tensor
    ) -> Tensor:
        ctx.head = head
        ctx.save_for_backward(indices_Mc, mean_MH)
        return head.logits_at(hidden_MH, indices_Mc) - lse_M[:, None]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        indices_Mc, mean_MH = ctx.saved_tensors
        towards_MH = ctx.head.pull_back_at(grads[0], indices_Mc) - grads[0].sum(-1, keepdim=True) * mean_MH
        return towards_MH, None, None, None, None


def candidate_log_probs(hidden_NKH: Tensor, head: HeadProducts, near_NK: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` likeliest tokens of softmax(W_d h), likeliest first, and the logarithms of their probabilities.

    These are differentiable, towards the whole softmax; the choice is not.

    Args:
        near_NK: tokens with a logit near the largest, which is taken from the others before they are rounded.
    """
    hidden_MH, near_M = hidden_NKH.flatten(0, 1), near_NK.flatten()
    needs_grad = torch.is_grad_enabled() and hidden_MH.requires_grad
    chosen, sums, means = [], [], []
    with torch.no_grad():
        M, V = len(hidden_MH), len(head.head_VH)
        C = chunk_rows(M, V, head.dtype.itemsize)
        for start in range(0, M, C):
            rows_CH = hidden_MH[start : start + C]
            shift_C = head.at(rows_CH, near_M[start : start + C])
            z = (-shift_C.to(head.dtype))[:, None].expand(-1, V).contiguous()
            head.add_logits(z, rows_CH.to(head.dtype))
            indices_Cc = z.topk(count, dim=-1).indices
            order_Cc = torch.sort(head.logits_at(rows_CH, indices_Cc), stable=True, descending=True).indices
            chosen.append(indices_Cc.gather(-1, order_Cc))
            wide = z.to(rows_CH.dtype)
            sums.append(wide.logsumexp(-1) + shift_C.to(head.dtype).to(wide.dtype))
            if needs_grad:
                means.append(head.pull_back(wide.softmax(-1).to(head.dtype)).to(wide.dtype))
        indices_Mc, lse_M = torch.cat(chosen), torch.cat(sums)
        mean_MH = torch.cat(means) if needs_grad else lse_M
    log_probs_Mc = _LogProbs.apply(hidden_MH, head, indices_Mc, lse_M, mean_MH)
    shape = (*near_NK.shape, count)
    return indices_Mc.view(shape), log_probs_Mc.view(shape)


def lattice_loss(
    scores: tuple[Tensor, Tensor],
    true_NKc: Tensor,
    log_targets_NKc: Tensor,
    *,
    config: LatticeTerms,
    weights_NK: Tensor,
    is_argmax_NKc: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """sum_i w_i L_i, and acceptance and agreement per position [N, K], detached.

    Args:
        scores: of the first position [N, c], and of each later one by the candidate before and its own [N, J, c, c].
        true_NKc: which candidate is the response's token, none where it is not among them or not supervised.
        log_targets_NKc: log p_t of the candidates.
        weights_NK: w_i, 0 where not supervised.
        is_argmax_NKc: which candidate is the target's likeliest token.
    """
    start_Nc, pairs_NJcc = scores
    found_NK, place_NK = true_NKc.any(-1), true_NKc.int().argmax(-1)
    through_NK = found_NK.cumprod(-1).bool()
    reached_NK = torch.cat((torch.ones_like(found_NK[:, :1]), through_NK[:, :-1]), dim=1)
    from_N1c = place_NK[:, :-1, None, None].expand(-1, -1, 1, start_Nc.shape[-1])
    steps_NKc = torch.cat((start_Nc[:, None], pairs_NJcc.gather(2, from_N1c)[:, :, 0]), dim=1)
    log_q_NKc = steps_NKc.log_softmax(-1)
    loss_NK = -config.ce * log_q_NKc.gather(-1, place_NK[..., None])[..., 0]
    if config.margin and steps_NKc.shape[-1] > 1:
        best_NK = steps_NKc.masked_fill(true_NKc, -torch.inf).amax(-1)
        gap_NK = steps_NKc.gather(-1, place_NK[..., None])[..., 0] - best_NK
        loss_NK = loss_NK + config.margin * F.relu(config.margin_width - gap_NK)
    if config.penalty:
        true_NK1 = log_targets_NKc.gather(-1, place_NK[..., None])
        loss_NK = loss_NK + config.penalty * (log_q_NKc.exp() * F.relu(true_NK1 - log_targets_NKc)).sum(-1)
    total = torch.where(through_NK, weights_NK * loss_NK, 0.0).sum()
    with torch.no_grad():
        distance_NK = 2 * (log_q_NKc.exp() - log_targets_NKc.exp()).clamp(min=0).sum(-1)
        acceptance_NK = (1 - distance_NK / 2).clamp(0, 1) * reached_NK
        agreement_NK = is_argmax_NKc.gather(-1, log_q_NKc.argmax(-1, keepdim=True))[..., 0] & reached_NK
    return total, acceptance_NK, agreement_NK
