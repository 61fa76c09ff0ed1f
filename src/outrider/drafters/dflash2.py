"""DFlash 2: DFlash with a convolution over each block and a selector among candidates.

    layer      x += conv(attention(conv(norm x)));  x += conv(mlp(conv(norm x)))
    drafting   top-c tokens of every position, then one sequential choice among them

Attention, context features and the layout (anchor + masks) are DFlash's.

Training. The parallel logits U get DFlash's own objective, which is what brings the true token among the candidates;
the selector's distribution gets the same objective over the candidates it will have when served, given the true
previous token. Where the true token is not among them it has no cross-entropy there, as a token outside a reduced
draft vocabulary has none, and the distance counts the target's mass outside. (speculators and TorchSpec put the true
token in by force; what such a set accepts is not what is served.)

Source: z-lab's DFlash 2 (package `dflash` 0.1.0).
Shapes: N blocks, K rows a block, S context slots, H draft hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from outrider.drafters.base import (
    BlockInputs,
    DraftCall,
    Drafter,
    DraftRows,
    longest_draft,
)
from outrider.drafters.chain import BlockRows, sample_rows
from outrider.drafters.config import Count
from outrider.drafters.dflash import BlockDrafter, DFlash, DFlashConfig, DraftLayer
from outrider.drafters.draft import Draft
from outrider.drafters.fused_loss import Supervision, fused_loss, logit_chunks
from outrider.drafters.layers import KeySource
from outrider.drafters.loss import DraftLoss, reference_loss
from outrider.drafters.rope import Rope

# ----------------------------------------------------------------------------
# Grouped dynamic causal convolution: a block row mixes with the rows right before it.
#
#     conv(x)_i = sum_{o < O} (b_o + d_io[group]) * x_{i-o}      x_{i-o} = 0 before the first row, which is the anchor's
#     d         = W x      one projection of the sublayer's input gives the dynamic parts of both sides
#     y         = x + conv_1(sublayer(conv_0(norm x)))      b: a weight per channel, d: one per group of channels
#
# Rows of a block see each other in both directions in attention, and yet guess apart from each other; the convolution
# is a cheap path from a draft position to the next. Context features do not pass it. At the start it is the identity:
# b_0 = 1, all else 0.
#
# Source: z-lab's DFlash 2 (package `dflash` 0.1.0), whose parameter names these are; the identity start is that of
# public trainers (speculators, TorchSpec).
# Shapes: N blocks, K rows a block, H hidden, G groups, O kernel size, 2 sides: before and behind the sublayer.
# ----------------------------------------------------------------------------


def convolve(x_NKH: Tensor, base_OH: Tensor, dynamic_NKOG: Tensor) -> Tensor:
    """One side, [N, K, H]; a block has at least O rows."""
    size, groups = dynamic_NKOG.shape[-2:]
    x = x_NKH.unflatten(-1, (groups, -1))
    kernel = base_OH.unflatten(-1, (groups, -1)) + dynamic_NKOG[..., None]
    y = kernel[:, :, 0] * x
    for o in range(1, size):
        y = y + F.pad(kernel[:, o:, o] * x[:, :-o], (0, 0, 0, 0, o, 0))
    return y.flatten(-2)


class GroupedDynamicConv(nn.Module):
    """Both sides of one sublayer."""

    def __init__(self, hidden_size: int, kernel_size: int, group_size: int) -> None:
        super().__init__()
        self.shape = (2, kernel_size, hidden_size // group_size)
        self.base_kernel = nn.Parameter(torch.zeros(2, kernel_size, hidden_size))
        self.kernel_projection = nn.Linear(hidden_size, 2 * kernel_size * self.shape[-1], bias=False)
        nn.init.ones_(self.base_kernel[:, 0])
        nn.init.zeros_(self.kernel_projection.weight)

    def before(self, x_NKH: Tensor) -> tuple[Tensor, Tensor]:
        """What the sublayer reads, and the dynamic kernel that `behind` takes."""
        dynamic = self.kernel_projection(x_NKH).unflatten(-1, self.shape)
        return convolve(x_NKH, self.base_kernel[0], dynamic[:, :, 0]), dynamic[:, :, 1]

    def behind(self, y_NKH: Tensor, dynamic_NKOG: Tensor) -> Tensor:
        """What is added to the residual stream."""
        return convolve(y_NKH, self.base_kernel[1], dynamic_NKOG)


# ----------------------------------------------------------------------------
# The candidate selector: a sequential choice among the likeliest tokens of every position.
#
#     C_k = the c likeliest tokens of U_k = W_head h_k                 every position on its own, from one parallel pass
#     s_k(v) = U_k(v) + <A[x_{k-1}] * P h_k, B[v]>   for v in C_k      x_0: the anchor
#     p_k = warp(softmax(s_k)), zero outside C_k
#
# Each p_k is an exact distribution over the vocabulary, so verification stays lossless. A * P h is the latent of a
# sequential head (drafters/heads.py) whose output matrix B is asked for c rows only.
#
# Source: z-lab's DFlash 2 (package `dflash` 0.1.0), whose parameter names these are. The successors start at zero:
# training begins with the parallel drafter, uncorrected.
# Shapes: X any, R requests, A those that draw, K positions, V vocab, Vd draft vocab, C candidates, H hidden, r rank.
# ----------------------------------------------------------------------------


def candidate_scores(unary_XC: Tensor, codes_XCr: Tensor, latent_Xr: Tensor) -> Tensor:
    """s [X, C] from the candidates' logits U, their rows of B, and A[x_{k-1}] * P h_k."""
    return unary_XC + torch.einsum("...cr,...r->...c", codes_XCr, latent_Xr)


