"""causal look-ahead: plan with expectations, pay with what is revealed, plan again

    revealed   c_1 .. c_l of the admitted and c_{l+1} at each frontier:  a_{r,l+1} is known
    expected   a_{r,j} = a_{r,l+1} * e_{l+2} ... e_j  for the rest, e_k the mean of earlier steps (`expected_K`)
    plan       m* = argmax_m (tau + the m largest) / seconds(B + m), over the whole curve;   m* = 0 ends it
    admit      in causal order while survival holds the plan's price (its smallest value), m* tokens at most

An early stop is blind on real cost curves, which are staircases: the first token over a cliff never pays for itself,
though seven more on the same step would be free. Looking at *realised* confidences behind the frontier would
see them and bias the output: c_{k+1} tells x_k. Expectations do not. Whether x_k is admitted is a function of earlier
steps, of c_1 .. c_k, and of tokens admitted before it: the plan was made from those, and stopping at the price looks at
a survival that is on the frontier by then. So the output stays exact, by construction (checked by enumeration).
Shapes: R requests, K draft positions, N candidates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from outrider.scheduling.cost import StepCost, step_seconds
from outrider.scheduling.order import causal_order, falling, gains, lengths_of
from outrider.scheduling.view import Floats, Ints, StepView

_LEAST = 1e-6  # of an expected confidence: products of 16 of them are divided by
_SORTED = 8_192  # candidates in all plans of a step together, which bounds its time; 2 plans for 256 requests of 16


@dataclass(frozen=True)
class LookAhead:
    """Admit what earlier steps promise and this one keeps. Before there are any, only frontiers are seen."""

    cost: StepCost
    floor: ClassVar[float] = 0.0

    def lengths(self, view: StepView) -> Ints:
        survival_RK = view.survival_RK()
        lengths_R = np.zeros_like(view.drafted_R)
        if not view.drafted_R.any():
            return lengths_R
        order_N = causal_order(survival_RK, view.drafted_R)
        realised_N = survival_RK.T.ravel()[order_N]
        seconds_N = step_seconds(self.cost, view, np.arange(len(order_N) + 1))
        promise_K = _promise(view)
        admitted, tau = 0, float(len(survival_RK))
        for _ in range(max(2, _SORTED // len(order_N))):
            curve = gains(expected_survival(survival_RK, lengths_R, view.drafted_R, promise_K))
            planned = int(((tau + curve[: len(order_N) - admitted + 1]) / seconds_N[admitted:]).argmax())
            if planned == 0:
                break
            price = curve[planned] - curve[planned - 1]
            kept = _kept(realised_N[admitted : admitted + planned], price)
            tau += float(realised_N[admitted : admitted + kept].sum())
            admitted += kept
            lengths_R = lengths_of(order_N[:admitted], len(survival_RK))
            if admitted == len(order_N):
                break
        return lengths_R


def expected_survival(survival_RK: Floats, lengths_R: Ints, drafted_R: Ints, promise_K: Floats) -> Floats:
    """What the tokens from each frontier on are expected to survive, 0 elsewhere; reads a_{r,l+1} and nothing behind.

    Args:
        promise_K: expected survival by position of a request of which nothing is revealed.
    """
    positions = survival_RK.shape[1]
    frontier_R = np.minimum(lengths_R, positions - 1)
    scale_R = survival_RK[np.arange(len(frontier_R)), frontier_R] / promise_K[frontier_R]
    positions_K = np.arange(positions)
    open_RK = (positions_K >= lengths_R[:, None]) & (positions_K < drafted_R[:, None])
    return np.where(open_RK, scale_R[:, None] * promise_K, 0.0)


def _promise(view: StepView) -> Floats:
    positions = view.confidences_RK.shape[1]
    expected_K = np.zeros(positions) if view.expected_K is None else view.expected_K[:positions]
    return np.cumprod(np.maximum(expected_K, _LEAST), dtype=np.float64)


def _kept(realised_M: Floats, price: float) -> int:
    """How many of the next candidates are worth the plan's price; the first is what the plan was made from."""
    below = falling(realised_M) > falling(np.array(price)) + 1
    return max(1, int(below.argmax())) if below.any() else len(realised_M)
