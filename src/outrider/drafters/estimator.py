"""c_k = sigmoid(w_1 logit(max p_k) + w_2 H(p_k) + b_k),   p_k = softmax of the draft logits, as they are

The confidence of a drafter that has no confidence head: a logistic regression on how sure p_k is (maximum probability,
entropy in nats) and on the position. All of it is known before x_k is drawn. The drawn token's own probability says
more, and must not be used: admission would then depend on x_k, and the output would no longer be the target's (the
stopping rule of DSpark, arXiv 2607.05147). Shapes: A requests, Vd draft vocab, F = 2 features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

_LOGIT_LIMIT = 20.0  # float32 puts 1 - max p_k at 0 beyond; p_k is one-hot for every purpose


class Estimator(Protocol):
    """What a walk asks for the logit of c_k."""

    def __call__(self, logits_AVd: Tensor, k: int) -> Tensor:
        """Logits [A] of the confidences at position k, counted from 0, from the draft logits before the warp."""
        ...


@dataclass(frozen=True)
class CertaintyEstimator:
    """Fitted by `outrider calibrate`: two weights for all positions, one bias per position."""

    weights: Sequence[float]
    biases: Sequence[float]

    def __post_init__(self) -> None:
        if len(self.weights) != 2:
            raise ValueError(f"estimator weights {list(self.weights)} must be 2 numbers; run outrider calibrate again.")

    def __call__(self, logits_AVd: Tensor, k: int) -> Tensor:
        features_AF = certainty(logits_AVd)
        return features_AF @ features_AF.new_tensor(list(self.weights)) + self.biases[k]


def certainty(logits_AVd: Tensor) -> Tensor:
    """(logit of the largest probability, entropy in nats) of each row, [A, 2], at temperature 1."""
    log_probs_AVd = logits_AVd.log_softmax(-1)
    top_A, place_A = log_probs_AVd.max(-1)
    others_AVd = log_probs_AVd.scatter(-1, place_A[:, None], -torch.inf)  # 1 - p from the rest: no cancellation
    logit_A = (top_A - others_AVd.logsumexp(-1)).clamp(-_LOGIT_LIMIT, _LOGIT_LIMIT)
    entropy_A = torch.special.entr(log_probs_AVd.exp()).sum(-1)
    return torch.stack((logit_A, entropy_A), dim=-1)
