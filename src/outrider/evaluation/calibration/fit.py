"""Calibration of confidences: temperatures and offsets per draft position, fitted to collected decode rounds.

    a_k = prod_{i <= k} sigmoid(logit(c_i) / T_i + b_i)   should be   P(positions 1..k are accepted)
    ECE = sum_b n_b / N |mean(a_k) - mean(outcome)| in bin b,   20 equal bins over [0, 1]

The survival a_k is calibrated rather than each c_k alone, because schedulers decide by survival. `fit_scaling` does so
by penalised likelihood, `fit_sts` as DSpark's Sequential Temperature Scaling does (arXiv 2607.05147): temperatures
alone, by grid search on the ECE. `calibrate` fits on one part of the conversations and measures on the other;
`refusal` says why a fit is not worth storing; `sweep` gives tokens per step by confidence threshold. Rounds come from
evaluation/calibration/collect.py.
Shapes: N rounds, K block positions (gamma), M bins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from outrider.data.sources import TaskSettings
from outrider.decoding.acceptance import EDGE, logit, sigmoid
from outrider.decoding.cost import Floats, Ints
from outrider.drafters.confidence import CertaintyEstimator
from outrider.utils.measure import machine

BINS = 20


@dataclass(frozen=True)
class Rounds:
    """Decode rounds with their outcome."""

    confidences_NK: Floats  # raw c_k; values at positions from `admitted_N` on are not read
    accepted_N: Ints  # drafts the target accepted
    admitted_N: Ints  # drafts the target verified
    features_NKF: Floats | None = None  # input of a `CertaintyEstimator`, if the drafter has no confidence head

    def __post_init__(self) -> None:
        count, width = self.confidences_NK.shape
        if not self.accepted_N.shape == self.admitted_N.shape == (count,):
            raise ValueError(
                f"{count} rounds of confidences with accepted {self.accepted_N.shape} and admitted "
                f"{self.admitted_N.shape}; give one count per round."
            )
        if (self.accepted_N > self.admitted_N).any() or (self.admitted_N > width).any():
            raise ValueError(f"counts must satisfy accepted <= admitted <= {width} in every round.")

    def chosen(self, which: Ints) -> Rounds:
        """A subset of the rounds, by indices or by a mask."""
        return Rounds(*(None if array is None else array[which] for array in self._arrays()))  # type: ignore[arg-type]

    @staticmethod
    def joined(parts: Sequence[Rounds]) -> Rounds:
        """The rounds of all `parts` in order; `parts` must not be empty. Parts without rounds may have no features."""
        columns = zip(*(part._arrays() for part in parts), strict=True)
        known = ([array for array in column if array is not None] for column in columns)
        return Rounds(*(np.concatenate(arrays) if arrays else None for arrays in known))  # type: ignore[arg-type]

    def _arrays(self) -> tuple[Any, ...]:
        return self.confidences_NK, self.accepted_N, self.admitted_N, self.features_NKF


Conversations = Sequence[Sequence[Rounds]]  # the rounds of each turn of each conversation
TaskRounds = Mapping[str, Conversations]


@dataclass(frozen=True)
class Scaling:
    """Temperature T_k and offset b_k per position: calibrated c_k = sigmoid(logit(c_k) / T_k + b_k)."""

    temperatures: list[float]
    offsets: list[float]

    @staticmethod
    def identity(gamma: int) -> Scaling:
        """The scaling that changes nothing."""
        return Scaling([1.0] * gamma, [0.0] * gamma)

    def apply(self, confidences_NJ: Floats) -> Floats:
        """Calibrated confidences of the first J positions."""
        temperatures_J, offsets_J = (
            np.array(found[: confidences_NJ.shape[1]]) for found in (self.temperatures, self.offsets)
        )
        return sigmoid(logit(confidences_NJ) / temperatures_J + offsets_J)


def survival(rounds: Rounds, scaling: Scaling, width: int) -> Floats:
    """Survival a_1..a_j [N, j] for j = `width`; values at positions from `admitted_N` on mean nothing."""
    survival_NJ: Floats = np.cumprod(scaling.apply(rounds.confidences_NK[:, :width]), axis=1, dtype=np.float64)
    return survival_NJ


def at_position(rounds: Rounds, scaling: Scaling, k: int) -> tuple[Floats, Floats]:
    """Pairs (a_k, outcome) of the rounds that verified position k; outcome 1 where positions 1..k were accepted."""
    judged_N = rounds.admitted_N >= k
    predicted_N = survival(rounds, scaling, k)[judged_N, k - 1]
    return predicted_N, (rounds.accepted_N[judged_N] >= k).astype(np.float64)


def reliability(predicted_N: Floats, outcome_N: Floats, bins: int = BINS) -> tuple[Ints, Floats, Floats]:
    """Equal-width bins over [0, 1]: rounds per bin [M], and the sums of predictions and of outcomes in each."""
    places_N = np.minimum((predicted_N * bins).astype(np.int64), bins - 1)  # 1.0 belongs to the last bin
    predicted_M, happened_M = (
        np.bincount(places_N, by_N, bins).astype(np.float64) for by_N in (predicted_N, outcome_N)
    )
    return np.bincount(places_N, minlength=bins), predicted_M, happened_M


def ece(predicted_N: Floats, outcome_N: Floats, bins: int = BINS) -> float:
    """Expected calibration error; needs at least one prediction."""
    _, predicted_M, happened_M = reliability(predicted_N, outcome_N, bins)
    return float(np.abs(predicted_M - happened_M).sum() / len(predicted_N))


def ece_noise(predicted_N: Floats) -> float:
    """Expected calibration error that perfectly calibrated predictions show by chance in so many rounds.

    The sum of p - outcome in a bin is nearly normal with variance sum p (1 - p), and E|x| = s sqrt(2 / pi).
    """
    _, _, variance_M = reliability(predicted_N, predicted_N * (1 - predicted_N))
    return float(np.sqrt(2 / np.pi * variance_M).sum() / len(predicted_N))


def brier(predicted_N: Floats, outcome_N: Floats) -> float:
    """Brier score: mean squared error of the predictions; always predicting 0.5 gives 0.25."""
    return float(np.square(predicted_N - outcome_N).mean())


def log_loss(predicted_N: Floats, outcome_N: Floats) -> Floats:
    """-log P(outcome) of each round, in nats."""
    inside_N = np.clip(predicted_N, EDGE, 1 - EDGE)
    return -np.where(outcome_N > 0, np.log(inside_N), np.log1p(-inside_N))


def roc_auc(predicted_N: Floats, outcome_N: Floats) -> float | None:
    """P(an accepted round is predicted above a rejected one), ties count half; None without both kinds."""
    positives = int(outcome_N.sum())
    negatives = len(outcome_N) - positives
    if not positives or not negatives:
        return None
    _, places_N, counts = np.unique(predicted_N, return_inverse=True, return_counts=True)
    ranks = np.cumsum(counts) - (counts - 1) / 2  # ties share the mean of their ranks
    wins = ranks[places_N][outcome_N > 0].sum() - positives * (positives + 1) / 2
    return float(wins / (positives * negatives))


# ----------------------------------------------------------------------------
# u_k, b_k = argmin  - sum_n log P(outcome_n | a_k) + u^2 / (2 s_u^2) + b^2 / (2 s_b^2),   T_k = exp(u_k)
#                    left to right, earlier positions fixed;   s_u = 1/2,  s_b = 1
#
# Sequential Temperature Scaling (below) with two changes. It minimises the log loss with a normal prior in place of the
# ECE, because the ECE of a few hundred rounds is mostly noise and its minimum then lies anywhere, the ends of the grid
# included. A very small T_k lets c_k outweigh the positions before it, so that a_k even ranks rounds in reverse. And a
# temperature maps c = 1/2 to itself, so a head that is too
# confident everywhere keeps a bias; the offset removes it. The prior weighs as much as the rounds where their Fisher
# information is 4 for u and 1 for b: of rare acceptances about as many, so it decides only where there is little data.
# Both depend on the position only, so a calibrated c_k is known before x_k is drawn. Shapes: P = 2 parameters.
# ----------------------------------------------------------------------------


_PRIOR_P = np.array([4.0, 1.0])  # 1 / s^2 of u and b
_BOUND_P = np.array([np.log(10.0), 10.0])  # of |u| and |b|
_STEPS, _CLOSE = 50, 1e-9
_HALVINGS = 20


def fit_scaling(rounds: Rounds, offsets: bool = True) -> Scaling:
    """Fit a temperature and an offset per position; with few rounds they stay near 1 and 0.

    Args:
        offsets: False for temperatures alone.

    Raises:
        ValueError: no round verified a position.
    """

    def likeliest(before_N: Floats, logits_N: Floats, outcome_N: Floats) -> tuple[float, float]:
        u, offset = _fit_position(before_N, logits_N, outcome_N, free=2 if offsets else 1)
        return float(np.exp(u)), float(offset)

    return _left_to_right(rounds, likeliest)


def _left_to_right(rounds: Rounds, fit_one: Callable[[Floats, Floats, Floats], tuple[float, float]]) -> Scaling:
    """The temperature and offset that `fit_one` finds for each position, earlier positions fixed.

    Args:
        fit_one: (survival of the positions before, logits of c_k, outcome of each round) -> (T_k, b_k).
    """
    scaling = Scaling([], [])
    for k in range(1, rounds.confidences_NK.shape[1] + 1):
        judged_N = rounds.admitted_N >= k
        if not judged_N.any():
            raise ValueError(f"no round judged draft position {k}: decode more, with blocks verified whole.")
        before_N = survival(rounds, scaling, k - 1)[judged_N, -1] if k > 1 else np.ones(int(judged_N.sum()))
        logits_N = logit(rounds.confidences_NK[judged_N, k - 1])
        outcome_N = (rounds.accepted_N[judged_N] >= k).astype(np.float64)
        temperature, offset = fit_one(before_N, logits_N, outcome_N)
        scaling = Scaling([*scaling.temperatures, temperature], [*scaling.offsets, offset])
    return scaling


def _fit_position(before_N: Floats, logits_N: Floats, outcome_N: Floats, *, free: int) -> Floats:
    """(u, b) of least log loss plus penalty, by Fisher scoring from (0, 0); the first `free` of the two are fitted.

    `before_N`: survival of the positions before.
    """

    def cost_at(point_P: Floats) -> float:
        predicted_N = before_N * sigmoid(logits_N * np.exp(-point_P[0]) + point_P[1])
        return float(log_loss(predicted_N, outcome_N).sum() + (_PRIOR_P * point_P**2).sum() / 2)

    point_P = np.zeros(2)
    cost = cost_at(point_P)
    for _ in range(_STEPS):
        scaled_N = logits_N * np.exp(-point_P[0])
        calibrated_N = sigmoid(scaled_N + point_P[1])
        predicted_N = np.clip(before_N * calibrated_N, EDGE, 1 - EDGE)
        slope_N = predicted_N * (1 - calibrated_N)  # of the prediction, by the scaled logit
        variance_N = predicted_N * (1 - predicted_N)
        slopes_NP = np.stack((-scaled_N, np.ones_like(scaled_N)), axis=1)
        gradient_P = slopes_NP.T @ (slope_N * (predicted_N - outcome_N) / variance_N) + _PRIOR_P * point_P
        information_PP = (slopes_NP.T * (slope_N**2 / variance_N)) @ slopes_NP + np.diag(_PRIOR_P)
        step_P = np.zeros(2)
        step_P[:free] = np.linalg.solve(information_PP[:free, :free], gradient_P[:free])
        for _ in range(_HALVINGS):
            moved_P = np.clip(point_P - step_P, -_BOUND_P, _BOUND_P)
            if (lower := cost_at(moved_P)) < cost:
                break
            step_P /= 2
        else:
            break
        change = np.abs(moved_P - point_P).max()
        point_P, cost = moved_P, lower
        if change < _CLOSE:
            break
    return point_P


# ----------------------------------------------------------------------------
# T_k = argmin over a grid of  ECE(a_k),   left to right, earlier positions fixed;   b_k = 0
#
# Sequential Temperature Scaling (DSpark, arXiv 2607.05147, 3.2.1). The paper does not give its grid: here it is
# geometric, with 1 in the middle and the bound of the other fit at its ends.
# ----------------------------------------------------------------------------


_GRID = np.exp(np.linspace(-_BOUND_P[0], _BOUND_P[0], 201))
_GRID_FROM_ONE = _GRID[np.argsort(np.abs(np.log(_GRID)), kind="stable")]


def fit_sts(rounds: Rounds) -> Scaling:
    """The temperature of least ECE per position; of several the one nearest to 1.

    Raises:
        ValueError: no round verified a position.
    """

    def least_error(before_N: Floats, logits_N: Floats, outcome_N: Floats) -> tuple[float, float]:
        errors = [ece(before_N * sigmoid(logits_N / t), outcome_N) for t in _GRID_FROM_ONE]
        return float(_GRID_FROM_ONE[int(np.argmin(errors))]), 0.0

    return _left_to_right(rounds, least_error)


# ----------------------------------------------------------------------------
# Is a scaling better than none? Judged on conversations that it was not fitted on.
#
#     refused   T_k or b_k at its bound;  or the log loss is not lower;  or the ECE, mean over the positions, is higher
#               by more than its noise: the standard deviation of the difference over resampled conversations
#
# Conversations are resampled rather than rounds, because the rounds of one conversation are alike.
# Shapes: C conversations, R resamples.
# ----------------------------------------------------------------------------


_RESAMPLES = 200


def refusal(held_out: Sequence[Rounds], scaling: Scaling) -> str | None:
    """The reason why a scaling is not worth storing, with its figures; None if it is.

    Args:
        held_out: rounds of each conversation, none of which was fitted on.
    """
    points_KP = np.stack((np.log(scaling.temperatures), scaling.offsets), axis=1)
    at_bound = [str(k + 1) for k in np.flatnonzero((np.abs(points_KP) >= _BOUND_P - 1e-6).any(axis=1))]
    chances_C = np.full(len(held_out), 1 / len(held_out))
    drawn_RC = np.random.default_rng(0).multinomial(len(held_out), chances_C, size=_RESAMPLES).astype(np.float64)
    weights_RC = np.concatenate((np.ones((1, len(held_out))), drawn_RC))  # first the conversations as they are
    (loss_before, before_R), (loss_after, after_R) = (
        _held_out_errors(held_out, s, weights_RC) for s in (Scaling.identity(len(scaling.temperatures)), scaling)
    )
    noise = float((after_R - before_R)[1:].std())
    if not at_bound and loss_after < loss_before and after_R[0] <= before_R[0] + noise:
        return None
    bounds = f"the fit of position {', '.join(at_bound)} is at its bound; " if at_bound else ""
    return (
        f"{bounds}on held-out conversations ECE {before_R[0]:.3f} without, {after_R[0]:.3f} with; "
        f"log loss {loss_before:.4f} without, {loss_after:.4f} with"
    )


def _held_out_errors(held_out: Sequence[Rounds], scaling: Scaling, weights_RC: Floats) -> tuple[float, Floats]:
    """Mean log loss, and the mean ECE over the positions [R] with each conversation taken `weights_RC` times."""
    width, total = len(scaling.temperatures), 0.0
    gaps_CKM, counts_CK = np.zeros((len(held_out), width, BINS)), np.zeros((len(held_out), width))
    for c, rounds in enumerate(held_out):
        for k in range(width):
            predicted_N, outcome_N = at_position(rounds, scaling, k + 1)
            _, predicted_M, happened_M = reliability(predicted_N, outcome_N)
            gaps_CKM[c, k], counts_CK[c, k] = predicted_M - happened_M, len(outcome_N)
            total += float(log_loss(predicted_N, outcome_N).sum())
    gaps_RK = np.abs(np.einsum("rc,ckm->rkm", weights_RC, gaps_CKM)).sum(-1)
    return total / counts_CK.sum(), (gaps_RK / np.maximum(weights_RC @ counts_CK, 1)).mean(-1)


# ----------------------------------------------------------------------------
# argmax_w,b  sum_n log P(accepted_n | f_n, k_n) - ridge |w|^2 / 2,   P = sigmoid(w . f + b_k)
#
# Logistic regression for drafters without a confidence head (`CertaintyEstimator`), by Newton's method, one bias per
# position. A position counts where all before it were accepted, because c_k is a conditional probability.
# Shapes: F features, S samples, P = F + K parameters.
# ----------------------------------------------------------------------------


_RIDGE = 1e-2  # the weight of 0.01 samples; keeps parameters finite where all outcomes are equal


def fit_estimator(rounds: Rounds) -> CertaintyEstimator:
    """Fit the estimator to rounds with features. A position that was never reached gets the bias 0."""
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


def _estimated(conversations: Conversations, estimator: CertaintyEstimator) -> Conversations:
    """The same rounds with raw confidences computed by `estimator`."""

    def raw(features_NKF: Floats | None) -> Floats:
        assert features_NKF is not None
        return sigmoid(features_NKF @ np.array(estimator.weights) + np.array(estimator.biases))

    return [[replace(rounds, confidences_NK=raw(rounds.features_NKF)) for rounds in turns] for turns in conversations]


# ----------------------------------------------------------------------------
# Fit and measure: temperatures and offsets from one part of the conversations, figures from the other.
#
# Both use the rounds that decoding takes. Blocks in the middle of accepted runs are easier, and confidences that are
# right for those are too high in decoding. An estimator is fitted to all blocks.
# ----------------------------------------------------------------------------


_FEWEST_ROUNDS = 100  # a 20-bin error of fewer is mostly noise


class Bins(BaseModel):
    """A reliability diagram: the bins that hold rounds, in rising order.

    Of each: how many rounds, the mean of their predictions, and the share of them whose positions 1..k were accepted.
    """

    rounds: list[int]
    predicted: list[float]
    accepted: list[float]


class Quality(BaseModel):
    """Errors of the survival a_k against "positions 1..k accepted", one value per position."""

    ece: list[float]
    ece_noise: list[float]  # ECE that perfect confidences would show by chance in as many rounds
    brier: list[float]
    roc_auc: list[float | None]  # None: never or always accepted
    reliability: list[Bins] = []  # []: not recorded, as with drafters that were calibrated before it was


class ScalingError(BaseModel):
    """ECE of the survival by position on one task's rounds, or on those of all (`task` ""), under one scaling.

    None where no round verified a position.
    """

    task: str
    scaling: Literal["none", "sts", "temperatures", "temperatures and offsets"]
    rounds: int
    ece: list[float | None]
    ece_noise: list[float | None]  # as in Quality


FitMethod = Literal["likelihood", "sts"]


class Calibration(BaseModel):
    """`calibration` of outrider.json. `before` and `after` are measured on rounds that were not fitted on."""

    temperatures: list[float]
    offsets: list[float]
    estimator: dict[str, list[float]] | None  # None: the drafter has a confidence head
    fitted_on: list[str]
    measured_on: list[str]
    fit_rounds: int
    measured_rounds: int
    before: Quality
    after: Quality
    fit: FitMethod = "likelihood"  # what `temperatures` and `offsets` are from: `fit_scaling` or `fit_sts`
    temperatures_alone: list[float] = []  # `fit_scaling` without offsets; []: not recorded, by earlier versions
    errors: list[ScalingError] = []  # without scaling, with `fit_sts`, and with `fit_scaling` without and with offsets
    sampling: dict[str, Any]
    max_new_tokens: int
    versions: dict[str, str]
    machine: dict[str, Any]

    @property
    def scaling(self) -> Scaling:
        return Scaling(self.temperatures, self.offsets)


@dataclass(frozen=True)
class CalibrationResult:
    """A fitted calibration and its rounds."""

    calibration: Calibration
    fit: Rounds  # as decoding takes them
    held_out: list[Rounds]  # of each conversation, as decoding takes them
    measured: TaskRounds  # all
    alone: Scaling  # temperatures fitted without offsets, by the same method
    refused: str | None  # see `refusal`; None: the scaling is worth storing

    @property
    def storable(self) -> bool:
        """Whether there is something to store: a scaling that is not refused, or an estimator alone."""
        return self.refused is None or self.calibration.estimator is not None

    @property
    def unfitted(self) -> Calibration:
        """The calibration with temperatures of 1 and offsets of 0, and what was measured so."""
        none = Scaling.identity(len(self.calibration.temperatures))
        return self.calibration.model_copy(update=asdict(none) | {"after": self.calibration.before})

    @property
    def serving(self) -> Scaling:
        """The scaling to serve these confidences with: none if it was refused."""
        return (self.calibration if self.refused is None else self.unfitted).scaling


def calibrate(
    collected: TaskRounds,
    tasks: Sequence[str],
    fit_tasks: Sequence[str],
    settings: TaskSettings,
    versions: dict[str, str],
    method: FitMethod = "likelihood",
) -> CalibrationResult:
    """Fit a scaling of the confidences, and measure them before and after on other conversations.

    Where they are refused, an estimator is kept with temperatures of 1 and offsets of 0.

    Args:
        tasks: tasks of `collected` to measure on.
        fit_tasks: tasks of `collected` to fit on; if empty, every other conversation of each of `tasks` is fitted on.
        settings: what the rounds were decoded with.
        method: whose scaling is kept: that of `fit_scaling` or of `fit_sts`. The errors of both are told.

    Raises:
        ValueError: too few rounds.
    """
    step = 1 if fit_tasks else 2
    fit: Conversations = [turns for task in fit_tasks or tasks for turns in collected[task][::step]]
    measured = {task: collected[task][step - 1 :: step] for task in tasks}
    estimator = None
    blocks = [rounds for turns in fit for rounds in turns]
    if any(rounds.features_NKF is not None for rounds in blocks):
        estimator = fit_estimator(Rounds.joined(blocks))
        fit = _estimated(fit, estimator)
        measured = {task: _estimated(conversations, estimator) for task, conversations in measured.items()}
    replay = settings.params.temperature == 0.0
    fit_rounds = Rounds.joined(_enough(_decoded(fit, replay), "to fit on"))
    by_task = {task: _decoded(conversations, replay) for task, conversations in measured.items()}
    held_out = _enough([rounds for found in by_task.values() for rounds in found], "to measure on")
    joined, sts = Rounds.joined(held_out), fit_sts(fit_rounds)
    likeliest, temperatures = fit_scaling(fit_rounds), fit_scaling(fit_rounds, offsets=False)
    scaling, alone = (sts, sts) if method == "sts" else (likeliest, temperatures)
    tasks_rounds = {task: Rounds.joined(found) for task, found in by_task.items() if found}
    none = Scaling.identity(len(scaling.temperatures))
    kinds = {"none": none, "sts": sts, "temperatures": temperatures, "temperatures and offsets": likeliest}
    errors = _scaling_errors(tasks_rounds | {"": joined}, kinds)
    refused = refusal(held_out, scaling)
    if refused is not None and estimator is not None:
        scaling = none
    calibration = Calibration(
        **asdict(scaling),
        estimator=None if estimator is None else {k: list(v) for k, v in asdict(estimator).items()},
        fitted_on=list(fit_tasks or tasks),
        measured_on=list(tasks),
        fit_rounds=len(fit_rounds.accepted_N),
        measured_rounds=len(joined.accepted_N),
        before=quality(joined, none),
        after=quality(joined, scaling),
        fit=method,
        temperatures_alone=temperatures.temperatures,
        errors=errors,
        sampling=asdict(settings.params),
        max_new_tokens=settings.max_new_tokens,
        versions=versions,
        machine=machine(),
    )
    return CalibrationResult(calibration, fit_rounds, held_out, measured=measured, alone=alone, refused=refused)


def quality(rounds: Rounds, scaling: Scaling) -> Quality:
    """ECE (20 bins), Brier score, ROC-AUC and reliability of the survival at each position."""
    pairs = [at_position(rounds, scaling, k) for k in range(1, len(scaling.temperatures) + 1)]
    return Quality(
        ece=[ece(*pair) for pair in pairs],
        ece_noise=[ece_noise(predicted_N) for predicted_N, _ in pairs],
        brier=[brier(*pair) for pair in pairs],
        roc_auc=[roc_auc(*pair) for pair in pairs],
        reliability=[_bins(*reliability(*pair)) for pair in pairs],
    )


def _bins(count_M: Ints, predicted_M: Floats, happened_M: Floats) -> Bins:
    full = count_M > 0
    means_M, shares_M = (np.round(sums_M[full] / count_M[full], 4) for sums_M in (predicted_M, happened_M))
    return Bins(rounds=count_M[full].tolist(), predicted=means_M.tolist(), accepted=shares_M.tolist())


def _scaling_errors(tasks: Mapping[str, Rounds], kinds: Mapping[Any, Scaling]) -> list[ScalingError]:
    """The errors of each task's rounds under each of these scalings."""
    errors = []
    for (task, rounds), (kind, tried) in product(tasks.items(), kinds.items()):
        pairs = [at_position(rounds, tried, k) for k in range(1, len(tried.temperatures) + 1)]
        eces = [ece(*pair) if len(pair[0]) else None for pair in pairs]
        noise = [ece_noise(pair[0]) if len(pair[0]) else None for pair in pairs]
        count = len(rounds.accepted_N)
        errors.append(ScalingError(task=task, scaling=kind, rounds=count, ece=eces, ece_noise=noise))
    return errors


