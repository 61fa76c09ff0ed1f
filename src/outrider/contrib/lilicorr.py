"""LiLiCorr: DFlash, and a small transformer that scores the steps between the likeliest tokens of neighbouring rows.

    C_k    = the c likeliest tokens of U_k = W_head h_k         every position on its own, from one parallel pass
    x_ki   = P_t E[v_ki] + P_h h_k + MLP(LN(f_ki)) + slot_k + rank_i             v_ki: token i of C_k
    f_ki   = [log u, u, log u - log u_k1, (i - 1) / (c - 1), i = 1]              u_ki = softmax(U_k)(v_ki)
    y      = norm(transformer(x))                               all K c candidates see each other
    a      = norm(P_a H_ctx[anchor - 1])                        the newest committed context feature; 0: there is none
    z_ki   = silu(W [y_ki; a; y_ki * a] + b)
    s_1(j) = S <n(W_a a), n(W_in z_1j)>,  s_k(j) = S <n(W_out z_{k-1,i}), n(W_in z_kj)>     i: the candidate drawn last
    p_k    = warp(softmax(s_k)), zero outside C_k

n(.) scales a vector to length 1, so a score is S times a cosine. Attention in the transformer has a learned bias for
every signed distance between positions, and one more for candidates of the same position. The scores of all steps come
from one pass; only the choice of one candidate after the other is sequential. Each p_k is an exact distribution over
the vocabulary, so verification stays lossless.

`conv_kernel_size` and `conv_group_size` put DFlash 2's convolutions around the sublayers of the backbone.

Source: LiLiCorr, arXiv 2608.20530, as NVIDIA's Model Optimizer trains it and vLLM and SGLang serve it, whose parameter
names these are but for `attn.in_proj` (below).
Shapes: N blocks, R requests, A those that draw, K positions, c candidates, M = K c lattice rows, H draft hidden,
h head hidden, Q attention heads, d length of the vectors that are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Annotated, Any, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from outrider.checkpoints.dialects.base import ExportedCheckpoint, Fields, Source, TargetFacts
from outrider.checkpoints.dialects.blocks import BlockFields, read_vocabulary
from outrider.checkpoints.dialects.zlab import ZLab, embedding_scale, read_block
from outrider.checkpoints.registry import Export, Method
from outrider.drafters.base import (
    BlockInputs,
    DraftCall,
    Drafter,
    DrafterWeights,
    DraftRows,
    longest_draft,
)
from outrider.drafters.cache import DraftSession
from outrider.drafters.chain import Rows, sample_rows
from outrider.drafters.config import Count
from outrider.drafters.dflash import BlockDrafter, DFlash, DFlashConfig, DraftLayer
from outrider.drafters.dflash2 import ConvolvedLayer, check_convolution
from outrider.drafters.draft import Draft
from outrider.drafters.fused_loss import DraftLogits, HeadProducts, Supervision, logit_chunks
from outrider.drafters.loss import DraftLoss, ObjectiveConfig
from outrider.target.linear import Packable
from outrider.utils.documents import Section

FEATURES = 5  # of f_ki
_INITIAL_STD = 0.02


class LatticeTerms(Section):
    """Weights of the terms of the lattice's scores."""

    ce: float = Field(0.25, ge=0)
    """Weight of the cross-entropy among the candidates."""
    margin: float = Field(0.0, ge=0)
    """Weight of the hinge between the true candidate's score and the best other one's."""
    margin_width: float = Field(2.0, gt=0)
    """By how much the true one's must be larger."""
    penalty: float = Field(0.25, ge=0)
    """Weight of the expected gap of the target's logits between the true candidate and the one that is drafted."""


class LiLiCorrObjective(ObjectiveConfig):
    """Terms of the parallel logits, and of the lattice's scores beside them."""

    lattice: LatticeTerms = LatticeTerms()
    """Of LiLiCorr drafters: what their scores are trained by, beside the terms above of the parallel logits."""


