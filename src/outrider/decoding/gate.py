"""Draft gates: which requests draft at all in a step, and how many tokens.

    D*, k* = argmax_{D, k}  max_m (R + the m largest a_{r,j} with r in D, j <= k) / (seconds(R, m) + draft(|D|, k))

a_{r,j} is the survival that earlier steps let one expect of each request (`History`, below). Where requests have copies
of the text so far (drafters/ngram.py), those not in D bring theirs, at any j and for no seconds of drafting.

A draft costs its seconds whatever is verified of it. Under load that is more than a request of low survival returns:
the open limitation of DSpark (arXiv 2607.05147). Such a request skips its draft and decodes plainly in the same step.
Requests are ranked by expected accepted drafts, less those of their copies, and D is the best of 0, R, R/2, R/4, ..., 1
of them: neighbouring sizes cost nearly the same. All that draft draft equally deep, because a step of the drafter is
paid for once. The best of many estimates is too high on average, so drafting has to promise `margin` more than plain
decoding and copies.

Nothing new is known of a request that skips, so it probes, unless beliefs without confidences say what to expect of it:
these fade by themselves, and of a probe of which too little is expected nothing would be verified. A request that
probes saves `probe_share` of its share of every step it skips, and some of those that have waited longest draft once
their savings pay for it: all probing together costs `probe_share` of the time at most, and at most a quarter of the
requests probe in one step. Where so many requests decode that drafts would not pay even if they were accepted far more
often, none probes.

Everything read comes from earlier steps, so the output stays exact. Shapes: R requests, K draft positions, N, M counts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.decoding.beliefs import Beliefs, Slots
from outrider.decoding.cost import Floats, Ints, StepCost, decoding_seconds
from outrider.decoding.policies import PastStep, StepView, gains

Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class GateView:
    """What a gate is shown: what is known before a step drafts.

    `expected_RK`: a request's own mean calibrated confidence per position, NaN where it has never drafted; of a drafter
    without confidences what is believed now. `idle_R`: steps since it last drafted, or since it was first
    asked about, 0 where it need not probe; `other_requests` decode in the same step and cannot draft in it;
    `typical_K`: the same mean over all requests there ever were, None before there were any. `contexts_R` and
    `other_tokens` as in `StepView`. `copied_RK`: expected confidences of the copy that each request may take instead of
    a draft (drafters/ngram.py), 0 behind it; None: there are no copies.
    """

    expected_RK: Floats
    idle_R: Ints
    contexts_R: Ints
    other_tokens: int = 0
    other_requests: int = 0
    typical_K: Floats | None = None
    copied_RK: Floats | None = None

    def copied_survival_RK(self) -> Floats:
        """Survival of the copies, [R, K']; K' = 0 where there are none."""
        if self.copied_RK is None:
            return np.zeros((len(self.idle_R), 0))
        return np.cumprod(self.copied_RK, axis=1, dtype=np.float64)


class DraftGate(Protocol):
    """Decides which requests draft. Its answer follows from the view alone; it is not asked in every round
    (`Patience`).
    """

    def depths(self, view: GateView) -> Ints:
        """How many tokens each request drafts at most, [R]; 0 where it takes its copy, or nothing."""
        ...


# What a draft and a token more to verify cost where nothing was measured, in plain steps of one request.
_DRAFT_GUESS, _TOKEN_GUESS = 0.2, 0.05
_PRIOR = 0.5  # confidence in a token of a drafter that nobody has seen draft


@dataclass(frozen=True)
class AlwaysDraft:
    """Every request drafts a whole block in every step, but where its copy promises more tokens per second at guessed
    costs.
    """

    def depths(self, view: GateView) -> Ints:
        depths_R = np.full(len(view.idle_R), view.expected_RK.shape[1])
        copied_RK = view.copied_survival_RK()
        if copied_RK.any():
            own_RK = np.cumprod(_beliefs(view, _PRIOR), axis=1, dtype=np.float64)
            depths_R[_guessed_rate(copied_RK, 0.0) > _guessed_rate(own_RK, _DRAFT_GUESS)] = 0
        return depths_R


def _guessed_rate(survival_RK: Floats, draft: float) -> Floats:
    """Most expected tokens per plain step's time, [R], over how many of the drafts are verified."""
    tokens_RK = 1 + np.cumsum(survival_RK, axis=1)
    steps_K = 1 + draft + _TOKEN_GUESS * np.arange(1, survival_RK.shape[1] + 1)
    found_R: Floats = np.maximum((tokens_RK / steps_K).max(axis=1), 1 / (1 + draft))
    return found_R


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
    prior: float = _PRIOR

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
        beliefs_RK = _beliefs(view, self.prior)
        survival_RK = np.cumprod(beliefs_RK, axis=1, dtype=np.float64)
        copied_RK = view.copied_survival_RK()
        gain_R = survival_RK.sum(axis=1) - copied_RK.sum(axis=1)
        ranked_R = np.argsort(-gain_R, kind="stable")
        decoding = requests + view.other_requests
        context = float(view.contexts_R.mean())
        most = np.arange(1 + survival_RK.size + copied_RK.size)
        undrafted_M = decoding_seconds(self.cost, most, decoding, other_tokens=view.other_tokens, context=context)

        def planned(drafting: int, depth: int, survival: Sequence[Floats]) -> _Plan:
            """The best plan that verifies some of these drafts."""
            curve = gains(np.concatenate([one.ravel() for one in survival]))
            seconds_M = undrafted_M[: len(curve)] + self.cost.draft_seconds(drafting, depth)
            tokens_M = decoding + curve
            best = int((tokens_M / seconds_M).argmax())
            return _Plan(drafting, depth, tokens=float(tokens_M[best]), seconds=float(seconds_M[best]))

        def tried(drafting: int, depth: int) -> _Plan:
            """The best plan in which so many requests draft so deep."""
            return planned(drafting, depth, [survival_RK[ranked_R[:drafting], :depth], copied_RK[ranked_R[drafting:]]])

        plan = replace(tried(0, 0), depth=gamma)  # probes learn about every position
        # Every draft and every copy, for the price of the least draft, is more than any plan can give (but for noise in
        # the measured prices).
        if planned(1, 1, [survival_RK, copied_RK]).throughput() > (1 + self.margin) * plan.throughput():
            plan = self._better(plan, tried, gamma=gamma, counts=_halves(max(1, int(np.count_nonzero(gain_R > 0)))))
        depths_R[ranked_R[: plan.drafting]] = plan.depth
        probing = self._probing(view, depths_R == 0, plan)
        if len(probing) and not plan.drafting:
            # A probe can change nothing where drafts would not pay either if half of what is refused were accepted.
            hoped_RK: Floats = np.cumprod((1 + beliefs_RK) / 2, axis=1, dtype=np.float64)
            hoped = [planned(n, k, [hoped_RK[ranked_R[:n], :k]]) for n in {1, requests} for k in _halves(gamma)]
            if max(map(_Plan.throughput, hoped)) <= plan.throughput():
                probing = probing[:0]
        depths_R[probing] = plan.depth
        return depths_R

    def _better(self, plan: _Plan, tried: Callable[[int, int], _Plan], *, gamma: int, counts: list[int]) -> _Plan:
        """The best plan that drafts, if it promises `margin` more than `plan`, which does not; else that one."""
        # The best depth with all drafting that have no better copy, then the best number of requests at that depth.
        plans = [tried(counts[0], depth) for depth in _halves(gamma)]
        depth = max(plans, key=_Plan.throughput).depth
        plans += [tried(count, depth) for count in counts[1:]]
        best = max(plans, key=_Plan.throughput)
        return best if best.throughput() > (1 + self.margin) * plan.throughput() else plan

    def _probing(self, view: GateView, skipping_R: Flags, plan: _Plan) -> Ints:
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


SOME, MANY = 4, 8  # requests of a round
# Rounds of the longest rest. Where some requests decode, drafts seldom pay, and asking them all takes longer.
_LONGEST_REST, _LONGEST_REST_OF_SOME = 7, 31


class Patience:
    """Rounds in which nobody is asked whether to draft or copy, because nothing was worth verifying in those before.

    Asking costs as much as a row of the forward: look-ups, the gate, the policy, what is learned. After n rounds in a
    row in which no draft was verified 2^n - 1 rounds rest, at most 7, or 31 with four requests or more. A rest ends
    early where a quarter of the requests are new, or where half of them have left: fewer requests make drafts cheaper.
    If nothing is verified then either, the next rest is as long as if it had not ended early.

    Args:
        gate: where it drafts whatever that costs, no round rests.
    """

    def __init__(self, gate: DraftGate) -> None:
        self._patient = not isinstance(gate, AlwaysDraft)
        self._asked: set[Hashable] = set()
        self._count = 0  # of requests that were asked
        self._rest = self._left = 0  # rounds: of the latest rest, and what is left of it

    def rests(self, ids: Sequence[Hashable]) -> bool:
        """Whether the next round of these requests, which may use drafts, is one of a rest. Asked once a round."""
        if not self._left:
            return False
        known = sum(id in self._asked for id in ids)
        if 4 * (len(ids) - known) >= len(ids) or 2 * known <= self._count:
            self._left = 0
            return False
        self._left -= 1
        return True

    def told(self, ids: Sequence[Hashable], verified: bool) -> None:
        """What came of a round that did not rest: whether any draft was verified."""
        if not self._patient:
            return
        longest = _LONGEST_REST_OF_SOME if len(ids) >= SOME else _LONGEST_REST
        self._rest = self._left = 0 if verified else min(2 * self._rest + 1, longest)
        self._asked, self._count = set(ids), len(ids)

    def forget(self, id: Hashable) -> None:
        """A request has left, and another may come under its id."""
        self._asked.discard(id)


@dataclass(frozen=True)
class _Plan:
    """One way to run a step: requests that draft, how deep; expected tokens and seconds, without prompts."""

    drafting: int
    depth: int
    tokens: float
    seconds: float

    def throughput(self) -> float:
        return self.tokens / self.seconds


def _beliefs(view: GateView, prior: float) -> Floats:
    """Expected confidences of every request's own drafts, [R, K]."""
    unknown_R: Flags = np.asarray(np.isnan(view.expected_RK).any(axis=1))
    if not unknown_R.any():
        return _carried(view.expected_RK)
    if not unknown_R.all():  # a mean over all, drafting now or not: those that draft are better than the rest
        unknown_K = view.expected_RK[~unknown_R].mean(axis=0)
    elif view.typical_K is not None:
        unknown_K = view.typical_K
    else:
        unknown_K = np.full(view.expected_RK.shape[1], prior)
    return _carried(np.where(unknown_R[:, None], unknown_K, view.expected_RK))


def _carried(beliefs_RK: Floats) -> Floats:
    """Give a position that no draft reached the value of the last that one did: 0 would keep drafts short for ever."""
    reached_RK = np.where(beliefs_RK > 0, np.arange(beliefs_RK.shape[1]), 0)
    carried_RK: Floats = np.take_along_axis(beliefs_RK, np.maximum.accumulate(reached_RK, axis=1), axis=1)
    return carried_RK


def _halves(count: int) -> list[int]:
    """count, count / 2, ..., 1; [] for 0."""
    return [count >> shift for shift in range(count.bit_length())]


# ----------------------------------------------------------------------------
# What earlier steps let one expect of a step:
#
#     of its drafts        c_k as `Beliefs` corrects it, or what is believed of position k where the drafter has no c_k
#     before it drafts     e_k = mean(a_k) / mean(a_{k-1}),   exponentially weighted means of products of these c_k
#                          what is believed of position k where the drafter has no c_k
#
# e_k is the mean confidence at position k, each draft weighted by its survival up to there. That makes e_1 ... e_k the
# mean survival itself; a plain mean of c_k would count drafts that were lost before k, and its products would come out
# too low, since easy positions come together. The means count all drafted positions, verified or not: where policies
# read c_k, those that were verified are the easier ones.
#
# Trees: their nodes are no positions, so nothing is learned of them and their confidences are left as they are.
#
# One `History` serves an engine and its simulation alike. Shapes: R requests, K = gamma draft positions, S slots.
# ----------------------------------------------------------------------------


class History:
    """Confidences of past steps: the last two, running means by request and over all requests, and what became of them.

    Args:
        gamma: most draft tokens of a block.
        chains: False where drafts are trees.
        decay: what one more draft leaves of the weight of those before (over all requests: one more step), in [0, 1).
    """

    def __init__(self, gamma: int, decay: float = 0.9, chains: bool = True) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"decay={decay} must be in [0, 1); 0 remembers the last draft only")
        self.gamma, self.decay = gamma, decay
        self._past: deque[PastStep] = deque(maxlen=2)
        self._all_2K: Floats | None = None  # mean a_{k-1} and mean a_k over all requests
        self._beliefs = Beliefs(gamma, groups=2) if chains else None  # of greedy text and of sampled text
        self._foreseen = False  # the drafter has no confidences
        self._slots = Slots()
        self._means_S2K = np.empty((0, 2, gamma))  # the same by request, NaN before its first draft
        self._steps = 0  # all of them
        self._drafted_S = np.empty(0, dtype=np.int64)  # steps before its last draft, or before it came; -1: nobody's

    def gate_view(
        self,
        ids: Sequence[Hashable],
        contexts: Sequence[int],
        other_tokens: int = 0,
        other_requests: int = 0,
        copied_RK: Floats | None = None,
        sampled: Sequence[bool] | None = None,
    ) -> GateView:
        """What a `DraftGate` is shown of these requests before they draft."""
        slots_R = self._slots_of(ids)
        expected_RK, idle_R = _ratio(self._means_S2K[slots_R]), self._steps - self._drafted_S[slots_R]
        if self._foreseen and self._beliefs is not None:
            expected_RK = self._beliefs.expected(ids, None if sampled is None else np.array(sampled, dtype=np.int64))
            idle_R = np.zeros_like(idle_R)
        return GateView(
            expected_RK,
            idle_R,
            np.asarray(contexts, dtype=np.int64),
            other_tokens=other_tokens,
            other_requests=other_requests,
            typical_K=self._expected_K(),
            copied_RK=copied_RK,
        )

    def step_view(
        self,
        ids: Sequence[Hashable],
        confidences: Sequence[Sequence[float]],
        drafted: Sequence[int],
        contexts: Sequence[int],
        other_tokens: int = 0,
        copied: Sequence[bool] | None = None,
        sampled: Sequence[bool] | None = None,
    ) -> StepView:
        """What a `Policy` is shown: this step's drafts, one list per request, with what came before."""
        view = StepView.of(confidences, drafted, contexts)
        copied_R, sampled_R = (
            None if flags is None else np.array(flags, dtype=np.bool_) for flags in (copied, sampled)
        )
        view = replace(
            view,
            other_tokens=other_tokens,
            past=tuple(self._past),
            expected_K=self._expected_K(),
            copied_R=copied_R,
            sampled_R=sampled_R,
        )
        assert len(ids) == len(drafted) and view.made_R.max(initial=0) <= self.gamma
        if self._beliefs is None or not view.made_R.any():
            return view
        own_RJ = view.confidences_RK[:, : self.gamma]
        believed_RJ = self._beliefs.expected(ids, _groups(view), own_RJ)
        made_RJ = np.arange(own_RJ.shape[1]) < view.made_R[:, None]
        believed_RK = view.confidences_RK.copy()
        believed_RK[:, : self.gamma] = np.where(made_RJ, believed_RJ, own_RJ)
        return replace(view, confidences_RK=believed_RK, own_RK=view.confidences_RK)

    def skip(self, requests: int) -> None:
        """Remember a step of so many requests in which nothing was drafted."""
        self._past.append(PastStep(np.zeros((requests, 0)), np.zeros(requests, dtype=np.int64)))
        self._steps += 1
        if self._beliefs is not None:
            self._beliefs.skip()

    def record(self, ids: Sequence[Hashable], view: StepView, *, verified_R: Ints, accepted_R: Ints) -> None:
        """Remember a step once it is over; a request that did not draft, or took a copy, keeps its means.

        Args:
            verified_R: of each request, how many drafts have a known verdict (`known_verdicts`).
            accepted_R: how many of them were accepted.
        """
        slots_R, made_R = self._slots_of(ids), view.made_R
        if self._beliefs is not None:
            own_RK = view.confidences_RK if view.own_RK is None else view.own_RK
            verified_R, accepted_R = np.minimum(verified_R, made_R), np.minimum(accepted_R, made_R)
            groups_R, own_RJ = _groups(view), own_RK[:, : self.gamma]
            self._beliefs.record(ids, verified_R, accepted_R, groups_R=groups_R, confidences_RK=own_RJ)
            if made_R.any():
                self._foreseen = bool(np.isnan(own_RK[made_R > 0]).any())
        self._past.append(PastStep(view.confidences_RK, view.drafted_R))
        self._steps += 1
        self._drafted_S[slots_R[made_R > 0]] = self._steps
        if not made_R.any():
            return
        known_R = (made_R > 0) & ~np.isnan(view.confidences_RK).any(axis=1)
        if not known_R.any():
            return
        survival_R2K = self._survival(view.confidences_RK[known_R, : self.gamma])
        seen_RK = np.arange(self.gamma) < made_R[known_R, None]
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
        slot = self._slots.release(id)
        if slot is not None:
            self._means_S2K[slot], self._drafted_S[slot] = np.nan, -1
        if self._beliefs is not None:
            self._beliefs.forget(id)

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
        slots_R = self._slots.of(ids)
        added = self._slots.size - len(self._drafted_S)
        if added > 0:
            self._means_S2K = np.concatenate((self._means_S2K, np.full((added, 2, self.gamma), np.nan)))
            self._drafted_S = np.concatenate((self._drafted_S, np.full(added, -1, dtype=np.int64)))
        self._drafted_S[slots_R[self._drafted_S[slots_R] < 0]] = self._steps
        return slots_R


def known_verdicts(verified_R: Ints, accepted_R: Ints, committed_R: Ints) -> tuple[Ints, Ints]:
    """How many drafts were verified and accepted, [R] each, without those behind the end of a response.

    Args:
        committed_R: tokens that the step gave each request. Where they end among the accepted drafts, the text does not
            say what would have become of the next one.
    """
    ended_R = accepted_R >= committed_R
    return np.where(ended_R, committed_R, verified_R), np.where(ended_R, committed_R, accepted_R)


def _groups(view: StepView) -> Ints | None:
    return None if view.sampled_R is None else view.sampled_R.astype(np.int64)


def _ratio(means_R2K: Floats) -> Floats:
    """mean(a_k) / mean(a_{k-1}), 0 where nothing got so far; NaN where nothing is known."""
    before_RK, after_RK = means_R2K[:, 0], means_R2K[:, 1]
    ratio_RK: Floats = np.divide(after_RK, before_RK, out=np.zeros_like(after_RK), where=before_RK != 0)
    return ratio_RK
