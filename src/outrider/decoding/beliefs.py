"""Beliefs about acceptance, learned while serving: P(draft k is accepted | drafts 1 .. k-1 are, and k is verified).

    logit p_{r,k}  =  a_g + w_k + v_k logit c_{r,k} + u_r        with confidences
                      a'_g + w'_k + u_r                          without

a_g is the level of a group g of drafts (one for a trained drafter; for copied drafts the length of the matched suffix),
w_k and v_k are common to all at a position, u_r is a request's own deviation: a new request starts from the mean over
all. The prior of drafts with confidences is p = c, that of others p = 1/2.

Every parameter is a normal belief (mean, variance P). P never falls below a least one, so old outcomes count less and
less. The outcomes y of a step give one Newton step per parameter, from the residuals that parameters before it leave:

    h = p (1 - p)      s = 1 / (1 / h + variance of the parameters still to come)      e = (y - p) / h
    1 / P += sum s f^2                mean += P sum s f e                e -= f (change of the mean)       f: 1, logit c

For one outcome this is the extended Kalman filter with a diagonal covariance. What a step does not try fades: a
position that no request verifies, a group or a request of which nothing is verified return to their prior by `FADE`.
Otherwise a position once believed hopeless would never be verified again, and never be seen to have improved.

Why the estimates are unbiased although they decide what is verified: outcome k of a round is observed where k is
verified and all before it were accepted. Whether k is verified is a function of earlier rounds and of c_1 .. c_k. Given
these, the outcome has the same distribution whether it is looked at or not, so the residuals y - p of the observed
outcomes have mean 0 at the true p, however many are observed. A model without c_k would not have this property where
policies read c_k: of hard positions it would only see easy cases. Therefore drafts with confidences are never counted
for the parameters without.

Losslessness: nothing of the round that is planned is read but c_1 .. c_k and the group, which is known before drafting.
The probability of the drafted token itself must not take the place of c_k: it depends on x_k.

Sources: DSpark, arXiv 2607.05147 (temperatures per position, fitted once); extended Kalman filters of logistic models:
Penny and Roberts, "Dynamic logistic regression" (IJCNN 1999). Shapes: R requests, K positions, G groups, S slots; 2:
without and with confidences.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from outrider.decoding.cost import Floats, Ints

Flags = NDArray[np.bool_]

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

    `size`: how many places there are, which grows when all are taken.
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
        """The place that an id had and that another may get; None where it had none."""
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
_CLIP = 1e-3  # of confidences: beyond these, one outcome would move a slope too far
_LEAST_CURVATURE = 1e-3  # h of an outcome that was thought impossible, which must not move everything


class Beliefs:
    """P(draft k accepted | those before it accepted), by group, position and request, learned from outcomes.

    Chains only: the nodes of a tree are no positions.

    Args:
        positions: most drafts of a chain.
        groups: kinds of drafts with a level of their own. Drafters whose positions differ otherwise (a trained one and
            copies) need a `Beliefs` each.
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
            confidences_RK: the drafters' own c_k, of any number of positions up to `positions`; NaN where there are
                none. Without them K is `positions`, and what is told was learned from drafts without confidences only.
        """
        self._fade_all()
        slots_R = self._slots_of(ids)
        if confidences_RK is None:
            confidences_RK = np.full((len(slots_R), self.positions), np.nan)
        known_RK, logit_RK = _features(confidences_RK)
        slots_R1, groups_R1 = slots_R[:, None], 0 if groups_R is None else groups_R[:, None]
        places_4RK = self._places(known_RK, slots_R1, groups_R1, positions=np.arange(known_RK.shape[1]))
        level_RK, position_RK, slope_RK, request_RK = (self._mean_P[places_RK] for places_RK in places_4RK)
        return sigmoid(level_RK + position_RK + slope_RK * logit_RK + request_RK)

    def record(
        self,
        ids: Sequence[Hashable],
        verified_R: Ints,
        accepted_R: Ints,
        *,
        groups_R: Ints | None = None,
        confidences_RK: Floats | None = None,
    ) -> None:
        """Learn from the outcomes of a step: positions 1 .. min(accepted + 1, verified) of each request.

        Args:
            verified_R: drafts whose verdict is known. A request of which nothing was verified is given too, with the
                group that it could have drafted: what is not tried fades.
            accepted_R: how many of them were accepted, from the first on.
            groups_R, confidences_RK: as `expected` was asked.
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
        belief_N = sigmoid(np.einsum("ij,ij->j", factor_4N, self._mean_P[place_4N]))
        curvature_N = np.maximum(belief_N * (1 - belief_N), _LEAST_CURVATURE)
        error_N = ((k_N < accepted_R[r_N]) - belief_N) / curvature_N
        unsure_4N = factor_4N**2 * self._variance_P[place_4N]
        # Of what is still to come: every parameter sees those behind it as noise, and those before it as settled.
        later_4N = np.cumsum(unsure_4N[::-1], axis=0)[::-1] - unsure_4N
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
        """Drop the deviation of a request that has left; what it taught about all requests stays."""
        slot = self._slots.release(id)
        if slot is not None:
            places_2 = self._starts_4[_REQUEST] + 2 * slot + np.arange(2)
            self._mean_P[places_2], self._variance_P[places_2] = self._prior_P[places_2], self._most_P[places_2]

    def _places(self, known: Ints, slots: Ints, groups: Ints | int, positions: Ints) -> tuple[Ints, ...]:
        """Where the four parameters of drafts are, shapes as they broadcast."""
        _, position, slope, request = self._starts_4
        at = known * self.positions + positions
        return known * self.groups + groups, position + at, slope + at, request + 2 * slots + known

    def _fade_all(self) -> None:
        """Let go of everything by the steps in which nothing was tried, all at once."""
        if self._idle_steps:
            kept = FADE**self._idle_steps
            self._mean_P = self._prior_P + kept * (self._mean_P - self._prior_P)
            self._variance_P = self._most_P + kept**2 * (self._variance_P - self._most_P)
            self._idle_steps = 0

    def _fade_untried(self, slots_R: Ints, groups_R: Ints, tried_R: Flags, depth: int) -> None:
        """Let go of what this step does not try: levels of groups, requests, and positions from `depth` on."""
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
    """Whether there is a confidence, as 0 or 1, and its logit, 0 where there is none."""
    unknown = np.isnan(confidences)
    return 1 - unknown.astype(np.int64), logit(np.where(unknown, 0.5, confidences), _CLIP)