@dataclass(frozen=True, kw_only=True)
class LiLiCorrConfig(DFlashConfig):
    """DFlash's fields and those of the head; defaults are those of Model Optimizer's recipe but for the widths."""

    algorithm: ClassVar[str] = "lilicorr"
    objective: ClassVar[type[ObjectiveConfig]] = LiLiCorrObjective

    block_size: Annotated[int, Field(ge=2, description="Rows of a block, the anchor included.")] = 8
    conv_kernel_size: Annotated[int, Field(ge=0, description="Rows that the causal convolution sees; 0: none.")] = 0
    conv_group_size: Annotated[int, Field(ge=0, description="Channels of a group of the convolution; 0: none.")] = 0
    lilicorr_candidate_topk: Annotated[Count, Field(description="Likeliest tokens of a row that can be drafted.")] = 8
    lilicorr_hidden_size: Annotated[
        int, Field(ge=0, description="Width of the transformer over candidates; 0: the target's.")
    ] = 256
    lilicorr_num_layers: Annotated[Count, Field(description="Layers of the transformer over candidates.")] = 2
    lilicorr_num_heads: Annotated[Count, Field(description="Attention heads of each of them.")] = 8
    lilicorr_mlp_ratio: Annotated[float, Field(gt=0, description="Width of their MLPs, in their own widths.")] = 2.0
    lilicorr_factor_dim: Annotated[Count, Field(description="Length of the vectors whose cosines are scores.")] = 256
    lilicorr_vector_eps: Annotated[float, Field(gt=0, lt=0.5, description="Least length they are divided by.")] = 1e-4
    lilicorr_logit_scale: Annotated[float, Field(gt=0, description="What cosines are multiplied by.")] = 8.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if bool(self.conv_kernel_size) != bool(self.conv_group_size):
            raise ValueError(
                f"conv_kernel_size {self.conv_kernel_size} and conv_group_size {self.conv_group_size}: the "
                "convolutions need both; leave both out, or 0, for none."
            )
        if self.conv_kernel_size:
            check_convolution(self)
        if self.head_width % self.lilicorr_num_heads:
            raise ValueError(
                f"lilicorr_num_heads {self.lilicorr_num_heads} must divide the head's width {self.head_width}."
            )
        if self.lilicorr_candidate_topk > self.draft_vocab_size:
            raise ValueError(
                f"lilicorr_candidate_topk {self.lilicorr_candidate_topk} must be between 1 and draft_vocab_size "
                f"{self.draft_vocab_size}."
            )

    @property
    def head_width(self) -> int:
        """h."""
        return self.lilicorr_hidden_size or self.hidden_size

    def describe_heads(self) -> list[tuple[str, str]]:
        shape = f"{self.lilicorr_num_layers} layers of {self.head_width}, vectors of {self.lilicorr_factor_dim}"
        rows = [("candidates a position", str(self.lilicorr_candidate_topk)), ("scores of steps", shape)]
        if self.conv_kernel_size:
            rows.append(("convolutions", f"{self.conv_kernel_size} rows, groups of {self.conv_group_size}"))
        return rows


class LatticeMLP(Packable):
    """W_2 silu(W_1 x + b_1) + b_2."""

    groups = (("up_proj",), ("down_proj",))

    def __init__(self, inputs: int, inner: int, outputs: int) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(inputs, inner), nn.Linear(inner, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.up_proj(x)))


class LatticeAttention(Packable):
    """Attention of every candidate to every candidate."""

    groups = (("in_proj",), ("out_proj",))

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.in_proj, self.out_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x_NMh: Tensor, bias_QMM: Tensor) -> Tensor:
        q, k, v = self.in_proj(x_NMh).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        out_NQME = F.scaled_dot_product_attention(q, k, v, attn_mask=bias_QMM.to(q.dtype))
        return self.out_proj(out_NQME.transpose(1, 2).flatten(-2))


