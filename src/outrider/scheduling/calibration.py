"""a_k = prod_{i <= k} sigmoid(logit(c_i) / T_i)   should be   P(positions 1..k are accepted)

Sequential Temperature Scaling (DSpark, arXiv 2607.05147), left to right, earlier temperatures fixed:

    T_k = argmin over a grid of  ECE(a_k, [accepted >= k]),   ECE = sum_b n_b / N |mean(a_k) - mean(outcome)| in bin b

The product is what is calibrated, not each c_k alone: schedulers weigh survival. A temperature per position is a
function of the position only, so a calibrated c_k is still known before x_k is drawn.
Shapes: N rounds, K block positions, G temperatures on the grid, M bins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

BINS = 20
_GRID = np.geomspace(0.1, 10.0, 401)  # steps of 1.2 %
_GRID_FROM_ONE = _GRID[np.argsort(np.abs(np.log(_GRID)), kind="stable")]  # of equal errors the mildest change wins
_EDGE = 1e-9  # float32 sigmoids reach 0 and 1, whose logits are infinite


@dataclass(frozen=True)
class Rounds:
    """Decode rounds with their outcome.

    `confidences_NK` [N, K] are raw c_k, `admitted_N` says how many of a row were judged by the target and
    `accepted_N` how many of those it accepted; what stands behind `admitted` in a row is not read.
    """

    confidences_NK: Floats
    accepted_N: Ints
    admitted_N: Ints

    def __post_init__(self) -> None:
        count, width = self.confidences_NK.shape
        if self.accepted_N.shape != (count,) or self.admitted_N.shape != (count,):
            raise ValueError(
                f"{count} rounds of confidences with accepted {self.accepted_N.shape} and admitted "
                f"{self.admitted_N.shape}; give one count per round."
            )
        if (self.accepted_N > self.admitted_N).any() or (self.admitted_N > width).any():
            raise ValueError(f"counts must satisfy accepted <= admitted <= {width} in every round.")

    @staticmethod
    def joined(parts: Sequence[Rounds]) -> Rounds:
        """All rounds of `parts`, at least one of them, in order."""
        return Rounds(
            np.concatenate([p.confidences_NK for p in parts]),
            np.concatenate([p.accepted_N for p in parts]),
            np.concatenate([p.admitted_N for p in parts]),
        )


@dataclass(frozen=True)
class Reliability:
    """Equal-width bins over [0, 1]: rounds per bin, and the sums of predictions and of outcomes in each."""

    count_M: Ints
    predicted_M: Floats
    happened_M: Floats


def survival(rounds: Rounds, temperatures: Sequence[float]) -> Floats:
    """a_1..a_j [N, j] for j = len(temperatures); rows hold nonsense behind their `admitted`."""
    logits_NJ = _logit(rounds.confidences_NK[:, : len(temperatures)])
    survival_NJ: Floats = np.cumprod(_sigmoid(logits_NJ / np.asarray(temperatures)), axis=1, dtype=np.float64)
    return survival_NJ


def at_position(rounds: Rounds, temperatures: Sequence[float], k: int) -> tuple[Floats, Floats]:
    """(a_k, 1 where positions 1..k were accepted else 0) over the rounds that judged position k, counted from 1."""
    judged_N = rounds.admitted_N >= k
    predicted_N = survival(rounds, temperatures[:k])[judged_N, k - 1]
    return predicted_N, (rounds.accepted_N[judged_N] >= k).astype(np.float64)


def fit_sts(rounds: Rounds, bins: int = BINS) -> list[float]:
    """One temperature per position.

    Raises:
        ValueError: no round judged a position.
    """
    temperatures: list[float] = []
    for k in range(1, rounds.confidences_NK.shape[1] + 1):
        judged_N = rounds.admitted_N >= k
        if not judged_N.any():
            raise ValueError(f"no round judged draft position {k}: decode more, with blocks verified whole.")
        before_N = survival(rounds, temperatures)[judged_N, -1] if temperatures else np.ones(int(judged_N.sum()))
        logits_N = _logit(rounds.confidences_NK[judged_N, k - 1])
        outcome_N = (rounds.accepted_N[judged_N] >= k).astype(np.float64)
        predicted_GN = before_N * _sigmoid(logits_N / _GRID_FROM_ONE[:, None])
        errors = [ece(predicted_N, outcome_N, bins) for predicted_N in predicted_GN]
        temperatures.append(float(_GRID_FROM_ONE[int(np.argmin(errors))]))
    return temperatures


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


def _logit(probability: Floats) -> Floats:
    inside = np.clip(probability, _EDGE, 1 - _EDGE)
    return np.log(inside) - np.log1p(-inside)


def _sigmoid(logit: Floats) -> Floats:
    return 0.5 * (1.0 + np.tanh(0.5 * logit))