class CandidateSelector(nn.Module):
    """A, B and P."""

    def __init__(self, vocab_size: int, draft_vocab_size: int, hidden_size: int, rank: int) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.empty(vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.zeros(draft_vocab_size, rank))
        self.hidden_projection = nn.Linear(hidden_size, rank, bias=False)
        nn.init.normal_(self.predecessor_codebook, std=0.02)

    def latent(self, previous_X: Tensor, hidden_XH: Tensor) -> Tensor:
        """A[x_{k-1}] * P h_k, [X, r]."""
        return self.predecessor_codebook[previous_X] * self.hidden_projection(hidden_XH)


class CandidateRows(BlockRows):
    """What `sample_rows` draws from: c logits a position, of tokens that differ from row to row."""

    def __init__(
        self,
        base_logits: Callable[[Tensor], Tensor],
        hidden_RKH: Tensor,
        selector: CandidateSelector,
        count: int,
        draft_ids_Vd: Tensor | None,
    ) -> None:
        super().__init__(lambda hidden_NH: self._candidates(base_logits(hidden_NH)), hidden_RKH)
        self.selector, self.count, self.draft_ids_Vd = selector, count, draft_ids_Vd

    def _candidates(self, logits_NVd: Tensor) -> Tensor:
        """The candidates' logits; their indices are kept."""
        unary_NC, self.indices_NC = logits_NVd.topk(self.count, dim=-1)
        return unary_NC

    def _indices(self, k: int, active: list[int]) -> Tensor:
        indices_NKC = self.indices_NC.view(len(self.rows_of), -1, self.count)
        return indices_NKC[[self.rows_of[r] for r in active], k]

    def hidden(self, k: int, previous: list[int]) -> Tensor:
        self.previous_R = torch.tensor(previous, device=self.hidden_RKH.device)
        return super().hidden(k, previous)

    def logits(self, k: int, active: list[int]) -> Tensor:
        unary_AC = super().logits(k, active)
        codes_ACr = self.selector.successor_codebook[self._indices(k, active)]
        latent_Ar = self.selector.latent(self.previous_R[active], self.hidden_RKH[active, k])
        return candidate_scores(unary_AC, codes_ACr, latent_Ar)

    def ids(self, k: int, active: list[int]) -> Tensor | None:
        indices_AC = self._indices(k, active)
        return indices_AC if self.draft_ids_Vd is None else self.draft_ids_Vd[indices_AC]


