"""a_k = prod_{i <= k} sigmoid(logit(c_i) / T_i + b_i)   should be   P(positions 1..k are accepted)

    ECE = sum_b n_b / N |mean(a_k) - mean(outcome)| in bin b,   20 equal bins over [0, 1]

The product is what is calibrated, not each c_k alone: schedulers weigh survival (DSpark, arXiv 2607.05147). How T and b
are found: calibration/fit.py. Shapes: N rounds, K block positions, M bins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from outrider.drafters.heads import CertaintyEstimator
from outrider.scheduling.view import Floats, Ints

BINS = 20
_EDGE = 1e-9  # float32 sigmoids reach 0 and 1, whose logits are infinite


@dataclass(frozen=True)
class Rounds:
    """Decode rounds with their outcome.

    `confidences_NK` [N, K] are raw c_k, `admitted_N` says how many of a row were judged by the target and
    `accepted_N` how many of those it accepted; what stands behind `admitted` in a row is not read. `features_NKF` are
    what an estimator of confidences reads (drafters/medusa.py), where the drafter has no confidence head.
    """

    confidences_NK: Floats
    accepted_N: Ints
    admitted_N: Ints
    features_NKF: Floats | None = None

    def __post_init__(self) -> None:
        count, width = self.confidences_NK.shape
        if self.accepted_N.shape != (count,) or self.admitted_N.shape != (count,):
            raise ValueError(
                f"{count} rounds of confidences with accepted {self.accepted_N.shape} and admitted "
                f"{self.admitted_N.shape}; give one count per round."
            )
        if (self.accepted_N > self.admitted_N).any() or (self.admitted_N > width).any():
            raise ValueError(f"counts must satisfy accepted <= admitted <= {width} in every round.")

    def chosen(self, which: Ints) -> Rounds:
        """Some of the rounds, by their places or by a mask."""
        features_NKF = None if self.features_NKF is None else self.features_NKF[which]
        return Rounds(self.confidences_NK[which], self.accepted_N[which], self.admitted_N[which], features_NKF)

    @staticmethod
    def joined(parts: Sequence[Rounds]) -> Rounds:
        """All rounds of `parts`, at least one of them, in order."""
        features = [p.features_NKF for p in parts if p.features_NKF is not None]
        return Rounds(
            np.concatenate([p.confidences_NK for p in parts]),
            np.concatenate([p.accepted_N for p in parts]),
            np.concatenate([p.admitted_N for p in parts]),
            np.concatenate(features) if features else None,
        )


@dataclass(frozen=True)
class Scaling:
    """T_k and b_k per position: a calibrated confidence is sigmoid(logit(c_k) / T_k + b_k)."""

    temperatures: list[float]
    offsets: list[float]

    @staticmethod
    def identity(gamma: int) -> Scaling:
        """Confidences as they are."""
        return Scaling([1.0] * gamma, [0.0] * gamma)


@dataclass(frozen=True)
class Reliability:
    """Equal-width bins over [0, 1]: rounds per bin, and the sums of predictions and of outcomes in each."""

    count_M: Ints
    predicted_M: Floats
    happened_M: Floats


def survival(rounds: Rounds, scaling: Scaling, width: int) -> Floats:
    """a_1..a_j [N, j] for j = `width`; rows hold nonsense behind their `admitted`."""
    temperatures_J, offsets_J = np.asarray(scaling.temperatures[:width]), np.asarray(scaling.offsets[:width])
    logits_NJ = logit(rounds.confidences_NK[:, :width]) / temperatures_J + offsets_J
    survival_NJ: Floats = np.cumprod(sigmoid(logits_NJ), axis=1, dtype=np.float64)
    return survival_NJ


def at_position(rounds: Rounds, scaling: Scaling, k: int) -> tuple[Floats, Floats]:
    """(a_k, 1 where positions 1..k were accepted else 0) over the rounds that judged position k, counted from 1."""
    judged_N = rounds.admitted_N >= k
    predicted_N = survival(rounds, scaling, k)[judged_N, k - 1]
    return predicted_N, (rounds.accepted_N[judged_N] >= k).astype(np.float64)


def reliability(predicted_N: Floats, outcome_N: Floats, bins: int = BINS) -> Reliability:
    """How often what was predicted happened, bin by bin."""
    places_N = _bin(predicted_N, bins)
    return Reliability(
        np.bincount(places_N, minlength=bins),
        np.bincount(places_N, weights=predicted_N, minlength=bins).astype(np.float64),
        np.bincount(places_N, weights=outcome_N, minlength=bins).astype(np.float64),
    )


def ece(predicted_N: Floats, outcome_N: Floats, bins: int = BINS) -> float:
    """Expected calibration error of at least one prediction."""
    found = reliability(predicted_N, outcome_N, bins)
    return float(np.abs(found.predicted_M - found.happened_M).sum() / len(predicted_N))


def ece_noise(predicted_N: Floats, bins: int = BINS) -> float:
    """The error to expect by chance alone, of predictions that are right, from as many rounds.

    The sum of p - outcome in a bin is then nearly normal with variance sum p (1 - p), and E|x| = s sqrt(2 / pi).
    """
    places_N = _bin(predicted_N, bins)
    variance_M = np.bincount(places_N, weights=predicted_N * (1 - predicted_N), minlength=bins)
    return float(np.sqrt(2 / np.pi * variance_M).sum() / len(predicted_N))


def brier(predicted_N: Floats, outcome_N: Floats) -> float:
    """Mean squared error of the predictions; 0 is perfect, 0.25 is a coin."""
    return float(np.square(predicted_N - outcome_N).mean())


def roc_auc(predicted_N: Floats, outcome_N: Floats) -> float | None:
    """P(an accepted round is rated above a rejected one), ties counting half; None where one kind is missing."""
    positives = int(outcome_N.sum())
    negatives = len(outcome_N) - positives
    if not positives or not negatives:
        return None
    _, places_N, counts = np.unique(predicted_N, return_inverse=True, return_counts=True)
    ranks = np.cumsum(counts) - (counts - 1) / 2  # ties share the mean of their ranks
    wins = ranks[places_N][outcome_N > 0].sum() - positives * (positives + 1) / 2
    return float(wins / (positives * negatives))


def _bin(predicted_N: Floats, bins: int) -> Ints:
    return np.minimum((predicted_N * bins).astype(np.int64), bins - 1)  # 1.0 belongs to the last bin


def logit(probability: Floats) -> Floats:
    """Finite for 0 and 1, too."""
    inside = np.clip(probability, _EDGE, 1 - _EDGE)
    return np.log(inside) - np.log1p(-inside)


def sigmoid(x: Floats) -> Floats:
    """1 / (1 + exp(-x)), without overflow."""
    result: Floats = 0.5 * (1.0 + np.tanh(0.5 * x))
    return result


# ----------------------------------------------------------------------------
# T_k, b_k = argmin ECE(a_k, [accepted >= k]),   left to right, earlier positions fixed
#
#     temperature alone     T_k over a grid, b_k = 0                    Sequential Temperature Scaling
#     with an offset        T_k over a grid, b_k(T_k) such that  mean a_k = mean outcome
#
# Source: DSpark, arXiv 2607.05147, for the first. A temperature cannot move c = 1/2, so it leaves a bias where a head
# is too hopeful at any certainty; the offset removes it. Tied to the mean, it adds no second dimension to the search,
# that would follow the noise of 20 bins. A position gets one where held-out folds say that it pays. Both depend on the
# position only: a calibrated c_k is still known before x_k is drawn. Shapes: N rounds, K block positions, G grid.
# ----------------------------------------------------------------------------


_GRID = np.geomspace(0.1, 10.0, 401)  # steps of 1.2 %
_GRID_FROM_ONE = _GRID[np.argsort(np.abs(np.log(_GRID)), kind="stable")]  # of equal errors the mildest change wins
_COARSE = _GRID[::5]  # 6 %: each needs its offset
_COARSE_FROM_ONE = _COARSE[np.argsort(np.abs(np.log(_COARSE)), kind="stable")]
_FOLDS = 5
_FURTHEST_OFFSET, _HALVINGS = 10.0, 26


def fit_sts(rounds: Rounds, offsets: bool = True) -> Scaling:
    """One temperature per position, and an offset where it pays.

    Args:
        rounds: in the order they were decoded; folds are stretches of it, since neighbours resemble each other.
        offsets: False for temperatures alone.

    Raises:
        ValueError: no round judged a position.
    """
    scaling = Scaling([], [])
    for k in range(1, rounds.confidences_NK.shape[1] + 1):
        judged_N = rounds.admitted_N >= k
        if not judged_N.any():
            raise ValueError(f"no round judged draft position {k}: decode more, with blocks verified whole.")
        before_N = survival(rounds, scaling, k - 1)[judged_N, -1] if k > 1 else np.ones(int(judged_N.sum()))
        logits_N = logit(rounds.confidences_NK[judged_N, k - 1])
        outcome_N = (rounds.accepted_N[judged_N] >= k).astype(np.float64)
        position = _Position(before_N, logits_N, outcome_N)
        temperature, offset = position.fit(offsets and position.offset_pays())
        scaling = Scaling([*scaling.temperatures, temperature], [*scaling.offsets, offset])
    return scaling


class _Position:
    """The rounds that judged one position, with the survival up to it."""

    def __init__(self, before_N: Floats, logits_N: Floats, outcome_N: Floats) -> None:
        self.before_N, self.logits_N, self.outcome_N = before_N, logits_N, outcome_N

    def predicted(self, temperature: float, offset: float) -> Floats:
        return self.before_N * sigmoid(self.logits_N / temperature + offset)

    def fit(self, with_offset: bool) -> tuple[float, float]:
        grid_G = _COARSE_FROM_ONE if with_offset else _GRID_FROM_ONE
        offsets_G = self._offsets(grid_G) if with_offset else np.zeros(len(grid_G))
        errors = [ece(self.predicted(*pair), self.outcome_N) for pair in zip(grid_G, offsets_G, strict=True)]
        best = int(np.argmin(errors))
        return float(grid_G[best]), float(offsets_G[best])

    def _offsets(self, grid_G: Floats) -> Floats:
        """Per temperature, the offset that makes the mean prediction right: by bisection, the mean rises with it."""
        low_G, high_G = np.full(len(grid_G), -_FURTHEST_OFFSET), np.full(len(grid_G), _FURTHEST_OFFSET)
        goal = float(self.outcome_N.mean())
        scaled_GN = self.logits_N / grid_G[:, None]
        for _ in range(_HALVINGS):
            middle_G = (low_G + high_G) / 2
            short_G = (self.before_N * sigmoid(scaled_GN + middle_G[:, None])).mean(axis=1) < goal
            low_G, high_G = np.where(short_G, middle_G, low_G), np.where(short_G, high_G, middle_G)
        offsets_G: Floats = (low_G + high_G) / 2
        return offsets_G

    def offset_pays(self) -> bool:
        """Whether it makes the error of the folds that were not fitted on smaller."""
        if len(self.outcome_N) < 2 * _FOLDS:
            return False
        folds = np.array_split(np.arange(len(self.outcome_N)), _FOLDS)
        errors = []
        for with_offset in (False, True):
            predicted_N = np.empty(len(self.outcome_N))
            for fold in folds:
                predicted_N[fold] = self.predicted(*self._without(fold).fit(with_offset))[fold]
            errors.append(ece(predicted_N, self.outcome_N))
        return errors[1] < errors[0]

    def _without(self, fold: Ints) -> _Position:
        kept = np.delete(np.arange(len(self.outcome_N)), fold)
        return _Position(self.before_N[kept], self.logits_N[kept], self.outcome_N[kept])


# ----------------------------------------------------------------------------
# argmax_w,b  sum_n log P(accepted_n | f_n, k_n) - ridge |w|^2 / 2,   P = sigmoid(w . f + b_k)
#
# What an estimator of confidences is fitted with (drafters/medusa.py): Newton's method over all positions at once, one
# bias per position. A position counts where all before it were accepted: c_k is a conditional probability.
# Shapes: N rounds, K block positions, F features, S samples, P = F + K parameters.
# ----------------------------------------------------------------------------


_RIDGE = 1e-2  # of one sample's worth: bounds weights and biases where outcomes are all alike
_STEPS, _CLOSE = 50, 1e-9


def fit_estimator(rounds: Rounds) -> CertaintyEstimator:
    """From rounds with features. Positions that were never reached get the bias of an even chance at zero features."""
    assert rounds.features_NKF is not None
    _, gamma, count = rounds.features_NKF.shape
    positions_K = np.arange(gamma)
    reached_NK = (positions_K <= rounds.accepted_N[:, None]) & (positions_K < rounds.admitted_N[:, None])
    place_S = np.nonzero(reached_NK)[1]
    inputs_SP = np.concatenate((rounds.features_NKF[reached_NK], np.eye(gamma)[place_S]), axis=1)
    outcome_S = (positions_K < rounds.accepted_N[:, None])[reached_NK].astype(np.float64)
    found_P = np.zeros(count + gamma)
    for _ in range(_STEPS):
        predicted_S = sigmoid(inputs_SP @ found_P)
        gradient_P = inputs_SP.T @ (outcome_S - predicted_S) - _RIDGE * found_P
        curvature_PP = (inputs_SP.T * (predicted_S * (1 - predicted_S))) @ inputs_SP + _RIDGE * np.eye(len(found_P))
        step_P = np.linalg.solve(curvature_PP, gradient_P)
        found_P += step_P * min(1.0, 5.0 / max(np.abs(step_P).max(), 1e-12))
        if np.abs(step_P).max() < _CLOSE:
            break
    return CertaintyEstimator(found_P[:count].tolist(), found_P[count:].tolist())