class LatticeLayer(nn.Module):
    """x += attention(norm(x)), x += MLP(norm(x))."""

    def __init__(self, config: LiLiCorrConfig) -> None:
        super().__init__()
        h = config.head_width
        self.attn_norm = nn.RMSNorm(h, eps=config.rms_norm_eps)
        self.attn = LatticeAttention(h, config.lilicorr_num_heads)
        self.mlp_norm = nn.RMSNorm(h, eps=config.rms_norm_eps)
        self.mlp = LatticeMLP(h, int(h * config.lilicorr_mlp_ratio), h)

    def forward(self, x_NMh: Tensor, bias_QMM: Tensor) -> Tensor:
        x_NMh = x_NMh + self.attn(self.attn_norm(x_NMh), bias_QMM)
        return x_NMh + self.mlp(self.mlp_norm(x_NMh))


class LatticeHead(Packable):
    """The scores of all steps through the candidates of a block."""

    def __init__(self, config: LiLiCorrConfig) -> None:
        super().__init__()
        H, h, d, eps = config.hidden_size, config.head_width, config.lilicorr_factor_dim, config.rms_norm_eps
        self.config = config
        self.token_proj = nn.Identity() if h == H else nn.Linear(H, h)
        self.pass_hidden_proj = nn.Linear(H, h)
        self.feature_norm = nn.LayerNorm(FEATURES)
        self.feature_mlp = LatticeMLP(FEATURES, h, h)
        self.slot_embedding = nn.Parameter(torch.zeros(1, 1, config.gamma, 1, h))
        self.rank_embedding = nn.Parameter(torch.zeros(1, 1, 1, config.lilicorr_candidate_topk, h))
        self.relative_slot_bias = nn.Parameter(torch.zeros(config.lilicorr_num_heads, 2 * config.block_size - 1))
        self.same_slot_bias = nn.Parameter(torch.zeros(config.lilicorr_num_heads))
        self.context_proj = nn.Linear(H, h)
        self.layers = nn.ModuleList(LatticeLayer(config) for _ in range(config.lilicorr_num_layers))
        self.output_norm, self.anchor_norm = nn.RMSNorm(h, eps=eps), nn.RMSNorm(h, eps=eps)
        self.factor_input_proj = nn.Linear(3 * h, h)
        self.out_head, self.in_head, self.anchor_out_head = nn.Linear(h, d), nn.Linear(h, d), nn.Linear(h, d)
        own = ("pass_hidden_proj", "context_proj", "factor_input_proj", "anchor_out_head")
        wide = () if h == H else (("token_proj",),)
        self.groups = (*wide, *((name,) for name in own), ("out_head", "in_head"))
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):  # cosines of zero vectors would have no gradient
                nn.init.normal_(module.weight, std=_INITIAL_STD)
                nn.init.zeros_(module.bias)
                if name.endswith("in_proj"):
                    nn.init.xavier_uniform_(module.weight)

    def attention_bias(self, positions: int) -> Tensor:
        """[Q, M, M]: by signed distance of so many positions, and for candidates of one position."""
        slot_M = torch.arange(positions, device=self.same_slot_bias.device)
        slot_M = slot_M.repeat_interleave(self.config.lilicorr_candidate_topk)
        distance_MM = slot_M[:, None] - slot_M
        bias_QMM = self.relative_slot_bias[:, distance_MM + self.config.block_size - 1]
        return bias_QMM + (distance_MM == 0) * self.same_slot_bias[:, None, None]

    def candidates(self, embedded_NKcH: Tensor, log_probs_NKc: Tensor, hidden_NKH: Tensor) -> Tensor:
        """x, [N, K, c, h]."""
        ranks_c = torch.arange(log_probs_NKc.shape[-1], device=log_probs_NKc.device, dtype=log_probs_NKc.dtype)
        features = (
            log_probs_NKc,
            log_probs_NKc.exp(),
            log_probs_NKc - log_probs_NKc[..., :1],
            (ranks_c / max(1, len(ranks_c) - 1)).expand_as(log_probs_NKc),
            (ranks_c == 0).to(ranks_c).expand_as(log_probs_NKc),
        )
        x_NKch = self.token_proj(embedded_NKcH) + self.pass_hidden_proj(hidden_NKH)[..., None, :]
        x_NKch = x_NKch + self.feature_mlp(self.feature_norm(torch.stack(features, dim=-1)))
        return x_NKch + self.slot_embedding[0, :, : log_probs_NKc.shape[1]] + self.rank_embedding[0]

    def forward(
        self, embedded_NKcH: Tensor, log_probs_NKc: Tensor, hidden_NKH: Tensor, context_NH: Tensor
    ) -> tuple[Tensor, Tensor]:
        """s_1 [N, c], and s_k [N, K - 1, c, c] by the candidates of position k - 1 and of k.

        Args:
            embedded_NKcH: the target's embeddings of the candidates, the likeliest of a position first.
            log_probs_NKc: log u.
            context_NH: features of the tokens right before the anchors; rows of zeros where nothing precedes one.
        """
        x_NMh = self.candidates(embedded_NKcH, log_probs_NKc, hidden_NKH).flatten(1, 2)
        bias_QMM = self.attention_bias(log_probs_NKc.shape[1])
        for layer in self.layers:
            x_NMh = layer(x_NMh, bias_QMM)
        y_NKch = self.output_norm(x_NMh).unflatten(1, log_probs_NKc.shape[1:])
        a_Nh = self.context_proj(context_NH) * (context_NH != 0).any(-1, keepdim=True)
        a_Nh = self.anchor_norm(a_Nh)
        a_NKch = a_Nh[:, None, None].expand_as(y_NKch)
        z_NKch = F.silu(self.factor_input_proj(torch.cat((y_NKch, a_NKch, y_NKch * a_NKch), dim=-1)))
        first_Nd, out, entering = (
            F.normalize(vectors, dim=-1, eps=self.config.lilicorr_vector_eps)
            for vectors in (self.anchor_out_head(a_Nh), *self.outputs(z_NKch, "out_head", "in_head"))
        )
        start_Nc = (entering[:, 0] @ first_Nd[..., None])[..., 0]
        pairs_NJcc = out[:, :-1] @ entering[:, 1:].transpose(-1, -2)
        wide, scale = torch.promote_types(pairs_NJcc.dtype, torch.float32), self.config.lilicorr_logit_scale
        return start_Nc.to(wide) * scale, pairs_NJcc.to(wide) * scale


