"""Verification policies: how many of its draft tokens each request has verified in a step.

    FixedPolicy       l_r = min(length, drafted_r)
    ThresholdPolicy   l_r = the longest prefix with every c_k >= threshold
    PrefixScheduler   tokens in order of survival while throughput improves                    (DSpark, algorithm 1)
    AsyncScheduler    the number of tokens from two steps ago, spent in order of survival      (DSpark, production form)
    GoodputPolicy     one length for all requests, from what earlier steps promise             (TurboSpec)
    LookAhead         PrefixScheduler that plans with expected survival behind each frontier   (ours)

Losslessness demands that admitting x_k never depends on x_k: a policy sees c_1 .. c_k of a request and what is already
admitted. c_{k+1} depends on x_k, so a search over all confidences of a step biases the output.

The last four verify candidates (r, k) in causal order, which is that of falling survival a_{r,k} = c_1 ... c_k.
Survival never rises along a draft, so sorting all candidates gives the order in which a heap of frontiers (r, l_r + 1)
would pop them: what stands before a candidate is its own prefix or another request's, and nothing behind it can move
it. Survivals are compared in steps of 1 / 65534: that is a radix sort, some five times as fast as a sort of floats, and
steps keep the order of one draft. Ties resolve by (position, request), never by token values.

Sources: DSpark, arXiv 2607.05147; TurboSpec, 2406.14066.
Shapes: R requests, K draft positions, N candidates, B tokens per forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.decoding.cost import Floats, Ints, StepCost, decoding_seconds

Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class PastStep:
    """Confidences and draft lengths of an earlier step."""

    confidences_RK: Floats
    drafted_R: Ints


@dataclass(frozen=True)
class StepView:
    """What a policy is shown: one step before its verification, without its tokens.

    Row r of `confidences_RK` holds c_1 .. c_drafted of request r, known before the tokens they judge, and 0 behind
    them: what is believed of its drafts (`Beliefs`), which reads its drafter's own confidences where it has any; NaN
    where nothing is believed, of trees without confidences. `own_RK`: the drafters' own, NaN where they have none, so
    that all that is believed follows from earlier steps; None: `confidences_RK` are. `contexts_R` counts committed
    tokens; `other_tokens` are rows of the same target forward that verify nothing (chunks of prefill); `past` holds
    earlier steps, the latest last; `expected_K` is the mean confidence per position over earlier steps, None before
    there were any. `copied_R`: which drafts are copies of the text so far (None: none is). They cost no draft, and
    their confidences follow from earlier steps alone. `sampled_R`: whose tokens are drawn at a temperature above 0, of
    which fewer drafts are accepted (None: nobody's).
    """

    confidences_RK: Floats
    drafted_R: Ints
    contexts_R: Ints
    other_tokens: int = 0
    past: tuple[PastStep, ...] = ()
    expected_K: Floats | None = None
    own_RK: Floats | None = None
    copied_R: Flags | None = None
    sampled_R: Flags | None = None

    @property
    def made_R(self) -> Ints:
        """Drafted tokens of each request that a drafter made, [R]: 0 where they are copied."""
        return self.drafted_R if self.copied_R is None else np.where(self.copied_R, 0, self.drafted_R)

    @property
    def foreseen_R(self) -> Flags:
        """Whose confidences follow from earlier steps alone, [R]: a policy may read all of them at any time."""
        copied_R = np.zeros(len(self.drafted_R), dtype=np.bool_) if self.copied_R is None else self.copied_R
        return copied_R if self.own_RK is None else copied_R | np.isnan(self.own_RK).any(axis=1)

    @staticmethod
    def of(
        confidences: Sequence[Sequence[float]], drafted: Sequence[int], contexts: Sequence[int] | None = None
    ) -> StepView:
        """A view from one list of confidences per request, [] where a drafter has none."""
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
            ValueError: nothing is believed of a drafted token.
        """
        missing_R = np.isnan(self.confidences_RK).any(axis=1)
        if missing_R.any():
            raise ValueError(
                f"request {int(missing_R.argmax())} has a draft of which nothing is believed: acceptance is learned of "
                "chains only. Of trees without confidences verify a fixed number of nodes, or take a drafter of chains."
            )
        return np.cumprod(self.confidences_RK, axis=1, dtype=np.float64)


def step_seconds(cost: StepCost, view: StepView, admitted_N: Ints) -> Floats:
    """Seconds [N] of the step of `view`, which has a request, if it verifies so many drafts in all; see
    `decoding_seconds` for what is left out.
    """
    requests, made_R = len(view.drafted_R), view.made_R
    draft = cost.draft_seconds(int(np.count_nonzero(made_R)), int(made_R.max(initial=0)))
    context = float(view.contexts_R.mean())
    return draft + decoding_seconds(cost, admitted_N, requests, other_tokens=view.other_tokens, context=context)


def promised_survival(view: StepView, least: float = 0.0) -> Floats:
    """Survival [R, K] that earlier steps let one expect: their own where it is foreseen, else that of `expected_K`.

    Args:
        least: that every factor counts as.
    """
    requests, positions = view.confidences_RK.shape
    expected_K = np.zeros(positions)
    if view.expected_K is not None:
        known_K = view.expected_K[:positions]
        expected_K[: len(known_K)] = known_K
    foreseen_R = view.foreseen_R
    if not foreseen_R.any():  # all alike
        return np.broadcast_to(np.cumprod(np.maximum(expected_K, least), dtype=np.float64), (requests, positions))
    expected_RK = np.where(foreseen_R[:, None], view.confidences_RK, expected_K)
    return np.cumprod(np.maximum(expected_RK, least), axis=1, dtype=np.float64)


STEPS = 65534
_LAST = STEPS + 1  # behind everything drafted


def falling(survival: Floats) -> NDArray[np.uint16]:
    """Sort keys of survivals, any shape: the larger the survival, the smaller the key."""
    keys: NDArray[np.uint16] = (STEPS + 0.5 - survival * STEPS).astype(np.uint16)
    return keys


def causal_order(survival_RK: Floats, drafted_R: Ints) -> Ints:
    """Flat indices k * R + r of all drafted tokens, best first, [N]."""
    drafted_KR = np.arange(survival_RK.shape[1])[:, None] < drafted_R
    keys_KR = np.where(drafted_KR, falling(survival_RK.T), np.uint16(_LAST))
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


class Policy(Protocol):
    """Decides how many draft tokens of each request are verified."""

    @property
    def min_confidence(self) -> float:
        """No token whose confidence is below this is ever admitted, so a drafter need not draw it."""
        ...

    def lengths(self, view: StepView) -> Ints:
        """How many of its draft tokens each request has verified, [R]."""
        ...

    def reason(self, view: StepView, lengths_R: Ints, request: int) -> str:
        """Why the draft behind the verified ones of this request is left out, for people.

        Args:
            lengths_R: what `lengths` gave for this view.
        """
        ...


@dataclass(frozen=True)
class FixedPolicy:
    """Fixed length: verify that many draft tokens of each request; None verifies all of them."""

    length: int | None = None
    min_confidence: ClassVar[float] = 0.0

    def __post_init__(self) -> None:
        if self.length is not None and self.length < 0:
            raise ValueError(f"length={self.length} must be >= 0; use None to verify the whole block")

    def lengths(self, view: StepView) -> Ints:
        return view.drafted_R if self.length is None else np.minimum(view.drafted_R, self.length)

    def reason(self, view: StepView, lengths_R: Ints, request: int) -> str:
        return f"the policy verifies {self.length} drafts of a request"


@dataclass(frozen=True)
class ThresholdPolicy:
    """Confidence threshold: verify the longest prefix whose confidences, the drafter's own, are all >= threshold."""

    threshold: float

    @property
    def min_confidence(self) -> float:
        return self.threshold

    def __post_init__(self) -> None:
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"threshold={self.threshold} must be in [0, 1]; it is compared with a probability")

    def lengths(self, view: StepView) -> Ints:
        own_RK = view.confidences_RK if view.own_RK is None else view.own_RK
        missing_R = np.isnan(own_RK).any(axis=1)
        if missing_R.any():
            raise ValueError(
                f"request {int(missing_R.argmax())} has draft tokens without confidences, and a threshold is compared "
                "with them: verify a fixed length or by cost; or take a block drafter: DSpark has a head for them, and "
                "outrider calibrate fits them for the others."
            )
        passing_RK = (own_RK >= self.threshold) & (np.arange(own_RK.shape[1]) < view.drafted_R[:, None])
        lengths_R: Ints = np.logical_and.accumulate(passing_RK, axis=1).sum(axis=1)
        return lengths_R

    def reason(self, view: StepView, lengths_R: Ints, request: int) -> str:
        place = int(lengths_R[request])
        own_RK = view.confidences_RK if view.own_RK is None else view.own_RK
        return f"confidence {own_RK[request, place]:.2f} of draft {place + 1} is below the threshold {self.threshold:g}"


