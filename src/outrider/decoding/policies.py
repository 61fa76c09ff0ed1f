"""Policies: who drafts in a step and how deep (`depths`), then how many of the drafts are verified (`lengths`).

    FixedPolicy       l_r = min(length, drafted_r)
    ThresholdPolicy   l_r = the longest prefix with every c_k >= threshold
    PrefixScheduler   tokens in order of survival while throughput improves                    (DSpark, algorithm 1)
    AsyncScheduler    the number of tokens from two steps ago, spent in order of survival      (DSpark, production form)
                      (also the rule of the others that weigh c_k, where steps are launched ahead: decoding/ahead.py)
    GoodputPolicy     one length for all requests, from the estimates of earlier steps         (TurboSpec)
    LookAhead         PrefixScheduler that plans with the expected survival after each frontier      (ours)
    SkipDrafting      drafts where that raises throughput, and verifies as another policy            (ours)

Losslessness: whether x_k is admitted must never depend on x_k. So `depths` reads a `PlanView`, which holds earlier
steps alone; `lengths` reads a `StepView`, whose c_1 .. c_k of a request are known before x_k is drawn. c_{k+1} depends
on x_k: a search over all confidences of a step biases the output.

Prefix, async, goodput and look-ahead verify candidates (r, k) in causal order, which is that of falling survival
a_{r,k} = c_1 ... c_k. Survival never rises along a draft, so sorting all candidates gives the order in which a heap of
frontiers (r, l_r + 1) would pop them. Survivals are compared in steps of 1 / 65534: that is a radix sort, some five
times as fast as a sort of floats, and steps keep the order of one draft. Ties resolve by (position, request), never by
token values.

Sources: DSpark, arXiv 2607.05147; TurboSpec, 2406.14066.
Shapes: R requests, K draft positions, N candidates, M counts, B tokens per forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from outrider.decoding.cost import Flags, Floats, Ints, StepCost, decoding_seconds
from outrider.decoding.learned_cost import Trial, learned

# ----------------------------------------------------------------------------
# What a policy may read.
# ----------------------------------------------------------------------------


@dataclass(frozen=True)
class PlanView:
    """The requests of a step before any of them drafts: everything here follows from earlier steps.

    Attributes:
        expected_RK: expected confidence of each request's drafts by position, NaN if it has never drafted.
        idle_R: steps since a request last drafted, or since it came; 0 if it needs no probe.
        contexts_R: committed tokens.
        other_tokens: rows of the same target forward that verify nothing (chunks of prefill).
        other_requests: how many decode in the same step and cannot draft in it.
        typical_K: the mean of `expected_RK` over all requests so far; None before the first draft.
        lookup_RK: expected confidences of the prompt lookup that each request may verify in place of a draft, 0 after
            its end; None: there is no prompt lookup.
        shallow: steps with drafts since the last draft of all positions.
    """

    expected_RK: Floats
    idle_R: Ints
    contexts_R: Ints
    other_tokens: int = 0
    other_requests: int = 0
    typical_K: Floats | None = None
    lookup_RK: Floats | None = None
    shallow: int = 0

    def lookup_survival_RK(self) -> Floats:
        """Survival of the prompt lookups, [R, K']; K' = 0 without prompt lookup."""
        if self.lookup_RK is None:
            return np.zeros((len(self.idle_R), 0))
        return np.cumprod(self.lookup_RK, axis=1, dtype=np.float64)

    def carried_RK(self, prior: float) -> Floats:
        """`expected_RK` without gaps.

        A request that has never drafted counts as the mean of those present that have, else as `typical_K`, else as
        `prior`. A position that no draft has reached gets the value of the last one reached: 0 would keep drafts short
        for ever.
        """
        unknown_R: Flags = np.asarray(np.isnan(self.expected_RK).any(axis=1))
        if not unknown_R.any():
            return _carried(self.expected_RK)
        if not unknown_R.all():  # a mean over all, drafting now or not: those that draft are better than the rest
            unknown_K = self.expected_RK[~unknown_R].mean(axis=0)
        elif self.typical_K is not None:
            unknown_K = self.typical_K
        else:
            unknown_K = np.full(self.expected_RK.shape[1], prior)
        return _carried(np.where(unknown_R[:, None], unknown_K, self.expected_RK))


def _carried(expected_RK: Floats) -> Floats:
    reached_RK = np.where(expected_RK > 0, np.arange(expected_RK.shape[1]), 0)
    carried_RK: Floats = np.take_along_axis(expected_RK, np.maximum.accumulate(reached_RK, axis=1), axis=1)
    return carried_RK


@dataclass(frozen=True)
class PastStep:
    """Confidences and draft lengths of an earlier step."""

    confidences_RK: Floats
    drafted_R: Ints


@dataclass(frozen=True)
class StepView:
    """The drafts of a step before their verification, without their tokens.

    Attributes:
        confidences_RK: acceptance estimates c_1 .. c_drafted of each request, 0 after them; c_k is known before x_k is
            drawn. NaN without an estimate: trees without confidences.
        drafted_R: draft tokens.
        contexts_R, other_tokens: as in `PlanView`.
        past: earlier steps, the latest last.
        expected_K: mean confidence by position over earlier steps; None before the first.
        drafter_RK: the drafter's own confidences, NaN if it has none; None: `confidences_RK` are its own.
        looked_up_R: whose draft comes from prompt lookup, which costs no drafting (None: nobody's). Its confidences
            follow from earlier steps alone.
        sampled_R: whose tokens are drawn at a temperature above 0, where fewer drafts are accepted (None: nobody's).
    """

    confidences_RK: Floats
    drafted_R: Ints
    contexts_R: Ints
    other_tokens: int = 0
    past: tuple[PastStep, ...] = ()
    expected_K: Floats | None = None
    drafter_RK: Floats | None = None
    looked_up_R: Flags | None = None
    sampled_R: Flags | None = None

    @property
    def by_drafter_R(self) -> Ints:
        """Tokens of each request that the drafter drafted, [R]: 0 if they come from prompt lookup."""
        return self.drafted_R if self.looked_up_R is None else np.where(self.looked_up_R, 0, self.drafted_R)

    @property
    def own_RK(self) -> Floats:
        """The drafter's own confidences, NaN if it has none."""
        return self.confidences_RK if self.drafter_RK is None else self.drafter_RK

    @property
    def predicted_R(self) -> Flags:
        """Whose confidences follow from earlier steps alone, [R]: a policy may read all of them at any time."""
        looked_up_R = np.zeros(len(self.drafted_R), dtype=np.bool_) if self.looked_up_R is None else self.looked_up_R
        return looked_up_R if self.drafter_RK is None else looked_up_R | np.isnan(self.drafter_RK).any(axis=1)

    @staticmethod
    def of(
        confidences: Sequence[Sequence[float]], drafted: Sequence[int], contexts: Sequence[int] | None = None
    ) -> StepView:
        """A view from one list of confidences per request, [] for a drafter without confidences."""
        drafted_R = np.asarray(drafted, dtype=np.int64)
        confidences_RK = np.zeros((len(drafted), int(drafted_R.max(initial=0))))
        for row_K, known, count in zip(confidences_RK, confidences, drafted, strict=True):
            row_K[:count] = np.nan
            known = known[:count]
            row_K[: len(known)] = known
        contexts_R = np.zeros_like(drafted_R) if contexts is None else np.asarray(contexts, dtype=np.int64)
        return StepView(confidences_RK, drafted_R, contexts_R)

    def survival_RK(self) -> Floats:
        """a_{r,k} = c_{r,1} ... c_{r,k}, not increasing in k.

        Raises:
            ValueError: a drafted token has no acceptance estimate.
        """
        missing_R = np.isnan(self.confidences_RK).any(axis=1)
        if missing_R.any():
            raise ValueError(
                f"request {int(missing_R.argmax())} drafted a tree without confidences, which this policy cannot rank. "
                "Use --draft-length or a drafter of chains."
            )
        return np.cumprod(self.confidences_RK, axis=1, dtype=np.float64)


# ----------------------------------------------------------------------------
# What all policies share.
# ----------------------------------------------------------------------------


# What a draft and one more verified token cost if nothing was measured, in plain steps of one request.
_DRAFT_GUESS, _TOKEN_GUESS = 0.2, 0.05
_SHALLOW = 16
_PRIOR = 0.5  # confidence in a token of a drafter that has not drafted yet


class Policy:
    """Decides who drafts, how deep, and how many of the drafts are verified."""

    @property
    def skips(self) -> bool:
        """Whether requests go without drafts that do not pay: then whole steps may back off."""
        return False

    @property
    def name(self) -> str:
        """What load tests call it."""
        return type(self).__name__.removesuffix("Policy").lower()

    @property
    def min_confidence(self) -> float:
        """No token whose confidence is below this is ever admitted, so a drafter need not draw it."""
        return 0.0

    @property
    def step_cost(self) -> StepCost | None:
        """What it weighs expected tokens against; None: it weighs no costs."""
        return None

    def reproducible(self) -> Policy:
        """The same policy without costs that are learned from a clock: what it decides is the same in every run."""
        return self

    def depths(self, view: PlanView) -> Ints:
        """How many tokens each request drafts at most, [R]; 0: it verifies its prompt lookup, or nothing.

        By default a whole draft, unless the prompt lookup promises more tokens per second at guessed costs.
        """
        depths_R = np.full(len(view.idle_R), view.expected_RK.shape[1])
        lookup_RK = view.lookup_survival_RK()
        if lookup_RK.any():
            draft_RK = np.cumprod(view.carried_RK(_PRIOR), axis=1, dtype=np.float64)
            depths_R[_guessed_rate(lookup_RK, 0.0) > _guessed_rate(draft_RK, _DRAFT_GUESS)] = 0
        return depths_R

    def lengths(self, view: StepView) -> Ints:
        """How many of its draft tokens each request has verified, [R]."""
        raise NotImplementedError

    # Of a step that is launched before its confidences are read (decoding/ahead.py).

    @property
    def budgets(self) -> bool:
        """Whether `budget` can say how many drafts such a step verifies."""
        return False

    @property
    def longest(self) -> int | None:
        """Most drafts of a request that it ever verifies; None: all."""
        return None

    def budget(self, view: StepView) -> int:
        """How many drafts such a step verifies at most, in order of survival.

        Args:
            view: of `past`, the latest step that has been read; its confidences are not those of the step.
        """
        raise NotImplementedError

    def reason(self, view: StepView, lengths_R: Ints, request: int) -> str:
        """Why the draft of this request is verified no further than `lengths` says, for people.

        Args:
            lengths_R: the result of `lengths` for this view.
        """
        raise NotImplementedError


def _guessed_rate(survival_RK: Floats, draft: float) -> Floats:
    """Most expected tokens per plain step's time, [R], over how many of the drafts are verified."""
    tokens_RK = 1 + np.cumsum(survival_RK, axis=1)
    steps_K = 1 + draft + _TOKEN_GUESS * np.arange(1, survival_RK.shape[1] + 1)
    rate_R: Floats = np.maximum((tokens_RK / steps_K).max(axis=1), 1 / (1 + draft))
    return rate_R


def step_seconds(cost: StepCost, view: StepView, admitted_N: Ints) -> Floats:
    """Seconds [N] of the step of `view`, which has a request, if it verifies so many drafts in all; see
    `decoding_seconds` for what is left out.
    """
    requests, by_drafter_R = len(view.drafted_R), view.by_drafter_R
    draft = cost.draft_seconds(int(np.count_nonzero(by_drafter_R)), int(by_drafter_R.max(initial=0)))
    context = float(view.contexts_R.mean())
    return draft + decoding_seconds(cost, admitted_N, requests, other_tokens=view.other_tokens, context=context)


def predicted_survival(view: StepView, least: float = 0.0) -> Floats:
    """Survival [R, K] as earlier steps predict it: a request's own estimates if `predicted_R`, else `expected_K`.

    Args:
        least: that every factor counts as.
    """
    requests, positions = view.confidences_RK.shape
    expected_K = np.zeros(positions)
    if view.expected_K is not None:
        known_K = view.expected_K[:positions]
        expected_K[: len(known_K)] = known_K
    predicted_R = view.predicted_R
    if not predicted_R.any():  # all alike
        return np.broadcast_to(np.cumprod(np.maximum(expected_K, least), dtype=np.float64), (requests, positions))
    expected_RK = np.where(predicted_R[:, None], view.confidences_RK, expected_K)
    return np.cumprod(np.maximum(expected_RK, least), axis=1, dtype=np.float64)


STEPS = 65534
LAST = STEPS + 1  # after everything drafted


def falling(survival: Floats) -> NDArray[np.uint16]:
    """Sort keys of survivals, any shape: the larger the survival, the smaller the key."""
    keys: NDArray[np.uint16] = (STEPS + 0.5 - survival * STEPS).astype(np.uint16)
    return keys


def causal_order(survival_RK: Floats, drafted_R: Ints) -> Ints:
    """Flat indices k * R + r of all drafted tokens, best first, [N]."""
    drafted_KR = np.arange(survival_RK.shape[1])[:, None] < drafted_R
    keys_KR = np.where(drafted_KR, falling(survival_RK.T), np.uint16(LAST))
    order_N: Ints = np.argsort(keys_KR, axis=None, kind="stable")[: int(drafted_R.sum())]
    return order_N


def gains(values: Floats) -> Floats:
    """Sums of the largest 0, 1, 2, ... of `values` (any shape, in [0, 1]), to within 1 / 65534 each."""
    largest_first = np.sort(falling(values), axis=None, kind="stable")
    sums = np.zeros(largest_first.size + 1, dtype=np.int64)
    np.cumsum(STEPS - largest_first, dtype=np.int64, out=sums[1:])
    return sums / STEPS


def lengths_of(admitted_N: Ints, requests: int) -> Ints:
    """How many candidates of each request are among these, [R]."""
    lengths_R: Ints = np.bincount(admitted_N % requests, minlength=requests)
    return lengths_R


# ----------------------------------------------------------------------------
# Policies without costs.
# ----------------------------------------------------------------------------


@dataclass(frozen=True)
class FixedPolicy(Policy):
    """Fixed length: verify that many draft tokens of each request; None verifies all of them."""

    length: int | None = None

    def __post_init__(self) -> None:
        if self.length is not None and self.length < 0:
            raise ValueError(f"length={self.length} must be >= 0; use None to verify the whole block")

    def lengths(self, view: StepView) -> Ints:
        return view.drafted_R if self.length is None else np.minimum(view.drafted_R, self.length)

    @property
    def budgets(self) -> bool:
        return True

    @property
    def longest(self) -> int | None:
        return self.length

    def budget(self, view: StepView) -> int:
        return int(view.drafted_R.sum())

    def reason(self, view: StepView, lengths_R: Ints, request: int) -> str:
        return f"the policy verifies {self.length} drafts of a request"


@dataclass(frozen=True)
class ThresholdPolicy(Policy):
    """Confidence threshold: verify the longest prefix whose confidences, the drafter's own, are all >= threshold."""

    threshold: float

    @property
    def min_confidence(self) -> float:
        return self.threshold

    def __post_init__(self) -> None:
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"threshold={self.threshold} must be in [0, 1]; it is compared with a probability")

    def lengths(self, view: StepView) -> Ints:
        missing_R = np.isnan(view.own_RK).any(axis=1)
        if missing_R.any():
            raise ValueError(
                f"request {int(missing_R.argmax())} has draft tokens without confidences, which a threshold needs: use "
                "--draft-length, or fit confidences for a block drafter with outrider calibrate."
            )
        passing_RK = (view.own_RK >= self.threshold) & (np.arange(view.own_RK.shape[1]) < view.drafted_R[:, None])
        lengths_R: Ints = np.logical_and.accumulate(passing_RK, axis=1).sum(axis=1)
        return lengths_R

    def reason(self, view: StepView, lengths_R: Ints, request: int) -> str:
        place = int(lengths_R[request])
        confidence = view.own_RK[request, place]
        return f"confidence {confidence:.2f} of draft {place + 1} is below the threshold {self.threshold:g}"


# ----------------------------------------------------------------------------
# Published policies that weigh costs.
# ----------------------------------------------------------------------------


@dataclass(frozen=True)
class CostPolicy(Policy):
    """A policy that weighs expected tokens against what a step costs, and admits tokens of any confidence."""

    cost: StepCost
    basis: ClassVar[str] = ""  # what decides if the step's own figures do not

    @property
    def name(self) -> str:
        return next((name for name, kind in BY_COST.items() if type(self) is kind), super().name)

    @property
    def step_cost(self) -> StepCost:
        return self.cost

    def reason(self, view: StepView, lengths_R: Ints, request: int) -> str:
        survival_RK, place = view.survival_RK(), int(lengths_R[request])
        verified_RK = np.arange(survival_RK.shape[1]) < lengths_R[:, None]
        tokens, more = len(lengths_R) + survival_RK[verified_RK].sum(), survival_RK[request, place]
        seconds_2 = step_seconds(self.cost, view, lengths_R.sum() + np.arange(2))
        step = "the step, its prompts apart," if view.other_tokens else "the step"
        return (
            f"draft {place + 1} is expected to be accepted with probability {more:.2f} and costs "
            f"{1000 * (seconds_2[1] - seconds_2[0]):.1f} ms more: {tokens / seconds_2[0]:.1f} tokens/s of {step} "
            f"without it, {(tokens + more) / seconds_2[1]:.1f} with it{self.basis}"
        )


class CausalPolicy(CostPolicy):
    """A cost policy that verifies the first m candidates in causal order; subclasses differ in m."""

    def lengths(self, view: StepView) -> Ints:
        survival_RK = view.survival_RK()
        if not view.drafted_R.any():
            return np.zeros_like(view.drafted_R)
        order_N = causal_order(survival_RK, view.drafted_R)
        return lengths_of(order_N[: self.admitted(view, survival_RK, order_N)], len(survival_RK))

    @property
    def budgets(self) -> bool:
        return True

    def budget(self, view: StepView) -> int:
        """By DSpark's asynchronous rule, whatever the policy."""
        return _asynchronous(self.cost, view, int(view.drafted_R.sum()))

    def admitted(self, view: StepView, survival_RK: Floats, order_N: Ints) -> int:
        """How many of the candidates `order_N`, at least one, are verified."""
        raise NotImplementedError


class PrefixScheduler(CausalPolicy):
    """DSpark's prefix scheduler (algorithm 1): admit tokens in causal order while expected throughput improves."""

    def admitted(self, view: StepView, survival_RK: Floats, order_N: Ints) -> int:
        gained = np.concatenate(([0.0], np.cumsum(survival_RK.T.ravel()[order_N])))
        throughput = (len(survival_RK) + gained) / step_seconds(self.cost, view, np.arange(len(gained)))
        # The first non-improvement ends it: searching on would look at confidences not yet revealed.
        worse = throughput[1:] <= throughput[:-1]
        return int(worse.argmax()) if worse.any() else len(order_N)


class AsyncScheduler(CausalPolicy):
    """DSpark's asynchronous scheduler: a number of tokens m* from two steps ago, spent by current survival.

    A machine that prepares its next forward while the draft still runs needs m* before the confidences. All confidences
    of two steps ago may be read, because no token of this step exists yet, so the search may cross cliffs of the cost
    curve. The old step is scaled to the requests that draft now; `expected_K` takes its place if nothing was drafted in
    it. In the first step each draft gets one token.
    """

    basis: ClassVar[str] = "; the number of drafts was chosen from the confidences of two steps ago"

    def admitted(self, view: StepView, survival_RK: Floats, order_N: Ints) -> int:
        return _asynchronous(self.cost, view, len(order_N))


def _asynchronous(cost: StepCost, view: StepView, candidates: int) -> int:
    """m* of so many candidates, from the earliest of `view.past`."""
    drafting = int(np.count_nonzero(view.drafted_R))
    old_RK = _earlier_survival(view)
    if old_RK is None:
        return drafting
    curve, scale = gains(old_RK), drafting / len(old_RK)
    admitted_N = np.arange(candidates + 1)
    gained = scale * np.interp(admitted_N / scale, np.arange(len(curve)), curve)
    throughput = (len(view.drafted_R) + gained) / step_seconds(cost, view, admitted_N)
    return int(throughput.argmax())


def _earlier_survival(view: StepView) -> Floats | None:
    """a_{r,k} of the requests that drafted two steps ago, or what a request's would be on average."""
    if view.past:
        drafting_R = view.past[0].drafted_R > 0
        if drafting_R.any():
            return np.cumprod(view.past[0].confidences_RK[drafting_R], axis=1, dtype=np.float64)
    return None if view.expected_K is None else np.cumprod(view.expected_K, dtype=np.float64)[None]


class GoodputPolicy(CostPolicy):
    """TurboSpec's goodput: the common length with most expected tokens per second; 1 before the first step.

    k* = argmax_k  (R + sum_r sum_{j <= k} E[a_j]) / seconds(R + sum_r min(k, drafted_r)),  E[a_j] from earlier steps.
    """

    basis: ClassVar[str] = "; the length, one for all requests, was chosen from earlier steps"

    def lengths(self, view: StepView) -> Ints:
        view.survival_RK()  # refuses trees without confidences
        if view.expected_K is None or not view.drafted_R.any():
            return np.minimum(view.drafted_R, 1)
        requests = len(view.drafted_R)
        lengths_K = np.arange(view.drafted_R.max() + 1)
        verified_KR = np.minimum(lengths_K[:, None], view.drafted_R)
        gained_RK = np.cumsum(predicted_survival(view), axis=1)
        gained_RK = np.concatenate((np.zeros((requests, 1)), gained_RK), axis=1)
        tokens_K = requests + gained_RK[np.arange(requests), verified_KR].sum(axis=1)
        throughput_K = tokens_K / step_seconds(self.cost, view, verified_KR.sum(axis=1))
        return verified_KR[int(throughput_K.argmax())]


# ----------------------------------------------------------------------------
# Our default: causal look-ahead, and `SkipDrafting` before it.
#
#     revealed   c_1 .. c_l of the admitted and c_{l+1} at each frontier:  a_{r,l+1} is known
#     expected   a_{r,j} = a_{r,l+1} * e_{l+2} ... e_j  for the rest, e_k the mean of earlier steps (`expected_K`)
#     plan       m* = argmax_m (tau + the m largest) / seconds(B + m), over the whole curve;   m* = 0 ends it
#     admit      in causal order while survival holds the plan's price (its smallest value), m* tokens at most
#
# Real cost curves are staircases, where stopping at the first non-improvement stops too early: the first token over a
# cliff never pays for itself, though seven more on the same step are free. *Realised* confidences after the frontier
# must not be read, because c_{k+1} depends on x_k; expectations may. Whether x_k is admitted is a function of earlier
# steps, of c_1 .. c_k, and of tokens admitted before it: the plan is made from those, and stopping at the price reads
# a survival that is on the frontier by then. So the output stays exact (checked by enumeration).
# ----------------------------------------------------------------------------


_LEAST = 1e-6  # of an expected confidence: products of dozens of them are divided by
_SORTED = 8_192  # candidates in all plans of a step together, which bounds its time; 2 plans for 256 requests of 16


@dataclass(frozen=True)
class LookAhead(CausalPolicy):
    """Causal look-ahead: admit planned tokens while their survival holds the plan's price.

    Before any step has been recorded, plans reach no further than the frontiers. Steps that are launched ahead follow
    the asynchronous rule instead (`budget`).


    Args:
        margin: share of the throughput of requests with drafts that the first plan must promise to gain over verifying
            nothing: the best of many estimates is too high on average.
    """

    margin: float = 0.02

    def __post_init__(self) -> None:
        if not 0 <= self.margin < 1:
            raise ValueError(f"margin={self.margin} must be in [0, 1); 0.02 asks for 2 % more tokens per second")

    def reason(self, view: StepView, lengths_R: Ints, request: int) -> str:
        reason = super().reason(view, lengths_R, request)
        return reason if lengths_R.any() else f"{reason}; no plan promised {self.margin:.0%} more than none"

    def admitted(self, view: StepView, survival_RK: Floats, order_N: Ints) -> int:
        lengths_R = np.zeros_like(view.drafted_R)
        realised_N = survival_RK.T.ravel()[order_N]
        seconds_N = step_seconds(self.cost, view, np.arange(len(order_N) + 1))
        predicted_RK = predicted_survival(view, _LEAST)
        admitted, tau = 0, float(len(survival_RK))
        margin = self.margin * np.count_nonzero(view.drafted_R) / len(view.drafted_R)
        for _ in range(max(2, _SORTED // len(order_N))):
            curve = gains(expected_survival(survival_RK, lengths_R, view.drafted_R, predicted_RK=predicted_RK))
            rates = (tau + curve[: len(order_N) - admitted + 1]) / seconds_N[admitted:]
            planned = int(rates.argmax())
            if planned == 0 or (not admitted and rates[planned] < (1 + margin) * rates[0]):
                break
            price = curve[planned] - curve[planned - 1]
            kept = _kept(realised_N[admitted : admitted + planned], price)
            tau += float(realised_N[admitted : admitted + kept].sum())
            admitted += kept
            lengths_R = lengths_of(order_N[:admitted], len(survival_RK))
            if admitted == len(order_N):
                break
        return admitted


def expected_survival(survival_RK: Floats, lengths_R: Ints, drafted_R: Ints, predicted_RK: Floats) -> Floats:
    """Expected survival of the tokens from each frontier on, 0 elsewhere; reads a_{r,l+1} and nothing after it.

    Args:
        predicted_RK: survival by position as earlier steps predict it.
    """
    positions = survival_RK.shape[1]
    requests_R, frontier_R = np.arange(len(survival_RK)), np.minimum(lengths_R, positions - 1)
    scale_R = survival_RK[requests_R, frontier_R] / predicted_RK[requests_R, frontier_R]
    positions_K = np.arange(positions)
    open_RK = (positions_K >= lengths_R[:, None]) & (positions_K < drafted_R[:, None])
    return np.where(open_RK, scale_R[:, None] * predicted_RK, 0.0)


def _kept(realised_M: Floats, price: float) -> int:
    """How many of the next candidates are worth the plan's price; the first is what the plan was made from."""
    below = falling(realised_M) > falling(np.array(price)) + 1
    return max(1, int(below.argmax())) if below.any() else len(realised_M)


BY_COST: dict[str, Callable[[StepCost], CostPolicy]] = {  # by the names of their variants in load tests
    "prefix": PrefixScheduler,
    "async": AsyncScheduler,
    "goodput": GoodputPolicy,
    "look-ahead": LookAhead,
}


# ----------------------------------------------------------------------------
# Who drafts, and how deep:
#
#     D*, k* = argmax_{D, k}  max_m (R + the m largest a_{r,j} with r in D, j <= k) / (seconds(R, m) + draft(|D|, k))
#
# a_{r,j} is the survival of each request that earlier steps predict. Requests with a prompt lookup that are not in D
# verify that, at any j and for no seconds of drafting. A draft costs its seconds whatever is verified of it; under load
# that is more than a request of low survival returns: the open limitation of DSpark (arXiv 2607.05147). Requests are
# ranked by expected accepted drafts, less those of their prompt lookups, and D is the best of 0, R, R/2, R/4, ..., 1 of
# them: neighbouring sizes cost nearly the same. All that draft draft equally deep, because a step of the drafter is
# paid for once. The best of many estimates is too high on average, so drafting has to promise `margin` more.
#
# A request that stops drafting produces no new data, so it occasionally drafts anyway (a probe). Drafters without
# confidences need no probe: their estimates decay to the prior. Each request that skips saves `probe_share` of its
# share of the step, and some of those that have waited longest draft once their savings pay for it: probes cost
# `probe_share` of the time at most, and at most a quarter of the requests probe in one step. Nobody probes if drafts
# would not pay even if half of the refused tokens were accepted. For the same reason drafts kept short are made whole
# once in `_SHALLOW` steps: nothing is seen of positions that are not drafted, and one hard beginning would keep them
# short for ever.
# ----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Plan:
    """One way to run a step: requests that draft, how deep; expected tokens and seconds, without prompts."""

    drafting: int
    depth: int
    tokens: float
    seconds: float

    def throughput(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True)
class SkipDrafting(Policy):
    """Draft only if that raises throughput by the step's whole cost, and verify as `policy` says.

    Of a step that is launched ahead, `depths` and `budget` follow from the step before the last.

    Args:
        policy: how many drafts are verified; all of them by default.
        probe_share: of the time, spent at most on finding out whether drafting pays again.
        margin: share of throughput that drafting must promise to gain.
        prior: confidence of every position before anything has been drafted.

    Raises:
        ValueError: a number out of its range, or a policy that ends drafts by their confidence, whose estimates would
            come from the better drafts alone.
    """

    cost: StepCost
    policy: Policy = field(default_factory=FixedPolicy)
    probe_share: float = 0.01
    margin: float = 0.03
    prior: float = _PRIOR

    def __post_init__(self) -> None:
        if not 0 <= self.probe_share < 1:
            raise ValueError(f"probe_share={self.probe_share} must be in [0, 1); 0.01 is a hundredth of the time")
        if not 0 <= self.margin < 1:
            raise ValueError(f"margin={self.margin} must be in [0, 1); 0.03 asks for 3 % more tokens per second")
        if not 0 <= self.prior <= 1:
            raise ValueError(f"prior={self.prior} must be in [0, 1]; it is the confidence in a token nobody has seen")
        if self.policy.min_confidence > 0:
            raise ValueError(f"{self.policy} ends drafts at its min_confidence: use a policy that decides by cost.")

    @property
    def skips(self) -> bool:
        return True

    @property
    def name(self) -> str:
        return self.policy.name

    @property
    def step_cost(self) -> StepCost:
        return self.cost

    def reproducible(self) -> SkipDrafting:
        cost = learned(self.cost)
        if cost is None:
            return self
        policy = replace(self.policy, cost=cost.cost) if isinstance(self.policy, CostPolicy) else self.policy
        return replace(self, cost=cost.cost, policy=policy)

    def _trial(self, decoding: int, other_tokens: int) -> Trial | None:
        """The drafts that this step makes and verifies whatever they promise, to learn what they cost."""
        cost = learned(self.cost)
        trial = None if cost is None or other_tokens else cost.trial(decoding)
        return trial if trial is not None and trial.drafts else None

    def lengths(self, view: StepView) -> Ints:
        if self._trial(len(view.drafted_R), view.other_tokens):
            return view.drafted_R
        return self.policy.lengths(view)

    @property
    def budgets(self) -> bool:
        return self.policy.budgets

    @property
    def longest(self) -> int | None:
        return self.policy.longest

    def budget(self, view: StepView) -> int:
        if self._trial(len(view.drafted_R), view.other_tokens):
            return int(view.drafted_R.sum())
        return self.policy.budget(view)

    def reason(self, view: StepView, lengths_R: Ints, request: int) -> str:
        return self.policy.reason(view, lengths_R, request)

    def depths(self, view: PlanView) -> Ints:
        requests = len(view.idle_R)
        depths_R = np.zeros(requests, dtype=np.int64)
        if not requests:
            return depths_R
        gamma = view.expected_RK.shape[1]
        expected_RK = view.carried_RK(self.prior)
        survival_RK = np.cumprod(expected_RK, axis=1, dtype=np.float64)
        lookup_RK = view.lookup_survival_RK()
        gain_R = survival_RK.sum(axis=1) - lookup_RK.sum(axis=1)
        ranked_R = np.argsort(-gain_R, kind="stable")
        decoding = requests + view.other_requests
        trial = self._trial(decoding, view.other_tokens)
        if trial is not None:
            depths_R[ranked_R[: max(1, requests // 4)]] = max(1, gamma >> trial.halvings)
            return depths_R
        context = float(view.contexts_R.mean())
        most = np.arange(1 + survival_RK.size + lookup_RK.size)
        undrafted_M = decoding_seconds(self.cost, most, decoding, other_tokens=view.other_tokens, context=context)

        def planned(drafting: int, depth: int, survival: Sequence[Floats]) -> _Plan:
            """The best plan that verifies some of these drafts."""
            curve = gains(np.concatenate([part.ravel() for part in survival]))
            seconds_M = undrafted_M[: len(curve)] + self.cost.draft_seconds(drafting, depth)
            tokens_M = decoding + curve
            best = int((tokens_M / seconds_M).argmax())
            return _Plan(drafting, depth, tokens=float(tokens_M[best]), seconds=float(seconds_M[best]))

        def tried(drafting: int, depth: int) -> _Plan:
            """The best plan in which so many requests draft so deep."""
            return planned(drafting, depth, [survival_RK[ranked_R[:drafting], :depth], lookup_RK[ranked_R[drafting:]]])

        plan = replace(tried(0, 0), depth=gamma)  # probes learn about every position
        # Every draft and every lookup, for the price of the least draft, is more than any plan can give (but for noise
        # in the measured prices).
        if planned(1, 1, [survival_RK, lookup_RK]).throughput() > (1 + self.margin) * plan.throughput():
            plan = self._better(plan, tried, gamma=gamma, counts=_halves(max(1, int(np.count_nonzero(gain_R > 0)))))
        depths_R[ranked_R[: plan.drafting]] = gamma if view.shallow >= _SHALLOW else plan.depth
        probing = self._probing(view, depths_R == 0, plan)
        if len(probing) and not plan.drafting:
            hoped_RK: Floats = np.cumprod((1 + expected_RK) / 2, axis=1, dtype=np.float64)
            hoped = [planned(n, k, [hoped_RK[ranked_R[:n], :k]]) for n in {1, requests} for k in _halves(gamma)]
            if max(map(_Plan.throughput, hoped)) <= plan.throughput():
                probing = probing[:0]
        depths_R[probing] = plan.depth
        return depths_R

    def _better(self, plan: _Plan, tried: Callable[[int, int], _Plan], *, gamma: int, counts: list[int]) -> _Plan:
        """The best plan with drafts if it promises `margin` more than `plan`, else `plan`."""
        # The best depth with all drafting that have no better lookup, then the best number of requests at that depth.
        plans = [tried(counts[0], depth) for depth in _halves(gamma)]
        depth = max(plans, key=_Plan.throughput).depth
        plans += [tried(count, depth) for count in counts[1:]]
        best = max(plans, key=_Plan.throughput)
        return best if best.throughput() > (1 + self.margin) * plan.throughput() else plan

    def _probing(self, view: PlanView, skipping_R: Flags, plan: _Plan) -> Ints:
        """Those of the skipping requests that draft all the same."""
        waiting = np.flatnonzero(skipping_R & (view.idle_R > 0))
        waiting = waiting[np.argsort(-view.idle_R[waiting], kind="stable")]
        share = self.probe_share * plan.seconds / (len(skipping_R) + view.other_requests)
        saved = share * np.cumsum(view.idle_R[waiting], dtype=np.float64)
        drafting = self.cost.draft_seconds(plan.drafting, plan.depth)
        for count in _halves(min(len(waiting), max(1, len(skipping_R) // 4))):
            if self.cost.draft_seconds(plan.drafting + count, plan.depth) - drafting <= float(saved[count - 1]):
                return waiting[:count]
        return waiting[:0]


def _halves(count: int) -> list[int]:
    """count, count / 2, ..., 1; [] for 0."""
    return [count >> shift for shift in range(count.bit_length())]