class LatticeRows(Rows):
    """What `sample_rows` draws from: the scores of the steps from the candidate drawn last.

    Args:
        tokens_RKc: the target's ids of the candidates.
        start_Rc, pairs_RJcc: as `LatticeHead` gives them.
    """

    def __init__(self, hidden_RKH: Tensor, tokens_RKc: Tensor, start_Rc: Tensor, pairs_RJcc: Tensor) -> None:
        self.hidden_RKH, self.tokens_RKc, self.start_Rc, self.pairs_RJcc = hidden_RKH, tokens_RKc, start_Rc, pairs_RJcc

    def hidden(self, k: int, previous: list[int]) -> Tensor:
        self.previous_R = torch.tensor(previous, device=self.tokens_RKc.device)
        return self.hidden_RKH[:, k]

    def logits(self, k: int, active: list[int]) -> Tensor:
        if k == 0:
            return self.start_Rc[active]
        drawn_Ac = self.tokens_RKc[active, k - 1] == self.previous_R[active][:, None]
        return self.pairs_RJcc[active, k - 1, drawn_Ac.int().argmax(-1)]

    def ids(self, k: int, active: list[int]) -> Tensor:
        return self.tokens_RKc[active, k]


# ----------------------------------------------------------------------------
# The loss.
#
#     q_k = softmax(s_k), s_k the scores of the steps from the true x_{k-1} to C_k
#     L_k = ce (-log q_k(x_k)) + margin [m - s_k(x_k) + max_{j != x_k} s_k(j)]_+
#           + penalty sum_j q_k(j) [t_k(x_k) - t_k(j)]_+                                     t_k: the target's logits
#
# The penalty costs little where the target finds the other candidate likely, too. Position k counts while x_1 .. x_k
# are all candidates; otherwise no draft gets there along the text, and the acceptance after it is 0. The parallel
# logits have DFlash's loss beside this one, with the same position weights.
#
# Source: LiLiCorr, arXiv 2608.20530, in NVIDIA's Model Optimizer, which has no position weights here, divides by the
# number of positions that count, and leaves out blocks that reach beyond the response.
# Shapes: N blocks, K positions, J = K - 1, M = N K, c candidates.
# ----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LatticeTrainingRows(DraftRows):
    """The parallel logits, and the head that scores the steps between their `count` likeliest tokens.

    `lattice`: (the candidates' ids in the target's vocabulary, the likeliest first, and the logarithms of their
    probabilities, [N, K, c]) -> s_1 [N, c] and s_k [N, K - 1, c, c], as `LatticeHead` gives them.
    """

    lattice: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    count: int

    def loss(self, given: Supervision) -> DraftLoss:
        """L(softmax(U)) + sum_i w_i L_i / sum_i w_i; acceptance and agreement are those of the lattice."""
        assert isinstance(given.config, LiLiCorrObjective)
        parallel, view = super().loss(given), given.view
        indices_NKc, log_probs_NKc = candidate_log_probs(
            self.hidden_NKH.float(), given.head, view.argmax_N.clamp(min=0), count=self.count
        )
        log_targets_NKc = view.log_probs(given.head, indices_NKc)
        with torch.autocast(indices_NKc.device.type, torch.bfloat16, enabled=given.head.dtype == torch.bfloat16):
            scores = self.lattice(given.draft_ids_Vd[indices_NKc], log_probs_NKc)
        labels_NK = torch.where(given.supervised_NK, view.labels_N, -1)
        loss, acceptance_NK, agreement_NK = lattice_loss(
            scores,
            indices_NKc == labels_NK[..., None],
            log_targets_NKc,
            config=given.config.lattice,
            weights_NK=given.weights_NK / given.total_weight,
            is_argmax_NKc=indices_NKc == view.argmax_N[..., None],
        )
        return DraftLoss(parallel.loss + loss, given.of(acceptance_NK), given.of(agreement_NK).float())

    @torch.no_grad()
    def drafted_labels(self, given: Supervision) -> tuple[Tensor, Tensor]:
        """Whether the label is the likeliest candidate after the label before it stands for both."""
        likeliest = replace(given, view=replace(given.view, argmax_N=given.view.labels_N))
        agreement_M = self.loss(likeliest).agreement_N
        return agreement_M, agreement_M


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
        for part, z in logit_chunks(DraftLogits(hidden_MH), head, near_M):
            rows_CH = hidden_MH[part]
            indices_Cc = z.topk(count, dim=-1).indices
            order_Cc = torch.sort(head.logits_at(rows_CH, indices_Cc), stable=True, descending=True).indices
            chosen.append(indices_Cc.gather(-1, order_Cc))
            wide = z.to(rows_CH.dtype)
            sums.append(wide.logsumexp(-1) + head.at(rows_CH, near_M[part]).to(head.dtype).to(wide.dtype))
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


