"""held-out prompts -> labelled blocks (evaluation/collect.py) -> temperatures and offsets, and how much they help.

Blocks are judged whole, so every position counts whatever the drafter thinks of it. Conversations are split in two:
one part is for fitting and every reported figure is measured on the other. The sequential fit and the figures use the
rounds that decoding plays: blocks in the middle of accepted runs are easier, and confidences right for those are too
high for these. An estimator, for drafters without a confidence head, learns from all blocks.
Source: Sequential Temperature Scaling, DSpark, arXiv 2607.05147 (scheduling/sts.py). Shapes: N rounds, K gamma.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from outrider.data.prompts import load_prompts
from outrider.drafters.packed import PackedDrafter
from outrider.evaluation.collect import collect, visited, with_estimates
from outrider.evaluation.results import machine
from outrider.evaluation.run import EvaluationConfig
from outrider.scheduling.calibration import Rounds, Scaling, at_position, brier, ece, ece_noise, roc_auc
from outrider.scheduling.logistic import fit_estimator
from outrider.scheduling.sts import fit_sts
from outrider.target import Target

_FEWEST_ROUNDS = 100  # a 20-bin error of fewer is mostly noise

Progress = Callable[[str, int, int], None]


class Quality(BaseModel):
    """Figures of the survival a_k against "positions 1..k accepted", one per position."""

    ece: list[float]
    ece_noise: list[float]  # what chance alone would show: how small an error these rounds can tell from none
    brier: list[float]
    roc_auc: list[float | None]  # None: accepted never, or always


class Calibration(BaseModel):
    """What outrider.json keeps under `calibration`. `before` and `after` are measured on rounds not fitted on."""

    temperatures: list[float]
    offsets: list[float] | None = None  # None: a calibration from before there were any
    estimator: dict[str, list[float]] | None = None  # of a drafter without a confidence head
    fitted_on: list[str]
    measured_on: list[str]
    fit_rounds: int
    measured_rounds: int
    before: Quality
    after: Quality
    sampling: dict[str, Any]
    max_new_tokens: int
    versions: dict[str, str]
    machine: dict[str, Any]


@dataclass(frozen=True)
class Calibrated:
    """The result, with the rounds behind it: those decoding plays, and every collected block per measured task."""

    calibration: Calibration
    scaling: Scaling
    fit: Rounds
    held_out: Rounds
    measured: dict[str, list[list[Rounds]]]


def collect_tasks(
    target: Target,
    drafter: PackedDrafter,
    tasks: Sequence[str],
    config: EvaluationConfig,
    on_progress: Progress = lambda task, done, total: None,
) -> dict[str, list[list[Rounds]]]:
    """Per task, conversation and turn.

    Raises:
        ValueError: a task file is missing or malformed.
    """
    assert drafter.heads.temperatures is None, "calibration starts from raw confidences"
    # All are read before the first is decoded: a mistyped name should not cost minutes.
    prompts = {task: load_prompts(task, config.max_samples) for task in tasks}
    found: dict[str, list[list[Rounds]]] = {}
    for task in tasks:
        count = len(prompts[task])
        on_progress(Path(task).stem, 0, count)
        found[task] = collect(target, drafter, prompts[task], config, partial(_forward, on_progress, task, count))
    return found


def _forward(on_progress: Progress, task: str, total: int, done: int) -> None:
    on_progress(Path(task).stem, done, total)


def calibrate(
    collected: Mapping[str, Sequence[Sequence[Rounds]]],
    tasks: Sequence[str],
    fit_tasks: Sequence[str],
    config: EvaluationConfig,
    versions: dict[str, str],
) -> Calibrated:
    """Fit and measure.

    Args:
        tasks: of `collected`, to measure on.
        fit_tasks: of `collected`, to fit on; when empty, every other conversation of each of `tasks` is for fitting.

    Raises:
        ValueError: too few rounds.
    """
    fit = [turns for task in fit_tasks or tasks for turns in collected[task][:: 1 if fit_tasks else 2]]
    measured = {
        task: [list(turns) for turns in collected[task][0 if fit_tasks else 1 :: 1 if fit_tasks else 2]]
        for task in tasks
    }
    estimator = None
    if any(rounds.features_NKF is not None for turns in fit for rounds in turns):
        estimator = fit_estimator(Rounds.joined([rounds for turns in fit for rounds in turns]))
        fit = [[with_estimates(rounds, estimator) for rounds in turns] for turns in fit]
        measured = {
            task: [[with_estimates(rounds, estimator) for rounds in turns] for turns in conversations]
            for task, conversations in measured.items()
        }
    replay = config.params.temperature == 0.0
    fit_rounds = _enough(fit, replay, "to fit on")
    held_out = _enough([turns for found in measured.values() for turns in found], replay, "to measure on")
    scaling = fit_sts(fit_rounds)
    calibration = Calibration(
        temperatures=scaling.temperatures,
        offsets=scaling.offsets,
        estimator=None if estimator is None else {k: list(v) for k, v in asdict(estimator).items()},
        fitted_on=[Path(task).stem for task in fit_tasks or tasks],
        measured_on=[Path(task).stem for task in tasks],
        fit_rounds=len(fit_rounds.accepted_N),
        measured_rounds=len(held_out.accepted_N),
        before=quality(held_out, Scaling.identity(len(scaling.temperatures))),
        after=quality(held_out, scaling),
        sampling=asdict(config.params),
        max_new_tokens=config.max_new_tokens,
        versions=versions,
        machine=machine(),
    )
    return Calibrated(calibration, scaling, fit_rounds, held_out, measured)


def quality(rounds: Rounds, scaling: Scaling) -> Quality:
    """ECE (20 bins), Brier score and ROC-AUC of the survival at every position."""
    pairs = [at_position(rounds, scaling, k) for k in range(1, len(scaling.temperatures) + 1)]
    return Quality(
        ece=[ece(*pair) for pair in pairs],
        ece_noise=[ece_noise(predicted_N) for predicted_N, _ in pairs],
        brier=[brier(*pair) for pair in pairs],
        roc_auc=[roc_auc(*pair) for pair in pairs],
    )


def _enough(conversations: Sequence[Sequence[Rounds]], replay: bool, purpose: str) -> Rounds:
    """The rounds that decoding plays. `replay`: those collected are blocks after every token."""
    parts = [visited(rounds) if replay else rounds for turns in conversations for rounds in turns]
    found = sum(len(part.accepted_N) for part in parts)
    if found < _FEWEST_ROUNDS:
        raise ValueError(
            f"{found} decode rounds {purpose} are too few, {_FEWEST_ROUNDS} is the least: give more prompts "
            "(--max-samples) or longer responses (--max-new-tokens)."
        )
    return Rounds.joined(parts)