@dataclass(frozen=True)
class CostPolicy:
    """A policy that weighs expected tokens against what a step costs, and admits tokens of any confidence."""

    cost: StepCost
    min_confidence: ClassVar[float] = 0.0
    chosen: ClassVar[str] = ""  # what decides instead, where a step's own figures do not

    def reason(self, view: StepView, lengths_R: Ints, request: int) -> str:
        survival_RK, place = view.survival_RK(), int(lengths_R[request])
        verified_RK = np.arange(survival_RK.shape[1]) < lengths_R[:, None]
        tokens, more = len(lengths_R) + survival_RK[verified_RK].sum(), survival_RK[request, place]
        seconds_2 = step_seconds(self.cost, view, lengths_R.sum() + np.arange(2))
        step = "the step, its prompts apart," if view.other_tokens else "the step"
        return (
            f"draft {place + 1} is expected to be accepted with probability {more:.2f} and costs "
            f"{1000 * (seconds_2[1] - seconds_2[0]):.1f} ms more: {tokens / seconds_2[0]:.1f} tokens/s of {step} "
            f"without it, {(tokens + more) / seconds_2[1]:.1f} with it{self.chosen}"
        )


class CausalPolicy(CostPolicy):
    """A cost policy that verifies the first m candidates in causal order; subclasses differ in m."""

    def lengths(self, view: StepView) -> Ints:
        survival_RK = view.survival_RK()
        if not view.drafted_R.any():
            return np.zeros_like(view.drafted_R)
        order_N = causal_order(survival_RK, view.drafted_R)
        return lengths_of(order_N[: self.admitted(view, survival_RK, order_N)], len(survival_RK))

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


