"""argmax_w,b  sum_n log P(accepted_n | f_n, k_n) - ridge |w|^2 / 2,   P = sigmoid(w . f + b_k)

What an estimator of confidences is fitted with (drafters/estimator.py): Newton's method over all positions at once, one
bias per position. A position counts where all before it were accepted: c_k is a conditional probability.
Shapes: N rounds, K block positions, F features, S samples, P = F + K parameters.
"""

from __future__ import annotations

import numpy as np

from outrider.drafters.estimator import CertaintyEstimator
from outrider.scheduling.calibration import Rounds, sigmoid

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
