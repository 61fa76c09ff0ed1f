"""step t - 2:  confidences --- global search over the cost curve ---> budget m*
step t:      confidences -------------------------------- causal order, the first m* -> lengths

The production form of the prefix scheduler (DSpark, arXiv 2607.05147): a machine that prepares its next forward while
the draft still runs needs the number of tokens before the confidences. Two steps back, every confidence may be read,
whatever it tells about its own token: the tokens of *this* step do not exist yet. So the search may cross cliffs of a
jagged curve. Only the allocation reads this draft, in causal order and to a length fixed before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from outrider.scheduling.cost import StepCost, step_seconds
from outrider.scheduling.order import causal_order, gains, lengths_of
from outrider.scheduling.view import Floats, Ints, StepView


@dataclass(frozen=True)
class AsyncScheduler:
    """A budget from two steps ago, spent by current survival.

    The old step is scaled to the requests that draft now. In the second step of all the one before is the oldest there
    is; where the old step drafted nothing, `expected_K` speaks for it. In the first step each draft gets one token:
    first positions are the likeliest, and the next step knows more.
    """

    cost: StepCost
    floor: ClassVar[float] = 0.0

    def lengths(self, view: StepView) -> Ints:
        survival_RK = view.survival_RK()
        if not view.drafted_R.any():
            return np.zeros_like(view.drafted_R)
        order_N = causal_order(survival_RK, view.drafted_R)
        return lengths_of(order_N[: self._budget(view, len(order_N))], len(survival_RK))

    def _budget(self, view: StepView, candidates: int) -> int:
        """How many of the candidates are verified; independent of this step's confidences."""
        drafting = int(np.count_nonzero(view.drafted_R))
        old_RK = _earlier_survival(view)
        if old_RK is None:
            return drafting
        curve, scale = gains(old_RK), drafting / len(old_RK)
        admitted_N = np.arange(candidates + 1)
        gained = scale * np.interp(admitted_N / scale, np.arange(len(curve)), curve)
        throughput = (len(view.drafted_R) + gained) / step_seconds(self.cost, view, admitted_N)
        return int(throughput.argmax())


def _earlier_survival(view: StepView) -> Floats | None:
    """a_{r,k} of the requests that drafted two steps ago, or what a request's would be on average."""
    if view.past:
        drafting_R = view.past[0].drafted_R > 0
        if drafting_R.any():
            return np.cumprod(view.past[0].confidences_RK[drafting_R], axis=1, dtype=np.float64)
    return None if view.expected_K is None else np.cumprod(view.expected_K, dtype=np.float64)[None]