def _decoded(conversations: Conversations, replay: bool) -> list[Rounds]:
    """The rounds that decoding takes, by conversation. `replay`: the collected blocks follow every token."""
    return [
        Rounds.joined([decoded_rounds(rounds) if replay else rounds for rounds in turns])
        for turns in conversations
        if turns
    ]


def _enough(parts: list[Rounds], purpose: str) -> list[Rounds]:
    count = sum(len(part.accepted_N) for part in parts)
    if count < _FEWEST_ROUNDS:
        raise ValueError(
            f"{count} decode rounds {purpose} are too few, {_FEWEST_ROUNDS} is the least: give more prompts "
            "(--max-samples) or longer responses (--max-new-tokens)."
        )
    return parts


def decoded_rounds(rounds: Rounds) -> Rounds:
    """The rounds that decoding with whole blocks takes, of the blocks after every token of one text."""
    places, place = list[int](), 0
    while place < len(rounds.accepted_N):
        places.append(place)
        place += int(rounds.accepted_N[place]) + 1
    return rounds.chosen(np.array(places, dtype=np.int64))


# ----------------------------------------------------------------------------
# Threshold sweep, a curve per task (Figure 5 of DSpark, arXiv 2607.05147). Per threshold t:
#
#     l = longest prefix with every c_k >= t,   tokens per step = mean(min(accepted, l) + 1),
#     acceptance rate = sum min(accepted, l) / sum l
#
# At temperature 0 blocks were drafted after every token, so decoding is replayed exactly: the next block follows what
# was committed. Rounds sampled at a temperature cannot be replayed; each is cut where it stands.
# ----------------------------------------------------------------------------


