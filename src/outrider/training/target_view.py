"""What the objective needs of the target at each supervised position, without its logits."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


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
