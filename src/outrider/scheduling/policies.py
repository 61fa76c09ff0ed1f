"""admit (r, k) or stop, seeing only c_1..c_k of r and what is already admitted:

    fixed       l_r = min(length, drafted_r)
    threshold   l_r = the longest prefix with every c_k >= threshold
    prefix      the largest survival a_{r,k} = c_1 ... c_k on the frontier (r, l_r + 1), while tau * SPS(B) improves

Source: DSpark, arXiv 2607.05147, algorithm 1. Losslessness demands that admitting x_k never depends on x_k, and
c_{k+1} does: a search over all confidences, however tempting, biases the output. R requests, B tokens per forward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np

from outrider.scheduling.cost import StepCost, step_seconds
from outrider.scheduling.order import causal_order, lengths_of
from outrider.scheduling.view import Ints, StepView


class Policy(Protocol):
    @property
    def floor(self) -> float:
        """No token whose confidence is below this is ever admitted, so a drafter need not draw it."""
        ...

    def lengths(self, view: StepView) -> Ints:
        """How many of its draft tokens each request has verified, [R]."""
        ...


@dataclass(frozen=True)
class FixedPolicy:
    """Verify a fixed number of draft tokens; None verifies all of them."""

    length: int | None = None
    floor: ClassVar[float] = 0.0

    def __post_init__(self) -> None:
        if self.length is not None and self.length < 0:
            raise ValueError(f"length={self.length} must be >= 0; use None to verify the whole block")

    def lengths(self, view: StepView) -> Ints:
        return view.drafted_R if self.length is None else np.minimum(view.drafted_R, self.length)


@dataclass(frozen=True)
class ThresholdPolicy:
    """Verify until the drafter doubts itself."""

    threshold: float

    @property
    def floor(self) -> float:
        return self.threshold

    def __post_init__(self) -> None:
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"threshold={self.threshold} must be in [0, 1]; it is compared with a probability")

    def lengths(self, view: StepView) -> Ints:
        view.survival_RK()  # refuses drafts without confidences
        positions_K = np.arange(view.confidences_RK.shape[1])
        passing_RK = (view.confidences_RK >= self.threshold) & (positions_K < view.drafted_R[:, None])
        lengths_R: Ints = np.logical_and.accumulate(passing_RK, axis=1).sum(axis=1)
        return lengths_R


@dataclass(frozen=True)
class PrefixScheduler:
    """Spend verification where survival is highest, while expected tokens per second improve (Algorithm 1)."""

    cost: StepCost
    floor: ClassVar[float] = 0.0

    def lengths(self, view: StepView) -> Ints:
        if not view.drafted_R.any():
            return np.zeros_like(view.drafted_R)
        survival_RK = view.survival_RK()
        order_N = causal_order(survival_RK, view.drafted_R)
        gained = np.concatenate(([0.0], np.cumsum(survival_RK.T.ravel()[order_N])))
        throughput = (len(survival_RK) + gained) / step_seconds(self.cost, view, np.arange(len(gained)))
        # The first non-improvement ends it: searching on would look at confidences not yet revealed.
        worse = throughput[1:] <= throughput[:-1]
        admitted = int(worse.argmax()) if worse.any() else len(order_N)
        return lengths_of(order_N[:admitted], len(survival_RK))