THRESHOLDS = tuple(round(0.05 * i, 2) for i in range(20))


class SweepPoint(BaseModel):
    """One task at one threshold. `acceptance_rate` is None where nothing was verified."""

    task: str
    threshold: float
    steps: int
    tokens_per_step: float
    verified_per_step: float
    acceptance_rate: float | None


def sweep(
    tasks: TaskRounds, scaling: Scaling, replay: bool, thresholds: Sequence[float] = THRESHOLDS
) -> list[SweepPoint]:
    """Tokens per step and acceptance rate of each task at each threshold, with calibrated confidences.

    Args:
        replay: the rounds of a turn are blocks after every token of one text.
    """
    points = []
    for task, conversations in tasks.items():
        turns = [rounds for turns in conversations for rounds in turns if len(rounds.accepted_N)]
        if not turns:  # the task's only conversation was fitted on
            continue
        calibrated = [scaling.apply(rounds.confidences_NK) for rounds in turns]
        for threshold in thresholds:
            played = [
                pair
                for rounds, confidences_NK in zip(turns, calibrated, strict=True)
                for pair in _steps(rounds, confidences_NK >= threshold, replay)  # NaN, unverified, does not pass
            ]
            steps = len(played)
            accepted, verified = (int(total) for total in np.sum(played, axis=0))
            rate = accepted / verified if verified else None
            points.append(
                SweepPoint(task=task, threshold=threshold, steps=steps, tokens_per_step=accepted / steps + 1,
                           verified_per_step=verified / steps, acceptance_rate=rate)
            )  # fmt: skip
    return points


def _steps(rounds: Rounds, passing_NK: NDArray[np.bool_], replay: bool) -> Iterator[tuple[int, int]]:
    """(accepted, verified) of each step that decoding takes with the longest prefixes that pass."""
    lengths_N = np.minimum(np.logical_and.accumulate(passing_NK, axis=1).sum(axis=1), rounds.admitted_N)
    accepted_N, place = rounds.accepted_N, 0
    while place < len(accepted_N):
        left = len(accepted_N) - place - 1 if replay else int(accepted_N[place])  # the text may end inside the block
        accepted = int(min(accepted_N[place], lengths_N[place], left))
        yield accepted, int(lengths_N[place])
        place += accepted + 1 if replay else 1
