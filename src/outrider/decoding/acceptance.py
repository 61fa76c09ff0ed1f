"""Acceptance estimates, learned while serving: P(draft k is accepted | drafts 1 .. k-1 are, and k is verified).

    logit p_{r,k}  =  a_g + w_k + v_k logit c_{r,k} + u_r        with confidences
                      a'_g + w'_k + u_r                          without

a_g is the level of a group g of drafts (of a drafter: greedy or sampled text; of prompt lookup: the length of the
matched suffix), w_k and v_k are common to all at a position, u_r is a request's own deviation: a new request starts
from the mean over all. The prior of drafts with confidences is p = c, that of others p = 1/2.

Every parameter is a normal estimate (mean, variance P). P never falls below a least one, so old outcomes count less and
less. The outcomes y of a step give one Newton step per parameter, from the residuals that parameters before it leave:

    h = p (1 - p)      s = 1 / (1 / h + variance of the parameters still to come)      e = (y - p) / h
    1 / P += sum s f^2                mean += P sum s f e                e -= f (change of the mean)       f: 1, logit c

For one outcome this is the extended Kalman filter with a diagonal covariance. What a step does not try fades: a
position that no request verifies, a group or a request of which nothing is verified return to their prior by `FADE`.
Otherwise a position once thought hopeless would never be verified again, and never be seen to have improved.

Why the estimates are unbiased although they decide what is verified: outcome k of a round is observed if k is verified
and all before it were accepted. Whether k is verified is a function of earlier rounds and of c_1 .. c_k. Given these,
the outcome has the same distribution whether it is observed or not, so the residuals y - p of the observed outcomes
have mean 0 at the true p, however many are observed. A model without c_k would not have this property under policies
that read c_k: of hard positions it would only see easy cases. Therefore drafts with confidences are never counted for
the parameters without.

Losslessness: nothing of the round that is planned is read but c_1 .. c_k and the group, which is known before drafting.
The probability of the drafted token itself must not take the place of c_k: it depends on x_k.

Sources: DSpark, arXiv 2607.05147 (temperatures per position, fitted once); extended Kalman filters of logistic models:
Penny and Roberts, "Dynamic logistic regression" (IJCNN 1999). Shapes: R requests, K positions, G groups, S slots; 2:
without and with confidences.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from outrider.decoding.cost import Flags, Floats, Ints
from outrider.decoding.policies import PastStep, PlanView, StepView

EDGE = 1e-9  # float32 sigmoids reach 0 and 1, whose logits are infinite


def logit(probability: Floats, edge: float = EDGE) -> Floats:
    """log(p / (1 - p)) of p clipped to [edge, 1 - edge]: finite for p = 0 and 1 too."""
    inside = np.minimum(np.maximum(probability, edge), 1 - edge)
    return np.log(inside) - np.log1p(-inside)


def sigmoid(x: Floats) -> Floats:
    """1 / (1 + exp(-x)), without overflow."""
    result: Floats = 0.5 * (1.0 + np.tanh(0.5 * x))
    return result


class Slots:
    """Places in arrays for ids that come and go: a collection of the ids that have one.

    `size`: how many places there are; it grows when all are taken.
    """

    def __init__(self) -> None:
        self.size = 0
        self._places: dict[Hashable, int] = {}
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self._places)

    def of(self, ids: Sequence[Hashable]) -> Ints:
        """The places of these ids; new ones get one."""
        for id in ids:
            if id not in self._places:
                if not self._free:
                    added = max(self.size, 16)
                    self._free.extend(range(self.size + added - 1, self.size - 1, -1))
                    self.size += added
                self._places[id] = self._free.pop()
        return np.array([self._places[id] for id in ids], dtype=np.int64)

    def release(self, id: Hashable) -> int | None:
        """The place that an id had and that another may get; None: it had none."""
        place = self._places.pop(id, None)
        if place is not None:
            self._free.append(place)
        return place


# By sort of parameter (a, w, v, u), without and with confidences: means and variances of the prior, and the least
# variance that outcomes leave. A parameter of least variance P remembers some 1 / (h P) outcomes.
_LEVEL, _POSITION, _SLOPE, _REQUEST = range(4)
_PRIORS_32 = np.array([[0.0, 0.0], [0.0, 0.0], [1.0, 1.0]])
_MOST_42 = np.array([[2.0, 0.1], [1.0, 0.03], [0.05, 0.02], [0.1, 0.1]])
_LEAST_42 = np.array([[0.05, 0.02], [0.05, 0.01], [5e-4, 5e-4], [0.02, 0.02]])
FADE = 0.99
CLIP = 1e-3  # of confidences: beyond these, one outcome would move a slope too far
_LEAST_CURVATURE = 1e-3  # h of an outcome that was thought impossible, which must not move everything


class LogisticEstimates:
    """P(draft k accepted | those before it accepted), by group, position and request, learned from outcomes.

    Chains only: the nodes of a tree are no positions.

    Args:
        positions: most drafts of a chain.
        groups: kinds of drafts with a level of their own. Sources whose positions differ otherwise (a drafter and
            prompt lookup) need an object each.
    """

    def __init__(self, positions: int, groups: int = 1) -> None:
        self.positions, self.groups = positions, groups
        self._slots = Slots()
        # All parameters in one array, by kind of drafts: a (2 G), w (2 K), v (2 K), then u of each slot (2).
        counts = (groups, positions, positions)
        self._starts_4 = np.cumsum([0, *(2 * count for count in counts)])
        self._prior_P, self._most_P, self._least_P = (
            np.concatenate([np.repeat(values_2, n) for n, values_2 in zip(counts, of_sort, strict=True)])
            for of_sort in (_PRIORS_32, _MOST_42[:3], _LEAST_42[:3])
        )
        self._mean_P, self._variance_P = self._prior_P.copy(), self._most_P.copy()
        self._idle_steps = 0  # since the last outcome; everything has yet to fade by them

    def expected(
        self, ids: Sequence[Hashable], groups_R: Ints | None = None, confidences_RK: Floats | None = None
    ) -> Floats:
        """P(k accepted | 1 .. k-1 accepted and k verified), [R, K].

        Args:
            groups_R: group of each draft; all 0 by default.
            confidences_RK: the drafters' own c_k, of any number of positions up to `positions`; NaN: none.
                Without them K is `positions`, and the estimates come from drafts without confidences alone.
        """
        if confidences_RK is None:
            confidences_RK = np.full((len(ids), self.positions), np.nan)
        known_RK, logit_RK = _features(confidences_RK)
        level_RK, position_RK, slope_RK, request_RK = self.terms(ids, groups_R, known_RK)
        return sigmoid(level_RK + position_RK + slope_RK * logit_RK + request_RK)

    def terms(self, ids: Sequence[Hashable], groups_R: Ints | None, known_RK: Ints) -> tuple[Floats, ...]:
        """a, w, v and u of drafts, [R, K] each. `known_RK`: 1 with confidences, 0 without."""
        self._fade_all()
        slots_R = self._slots_of(ids)
        slots_R1, groups_R1 = slots_R[:, None], 0 if groups_R is None else groups_R[:, None]
        places = self._places(known_RK, slots_R1, groups_R1, positions=np.arange(known_RK.shape[1]))
        return tuple(self._mean_P[places_RK] for places_RK in places)

    def observe(
        self,
        ids: Sequence[Hashable],
        verified_R: Ints,
        accepted_R: Ints,
        *,
        groups_R: Ints | None = None,
        confidences_RK: Floats | None = None,
    ) -> None:
        """Update from the outcomes of a step: positions 1 .. min(accepted + 1, verified) of each request.

        Args:
            verified_R: drafts whose verdict is known. Requests of which nothing was verified are listed too, with the
                group that they could have drafted: what is not tried fades.
            accepted_R: how many of them were accepted, from the first on.
            groups_R, confidences_RK: as in `expected`.
        """
        if not len(ids):
            return
        if not verified_R.any():
            self.skip()
            return
        self._fade_all()
        slots_R = self._slots_of(ids)
        groups_R = np.zeros(len(slots_R), dtype=np.int64) if groups_R is None else groups_R
        positions_K = np.arange(int(verified_R.max()))
        self._fade_untried(slots_R, groups_R, verified_R > 0, depth=len(positions_K))
        r_N, k_N = np.nonzero(positions_K < np.minimum(accepted_R + 1, verified_R)[:, None])
        known_N, logit_N = _features(np.full(len(r_N), np.nan) if confidences_RK is None else confidences_RK[r_N, k_N])
        place_4N = np.array(self._places(known_N, slots_R[r_N], groups_R[r_N], positions=k_N))
        factor_4N = np.ones(place_4N.shape)
        factor_4N[_SLOPE] = logit_N
        estimate_N = sigmoid(np.einsum("ij,ij->j", factor_4N, self._mean_P[place_4N]))
        curvature_N = np.maximum(estimate_N * (1 - estimate_N), _LEAST_CURVATURE)
        error_N = ((k_N < accepted_R[r_N]) - estimate_N) / curvature_N
        spread_4N = factor_4N**2 * self._variance_P[place_4N]
        # Every parameter sees those after it as noise, and those before it as settled.
        later_4N = np.cumsum(spread_4N[::-1], axis=0)[::-1] - spread_4N
        weight_4N = factor_4N / (1 / curvature_N + later_4N)
        size = len(self._mean_P)
        information_P = np.bincount(place_4N.ravel(), (weight_4N * factor_4N).ravel(), size)
        variance_P = 1 / (1 / self._variance_P + information_P)
        for place_N, factor_N, weight_N in zip(place_4N, factor_4N, weight_4N, strict=True):
            change_P = variance_P * np.bincount(place_N, weight_N * error_N, size)
            self._mean_P += change_P
            error_N = error_N - factor_N * change_P[place_N]
        self._variance_P = np.maximum(variance_P, self._least_P)

    def skip(self) -> None:
        """A step of which nothing was verified: all of it fades."""
        self._idle_steps += 1

    def forget(self, id: Hashable) -> None:
        """Drop the deviation of a request that has left; its outcomes stay in the common parameters."""
        slot = self._slots.release(id)
        if slot is not None:
            places_2 = self._starts_4[_REQUEST] + 2 * slot + np.arange(2)
            self._mean_P[places_2], self._variance_P[places_2] = self._prior_P[places_2], self._most_P[places_2]

    def _places(self, known: Ints, slots: Ints, groups: Ints | int, positions: Ints) -> tuple[Ints, ...]:
        """Indices of the four parameters of drafts, shapes as they broadcast."""
        _, position, slope, request = self._starts_4
        at = known * self.positions + positions
        return known * self.groups + groups, position + at, slope + at, request + 2 * slots + known

    def _fade_all(self) -> None:
        """Fade everything by the steps in which nothing was tried, all at once."""
        if self._idle_steps:
            kept = FADE**self._idle_steps
            self._mean_P = self._prior_P + kept * (self._mean_P - self._prior_P)
            self._variance_P = self._most_P + kept**2 * (self._variance_P - self._most_P)
            self._idle_steps = 0

    def _fade_untried(self, slots_R: Ints, groups_R: Ints, tried_R: Flags, depth: int) -> None:
        """Fade what this step does not try: levels of groups, requests, and positions from `depth` on."""
        both_2 = np.arange(2)[:, None]
        untried = []
        if not tried_R.all():
            untried.append(self._starts_4[_REQUEST] + 2 * slots_R[~tried_R] + both_2)
            untried.append(np.setdiff1d(groups_R[~tried_R], groups_R[tried_R]) + both_2 * self.groups)
        if depth < self.positions:
            at_2J = np.arange(depth, self.positions) + both_2 * self.positions
            untried += [self._starts_4[_POSITION] + at_2J, self._starts_4[_SLOPE] + at_2J]
        for places in untried:
            prior, most = self._prior_P[places], self._most_P[places]
            self._mean_P[places] = prior + FADE * (self._mean_P[places] - prior)
            self._variance_P[places] = most + FADE**2 * (self._variance_P[places] - most)

    def _slots_of(self, ids: Sequence[Hashable]) -> Ints:
        slots_R = self._slots.of(ids)
        added = self._slots.size - (len(self._mean_P) - self._starts_4[_REQUEST]) // 2
        if added > 0:
            prior, most, least = (
                np.tile(of_2, added) for of_2 in (np.zeros(2), _MOST_42[_REQUEST], _LEAST_42[_REQUEST])
            )
            self._prior_P = np.concatenate((self._prior_P, prior))
            self._mean_P = np.concatenate((self._mean_P, prior))
            self._variance_P = np.concatenate((self._variance_P, most))
            self._most_P = np.concatenate((self._most_P, most))
            self._least_P = np.concatenate((self._least_P, least))
        return slots_R


def _features(confidences: Floats) -> tuple[Ints, Floats]:
    """Whether there is a confidence, as 0 or 1, and its logit, 0 without one."""
    unknown = np.isnan(confidences)
    return 1 - unknown.astype(np.int64), logit(np.where(unknown, 0.5, confidences), CLIP)


# ----------------------------------------------------------------------------
# What earlier steps let one expect of a step:
#
#     of its drafts        c_k as `LogisticEstimates` corrects it; without confidences, the estimate of position k
#     before it drafts     e_k = mean(a_k) / mean(a_{k-1}),   exponentially weighted means of products of these c_k
#                          without confidences, the estimate of position k
#
# e_k is the mean confidence at position k, each draft weighted by its survival up to there. That makes e_1 ... e_k the
# mean survival itself; a plain mean of c_k would count drafts that were lost before k, and its products would come out
# too low, since easy positions come together. The means count all drafted positions, verified or not: under policies
# that read c_k, those that were verified are the easier ones.
#
# Trees: their nodes are no positions, so nothing is learned of them and their confidences are left as they are.
# ----------------------------------------------------------------------------


class Acceptance:
    """Estimates the acceptance of one drafter's drafts, by request and position, from the outcomes of earlier steps.

    Args:
        gamma: most draft tokens of a block.
        chains: False for a drafter of trees.
        decay: weight that one more draft leaves to those before (over all requests: one more step), in [0, 1).
    """

    def __init__(self, gamma: int, decay: float = 0.9, chains: bool = True) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"decay={decay} must be in [0, 1); 0 remembers the last draft only")
        self.gamma, self.decay = gamma, decay
        self._past: deque[PastStep] = deque(maxlen=2)
        self._estimates = LogisticEstimates(gamma, groups=2) if chains else None  # of greedy text and of sampled text
        self._no_confidences = False  # the drafter has none
        self._all_2K: Floats | None = None  # mean a_{k-1} and mean a_k over all requests
        self._slots = Slots()
        self._means_S2K = np.empty((0, 2, gamma))  # the same by request, NaN before its first draft
        self._steps = 0  # all of them
        self._shallow = 0  # steps with drafts since the last whole one
        self._drafted_S = np.empty(0, dtype=np.int64)  # steps before its last draft, or before it came; -1: nobody's

    def plan_view(
        self,
        ids: Sequence[Hashable],
        contexts: Sequence[int],
        other_tokens: int = 0,
        other_requests: int = 0,
        lookup_RK: Floats | None = None,
        sampled: Sequence[bool] | None = None,
    ) -> PlanView:
        """These requests before they draft, as `Policy.depths` reads them."""
        slots_R = self._slots_of(ids)
        expected_RK, idle_R = _ratio(self._means_S2K[slots_R]), self._steps - self._drafted_S[slots_R]
        if self._no_confidences and self._estimates is not None:
            expected_RK = self._estimates.expected(ids, None if sampled is None else np.array(sampled, dtype=np.int64))
            idle_R = np.zeros_like(idle_R)
        return PlanView(
            expected_RK,
            idle_R,
            np.asarray(contexts, dtype=np.int64),
            other_tokens=other_tokens,
            other_requests=other_requests,
            typical_K=self._expected_K(),
            lookup_RK=lookup_RK,
            shallow=self._shallow,
        )

    def step_view(
        self,
        ids: Sequence[Hashable],
        confidences: Sequence[Sequence[float]],
        drafted: Sequence[int],
        contexts: Sequence[int],
        other_tokens: int = 0,
        looked_up: Sequence[bool] | None = None,
        sampled: Sequence[bool] | None = None,
    ) -> StepView:
        """The drafts of this step, one list per request, as `Policy.lengths` reads them."""
        view = StepView.of(confidences, drafted, contexts)
        looked_up_R, sampled_R = (
            None if flags is None else np.array(flags, dtype=np.bool_) for flags in (looked_up, sampled)
        )
        view = replace(
            view,
            other_tokens=other_tokens,
            past=tuple(self._past),
            expected_K=self._expected_K(),
            looked_up_R=looked_up_R,
            sampled_R=sampled_R,
        )
        by_drafter_R = view.by_drafter_R
        assert len(ids) == len(drafted) and by_drafter_R.max(initial=0) <= self.gamma
        if self._estimates is None or not by_drafter_R.any():
            return view
        own_RJ = view.confidences_RK[:, : self.gamma]
        estimated_RJ = self._estimates.expected(ids, _groups(view), own_RJ)
        drafted_RJ = np.arange(own_RJ.shape[1]) < by_drafter_R[:, None]
        estimated_RK = view.confidences_RK.copy()
        estimated_RK[:, : self.gamma] = np.where(drafted_RJ, estimated_RJ, own_RJ)
        return replace(view, confidences_RK=estimated_RK, drafter_RK=view.confidences_RK)

    def terms(self, ids: Sequence[Hashable], positions: int, *, sampled: bool, confident: bool) -> Floats:
        """Slopes and offsets [2, R, K] by which the device makes logits of estimates from the drafter's own, clipped at
        `CLIP`, or from 0 where it has no confidences (decoding/ahead.py).
        """
        assert self._estimates is not None, "chains"
        known_RK = np.full((len(ids), positions), int(confident))
        groups_R = np.full(len(ids), int(sampled))
        level_RK, position_RK, slope_RK, request_RK = self._estimates.terms(ids, groups_R, known_RK)
        return np.stack([slope_RK, level_RK + position_RK + request_RK])

    def skip(self, requests: int) -> None:
        """Note a step of so many requests in which nothing was drafted."""
        self._past.append(PastStep(np.zeros((requests, 0)), np.zeros(requests, dtype=np.int64)))
        self._steps += 1
        if self._estimates is not None:
            self._estimates.skip()

    def observe(self, ids: Sequence[Hashable], view: StepView, *, verified_R: Ints, accepted_R: Ints) -> None:
        """Update after a step; a request without a draft of the drafter keeps its means.

        Args:
            verified_R: how many drafts of each request have a known verdict (`known_verdicts`).
            accepted_R: how many of them were accepted.
        """
        slots_R, by_drafter_R = self._slots_of(ids), view.by_drafter_R
        drafted_R = by_drafter_R > 0
        if self._estimates is not None:
            verified_R, accepted_R = np.minimum(verified_R, by_drafter_R), np.minimum(accepted_R, by_drafter_R)
            own_RJ = view.own_RK[:, : self.gamma]
            self._estimates.observe(ids, verified_R, accepted_R, groups_R=_groups(view), confidences_RK=own_RJ)
            if drafted_R.any():
                self._shallow = 0 if by_drafter_R.max() == self.gamma else self._shallow + 1
                self._no_confidences = bool(np.isnan(view.own_RK[drafted_R]).any())
        self._past.append(PastStep(view.confidences_RK, view.drafted_R))
        self._steps += 1
        self._drafted_S[slots_R[drafted_R]] = self._steps
        known_R = drafted_R & ~np.isnan(view.confidences_RK).any(axis=1)
        if known_R.any():
            self._update_means(slots_R[known_R], view.confidences_RK[known_R, : self.gamma], by_drafter_R[known_R])

    def _update_means(self, slots_R: Ints, confidences_RK: Floats, drafted_R: Ints) -> None:
        survival_R2K = self._survival(confidences_RK)
        seen_RK = np.arange(self.gamma) < drafted_R[:, None]
        # A new request starts from the mean over all, so that one rejected draft does not decide about it.
        old_R2K = self._means_S2K[slots_R]
        if self._all_2K is not None:
            old_R2K = np.where(np.isnan(old_R2K), self._all_2K, old_R2K)
        self._means_S2K[slots_R] = self._mixed(old_R2K, survival_R2K, seen_RK)
        count_K = seen_RK.sum(axis=0)
        mean_2K = (survival_R2K * seen_RK[:, None]).sum(axis=0) / np.maximum(count_K, 1)
        old_2K = np.full_like(mean_2K, np.nan) if self._all_2K is None else self._all_2K
        self._all_2K = self._mixed(old_2K[None], mean_2K[None], (count_K > 0)[None])[0]

    def forget(self, id: Hashable) -> None:
        """Drop the means of a request that has left; its drafts stay in the means over all."""
        slot = self._slots.release(id)
        if slot is not None:
            self._means_S2K[slot], self._drafted_S[slot] = np.nan, -1
        if self._estimates is not None:
            self._estimates.forget(id)

    def _expected_K(self) -> Floats | None:
        return None if self._all_2K is None else _ratio(self._all_2K[None])[0]

    def _survival(self, confidences_RK: Floats) -> Floats:
        """a_{k-1} and a_k, [R, 2, gamma]; 0 after the block."""
        survival_R2K = np.zeros((len(confidences_RK), 2, self.gamma))
        drafted = confidences_RK.shape[1]
        survival_R2K[:, 1, :drafted] = np.cumprod(confidences_RK, axis=1)
        survival_R2K[:, 0, 0] = 1.0
        survival_R2K[:, 0, 1:] = survival_R2K[:, 1, :-1]
        return survival_R2K

    def _mixed(self, old_R2K: Floats, new_R2K: Floats, seen_RK: Flags) -> Floats:
        """Means with one more draft in them, at positions that it reached; a first draft stands alone, 0 beyond it."""
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
    """How many drafts were verified and accepted, [R] each, without those after the end of a response.

    Args:
        committed_R: tokens that the step gave each request. If a response ends among the accepted drafts, the text does
            not say whether the next one would have been accepted.
    """
    ended_R = accepted_R >= committed_R
    return np.where(ended_R, committed_R, verified_R), np.where(ended_R, committed_R, accepted_R)


def _groups(view: StepView) -> Ints | None:
    return None if view.sampled_R is None else view.sampled_R.astype(np.int64)


def _ratio(means_R2K: Floats) -> Floats:
    """mean(a_k) / mean(a_{k-1}), 0 if nothing got so far; NaN if nothing is known."""
    before_RK, after_RK = means_R2K[:, 0], means_R2K[:, 1]
    ratio_RK: Floats = np.divide(after_RK, before_RK, out=np.zeros_like(after_RK), where=before_RK != 0)
    return ratio_RK
