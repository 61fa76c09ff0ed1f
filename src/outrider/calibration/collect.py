"""prompts -> blocks with raw confidences and what became of them.

    temperature > 0   decode; one labelled block per round
    temperature 0     y_1 .. y_T = the target's own text (many at once), then a block after *every* y_i:
                      accepted = the longest prefix of x_1 x_2 ... that is y_{i+1} y_{i+2} ...

At temperature 0 the text does not depend on the drafter, so a block anywhere in it has a known outcome. Decoding with
whole blocks visits some of these positions, from i to i + accepted + 1; `visited` says which.
Shapes: N rounds, K gamma, F = 2 features of an estimator (drafters/medusa.py).
"""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from pydantic import BaseModel
from torch import Tensor

from outrider.calibration.fit import (
    Rounds,
    Scaling,
    at_position,
    brier,
    ece,
    ece_noise,
    fit_estimator,
    fit_sts,
    logit,
    roc_auc,
    sigmoid,
)
from outrider.data.chat import render
from outrider.data.conversations import Conversation
from outrider.data.sources import load_prompts
from outrider.decoding.generate import RoundStats, generate
from outrider.decoding.request import ModelLane, StopRules
from outrider.drafters.base import DraftCall
from outrider.drafters.dflash import PackedDrafter
from outrider.drafters.heads import CertaintyEstimator, certainty
from outrider.engine.batch import Request
from outrider.engine.engine import Engine
from outrider.engine.scheduler import EngineConfig
from outrider.evaluation.evaluate import EvaluationConfig
from outrider.sampling import SamplingParams, SeenTokens
from outrider.scheduling.policies import FixedPolicy
from outrider.scheduling.view import Floats, Ints
from outrider.target.model import Target
from outrider.target.paged import check_pageable
from outrider.utils.files import write_atomically
from outrider.utils.measure import machine

_AT_ONCE = 16  # positions drafted together; more only take memory
_TOGETHER = 16  # texts decoded together


