"""The training loss of a draft model in plain torch: the formulas of the papers, and the reference of every test.

    p_d = softmax(W_d h + W2 l)       the drafter's distribution; W2 l: a sequential head's correction, 0 without one
    p_t                               the target's distribution at the same position
    loss = sum_i w_i [ce (-log p_d(x_i)) + soft_ce (-sum_v p_s(v) log p_d(v)) + l1 ||p_d - p_t||_1
                      + kl KL(p_t || p_d) + confidence BCE(c_i, a_i)] / sum_i w_i
    p_s = softmax over the draft vocabulary of the target's logits; no such term where its likeliest token is not in it
    a_i = 1 - ||p_d - p_t||_1 / 2     the acceptance probability; ||p_d - p_t||_1 / 2 is the total variation
    w_i = exp(-(k_i - 1) / decay)     k_i: position in the block, from 1; D-PACE: `dpace_weights`

`loss` of a method's rows (drafters/base.py and the method's file) says which distributions have which of these terms.
Whole logits of a vocabulary are never computed in training: `fused_loss` (drafters/fused_loss.py) gives the value and
the gradients of `reference_loss` chunk by chunk.

Source: DSpark, arXiv 2607.05147 (ce 0.1, l1 0.9, confidence 1.0 and the decay); DFlash, arXiv 2602.06036 (ce alone);
EAGLE-3, arXiv 2503.01840 (soft_ce alone; the draft vocabulary in it as in its official training code);
JetSpec, arXiv 2606.18394 (kl, there at a temperature of distillation, which is 1 here); D-PACE, arXiv 2605.18810.
Shapes: N supervised positions, or blocks of K positions; V draft vocabulary, or the tokens that can be drafted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field, SerializerFunctionWrapHandler, model_serializer
from torch import Tensor

from outrider.utils.documents import Section

TermKind = Literal["ce", "l1", "kl", "soft_ce"]


class Term(NamedTuple):
    """One term of the loss with its weight at each position, [N]."""

    kind: TermKind
    weight_N: Tensor


class DraftLoss(NamedTuple):
    """`loss` is differentiable; the others are detached, per position [N]."""

    loss: Tensor
    acceptance_N: Tensor  # the acceptance probability at temperature 1
    agreement_N: Tensor  # 1.0 if drafter and target have the same most likely token: acceptance at temperature 0


class ObjectiveConfig(Section):
    """Weights of the terms of the loss, and of draft positions in all of them (drafters/loss.py).

    The defaults are DSpark's (arXiv 2607.05147). A method with other weights names them in the `default_objective` of
    its config: DFlash is trained by cross-entropy alone, JetSpec by the KL divergence, EAGLE-3 by soft cross-entropy.
    """

    ce: float = Field(0.1, ge=0)
    """Weight of the cross-entropy with the response's tokens."""
    l1: float = Field(0.9, ge=0)
    """Weight of the 1-norm ||p_d - p_t||_1, DeepSpec's l1_loss_alpha."""
    kl: float = Field(0.0, ge=0)
    """Weight of the KL divergence of p_t from p_d, as in distillation; 1 for JetSpec."""
    soft_ce: float = Field(0.0, ge=0)
    """Weight of the cross-entropy with the target's distribution over the draft vocabulary; 1 for EAGLE-3."""
    confidence: float = Field(1.0, ge=0)
    """Weight of the confidence head's loss; 0 for drafters without one."""
    confidence_gradient: bool = True
    """Whether that loss also trains what its head reads, the draft layers and the sequential head; false: only it."""
    decay: float = Field(4.0, gt=0, allow_inf_nan=True)
    """Positions after which a draft position's weight has fallen to 1/e."""
    dpace: float | None = Field(None, gt=0, le=1)
    """D-PACE: position weights that follow from the drafter's own probabilities of the response, each raised to at
    least this much (0.5 in the paper), in place of weights that decay; null: none."""
    base: float = Field(0.0, ge=0, le=1)
    """Share of the loss that the parallel logits have alone at the first step, beside those that a sequential head
    corrects; it falls linearly to 0. 1 for Domino."""
    base_fraction: float = Field(1.0, gt=0, le=1)
    """Part of the steps after which that share is 0."""

    def terms(self, weights_N: Tensor) -> list[Term]:
        """The terms between distributions whose weight is not 0, at positions of these weights."""
        weights: dict[TermKind, float] = {"ce": self.ce, "l1": self.l1, "kl": self.kl, "soft_ce": self.soft_ce}
        return [Term(kind, weight * weights_N) for kind, weight in weights.items() if weight]

    def position_weights(self, gamma: int, device: torch.device) -> Tensor:
        """w_k = exp(-(k - 1) / decay) for k = 1..gamma; with `dpace` ones, which each block's own weights multiply."""
        decay = math.inf if self.dpace is not None else self.decay
        return torch.exp(-torch.arange(gamma, device=device, dtype=torch.float32) / decay)

    def base_share(self, progress: float) -> float:
        """The parallel logits' share of the loss; `progress`: the part of the run's steps that are done."""
        return self.base * max(0.0, 1 - progress / self.base_fraction)

    @model_serializer(mode="wrap")
    def _omit_defaults(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out fields that a recipe does not set: later fields then change no digest of an earlier run."""
        written: dict[str, Any] = handler(self)
        kept = {"ce", "l1", "confidence", "decay"}
        kept |= {name for name, field in type(self).model_fields.items() if getattr(self, name) != field.default}
        return {name: value for name, value in written.items() if name in kept}


# ----------------------------------------------------------------------------
# The formulas.
# ----------------------------------------------------------------------------


def cross_entropy(log_p_d: Tensor, labels: Tensor) -> Tensor:
    """-log p_d(x) of labels [...] under log p_d [..., V]; 0 for a label of -1, which cannot be drafted."""
    picked = log_p_d.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return torch.where(labels >= 0, -picked, 0.0)


def l1_distance(p_d: Tensor, p_t: Tensor) -> Tensor:
    """||p_d - p_t||_1 over the target's whole vocabulary, from the probabilities [..., V] of what can be drafted.

    Both sum to one over the whole vocabulary and p_d is 0 outside V, so this is 2 sum_{v in V} (p_d - p_t)_+: tokens
    that can never be drafted are part of the distance.
    """
    return 2 * (p_d - p_t).clamp(min=0).sum(-1)


def kl_divergence(log_p_t: Tensor, log_p_d: Tensor) -> Tensor:
    """KL(p_t || p_d) = sum_{v in V} p_t (log p_t - log p_d)."""
    return (log_p_t.exp() * (log_p_t - log_p_d)).sum(-1)


def soft_cross_entropy(log_p_t: Tensor, log_p_d: Tensor, argmax: Tensor) -> Tensor:
    """-sum_{v in V} p_s log p_d with p_s = p_t / sum_{v in V} p_t, over [..., V]; 0 for an argmax [...] of -1.

    The target's most likely token cannot be drafted there, and EAGLE-3's training leaves such positions out of the sum.
    """
    soft = -(log_p_t.log_softmax(-1).exp() * log_p_d).sum(-1)
    return torch.where(argmax >= 0, soft, 0.0)


def acceptance_probability(distance: Tensor) -> Tensor:
    """a = 1 - ||p_d - p_t||_1 / 2 = sum_v min(p_d, p_t)."""
    return (1 - distance / 2).clamp(0, 1)


def confidence_loss(confidence: Tensor, acceptance: Tensor) -> Tensor:
    """BCE(c, a): a confidence's logit is trained towards the acceptance probability."""
    return F.binary_cross_entropy_with_logits(confidence, acceptance, reduction="none")


def reference_loss(
    log_p_d: Tensor, log_p_t: Tensor, *, labels: Tensor, argmax: Tensor, terms: Sequence[Term]
) -> DraftLoss:
    """sum_i sum_terms weight_i term_i from the logarithms of both distributions, [N, V] each, by plain autograd.

    Args:
        log_p_t: the target's; tokens that cannot be drafted have the rest of its mass.
        labels, argmax: the next token and the target's most likely one, as indices into V; -1 if it cannot be drafted.
    """
    distance = l1_distance(log_p_d.exp(), log_p_t.exp())
    values = {
        "ce": cross_entropy(log_p_d, labels),
        "l1": distance,
        "kl": kl_divergence(log_p_t, log_p_d),
        "soft_ce": soft_cross_entropy(log_p_t, log_p_d, argmax),
    }
    loss = sum(((weight * values[kind]).sum() for kind, weight in terms), start=distance.new_zeros(()))
    agreement = log_p_d.argmax(-1) == argmax
    return DraftLoss(loss, acceptance_probability(distance).detach(), agreement.float())


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