@dataclass(frozen=True, kw_only=True)
class DFlash2Config(DFlashConfig):
    """DFlash's fields and those of the convolution and the selector; the defaults are z-lab's but for the rank."""

    algorithm: ClassVar[str] = "dflash2"

    block_size: Annotated[int, Field(ge=2, description="Rows of a block, the anchor included.")] = 8
    conv_kernel_size: Annotated[Count, Field(description="Rows that the causal convolution sees.")] = 2
    conv_group_size: Annotated[Count, Field(description="Channels of a group of the convolution.")] = 16
    selector_rank: Annotated[Count, Field(description="Rank of the selector's scores.")] = 64
    selector_top_k: Annotated[Count, Field(description="Likeliest tokens of a row that the selector rescores.")] = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        check_convolution(self)
        if self.selector_top_k > self.draft_vocab_size:
            raise ValueError(
                f"selector_top_k {self.selector_top_k} must be between 1 and draft_vocab_size {self.draft_vocab_size}."
            )


def check_convolution(config: Any) -> None:
    """The convolution of a config fits its block and its hidden size.

    Raises:
        ValueError: it does not.
    """
    if config.conv_kernel_size > config.block_size:
        raise ValueError(
            f"conv_kernel_size {config.conv_kernel_size} must be between 1 and block_size {config.block_size}: nothing "
            "precedes a block."
        )
    if config.hidden_size % config.conv_group_size:
        raise ValueError(f"conv_group_size {config.conv_group_size} must divide hidden_size {config.hidden_size}.")


class ConvolvedLayer(DraftLayer):
    def __init__(self, config: Any, index: int) -> None:
        super().__init__(config, index)
        sizes = config.hidden_size, config.conv_kernel_size, config.conv_group_size
        self.attention_conv = GroupedDynamicConv(*sizes)
        self.mlp_conv = GroupedDynamicConv(*sizes)

    def after_packing(self) -> None:
        """Its convolutions stand between what the kernels join."""

    def forward(self, x_NKH: Tensor, rope: Rope, source: KeySource) -> Tensor:
        x_NKH = x_NKH + convolved(
            self.attention_conv, self.input_layernorm(x_NKH), lambda y: self.self_attn(y, rope, source)
        )
        return x_NKH + convolved(self.mlp_conv, self.post_attention_layernorm(x_NKH), self.mlp)


