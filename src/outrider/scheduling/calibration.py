"""a_k = prod_{i <= k} sigmoid(logit(c_i) / T_i + b_i)   should be   P(positions 1..k are accepted)

    ECE = sum_b n_b / N |mean(a_k) - mean(outcome)| in bin b,   20 equal bins over [0, 1]

The product is what is calibrated, not each c_k alone: schedulers weigh survival (DSpark, arXiv 2607.05147). How T and b
are found: scheduling/sts.py. Shapes: N rounds, K block positions, M bins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from outrider.scheduling.view import Floats, Ints

BINS = 20
_EDGE = 1e-9  # float32 sigmoids reach 0 and 1, whose logits are infinite


@dataclass(frozen=True)
class Rounds:
    """Decode rounds with their outcome.

    `confidences_NK` [N, K] are raw c_k, `admitted_N` says how many of a row were judged by the target and
    `accepted_N` how many of those it accepted; what stands behind `admitted` in a row is not read. `features_NKF` are
    what an estimator of confidences reads (drafters/estimator.py), where the drafter has no confidence head.
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