class LiLiCorr(DFlash):
    """The backbone, with or without convolutions, and the head."""

    config: LiLiCorrConfig

    def __init__(self, config: LiLiCorrConfig) -> None:
        super().__init__(config)
        self.lilicorr = LatticeHead(config)

    @staticmethod
    def make_layer(config: LiLiCorrConfig, index: int) -> DraftLayer:
        return ConvolvedLayer(config, index) if config.conv_kernel_size else DraftLayer(config, index)

    def rows(self, inputs: BlockInputs) -> LatticeTrainingRows:
        aux_SLD, hidden_NKH = inputs.aux_SLD, super().rows(inputs).hidden_NKH
        before_NLD = inputs.layout.before_anchors(aux_SLD.flatten(1)).unflatten(1, aux_SLD.shape[1:])
        context_NH = self.context(before_NLD)

        def lattice(tokens_NKc: Tensor, log_probs_NKc: Tensor) -> tuple[Tensor, Tensor]:
            return self.lilicorr(inputs.embed(tokens_NKc), log_probs_NKc, hidden_NKH, context_NH)

        return LatticeTrainingRows(hidden_NKH, lattice=lattice, count=self.config.lilicorr_candidate_topk)

    @staticmethod
    def drafter() -> type[Drafter]:
        return LiLiCorrDrafter