class Probe:
    """Stands where an estimator will: notes what one could read and has no opinion."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def __call__(self, logits_AVd: Tensor, k: int) -> Tensor:
        self.seen.append(certainty(logits_AVd))
        return logits_AVd.new_zeros(len(logits_AVd))


def collect(
    target: Target,
    drafter: PackedDrafter,
    conversations: Sequence[Conversation],
    config: EvaluationConfig,
    on_progress: Callable[[int], None] = lambda done: None,
) -> list[list[Rounds]]:
    """The rounds of each turn of each conversation; with features where the drafter has no confidence head."""
    assert target.tokenizer is not None
    probe = Probe()
    if drafter.heads.confidence is None:
        drafter = copy.copy(drafter)
        drafter.heads = dataclasses.replace(drafter.heads, estimator=probe)
    found: list[list[Rounds]] = [[] for _ in conversations]
    history: list[list[str]] = [[] for _ in conversations]
    for turn in range(max(len(conversation.turns) for conversation in conversations)):
        going = [i for i, conversation in enumerate(conversations) if turn < len(conversation.turns)]
        prompts = [
            render(
                target.tokenizer,
                conversations[i].turns[: turn + 1],
                history[i],
                conversations[i].tools,
                config.thinking,
            )
            for i in going
        ]
        greedy = config.params.temperature == 0.0
        texts = target_texts(target, prompts, config) if greedy else [[] for _ in going]
        for i, prompt, text in zip(going, prompts, texts, strict=True):
            if greedy:
                found[i].append(everywhere(target, drafter, prompt, text, config.params, probe))
                history[i].append(str(target.tokenizer.decode(text, skip_special_tokens=True)))
            else:
                rules = StopRules(config.max_new_tokens)
                generation = generate(target, prompt, drafter, config.params, rules, FixedPolicy())
                found[i].append(as_rounds(generation.rounds, drafter.gamma, probe))
                history[i].append(generation.text)
            probe.seen.clear()
            on_progress(sum(len(turns) == len(c.turns) for turns, c in zip(found, conversations, strict=True)))
    return found


def target_texts(target: Target, prompts: Sequence[list[int]], config: EvaluationConfig) -> list[list[int]]:
    """The target's own responses, decoded together where its family allows that."""
    rules, longest = StopRules(config.max_new_tokens), max(map(len, prompts)) + config.max_new_tokens
    try:
        check_pageable(target.config)
    except ValueError:
        return [generate(target, prompt, params=config.params, rules=rules).tokens for prompt in prompts]
    together = EngineConfig(_TOGETHER, num_blocks=_TOGETHER * -(-longest // EngineConfig.block_size))
    engine = Engine(target, config=together)
    for i, prompt in enumerate(prompts):
        engine.submit(Request(str(i), prompt, config.params, rules))
    texts: list[list[int]] = [[] for _ in prompts]
    while not engine.idle:
        for output in engine.step():
            texts[int(output.id)] += output.tokens
    return texts


def as_rounds(stats: Sequence[RoundStats], gamma: int, probe: Probe | None = None) -> Rounds:
    """The judged rounds among `stats`, whose drafts `probe` has seen; unjudged positions hold NaN."""
    judged = [r for r in stats if r.admitted]
    confidences_NK = np.full((len(judged), gamma), np.nan)
    for row_K, r in zip(confidences_NK, judged, strict=True):
        row_K[: r.admitted] = r.confidences[: r.admitted]
    features = None
    if probe is not None and probe.seen:
        features = np.full((len(judged), gamma, 2), np.nan)
        read = iter(probe.seen)  # one row per drawn position, round after round
        drafts = [[next(read)[0].numpy(force=True) for _ in range(r.proposed)] for r in stats]
        for row_KF, found in zip(features, [d for d, r in zip(drafts, stats, strict=True) if r.admitted], strict=True):
            row_KF[: len(found)] = found
    counts = np.array([(r.accepted, r.admitted) for r in judged], dtype=np.int64).reshape(-1, 2)
    return Rounds(confidences_NK, counts[:, 0], counts[:, 1], features)


@torch.inference_mode()
def everywhere(
    target: Target,
    drafter: PackedDrafter,
    prompt: Sequence[int],
    text: Sequence[int],
    params: SamplingParams,
    probe: Probe | None = None,
) -> Rounds:
    """A block after the prompt and after every token of `text` but the last, which the target wrote at temperature 0.

    A block that agrees with all that is left of the text is judged that far only.
    """
    tokens, gamma = [*prompt, *text], drafter.gamma
    lane = ModelLane(target, drafter, tokens[:-1], params, len(tokens))
    ends = range(len(tokens) - 1, len(prompt) - 1, -1)
    confidences, accepted, admitted = list[list[float]](), list[int](), list[int]()
    # All share one draft cache, from the last position to the first: a block overwrites only what lies behind it.
    for start in range(0, len(ends), _AT_ONCE):
        calls = []
        for end in ends[start : start + _AT_ONCE]:
            session = copy.copy(lane.session)
            assert session is not None
            session.length = end - 1
            seen = SeenTokens(target.vocab_size, params.repetition_penalty, tokens[:end], target.device)
            calls.append(DraftCall(session, tokens[end - 1], params, seen, lane.source))
        for call, proposal in zip(calls, drafter.propose(calls), strict=True):
            left = tokens[call.session.length + 1 :][:gamma]
            agreed = [x == y for x, y in zip(proposal.tokens, left, strict=False)]
            right = agreed.index(False) if False in agreed else len(agreed)
            confidences.append(proposal.confidences)
            accepted.append(right)
            admitted.append(gamma if right < len(left) else len(left))
    confidences_NK = np.array(confidences)
    confidences_NK[np.arange(gamma) >= np.array(admitted)[:, None]] = np.nan
    features = None
    if probe is not None and probe.seen:  # gamma entries per call of propose
        blocks = [torch.stack(probe.seen[i : i + gamma], dim=1) for i in range(0, len(probe.seen), gamma)]
        features = torch.cat(blocks).double().numpy(force=True)[::-1]
    return Rounds(confidences_NK[::-1], np.array(accepted)[::-1], np.array(admitted)[::-1], features)


def visited(rounds: Rounds) -> Rounds:
    """Of the rounds `everywhere` in one text, those that decoding with whole blocks plays."""
    places, place = list[int](), 0
    while place < len(rounds.accepted_N):
        places.append(place)
        place += int(rounds.accepted_N[place]) + 1
    return rounds.chosen(np.array(places, dtype=np.int64))


def with_estimates(rounds: Rounds, estimator: CertaintyEstimator) -> Rounds:
    """The same rounds with the raw confidences that `estimator` gives."""
    assert rounds.features_NKF is not None
    raw_NK = sigmoid(rounds.features_NKF @ np.array(estimator.weights) + np.array(estimator.biases))
    return dataclasses.replace(rounds, confidences_NK=raw_NK)


# ----------------------------------------------------------------------------
# FILE.npz: collected rounds, so that fits and sweeps can be repeated without decoding.
#
#     about            JSON: what they were collected with; another drafter's rounds are refused
#     task, conversation, turn   [N]     accepted, admitted   [N]     confidences   [N, K]     features   [N, K, 2]
#
# Shapes: N rounds, K gamma.
# ----------------------------------------------------------------------------


Conversations = Sequence[Sequence[Rounds]]  # rounds of every turn of every conversation


def save_rounds(path: Path, tasks: Mapping[str, Conversations], about: Mapping[str, Any]) -> None:
    """Write the rounds of all `tasks`; `about` must be JSON."""
    places = [
        (task, conversation, turn, rounds)
        for task, conversations in enumerate(tasks.values())
        for conversation, turns in enumerate(conversations)
        for turn, rounds in enumerate(turns)
    ]
    joined = Rounds.joined([rounds for *_, rounds in places])
    counts = [len(rounds.accepted_N) for *_, rounds in places]
    arrays: dict[str, Any] = {
        name: np.repeat([place[column] for place in places], counts)
        for column, name in enumerate(("task", "conversation", "turn"))
    }
    arrays |= {"accepted": joined.accepted_N, "admitted": joined.admitted_N, "confidences": joined.confidences_NK}
    if joined.features_NKF is not None:
        arrays["features"] = joined.features_NKF
    path.parent.mkdir(parents=True, exist_ok=True)
    described = json.dumps({**about, "names": list(tasks)})
    write_atomically(path, lambda file: np.savez_compressed(file, about=described, **arrays))


def load_rounds(path: Path, about: Mapping[str, Any]) -> dict[str, list[list[Rounds]]]:
    """Rounds of `save_rounds`, by task.

    Raises:
        ValueError: not such a file, or collected with something else than `about`.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            found = json.loads(str(file["about"]))
            arrays = {name: file[name] for name in file.files if name != "about"}
        everything = Rounds(arrays["confidences"], arrays["accepted"], arrays["admitted"], arrays.get("features"))
        keys = np.stack([arrays[name] for name in ("task", "conversation", "turn")], axis=1)
    except (OSError, KeyError, ValueError, TypeError, EOFError, BadZipFile) as error:
        raise ValueError(f"{path}: not a file of rounds ({error}); remove it to collect again.") from error
    tasks: list[str] = found["names"]
    for name, wanted in json.loads(json.dumps(dict(about))).items():
        if found.get(name) != wanted:
            raise ValueError(
                f"{path} was collected with {name} {found.get(name)!r}, not {wanted!r}: remove it to collect again, "
                "or name another file (--rounds)."
            )
    result: dict[str, list[list[Rounds]]] = {task: [] for task in tasks}
    places, starts = np.unique(keys, axis=0, return_index=True)  # sorted as they were written
    for (task, conversation, _), part in zip(places, np.split(np.arange(len(keys)), starts[1:]), strict=True):
        conversations = result[tasks[task]]
        if len(conversations) <= conversation:
            conversations += [[] for _ in range(conversation + 1 - len(conversations))]
        conversations[conversation].append(everything.chosen(part))
    return result


# ----------------------------------------------------------------------------
# per threshold t:  l = longest prefix with every c_k >= t,   tokens per step = mean(min(accepted, l) + 1),
#                      acceptance rate = sum min(accepted, l) / sum l
#
# Figure 5 of DSpark (arXiv 2607.05147), a curve per task, from collected rounds. Where blocks were drafted after every
# token (temperature 0, calibration/collect.py), decoding is replayed exactly: the next block follows what was
# committed. Real rounds at a temperature cannot be replayed; each is cut where it stands.
# ----------------------------------------------------------------------------


THRESHOLDS = [round(0.05 * i, 2) for i in range(20)]


class SweepPoint(BaseModel):
    """One task at one threshold; `acceptance_rate` None: nothing was verified."""

    task: str
    threshold: float
    steps: int
    tokens_per_step: float
    verified_per_step: float
    acceptance_rate: float | None


def sweep(
    tasks: Mapping[str, Conversations], scaling: Scaling, replay: bool, thresholds: Sequence[float] = tuple(THRESHOLDS)
) -> list[SweepPoint]:
    """Every task at every threshold, with calibrated confidences.

    Args:
        replay: the rounds of a turn are blocks after every token of one text.
    """
    points = []
    for task, conversations in tasks.items():
        turns = [rounds for turns in conversations for rounds in turns if len(rounds.accepted_N)]
        if not turns:  # its only conversation was fitted on
            continue
        calibrated = [_calibrated(rounds, scaling) for rounds in turns]
        for threshold in thresholds:
            played = [
                pair
                for rounds, confidences_NK in zip(turns, calibrated, strict=True)
                for pair in _steps(rounds.accepted_N, _lengths(confidences_NK, rounds.admitted_N, threshold), replay)
            ]
            accepted, verified = (int(total) for total in np.sum(played, axis=0))
            points.append(
                SweepPoint(
                    task=Path(task).stem,
                    threshold=threshold,
                    steps=len(played),
                    tokens_per_step=accepted / len(played) + 1,
                    verified_per_step=verified / len(played),
                    acceptance_rate=accepted / verified if verified else None,
                )
            )
    return points


def _calibrated(rounds: Rounds, scaling: Scaling) -> Floats:
    return sigmoid(logit(rounds.confidences_NK) / np.array(scaling.temperatures) + np.array(scaling.offsets))


def _lengths(confidences_NK: Floats, admitted_N: Ints, threshold: float) -> Ints:
    passing_NK = confidences_NK >= threshold  # NaN behind `admitted` does not pass
    lengths_N: Ints = np.minimum(np.logical_and.accumulate(passing_NK, axis=1).sum(axis=1), admitted_N)
    return lengths_N


def _steps(accepted_N: Ints, lengths_N: Ints, replay: bool) -> Iterator[tuple[int, int]]:
    """(accepted, verified) of the steps that are played."""
    place = 0
    while place < len(accepted_N):
        left = len(accepted_N) - place - 1 if replay else int(accepted_N[place])  # the text may end before the block
        accepted = int(min(accepted_N[place], lengths_N[place], left))
        yield accepted, int(lengths_N[place])
        place += accepted + 1 if replay else 1


# ----------------------------------------------------------------------------
# held-out prompts -> labelled blocks (calibration/collect.py) -> temperatures and offsets, and how much they help.
#
# Blocks are judged whole, so every position counts whatever the drafter thinks of it. Conversations are split in two:
# one part is for fitting and every reported figure is measured on the other. The sequential fit and the figures use the
# rounds that decoding plays: blocks in the middle of accepted runs are easier, and confidences right for those are too
# high for these. An estimator, for drafters without a confidence head, learns from all blocks.
# Source: Sequential Temperature Scaling, DSpark, arXiv 2607.05147 (calibration/fit.py). Shapes: N rounds, K gamma.
# ----------------------------------------------------------------------------


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