# ----------------------------------------------------------------------------
# The production form of the prefix scheduler (DSpark, arXiv 2607.05147):
#
#     step t - 2:  confidences --- global search over the cost curve ---> budget m*
#     step t:      confidences -------------------------------- causal order, the first m* -> lengths
#
# A machine that prepares its next forward while the draft still runs needs the number of tokens before the confidences.
# Every confidence of two steps back may be read, because the tokens of *this* step do not exist yet. So the search may
# cross cliffs of a jagged curve. Only the allocation reads this draft, in causal order and to a length fixed before it.
# ----------------------------------------------------------------------------


class AsyncScheduler(CausalPolicy):
    """DSpark's asynchronous scheduler: a number of tokens from two steps ago, spent by current survival.

    The old step is scaled to the requests that draft now. The second step of all reads the one before it; where the old
    step drafted nothing, `expected_K` takes its place. In the first step each draft gets one token.
    """

    chosen: ClassVar[str] = "; the number of drafts was chosen from the confidences of two steps ago"

    def admitted(self, view: StepView, survival_RK: Floats, order_N: Ints) -> int:
        """See `CausalPolicy`; independent of this step's confidences."""
        drafting = int(np.count_nonzero(view.drafted_R))
        old_RK = _earlier_survival(view)
        if old_RK is None:
            return drafting
        curve, scale = gains(old_RK), drafting / len(old_RK)
        admitted_N = np.arange(len(order_N) + 1)
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


# ----------------------------------------------------------------------------
# The speculation length of TurboSpec (arXiv 2406.14066):
#
#     k* = argmax_k  (R + sum_r sum_{j <= k} E[a_j]) / seconds(R + sum_r min(k, drafted_r))
#
# E[a_j] are products of `expected_K`, which earlier steps give: requests count alike and nothing of this draft is read.
# ----------------------------------------------------------------------------


class GoodputPolicy(CostPolicy):
    """TurboSpec's goodput: the common length with most expected tokens per second; 1 before anything is known."""

    chosen: ClassVar[str] = "; the length, one for all requests, was chosen from earlier steps"

    def lengths(self, view: StepView) -> Ints:
        view.survival_RK()  # refuses trees without confidences: nothing would ever be known of them
        if view.expected_K is None or not view.drafted_R.any():
            return np.minimum(view.drafted_R, 1)
        requests = len(view.drafted_R)
        lengths_K = np.arange(view.drafted_R.max() + 1)
        verified_KR = np.minimum(lengths_K[:, None], view.drafted_R)
        gained_RK = np.cumsum(promised_survival(view), axis=1)
        gained_RK = np.concatenate((np.zeros((requests, 1)), gained_RK), axis=1)
        tokens_K = requests + gained_RK[np.arange(requests), verified_KR].sum(axis=1)
        throughput_K = tokens_K / step_seconds(self.cost, view, verified_KR.sum(axis=1))
        return verified_KR[int(throughput_K.argmax())]