class LiLiCorrDrafter(BlockDrafter):
    """Serves one LiLiCorr drafter: the block pass of DFlash, one pass over the candidates, then a walk through them.

    A session's `waiting` is its newest context feature, [1, H]. The whole block is scored whatever is asked for:
    candidates see those of later positions.
    """

    module: LiLiCorr

    def of_length(self, gamma: int) -> BlockDrafter:
        """As `BlockDrafter`'s, but no block is shorter than its convolution."""
        return super().of_length(max(gamma, self.module.config.conv_kernel_size - 1))

    def new_session(self, capacity: int) -> DraftSession:
        session = super().new_session(capacity)
        session.waiting = [torch.zeros(1, self.config.hidden_size, device=self.device)]
        return session

    def extend(self, sessions: Sequence[DraftSession], tokens: Sequence[Sequence[int]], aux_TLD: Tensor | None) -> None:
        assert aux_TLD is not None
        ends = accumulate(len(part) for part in tokens)
        longer = {end - 1: session for session, part, end in zip(sessions, tokens, ends, strict=True) if part}
        newest_RH = self.module.context(aux_TLD[list(longer)].float())
        super().extend(sessions, tokens, aux_TLD)
        for session, row_H in zip(longer.values(), newest_RH, strict=True):
            session.waiting = [row_H[None]]

    def propose(self, calls: Sequence[DraftCall], min_confidence: float = 0.0) -> list[Draft]:
        """Draft for every call, gamma tokens each at most, while c_k is at least `min_confidence`."""
        hidden_RKH = self.block_hidden([call.session for call in calls], [call.anchor for call in calls])
        logits_RKVd = self.head(hidden_RKH.flatten(0, 1)).unflatten(0, hidden_RKH.shape[:2])
        top_RKc, tokens_RKc = logits_RKVd.topk(self.config.lilicorr_candidate_topk, dim=-1)
        if self.heads.draft_ids_Vd is not None:
            tokens_RKc = self.heads.draft_ids_Vd[tokens_RKc]
        log_probs_RKc = top_RKc - logits_RKVd.logsumexp(-1, keepdim=True)
        context_RH = torch.cat([call.session.waiting[0] for call in calls])
        scores = self.module.lilicorr(self.embed(tokens_RKc), log_probs_RKc, hidden_RKH, context_RH)
        rows, longest = LatticeRows(hidden_RKH, tokens_RKc, *scores), longest_draft(calls, self.gamma)
        return sample_rows(rows, longest, calls, heads=self.heads, min_confidence=min_confidence)


# ----------------------------------------------------------------------------
# NVIDIA's LiLiCorr: `architectures: ["LiLiCorrDraftModel"]`, z-lab's DFlash with the head's fields in `dflash_config`.
#
#     lilicorr_*                           all stated: two of them change no shape, and readers have no defaults
#     conv_kernel_size, conv_group_size    both, or neither, as without convolutions
#     lilicorr.*                           tensors beside DFlash's; attn.in_proj_{weight,bias} as torch's own attention
#
# Model Optimizer has written the MLPs as sequences (feature_mlp.0, .1 and .3, mlp.0 and .2), which SGLang and we read
# too; vLLM reads the names that are written here.
#
# Source: Model Optimizer's code and export tests (torch/speculative/plugins), models/lilicorr.py of vLLM and SGLang.
# ----------------------------------------------------------------------------


_LILICORR_COUNTS = ("candidate_topk", "num_layers", "num_heads", "factor_dim")
_LILICORR_NUMBERS = ("mlp_ratio", "vector_eps", "logit_scale")
_LILICORR_NAMES = (  # ours, theirs, or what theirs were
    (".attn.in_proj.", ".attn.in_proj_"),
    ("lilicorr.feature_norm.", "lilicorr.feature_mlp.0."),
    ("lilicorr.feature_mlp.up_proj.", "lilicorr.feature_mlp.1."),
    ("lilicorr.feature_mlp.down_proj.", "lilicorr.feature_mlp.3."),
    (".mlp.up_proj.", ".mlp.0."),
    (".mlp.down_proj.", ".mlp.2."),
)


