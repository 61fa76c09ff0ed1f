"""T_k, b_k = argmin ECE(a_k, [accepted >= k]),   left to right, earlier positions fixed

    temperature alone     T_k over a grid, b_k = 0                    Sequential Temperature Scaling
    with an offset        T_k over a grid, b_k(T_k) such that  mean a_k = mean outcome

Source: DSpark, arXiv 2607.05147, for the first. A temperature cannot move c = 1/2, so it leaves a bias where a head is
too hopeful at any certainty; the offset removes it. Tied to the mean, it adds no second dimension to the search, that
would follow the noise of 20 bins. A position gets one where held-out folds say that it pays. Both depend on the
position only: a calibrated c_k is still known before x_k is drawn. Shapes: N rounds, K block positions, G grid.
"""

from __future__ import annotations

import numpy as np

from outrider.scheduling.calibration import Rounds, Scaling, ece, logit, sigmoid, survival
from outrider.scheduling.view import Floats, Ints

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
