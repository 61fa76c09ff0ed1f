"""held-out prompts -> decode rounds with raw confidences and outcomes -> temperatures, and how much they help.

Blocks are verified whole, so every position is judged whatever the drafter thinks of it. Conversations are split in
two: temperatures are fitted on one part and every reported figure is measured on the other.
Source: Sequential Temperature Scaling, DSpark, arXiv 2607.05147 (scheduling/calibration.py). Shapes: N rounds, K gamma.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel

from outrider.data.chat import render
from outrider.data.conversations import Conversation
from outrider.data.prompts import load_prompts
from outrider.decoding import RoundStats, StopRules, generate
from outrider.drafters.packed import PackedDrafter
from outrider.evaluation.results import machine
from outrider.evaluation.run import EvaluationConfig
from outrider.scheduling import FixedPolicy
from outrider.scheduling.calibration import Rounds, at_position, brier, ece, ece_noise, fit_sts, roc_auc
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


def calibrate(
    target: Target,
    drafter: PackedDrafter,
    tasks: Sequence[str],
    fit_tasks: Sequence[str],
    config: EvaluationConfig,
    versions: dict[str, str],
    on_progress: Progress = lambda task, done, total: None,
) -> tuple[Calibration, Rounds]:
    """Fit and measure; also gives the rounds the figures were measured on.

    Args:
        drafter: with raw confidences, no temperatures.
        tasks: task files or shipped sets to measure on.
        fit_tasks: to fit on; when empty, every other conversation of each of `tasks` is for fitting instead.

    Raises:
        ValueError: no confidence head, a task file is missing or malformed, or too few rounds.
    """
    assert drafter.heads.temperatures is None, "calibration starts from raw confidences"
    if not getattr(drafter.drafter, "confidence_head", None):
        raise ValueError(
            f"this {drafter.drafter.algorithm} drafter has no confidence head, so there is nothing to calibrate: train "
            "one with drafter.algorithm=dspark and drafter.enable_confidence_head=true."
        )
    # All are read before the first is decoded: a mistyped name should not cost minutes.
    prompts = {task: load_prompts(task, config.max_samples) for task in (*fit_tasks, *tasks)}
    fit: list[Rounds] = []
    measured: list[Rounds] = []
    for task in fit_tasks:
        fit += collect(target, drafter, task, prompts[task], config, on_progress)
    for task in tasks:
        found = collect(target, drafter, task, prompts[task], config, on_progress)
        if not fit_tasks:
            fit += found[::2]
        measured += found if fit_tasks else found[1::2]
    fit_rounds, held_out = _enough(fit, "to fit on"), _enough(measured, "to measure on")
    temperatures = fit_sts(fit_rounds)
    calibration = Calibration(
        temperatures=temperatures,
        fitted_on=[Path(task).stem for task in fit_tasks or tasks],
        measured_on=[Path(task).stem for task in tasks],
        fit_rounds=len(fit_rounds.accepted_N),
        measured_rounds=len(held_out.accepted_N),
        before=quality(held_out, [1.0] * len(temperatures)),
        after=quality(held_out, temperatures),
        sampling=asdict(config.params),
        max_new_tokens=config.max_new_tokens,
        versions=versions,
        machine=machine(),
    )
    return calibration, held_out


def collect(
    target: Target,
    drafter: PackedDrafter,
    task: str,
    prompts: Sequence[Conversation],
    config: EvaluationConfig,
    on_progress: Progress,
) -> list[Rounds]:
    """Decode a task with whole blocks verified; one entry per conversation."""
    conversations = []
    for number, prompt in enumerate(prompts):
        on_progress(Path(task).stem, number, len(prompts))
        conversations.append(as_rounds(_decode(target, drafter, prompt, config), drafter.config.gamma))
    on_progress(Path(task).stem, len(prompts), len(prompts))
    return conversations


def as_rounds(stats: Sequence[RoundStats], gamma: int) -> Rounds:
    """The judged rounds among `stats`; unjudged positions hold NaN."""
    judged = [r for r in stats if r.admitted]
    confidences_NK = np.full((len(judged), gamma), np.nan)
    for row_K, r in zip(confidences_NK, judged, strict=True):
        row_K[: r.admitted] = r.confidences[: r.admitted]
    return Rounds(confidences_NK, np.array([r.accepted for r in judged]), np.array([r.admitted for r in judged]))


def quality(rounds: Rounds, temperatures: Sequence[float]) -> Quality:
    """ECE (20 bins), Brier score and ROC-AUC of the survival at every position."""
    pairs = [at_position(rounds, temperatures, k) for k in range(1, len(temperatures) + 1)]
    return Quality(
        ece=[ece(*pair) for pair in pairs],
        ece_noise=[ece_noise(predicted_N) for predicted_N, _ in pairs],
        brier=[brier(*pair) for pair in pairs],
        roc_auc=[roc_auc(*pair) for pair in pairs],
    )


def _decode(target: Target, drafter: PackedDrafter, prompt: Conversation, config: EvaluationConfig) -> list[RoundStats]:
    assert target.tokenizer is not None
    rules, history, rounds = StopRules(config.max_new_tokens), list[str](), list[RoundStats]()
    for turn in range(len(prompt.turns)):
        tokens = render(target.tokenizer, prompt.turns[: turn + 1], history, prompt.tools)
        generation = generate(target, tokens, drafter, config.params, rules, FixedPolicy())
        rounds += generation.rounds
        history.append(generation.text)
    return rounds


def _enough(parts: Sequence[Rounds], purpose: str) -> Rounds:
    found = sum(len(part.accepted_N) for part in parts)
    if found < _FEWEST_ROUNDS:
        raise ValueError(
            f"{found} decode rounds {purpose} are too few, {_FEWEST_ROUNDS} is the least: give more prompts "
            "(--max-samples) or longer responses (--max-new-tokens)."
        )
    return Rounds.joined(parts)
