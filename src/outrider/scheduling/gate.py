"""Draft gates: which requests draft at all in a step, and how many tokens.

    D*, k* = argmax_{D, k}  max_m (R + the m largest a_{r,j} with r in D, j <= k) / seconds(R + m, |D|, k)

a_{r,j} is the survival that earlier steps let one expect of each request (`History`, below).

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

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.scheduling.cost import Floats, Ints, StepCost
from outrider.scheduling.policies import PastStep, StepView, gains

Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class GateView:
    """What a gate is shown: what is known before a step drafts.

    `expected_RK`: a request's own mean calibrated confidence per position, NaN where it has never drafted; `idle_R`:
    steps since it last drafted, or since it came; `other_requests` decode in the same step and cannot draft in it;
    `typical_K`: the same mean over all requests there ever were, None before there were any. `contexts_R` and
    `other_tokens` as in `StepView`.
    """

    expected_RK: Floats
    idle_R: Ints
    contexts_R: Ints
    other_tokens: int = 0
    other_requests: int = 0
    typical_K: Floats | None = None


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
        plain = float(self._seconds(view, np.zeros(1, dtype=np.int64), 0, depth=0)[0])
        plan = _Plan(
            0, gamma, 0, tokens=float(requests + view.other_requests), seconds=plain
        )  # probes learn about every position
        # The best depth with everybody drafting, then the best number of requests at that depth.
        tried = [self._tried(view, survival_RK, depth) for depth in _halves(gamma)]
        depth = max(tried, key=_Plan.throughput).depth
        tried += [self._tried(view, survival_RK[ranked_R[:n]], depth) for n in _halves(requests)[1:]]
        best = max(tried, key=_Plan.throughput)
        if best.throughput() > (1 + self.margin) * plan.throughput():
            plan = best
        depths_R[ranked_R[: plan.drafting]] = plan.depth
        depths_R[self._probing(view, depths_R == 0, plan)] = plan.depth
        return depths_R

    def _tried(self, view: GateView, survival_RK: Floats, depth: int) -> _Plan:
        """The best plan in which requests of this expected survival draft."""
        drafting = len(survival_RK)
        curve = gains(survival_RK[:, :depth])
        seconds_M = self._seconds(view, np.arange(len(curve)), drafting, depth=depth)
        tokens_M = len(view.idle_R) + view.other_requests + curve
        best = int((tokens_M / seconds_M).argmax())
        return _Plan(drafting, depth, best, tokens=float(tokens_M[best]), seconds=float(seconds_M[best]))

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
            more = self._seconds(view, np.array([plan.admitted]), plan.drafting + count, depth=plan.depth)
            if float(more[0]) - plan.seconds <= float(saved[count - 1]):
                return waiting[:count]
        return waiting[:0]

    def _seconds(self, view: GateView, admitted_M: Ints, drafting: int, depth: int) -> Floats:
        requests = len(view.idle_R) + view.other_requests
        tokens_M = requests + view.other_tokens + admitted_M
        return self.cost.seconds(tokens_M, requests, drafting, context=float(view.contexts_R.mean()), depth=depth)


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


# ----------------------------------------------------------------------------
# Expected confidences from earlier steps:   e_k = mean(a_k) / mean(a_{k-1}),   exponentially weighted means
#
# e_k is the mean calibrated confidence at position k, each draft weighted by its survival up to there. That makes
# e_1 ... e_k the mean survival itself; a plain mean of c_k would count drafts that were lost before k, and its products
# would come out too low, since easy positions come together.
#
# One `History` serves an engine and its simulation alike. Shapes: R requests, K = gamma draft positions, S slots.
# ----------------------------------------------------------------------------


class History:
    """Confidences of past steps: the last two, and running means by request and over all requests.

    Args:
        gamma: most draft tokens of a block.
        decay: what one more draft leaves of the weight of those before (over all requests: one more step), in [0, 1).
    """

    def __init__(self, gamma: int, decay: float = 0.9) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"decay={decay} must be in [0, 1); 0 remembers the last draft only")
        self.gamma, self.decay = gamma, decay
        self._past: deque[PastStep] = deque(maxlen=2)
        self._all_2K: Floats | None = None  # mean a_{k-1} and mean a_k over all requests
        self._slots: dict[Hashable, int] = {}
        self._free: list[int] = []
        self._means_S2K = np.empty((0, 2, gamma))  # the same by request, NaN before its first draft
        self._idle_S = np.empty(0, dtype=np.int64)

    def gate_view(
        self, ids: Sequence[Hashable], contexts: Sequence[int], other_tokens: int = 0, other_requests: int = 0
    ) -> GateView:
        """What a `DraftGate` is shown of these requests before they draft."""
        slots_R = self._slots_of(ids)
        return GateView(
            _ratio(self._means_S2K[slots_R]),
            self._idle_S[slots_R],
            np.asarray(contexts, dtype=np.int64),
            other_tokens=other_tokens,
            other_requests=other_requests,
            typical_K=self._expected_K(),
        )

    def step_view(
        self,
        ids: Sequence[Hashable],
        confidences: Sequence[Sequence[float]],
        drafted: Sequence[int],
        contexts: Sequence[int],
        other_tokens: int = 0,
    ) -> StepView:
        """What a `Policy` is shown: this step's drafts, one list per request, with what came before."""
        assert len(ids) == len(drafted) and max(drafted, default=0) <= self.gamma
        view = StepView.of(confidences, drafted, contexts)
        return replace(view, other_tokens=other_tokens, past=tuple(self._past), expected_K=self._expected_K())

    def record(self, ids: Sequence[Hashable], view: StepView) -> None:
        """Remember a step once it is over; a request that did not draft keeps its means."""
        slots_R = self._slots_of(ids)
        self._past.append(PastStep(view.confidences_RK, view.drafted_R))
        self._idle_S[slots_R] = np.where(view.drafted_R > 0, 0, self._idle_S[slots_R] + 1)
        known_R = (view.drafted_R > 0) & ~np.isnan(view.confidences_RK).any(axis=1)
        if not known_R.any():
            return
        survival_R2K = self._survival(view.confidences_RK[known_R])
        seen_RK = np.arange(self.gamma) < view.drafted_R[known_R, None]
        # A new request starts from the mean over all, so that one rejected draft does not decide about it.
        known_slots_R = slots_R[known_R]
        old_R2K = self._means_S2K[known_slots_R]
        if self._all_2K is not None:
            old_R2K = np.where(np.isnan(old_R2K), self._all_2K, old_R2K)
        self._means_S2K[known_slots_R] = self._mixed(old_R2K, survival_R2K, seen_RK)
        count_K = seen_RK.sum(axis=0)
        mean_2K = (survival_R2K * seen_RK[:, None]).sum(axis=0) / np.maximum(count_K, 1)
        old_2K = np.full_like(mean_2K, np.nan) if self._all_2K is None else self._all_2K
        self._all_2K = self._mixed(old_2K[None], mean_2K[None], (count_K > 0)[None])[0]

    def forget(self, id: Hashable) -> None:
        """Drop the means of a request that has left; its drafts stay in the means over all."""
        slot = self._slots.pop(id, None)
        if slot is not None:
            self._means_S2K[slot], self._idle_S[slot] = np.nan, 0
            self._free.append(slot)

    def _expected_K(self) -> Floats | None:
        return None if self._all_2K is None else _ratio(self._all_2K[None])[0]

    def _survival(self, confidences_RK: Floats) -> Floats:
        """a_{k-1} and a_k, [R, 2, gamma]; 0 behind the block."""
        survival_R2K = np.zeros((len(confidences_RK), 2, self.gamma))
        drafted = confidences_RK.shape[1]
        survival_R2K[:, 1, :drafted] = np.cumprod(confidences_RK, axis=1)
        survival_R2K[:, 0, 0] = 1.0
        survival_R2K[:, 0, 1:] = survival_R2K[:, 1, :-1]
        return survival_R2K

    def _mixed(self, old_R2K: Floats, new_R2K: Floats, seen_RK: Flags) -> Floats:
        """Means with one more draft in them, where it reached; a first draft stands alone, 0 where it did not reach."""
        start_R2K = np.where(np.isnan(old_R2K), np.where(seen_RK[:, None], new_R2K, 0.0), old_R2K)
        return np.where(seen_RK[:, None], self.decay * start_R2K + (1 - self.decay) * new_R2K, start_R2K)

    def _slots_of(self, ids: Sequence[Hashable]) -> Ints:
        for id in ids:
            if id not in self._slots:
                if not self._free:
                    self._grow()
                self._slots[id] = self._free.pop()
        return np.array([self._slots[id] for id in ids], dtype=np.int64)

    def _grow(self) -> None:
        size = len(self._idle_S)
        added = max(size, 16)
        self._means_S2K = np.concatenate((self._means_S2K, np.full((added, 2, self.gamma), np.nan)))
        self._idle_S = np.concatenate((self._idle_S, np.zeros(added, dtype=np.int64)))
        self._free.extend(range(size + added - 1, size - 1, -1))


def _ratio(means_R2K: Floats) -> Floats:
    """mean(a_k) / mean(a_{k-1}), 0 where nothing got so far; NaN where nothing is known."""
    before_RK, after_RK = means_R2K[:, 0], means_R2K[:, 1]
    ratio_RK: Floats = np.divide(after_RK, before_RK, out=np.zeros_like(after_RK), where=before_RK != 0)
    return ratio_RK
