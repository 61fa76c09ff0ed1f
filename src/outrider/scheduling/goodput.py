"""one length for all:   k* = argmax_k  (R + sum_r sum_{j <= k} E[a_j]) / seconds(R + sum_r min(k, drafted_r))

The speculation length of TurboSpec (arXiv 2406.14066): what a step returns is predicted from earlier steps alone, so no
request is told from another and nothing of this draft is read. E[a_j] are products of `expected_K`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from outrider.scheduling.cost import StepCost, step_seconds
from outrider.scheduling.view import Ints, StepView


@dataclass(frozen=True)
class GoodputPolicy:
    """The common length with most expected tokens per second; one token before anything is known."""

    cost: StepCost
    floor: ClassVar[float] = 0.0

    def lengths(self, view: StepView) -> Ints:
        view.survival_RK()  # refuses drafts without confidences: nothing would ever be known of them
        if view.expected_K is None or not view.drafted_R.any():
            return np.minimum(view.drafted_R, 1)
        lengths_K = np.arange(view.drafted_R.max() + 1)
        verified_KR = np.minimum(lengths_K[:, None], view.drafted_R)
        gained = np.concatenate(([0.0], np.cumsum(np.cumprod(view.expected_K))))
        tokens_K = len(view.drafted_R) + gained[verified_KR].sum(axis=1)
        throughput_K = tokens_K / step_seconds(self.cost, view, verified_KR.sum(axis=1))
        return verified_KR[int(throughput_K.argmax())]
