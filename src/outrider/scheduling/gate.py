"""Draft gates: which requests draft at all in a step, and how many tokens.

    D*, k* = argmax_{D, k}  max_m (R + the m largest a_{r,j} with r in D, j <= k) / seconds(R + m, |D|, k)

a_{r,j} is the survival that earlier steps let one expect of each request.

A draft costs its seconds whatever is verified of it. Under load that is more than a request of low survival returns:
the open limitation of DSpark (arXiv 2607.05147). Such a request skips its draft and decodes plainly in the same step.
Requests are ranked by expected accepted drafts, and D is the best of 0, R, R/2, R/4, ..., 1 of them: neighbouring sizes
cost nearly the same. All that draft draft equally deep, because a step of the drafter is paid for once. The best of
many estimates is too high on average, so drafting has to promise `margin` more than plain decoding.

Nothing new is known of a request that skips, so it probes. It saves `probe_share` of its share of every step it skips,
and some of those that have waited longest draft once their savings pay for it: all probing together costs `probe_share`
of the time at most, and at most a quarter of the requests probe in one step.

Everything read comes from earlier steps, so the output stays exact. Shapes: R requests, K draft positions, N, M counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from outrider.scheduling.cost import StepCost
from outrider.scheduling.policies import gains
from outrider.scheduling.view import Flags, Floats, GateView, Ints


class DraftGate(Protocol):
    """Decides which requests draft."""

    def depths(self, view: GateView) -> Ints:
        """How many tokens each request drafts at most, [R]; 0 where it skips."""
        ...


@dataclass(frozen=True)
class AlwaysDraft:
    """Every request drafts a whole block in every step."""

    def depths(self, view: GateView) -> Ints:
        return np.full(len(view.idle_R), view.expected_RK.shape[1])


@dataclass(frozen=True)
class SkipDrafting:
    """Draft only where it raises throughput by the step's whole cost; for policies that choose lengths by `cost` too.

    Args:
        probe_share: of the time, spent at most on finding out whether drafting pays again.
        margin: share of throughput that drafting must promise to gain.
        prior: confidence of every position before anything has been drafted. A request that has never drafted counts as
            the mean of those present that have, else as `typical_K`, else as this.
    """

    cost: StepCost
    probe_share: float = 0.01
    margin: float = 0.03
    prior: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.probe_share < 1:
            raise ValueError(f"probe_share={self.probe_share} must be in [0, 1); 0.01 is a hundredth of the time")
        if not 0 <= self.margin < 1:
            raise ValueError(f"margin={self.margin} must be in [0, 1); 0.03 asks for 3 % more tokens per second")
        if not 0 <= self.prior <= 1:
            raise ValueError(f"prior={self.prior} must be in [0, 1]; it is the confidence in a token nobody has seen")

    def depths(self, view: GateView) -> Ints:
        requests = len(view.idle_R)
        depths_R = np.zeros(requests, dtype=np.int64)
        if not requests:
            return depths_R
        gamma = view.expected_RK.shape[1]
        survival_RK = np.cumprod(self._beliefs(view), axis=1, dtype=np.float64)
        ranked_R = np.argsort(-survival_RK.sum(axis=1), kind="stable")
        plain = float(self._seconds(view, np.zeros(1, dtype=np.int64), 0, 0)[0])
        plan = _Plan(0, gamma, 0, float(requests + view.other_requests), plain)  # probes learn about every position
        # The best depth with everybody drafting, then the best number of requests at that depth.
        tried = [self._tried(view, survival_RK, requests, depth) for depth in _halves(gamma)]
        depth = max(tried, key=_Plan.throughput).depth
        tried += [self._tried(view, survival_RK[ranked_R[:n]], n, depth) for n in _halves(requests)[1:]]
        best = max(tried, key=_Plan.throughput)
        if best.throughput() > (1 + self.margin) * plan.throughput():
            plan = best
        depths_R[ranked_R[: plan.drafting]] = plan.depth
        depths_R[self._probing(view, depths_R == 0, plan)] = plan.depth
        return depths_R

    def _tried(self, view: GateView, survival_RK: Floats, drafting: int, depth: int) -> _Plan:
        """The best plan with these drafts, given their expected survival [drafting, K]."""
        curve = gains(survival_RK[:, :depth])
        seconds_M = self._seconds(view, np.arange(len(curve)), drafting, depth)
        tokens_M = len(view.idle_R) + view.other_requests + curve
        best = int((tokens_M / seconds_M).argmax())
        return _Plan(drafting, depth, best, float(tokens_M[best]), float(seconds_M[best]))

    def _beliefs(self, view: GateView) -> Floats:
        """Expected confidences of every request, [R, K]."""
        unknown_R: Flags = np.asarray(np.isnan(view.expected_RK).any(axis=1))
        if not unknown_R.any():
            return _carried(view.expected_RK)
        if not unknown_R.all():  # a mean over all, drafting now or not: those that draft are better than the rest
            unknown_K = view.expected_RK[~unknown_R].mean(axis=0)
        elif view.typical_K is not None:
            unknown_K = view.typical_K
        else:
            unknown_K = np.full(view.expected_RK.shape[1], self.prior)
        return _carried(np.where(unknown_R[:, None], unknown_K, view.expected_RK))

    def _probing(self, view: GateView, skipping_R: Flags, plan: _Plan) -> Ints:
        """Those of the skipping requests that draft all the same."""
        waiting = np.flatnonzero(skipping_R & (view.idle_R > 0))
        waiting = waiting[np.argsort(-view.idle_R[waiting], kind="stable")]
        share = self.probe_share * plan.seconds / (len(skipping_R) + view.other_requests)
        saved = share * np.cumsum(view.idle_R[waiting], dtype=np.float64)
        for count in _halves(min(len(waiting), max(1, len(skipping_R) // 4))):
            more = self._seconds(view, np.array([plan.admitted]), plan.drafting + count, plan.depth)
            if float(more[0]) - plan.seconds <= float(saved[count - 1]):
                return waiting[:count]
        return waiting[:0]

    def _seconds(self, view: GateView, admitted_M: Ints, drafting: int, depth: int) -> Floats:
        requests = len(view.idle_R) + view.other_requests
        tokens_M = requests + view.other_tokens + admitted_M
        return self.cost.seconds(tokens_M, requests, drafting, float(view.contexts_R.mean()), depth)


@dataclass(frozen=True)
class _Plan:
    """One way to run a step: requests that draft, how deep, tokens verified; expected tokens and seconds."""

    drafting: int
    depth: int
    admitted: int
    tokens: float
    seconds: float

    def throughput(self) -> float:
        return self.tokens / self.seconds


def _carried(beliefs_RK: Floats) -> Floats:
    """Give a position that no draft reached the value of the last that one did: 0 would keep drafts short for ever."""
    reached_RK = np.where(beliefs_RK > 0, np.arange(beliefs_RK.shape[1]), 0)
    carried_RK: Floats = np.take_along_axis(beliefs_RK, np.maximum.accumulate(reached_RK, axis=1), axis=1)
    return carried_RK


def _halves(count: int) -> list[int]:
    """count, count / 2, ..., 1; [] for 0."""
    return [count >> shift for shift in range(count.bit_length())]