def convolved(conv: GroupedDynamicConv, x_NKH: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
    """conv_1(sublayer(conv_0(x)))."""
    y_NKH, dynamic_NKOG = conv.before(x_NKH)
    return conv.behind(sublayer(y_NKH), dynamic_NKOG)


@dataclass(frozen=True, kw_only=True)
class SelectorRows(DraftRows):
    """The parallel logits, and what the selector rescores their `count` likeliest tokens with.

    `correction_NKr`: A[x_{k-1}] * P h_k; `codebook_Vr`: B.
    """

    correction_NKr: Tensor
    codebook_Vr: Tensor
    count: int

    def loss(self, given: Supervision) -> DraftLoss:
        """L(softmax(U)) + L(softmax(s) over C_k), L the sum_i w_i [ce CE_i + l1 ||p_d - p_t||_1] / sum_i w_i.

        C_k is a choice and has no gradient; s has, towards U too. Acceptance and agreement are those of the latter.

        Raises:
            ValueError: a KL or soft cross-entropy term; either would be infinite, for candidates leave tokens out that
                the target may choose.
        """
        for name in ("kl", "soft_ce"):
            if weight := getattr(given.config, name):
                raise ValueError(f"objective.{name} is {weight}: drafters that draw among candidates need 0.")
        logits, target = self.logits(given), given.target
        parallel = fused_loss(logits, given.head, target, terms=given.terms(), top=self.count)
        assert parallel.candidates is not None
        indices_Mc, unary_Mc, log_target_Mc = parallel.candidates
        among = reference_loss(
            self.scores(given, unary_Mc, indices_Mc).log_softmax(-1),
            log_target_Mc,
            labels=_place(target.labels_N, indices_Mc),
            argmax=_place(target.argmax_N, indices_Mc),
            terms=given.terms(),
        )
        return among._replace(loss=parallel.loss + among.loss)

    def scores(self, given: Supervision, unary_Mc: Tensor, indices_Mc: Tensor) -> Tensor:
        """s [M, c] of the candidates at the supervised positions, up to a constant per row."""
        return candidate_scores(unary_Mc, F.embedding(indices_Mc, self.codebook_Vr), given.wide(self.correction_NKr))

    @torch.no_grad()
    def label_probabilities(self, given: Supervision) -> tuple[Tensor, Tensor]:
        logits, labels_M = self.logits(given), given.target.labels_N
        chunks = logit_chunks(logits, given.head, near_N=labels_M.clamp(min=0))
        unary_Mc, indices_Mc = map(torch.cat, zip(*(z.topk(self.count, dim=-1) for _, z in chunks), strict=True))
        scores_Mc, place_M = self.scores(given, unary_Mc, indices_Mc), _place(labels_M, indices_Mc)
        probability_M = scores_Mc.softmax(-1).gather(-1, place_M.clamp(min=0)[:, None])[:, 0]
        return probability_M * (place_M >= 0), scores_Mc.argmax(-1) == place_M


def _place(tokens_M: Tensor, indices_Mc: Tensor) -> Tensor:
    """Which candidate each token is; -1: none."""
    is_token_Mc = indices_Mc == tokens_M[:, None]
    return torch.where(is_token_Mc.any(-1), is_token_Mc.int().argmax(-1), -1)


class DFlash2(DFlash):
    """The convolved backbone with its selector."""

    config: DFlash2Config

    def __init__(self, config: DFlash2Config) -> None:
        super().__init__(config)
        self.candidate_selector = CandidateSelector(
            config.vocab_size, config.draft_vocab_size, config.hidden_size, rank=config.selector_rank
        )

    @staticmethod
    def make_layer(config: Any, index: int) -> DraftLayer:
        return ConvolvedLayer(config, index)

    def rows(self, inputs: BlockInputs) -> SelectorRows:
        hidden_NKH, selector = super().rows(inputs).hidden_NKH, self.candidate_selector
        return SelectorRows(
            hidden_NKH,
            correction_NKr=selector.latent(inputs.previous_NK, hidden_NKH),
            codebook_Vr=selector.successor_codebook,
            count=self.config.selector_top_k,
        )

    @staticmethod
    def drafter() -> type[Drafter]:
        return DFlash2Drafter


class DFlash2Drafter(BlockDrafter):
    """Serves one DFlash 2 drafter: the block pass of DFlash, then a walk through the candidates of every position."""

    module: DFlash2

    def of_length(self, gamma: int) -> BlockDrafter:
        """As DFlash's, but for blocks that the convolution is too long for: those have as many rows as it sees."""
        return super().of_length(max(gamma, self.module.config.conv_kernel_size - 1))

    def propose(self, calls: Sequence[DraftCall], min_confidence: float = 0.0) -> list[Draft]:
        """Draft for every call, gamma tokens each at most, while c_k is at least `min_confidence`."""
        hidden_RKH = self.block_hidden([call.session for call in calls], [call.anchor for call in calls])
        longest = longest_draft(calls, self.gamma)
        rows = CandidateRows(
            self.head,
            hidden_RKH[:, :longest],
            self.module.candidate_selector,
            count=self.config.selector_top_k,
            draft_ids_Vd=self.heads.draft_ids_Vd,
        )
        return sample_rows(rows, longest, calls, heads=self.heads, min_confidence=min_confidence)