# ----------------------------------------------------------------------------
# Causal look-ahead: plan with expectations, admit by what is revealed, plan again.
#
#     revealed   c_1 .. c_l of the admitted and c_{l+1} at each frontier:  a_{r,l+1} is known
#     expected   a_{r,j} = a_{r,l+1} * e_{l+2} ... e_j  for the rest, e_k the mean of earlier steps (`expected_K`)
#     plan       m* = argmax_m (tau + the m largest) / seconds(B + m), over the whole curve;   m* = 0 ends it
#     admit      in causal order while survival holds the plan's price (its smallest value), m* tokens at most
#
# Real cost curves are staircases, where stopping at the first non-improvement stops too early: the first token over a
# cliff never pays for itself, though seven more on the same step are free. *Realised* confidences behind the frontier
# must not be read, because c_{k+1} depends on x_k; expectations may. Whether x_k is admitted is a function of earlier
# steps, of c_1 .. c_k, and of tokens admitted before it: the plan is made from those, and stopping at the price reads
# a survival that is on the frontier by then. So the output stays exact (checked by enumeration).
# ----------------------------------------------------------------------------


_LEAST = 1e-6  # of an expected confidence: products of dozens of them are divided by
_SORTED = 8_192  # candidates in all plans of a step together, which bounds its time; 2 plans for 256 requests of 16


@dataclass(frozen=True)
class LookAhead(CausalPolicy):
    """Causal look-ahead: admit planned tokens while their survival holds the plan's price; before any step has been
    recorded, plans reach no further than the frontiers.

    Args:
        margin: share of the throughput of requests with drafts that the first plan must promise to gain over verifying
            nothing: the best of many estimates is too high on average.
    """

    margin: float = 0.02

    def __post_init__(self) -> None:
        if not 0 <= self.margin < 1:
            raise ValueError(f"margin={self.margin} must be in [0, 1); 0.02 asks for 2 % more tokens per second")

    def reason(self, view: StepView, lengths_R: Ints, request: int) -> str:
        found = super().reason(view, lengths_R, request)
        return found if lengths_R.any() else f"{found}; no plan promised {self.margin:.0%} more than none"

    def admitted(self, view: StepView, survival_RK: Floats, order_N: Ints) -> int:
        lengths_R = np.zeros_like(view.drafted_R)
        realised_N = survival_RK.T.ravel()[order_N]
        seconds_N = step_seconds(self.cost, view, np.arange(len(order_N) + 1))
        promise_RK = promised_survival(view, _LEAST)
        admitted, tau = 0, float(len(survival_RK))
        margin = self.margin * np.count_nonzero(view.drafted_R) / len(view.drafted_R)
        for _ in range(max(2, _SORTED // len(order_N))):
            curve = gains(expected_survival(survival_RK, lengths_R, view.drafted_R, promise_RK=promise_RK))
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


def expected_survival(survival_RK: Floats, lengths_R: Ints, drafted_R: Ints, promise_RK: Floats) -> Floats:
    """Expected survival of the tokens from each frontier on, 0 elsewhere; reads a_{r,l+1} and nothing behind it.

    Args:
        promise_RK: expected survival by position of a request of which nothing is revealed.
    """
    positions = survival_RK.shape[1]
    requests_R, frontier_R = np.arange(len(survival_RK)), np.minimum(lengths_R, positions - 1)
    scale_R = survival_RK[requests_R, frontier_R] / promise_RK[requests_R, frontier_R]
    positions_K = np.arange(positions)
    open_RK = (positions_K >= lengths_R[:, None]) & (positions_K < drafted_R[:, None])
    return np.where(open_RK, scale_R[:, None] * promise_RK, 0.0)


def _kept(realised_M: Floats, price: float) -> int:
    """How many of the next candidates are worth the plan's price; the first is what the plan was made from."""
    below = falling(realised_M) > falling(np.array(price)) + 1
    return max(1, int(below.argmax())) if below.any() else len(realised_M)


# Policies that weigh what a step costs, by the names of their variants in load tests.
BY_COST: dict[str, Callable[[StepCost], Policy]] = {
    "prefix": PrefixScheduler,
    "async": AsyncScheduler,
    "goodput": GoodputPolicy,
    "look-ahead": LookAhead,
}


def policy_name(policy: Policy) -> str:
    """What load tests call a policy; "threshold", "fixed" and the like where it weighs no costs."""
    own = type(policy).__name__.removesuffix("Policy").lower()
    return next((name for name, kind in BY_COST.items() if type(policy) is kind), own)