class LiLiCorrDialect:
    """LiLiCorr as NVIDIA's Model Optimizer exports it."""

    name = "ModelOpt"
    spelling = "LiLiCorrDraftModel"
    methods: tuple[str, ...] = (LiLiCorrConfig.algorithm,)
    prefix = ""

    def __init__(self) -> None:
        self._zlab = ZLab()

    def reads(self, raw: Mapping[str, Any]) -> bool:
        return self.spelling in (raw.get("architectures") or [])

    def read(self, raw: Mapping[str, Any], tensors: Mapping[str, Tensor], source: Source) -> DrafterWeights:
        section = Fields(raw, source.where, self.name).section("dflash_config")
        if not section.flag("lilicorr_enabled", True):
            raise section.refuse("lilicorr_enabled", "true where the architecture is LiLiCorr's")
        own: dict[str, Any] = {f"lilicorr_{name}": section.integer(f"lilicorr_{name}") for name in _LILICORR_COUNTS}
        own |= {f"lilicorr_{name}": section.number(f"lilicorr_{name}") for name in _LILICORR_NUMBERS}
        own["lilicorr_hidden_size"] = section.integer("lilicorr_hidden_size", low=0)
        for name in ("conv_kernel_size", "conv_group_size"):
            own[name] = section.integer(name, low=0, default=0)
        fields = BlockFields(raw, source, self.name, nested="dflash_config")
        found = {_renamed(name): tensor for name, tensor in tensors.items()}
        weights = read_vocabulary(LiLiCorrConfig(**read_block(fields), **own), found, source, kind=LiLiCorr)
        return replace(weights, embedding_scale=embedding_scale(fields))

    def write(self, parts: DrafterWeights, target: TargetFacts | None) -> ExportedCheckpoint:
        written, config = self._zlab.write(parts, target), parts.config
        counts = ("hidden_size", *_LILICORR_COUNTS, *_LILICORR_NUMBERS)
        own = {"projector_type": "lilicorr", "lilicorr_enabled": True}
        own |= {f"lilicorr_{name}": getattr(config, f"lilicorr_{name}") for name in counts}
        if config.conv_kernel_size:
            own |= {name: getattr(config, name) for name in ("conv_kernel_size", "conv_group_size")}
        section = {**written.config["dflash_config"], **own}
        ours, theirs = _LILICORR_NAMES[0]
        return replace(
            written,
            config={**written.config, "architectures": [self.spelling], "dflash_config": section},
            tensors={name.replace(ours, theirs): tensor for name, tensor in written.tensors.items()},
        )


def _renamed(name: str) -> str:
    """Our name of a tensor of the head."""
    if name.startswith("lilicorr."):
        for ours, theirs in _LILICORR_NAMES:
            name = name.replace(theirs, ours)
    return name


_MOST_CANDIDATES = 16


def _kernel_limits(parts: DrafterWeights) -> list[str]:
    """Candidates fit the kernels of vLLM and SGLang that walk through them: a power of two, 16 at most."""
    count = parts.config.lilicorr_candidate_topk
    if count > _MOST_CANDIDATES or count & (count - 1):
        raise ValueError(
            f"lilicorr_candidate_topk {count} has no place there; its LiLiCorr has 1, 2, 4, 8 or 16 candidates a "
            "position: train with drafter.lilicorr_candidate_topk=8."
        )
    return []


METHOD = Method(
    LiLiCorrConfig,
    LiLiCorr,
    LiLiCorrDialect(),
    exports={  # both run it under DFlash's name: the checkpoint's architecture tells them apart
        "vllm": Export(
            LiLiCorrDialect(),
            "dflash",
            whole_vocabulary=True,
            targets_vocabulary=True,
            environment={"VLLM_USE_V2_MODEL_RUNNER": "1"},
            check=_kernel_limits,
        ),
        "sglang": Export(
            LiLiCorrDialect(), "DFLASH", whole_vocabulary=True, targets_vocabulary=True, check=_kernel_limits
        ),
    },
)
