"""Calibration: figures with known answers, a known temperature recovered, and confidences that stay lossless."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from functools import partial
from itertools import chain, pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tests.proof.toys as proof_toys
from outrider.backends.sglang import write_confidence_sts, write_sps_table
from outrider.data.conversations import Conversation
from outrider.data.sources import TaskSettings
from outrider.decoding.cost import Floats
from outrider.decoding.engine import Engine
from outrider.decoding.generate import generate
from outrider.decoding.policies import ThresholdPolicy
from outrider.decoding.request import Output, StopRules
from outrider.drafters.base import DraftCalibration, DrafterWeights
from outrider.drafters.confidence import CertaintyEstimator, ChainHeads, ConfidenceScaling, SampledScaling, certainty
from outrider.drafters.dflash import BlockDrafter, DFlash
from outrider.drafters.draft import Draft
from outrider.drafters.dspark import DSpark, DSparkConfig
from outrider.evaluation.calibration.collect import (
    FeatureRecorder,
    collect,
    load_rounds,
    rounds_of_decoding,
    rounds_of_text,
    save_rounds,
)
from outrider.evaluation.calibration.fit import (
    CalibrationResult,
    FitMethod,
    Rounds,
    Scaling,
    at_position,
    brier,
    calibrate,
    decoded_rounds,
    ece,
    ece_noise,
    fit_estimator,
    fit_scaling,
    fit_sts,
    log_loss,
    quality,
    refusal,
    reliability,
    roc_auc,
    survival,
    sweep,
)
from outrider.sampling import SamplingParams
from outrider.target.model import load_target
from tests.proof.cases import TOLERANCE, VISIBLE, deviation, requests_of, toy
from tests.toys.oracle import Oracle, drafted_with
from tests.toys.target_directory import save_toy_target
from tests.toys.targets import randomise, toy_config, toy_target


def drawn(count: int, temperatures: list[float], seed: int = 0) -> Rounds:
    """Rounds whose confidences would be right after division by `temperatures`; 1 in 10 was cut short by a stop."""
    generator = np.random.default_rng(seed)
    logits_NK = generator.normal(0.8, 1.5, (count, len(temperatures)))
    accepted_NK = generator.random(logits_NK.shape) < sigmoid(logits_NK)
    accepted_N = np.cumprod(accepted_NK, axis=1).sum(axis=1)
    admitted_N = np.where(generator.random(count) < 0.1, generator.integers(1, 1 + len(temperatures), count), 99)
    admitted_N = np.minimum(admitted_N, len(temperatures))
    confidences_NK = sigmoid(logits_NK * np.array(temperatures))
    confidences_NK[np.arange(len(temperatures)) >= admitted_N[:, None]] = np.nan
    return Rounds(confidences_NK, np.minimum(accepted_N, admitted_N), admitted_N)


def sigmoid(x: Floats) -> Floats:
    result: Floats = 1 / (1 + np.exp(-x))
    return result


def reference_ece(predicted: list[float], outcome: list[float], bins: int) -> float:
    """The definition, one bin at a time."""
    error = 0.0
    for b in range(bins):
        inside = [i for i, p in enumerate(predicted) if b <= p * bins < b + 1 or (b == bins - 1 and p == 1)]
        if inside:
            confidence = sum(predicted[i] for i in inside) / len(inside)
            accuracy = sum(outcome[i] for i in inside) / len(inside)
            error += len(inside) / len(predicted) * abs(confidence - accuracy)
    return error


def test_ece_by_hand() -> None:
    predicted, outcome = np.array([0.9, 0.9, 0.9, 0.9, 0.1, 0.1]), np.array([1.0, 1.0, 1.0, 0.0, 0.0, 1.0])
    assert ece(predicted, outcome) == pytest.approx((4 * 0.15 + 2 * 0.4) / 6)
    assert brier(predicted, outcome) == pytest.approx((3 * 0.01 + 0.81 + 0.01 + 0.81) / 6)
    assert ece(np.ones(3), np.ones(3)) == 0 and ece(np.ones(4), np.array([0.0, 1, 1, 1])) == 0.25
    assert reliability(np.array([1.0, 0.0, 0.5]), np.ones(3), bins=2)[0].tolist() == [1, 2]


@pytest.mark.parametrize("bins", [1, 7, 20])
def test_ece_against_its_definition(bins: int) -> None:
    generator = np.random.default_rng(1)
    predicted_N = np.concatenate([generator.random(200), [0.0, 1.0]])
    outcome_N = (generator.random(202) < predicted_N**2).astype(np.float64)
    expected = reference_ece(predicted_N.tolist(), outcome_N.tolist(), bins)
    assert ece(predicted_N, outcome_N, bins) == pytest.approx(expected, abs=1e-12)


def test_auc() -> None:
    assert roc_auc(np.array([0.1, 0.2, 0.8, 0.9]), np.array([0.0, 0, 1, 1])) == 1
    assert roc_auc(np.array([0.1, 0.2, 0.8, 0.9]), np.array([1.0, 1, 0, 0])) == 0
    assert roc_auc(np.full(6, 0.3), np.array([0.0, 1, 0, 1, 1, 1])) == 0.5
    assert roc_auc(np.array([0.3, 0.4]), np.ones(2)) is None and roc_auc(np.array([0.3]), np.zeros(1)) is None
    generator = np.random.default_rng(2)
    predicted_N = np.round(generator.random(80), 1)  # many ties
    outcome_N = (generator.random(80) < predicted_N).astype(np.float64)
    pairs = list(product(predicted_N[outcome_N > 0], predicted_N[outcome_N == 0]))
    expected = sum((a > b) + (a == b) / 2 for a, b in pairs) / len(pairs)
    assert roc_auc(predicted_N, outcome_N) == pytest.approx(expected, abs=1e-12)


def test_right_confidences_have_no_error_but_chance() -> None:
    found = quality(drawn(60_000, [1.0, 1.0, 1.0]), Scaling.identity(3))
    assert max(found.ece) < 0.006
    small = [quality(drawn(400, [1.0, 1.0, 1.0], seed), Scaling.identity(3)) for seed in range(20)]
    for k in range(3):
        mean = float(np.mean([q.ece[k] for q in small]))
        assert mean == pytest.approx(np.mean([q.ece_noise[k] for q in small]), rel=0.15) and mean > 0.015
    assert ece_noise(np.zeros(5)) == 0


def test_known_temperatures_are_recovered_left_to_right() -> None:
    known = [2.0, 0.6, 1.0, 3.0]
    rounds = drawn(20_000, known)
    found = fit_scaling(rounds, offsets=False)
    assert found.temperatures == pytest.approx(known, rel=0.2) and found.offsets == [0.0] * 4
    fresh = drawn(30_000, known, seed=5)
    before, after = quality(fresh, Scaling.identity(4)), quality(fresh, found)
    assert before.ece[0] > 0.05 and max(after.ece) < 0.015
    assert all(b <= a for a, b in zip(before.brier, after.brier, strict=True))
    assert after.roc_auc[0] == before.roc_auc[0], "one position's temperature keeps its order"


def test_sts_is_the_temperature_of_least_ece_given_the_earlier_ones() -> None:
    rounds = drawn(600, [1.5, 0.7, 2.5], seed=3)
    found = fit_sts(rounds)
    assert found.offsets == [0.0] * 3
    for k in range(1, 4):

        def error(t: float, k: int = k) -> float:
            pair = at_position(rounds, Scaling([*found.temperatures[: k - 1], t], [0.0] * k), k)
            return reference_ece(pair[0].tolist(), pair[1].tolist(), 20)

        tried = [error(t) for t in np.exp(np.linspace(-np.log(10), np.log(10), 201))]
        assert error(found.temperatures[k - 1]) == pytest.approx(min(tried), abs=1e-12)
        assert error(found.temperatures[k - 1]) < error(fit_scaling(rounds).temperatures[k - 1]) + 1e-12
    assert fit_sts(drawn(20_000, [2.0, 0.6, 1.0])).temperatures == pytest.approx([2.0, 0.6, 1.0], rel=0.15)


def test_of_equal_errors_sts_takes_the_temperature_nearest_to_1() -> None:
    rounds = Rounds(np.full((200, 1), 0.5), np.arange(200) % 2, np.ones(200, dtype=np.int64))
    assert fit_sts(rounds).temperatures == [1.0], "a confidence of 1/2 stays what it is at any"


def test_the_scaling_that_is_asked_for_is_kept() -> None:
    conversations = [drawn(100, [2.0, 0.5], seed) for seed in range(40)]
    sts, ours = (calibrated(conversations, method) for method in ("sts", "likelihood"))  # type: ignore[arg-type]
    assert sts.calibration.scaling == sts.alone == fit_sts(sts.fit) and sts.calibration.fit == "sts"
    assert ours.calibration.scaling == fit_scaling(ours.fit) and ours.calibration.fit == "likelihood"
    assert sts.refused is None and sts.calibration.errors == ours.calibration.errors


@pytest.mark.parametrize("offsets", [True, False])
def test_each_fit_is_the_likeliest_given_the_earlier_ones(offsets: bool) -> None:
    rounds = drawn(60, [1.5, 0.7, 2.5], seed=3)
    found = fit_scaling(rounds, offsets)

    def cost(k: int, t: float, b: float) -> float:
        scaling = Scaling([*found.temperatures[: k - 1], t], [*found.offsets[: k - 1], b])
        penalty = np.log(t) ** 2 / (2 * 0.5**2) + b**2 / 2
        return float(log_loss(*at_position(rounds, scaling, k)).sum() + penalty)

    for k in range(1, 4):
        best = cost(k, found.temperatures[k - 1], found.offsets[k - 1])
        tried = product(np.geomspace(0.1, 10, 81), np.linspace(-3, 3, 61) if offsets else [0.0])
        assert best <= min(cost(k, t, b) for t, b in tried) + 1e-9


def test_unjudged_positions_count_for_nothing() -> None:
    confidences_NK = np.array([[0.8, 0.6], [0.8, np.nan]])
    rounds = Rounds(confidences_NK, np.array([2, 1]), np.array([2, 1]))
    predicted_N, outcome_N = at_position(rounds, Scaling.identity(2), 2)
    assert predicted_N == pytest.approx([0.48]) and outcome_N.tolist() == [1.0]
    assert survival(rounds, Scaling.identity(2), 2)[0] == pytest.approx([0.8, 0.48])
    assert survival(rounds, Scaling([2.0], [0.0]), 1)[0] == pytest.approx([2 / 3]), "sigmoid(log(4) / 2)"
    with pytest.raises(ValueError, match="no round judged draft position 2"):
        fit_scaling(Rounds(confidences_NK[1:], np.array([1]), np.array([1])))
    with pytest.raises(ValueError, match="accepted <= admitted <= 2"):
        Rounds(confidences_NK, np.array([2, 2]), np.array([2, 1]))
    with pytest.raises(ValueError, match="2 rounds of confidences"):
        Rounds(confidences_NK, np.array([2]), np.array([2]))


def test_saturated_confidences_can_be_fitted() -> None:
    confidences_NK = np.array([[0.0], [1.0], [1.0], [0.0]])
    rounds = Rounds(confidences_NK, np.array([0, 1, 1, 0]), np.ones(4, dtype=np.int64))
    assert ece(*at_position(rounds, fit_scaling(rounds), 1)) < 1e-6


def test_rounds_of_a_generation() -> None:
    def stats(proposed: int, reach: int, accepted: int, *confidences: float) -> Output:
        counts = {"proposed": proposed, "verified": reach, "accepted": accepted, "reach": reach}
        return Output("", [0] * (accepted + 1), "", None, **counts, confidences=confidences)

    rounds = rounds_of_decoding([stats(3, 3, 1, 0.9, 0.8, 0.7), stats(3, 2, 2, 0.6, 0.5, 0.4), stats(0, 0, 0)], 3)
    assert rounds.accepted_N.tolist() == [1, 2] and rounds.admitted_N.tolist() == [3, 2]
    np.testing.assert_array_equal(rounds.confidences_NK, [[0.9, 0.8, 0.7], [0.6, 0.5, np.nan]])


def drafter_of(temperatures: list[float] | None) -> BlockDrafter:
    drafter = DSpark(toy_config())
    randomise(drafter)
    return BlockDrafter(DrafterWeights(drafter), toy_target(), DraftCalibration(ConfidenceScaling(temperatures)))


def test_decoding_reports_tempered_confidences_and_the_threshold_uses_them() -> None:
    rules, temperatures = StopRules(40, stop_ids=()), [0.2, 3.0, 1.0, 1.0]
    raw = generate(toy_target(), [5, 6, 7], drafter_of(None), rules=rules)
    tempered = generate(toy_target(), [5, 6, 7], drafter_of(temperatures), rules=rules)
    assert raw.tokens == tempered.tokens
    assert [r.accepted for r in raw.rounds] == [r.accepted for r in tempered.rounds]
    for before, after in zip(raw.rounds, tempered.rounds, strict=True):
        assert len(before.confidences) == before.proposed
        logits = np.log(before.confidences) - np.log1p(-np.array(before.confidences))
        assert after.confidences == pytest.approx(sigmoid(logits / temperatures[: before.proposed]), abs=1e-5)
    min_confidence = float(np.median([r.confidences[0] for r in raw.rounds if r.proposed])) * 0.5
    cut = generate(
        toy_target(), [5, 6, 7], drafter_of(temperatures), rules=rules, policy=ThresholdPolicy(min_confidence)
    )
    assert cut.tokens == raw.tokens
    assert all(c >= min_confidence for r in cut.rounds for c in r.confidences)
    full = generate(toy_target(), [5, 6, 7], drafter_of(None), rules=rules, policy=ThresholdPolicy(min_confidence))
    assert [r.proposed for r in cut.rounds] != [r.proposed for r in full.rounds], "the drafter stops by calibrated ones"


@pytest.mark.parametrize("temperatures", [[1.0] * 3, [1.0, 1.0, 1.0, 0.0], [1.0, -2.0, 1.0, 1.0]])
def test_temperatures_that_do_not_fit_the_block_are_refused(temperatures: list[float]) -> None:
    with pytest.raises(ValueError, match="must be 4 numbers above 0"):
        drafter_of(temperatures)


@pytest.mark.parametrize("temperatures", [[0.3, 4.0, 0.5], [5.0, 0.2, 2.0]])
def test_calibrated_confidences_are_lossless(monkeypatch: pytest.MonkeyPatch, temperatures: list[float]) -> None:
    scaling = ConfidenceScaling(temperatures, [1.0, -2.0, 0.5])
    sampled = SampledScaling(2.0, ConfidenceScaling([2.0, 0.5, 1.0]))  # half of both at temperature 1
    monkeypatch.setattr(proof_toys, "ChainHeads", partial(ChainHeads, scaling=scaling, sampled=sampled))
    drafter = toy(SamplingParams(temperature=1.0), 3, "rnn")
    assert deviation(requests_of(drafter), drafter.target, [(0,)], ThresholdPolicy(0.5), 3) <= TOLERANCE


def test_a_head_that_reads_only_hidden_states_is_tempered_too() -> None:
    config = toy_config(markov_rank=0, confidence_head_with_markov=False)
    assert isinstance(config, DSparkConfig)
    drafter = DSpark(config)
    randomise(drafter)
    packed = BlockDrafter(DrafterWeights(drafter), toy_target(), DraftCalibration(ConfidenceScaling([100.0] * 4)))
    found = generate(toy_target(), [5, 6], packed, rules=StopRules(9, stop_ids=()))
    assert all(abs(c - 0.5) < 0.05 for r in found.rounds for c in r.confidences)


def test_a_bias_that_no_temperature_removes_is_offset() -> None:
    def biased(count: int, seed: int) -> Rounds:
        right = drawn(count, [1.0, 1.0], seed)
        logits_NK = np.log(right.confidences_NK) - np.log1p(-right.confidences_NK)
        return Rounds(sigmoid((logits_NK - [0.8, -1.1]) * [1.0, 1.4]), right.accepted_N, right.admitted_N)

    fit, fresh = biased(12_000, 1), biased(30_000, 2)
    found, without = fit_scaling(fit), fit_scaling(fit, offsets=False)
    assert found.offsets == pytest.approx([0.8, -1.1], abs=0.25) and found.temperatures == pytest.approx(
        [1, 1.4], rel=0.25
    )
    raw, plain, best = (quality(fresh, s) for s in (Scaling.identity(2), without, found))
    assert max(best.ece) < 0.012 and plain.ece[0] > 0.03 < raw.ece[0]


def calibrated(collected: Sequence[Rounds], method: FitMethod = "likelihood") -> CalibrationResult:
    """Half of these conversations fitted on, half measured on; no replay."""
    settings = TaskSettings(params=SamplingParams(temperature=1.0))
    tasks = {"t": [[rounds] for rounds in collected]}
    return calibrate(tasks, ["t"], [], settings=settings, versions={}, method=method)


def test_errors_are_told_of_every_task_and_of_all_with_and_without_offsets() -> None:
    """On each task's own rounds; what was fitted on both tasks is right for neither, and offsets make up for a bias."""
    tasks = {"easy": [0.5, 0.5], "hard": [2.0, 2.0]}

    def conversations(shifts: Sequence[float], seed: int) -> list[list[Rounds]]:
        found = []
        for i in range(40):
            right = drawn(100, [1.0, 1.0], 1000 * seed + i)
            logits_NK = np.log(right.confidences_NK) - np.log1p(-right.confidences_NK)
            found.append([Rounds(sigmoid(logits_NK - shifts), right.accepted_N, right.admitted_N)])
        return found

    collected = {name: conversations(shifts, i) for i, (name, shifts) in enumerate(tasks.items())}
    settings = TaskSettings(params=SamplingParams(temperature=1.0))
    result = calibrate(collected, list(collected), [], settings=settings, versions={})
    found = {(error.task, error.scaling): error for error in result.calibration.errors}
    assert list(dict.fromkeys(task for task, _ in found)) == ["easy", "hard", ""] and len(found) == 12
    assert result.calibration.temperatures_alone == fit_scaling(result.fit, offsets=False).temperatures
    held = {Path(task).stem: Rounds.joined([r for turns in c[1::2] for r in turns]) for task, c in collected.items()}
    for kind, scaling in (
        ("none", Scaling.identity(2)),
        ("sts", fit_sts(result.fit)),
        ("temperatures", result.alone),
        ("temperatures and offsets", None),
    ):
        for task, rounds in {**held, "": Rounds.joined(list(held.values()))}.items():
            wanted = quality(rounds, scaling or result.calibration.scaling)
            assert found[task, kind].ece == wanted.ece and found[task, kind].ece_noise == wanted.ece_noise
            assert found[task, kind].rounds == len(rounds.accepted_N) == (4000 if task == "" else 2000)
    assert found["", "temperatures and offsets"].ece[0] < found["", "temperatures"].ece[0]  # type: ignore[operator]
    assert found["hard", "temperatures and offsets"].ece[0] > 0.05  # type: ignore[operator]


def test_little_data_changes_little_and_never_much_for_the_worse() -> None:
    fresh = drawn(30_000, [1.0, 1.0, 1.0], seed=99)
    before, refused = max(quality(fresh, Scaling.identity(3)).ece), 0
    for seed in range(12):
        found = calibrated([drawn(20, [1.0, 1.0, 1.0], 100 * seed + i) for i in range(12)])
        assert all(0.4 < t < 2.5 for t in found.calibration.temperatures)
        assert max(quality(fresh, found.serving).ece) < before + 0.06
        refused += found.refused is not None
    assert refused >= 4, "confidences that are right are no better with what was fitted to noise"


def test_a_wrong_head_is_corrected_with_enough_data() -> None:
    known, fresh = [2.5, 0.4, 3.0], drawn(30_000, [2.5, 0.4, 3.0], seed=99)
    raw = quality(fresh, Scaling.identity(3))
    for seed in range(4):
        found = calibrated([drawn(60, known, 100 * seed + i) for i in range(40)])
        assert found.refused is None and max(quality(fresh, found.serving).ece) < 0.03 < max(raw.ece)


def test_what_held_out_conversations_say_is_worse_is_refused() -> None:
    held_out = [drawn(30, [1.0, 1.0, 1.0], seed) for seed in range(12)]
    reason = refusal(held_out, Scaling([1.0] * 3, [0.0, 1.0, 0.0]))
    assert reason is not None and re.match(
        r"on held-out conversations ECE 0\.\d+ without, 0\.\d+ with; log loss", reason
    )
    bound = refusal([drawn(30, [1.0], seed) for seed in range(12)], Scaling([10.0], [0.0]))
    assert bound is not None and "position 1 is at its bound" in bound


def test_a_scaling_that_tells_more_but_says_it_wrongly_is_refused() -> None:
    """Its log loss is smaller, its calibration error larger."""
    alike = [Rounds(np.array([[0.51], [0.54]]), np.array([0, 1]), np.ones(2, dtype=np.int64)) for _ in range(8)]
    reason = refusal(alike, Scaling([0.11], [-1.0]))
    assert reason is not None and re.search(
        r"ECE 0\.025 without, 0\.3\d\d with; log loss 0\.6\d+ without, 0\.4", reason
    )


def test_a_temperature_at_its_bound_reverses_the_order_of_survivals() -> None:
    """c_2 of rounds that end at position 1 is an extrapolation; sharpened, it outweighs the survival before it."""
    generator = np.random.default_rng(0)
    first_N = generator.random(4000)
    accepted_N = (generator.random(4000) < first_N) * np.where(generator.random(4000) < 0.5, 2, 1)
    confidences_NK = np.stack((first_N, 0.45 - 0.1 * first_N), axis=1)
    rounds = Rounds(confidences_NK, accepted_N, np.full(4000, 2))
    raw, sharp = roc_auc(*at_position(rounds, Scaling.identity(2), 2)), Scaling([1.0, 0.1], [0.0, 0.0])
    reversed_auc = roc_auc(*at_position(rounds, sharp, 2))
    assert raw is not None and reversed_auc is not None and raw > 0.65 and reversed_auc < 0.4
    assert refusal([rounds], sharp) is not None
    fitted = roc_auc(*at_position(rounds, fit_scaling(rounds), 2))
    assert fitted is not None and fitted > raw - 0.02


@pytest.mark.parametrize("dspark", [True, False])
def test_blocks_after_every_token_contain_the_rounds_of_decoding(dspark: bool) -> None:
    target, params = toy_target(), SamplingParams()
    module = DSpark(toy_config()) if dspark else DFlash(toy_config(dspark=False))
    randomise(module)
    scaling, probe = ConfidenceScaling(estimator=None if dspark else FeatureRecorder()), FeatureRecorder()
    drafter = BlockDrafter(DrafterWeights(module), target, DraftCalibration(scaling))
    drafter.heads = dataclasses.replace(drafter.heads, scaling=ConfidenceScaling(estimator=probe))
    prompt, found = [5, 6, 7], generate(target, [5, 6, 7], drafter, params, StopRules(60, stop_ids=()))
    real = rounds_of_decoding(found.rounds, drafter.config.gamma, probe)
    probe.seen.clear()
    every = rounds_of_text(target, drafter, prompt, found.tokens, params, probe)
    assert len(every.accepted_N) == 60
    played, whole = decoded_rounds(every), slice(0, len(real.accepted_N) - drafter.config.gamma)
    assert real.accepted_N[whole].tolist() == played.accepted_N[whole].tolist()
    np.testing.assert_allclose(real.confidences_NK[whole], played.confidences_NK[whole], atol=1e-5)
    if not dspark:
        assert real.features_NKF is not None and played.features_NKF is not None
        np.testing.assert_allclose(real.features_NKF[whole], played.features_NKF[whole], atol=1e-4)


def test_a_block_that_agrees_to_the_end_of_the_text_is_verified_that_far() -> None:
    target, prompt = toy_target(), [5, 6, 7]
    text = generate(target, prompt, rules=StopRules(20, stop_ids=())).tokens
    knowing = Oracle(target, [*prompt, *text], spoil=0.0)
    rounds = rounds_of_text(target, knowing, prompt, text[:12], SamplingParams())  # type: ignore[arg-type]
    left = [min(knowing.gamma, 12 - i) for i in range(12)]
    assert rounds.accepted_N.tolist() == rounds.admitted_N.tolist() == left
    assert (~np.isnan(rounds.confidences_NK)).sum(axis=1).tolist() == left


def test_families_that_cannot_be_batched_are_calibrated_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    vocab = save_toy_target(tmp_path, layers=5)
    target = load_target(str(tmp_path))
    module = DSpark(toy_config(vocab_size=vocab, draft_vocab_size=vocab))
    randomise(module)
    drafter, config = BlockDrafter(DrafterWeights(module), target), TaskSettings(max_new_tokens=12)
    conversations = [Conversation(str(i), (f"say {i}", "more")[: i + 1]) for i in range(2)]
    together = collect(target, drafter, conversations, config)
    changed = type(target.config)(**target.config.to_dict())
    object.__setattr__(changed, "rope_parameters", {"rope_type": "dynamic"})
    monkeypatch.setattr(target, "config", changed)
    with pytest.raises(ValueError, match="dynamic"):
        Engine(target)
    alone = collect(target, drafter, conversations, config)
    assert [len(turns) for turns in alone] == [1, 2]
    for mine, theirs in zip(chain.from_iterable(alone), chain.from_iterable(together), strict=True):
        assert mine.accepted_N.tolist() == theirs.accepted_N.tolist() and len(mine.accepted_N)
        np.testing.assert_allclose(mine.confidences_NK, theirs.confidences_NK, atol=1e-5)


@pytest.mark.parametrize("thinking", [False, True])
def test_the_thinking_mode_reaches_the_template(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, thinking: bool
) -> None:
    vocab = save_toy_target(tmp_path, layers=5)
    target, asked = load_target(str(tmp_path)), list[list[int]]()
    assert target.tokenizer is not None
    target.tokenizer.chat_template = "{{ messages[0]['content'] }}{% if enable_thinking %}T{% endif %}"

    def answered(target: object, prompts: list[list[int]], config: TaskSettings) -> list[list[int]]:
        asked.extend(prompts)
        return [prompt[:2] for prompt in prompts]

    monkeypatch.setattr("outrider.evaluation.calibration.collect.target_texts", answered)
    drafter = BlockDrafter(DrafterWeights(DSpark(toy_config(vocab_size=vocab, draft_vocab_size=vocab))), target)
    config = TaskSettings(max_new_tokens=2, thinking=thinking)
    collect(target, drafter, [Conversation("a", ("say",))], config)
    assert [target.tokenizer.decode(prompt) for prompt in asked] == ["sayT" if thinking else "say"]


def test_certainty_and_its_fit() -> None:
    features = certainty(torch.tensor([[0.0, 0.0], [50.0, 0.0], [np.log(3.0), 0.0]]))
    expected = [[0.0, np.log(2)], [20.0, 0.0], [np.log(3), -0.75 * np.log(0.75) - 0.25 * np.log(0.25)]]
    np.testing.assert_allclose(features.numpy(), expected, atol=1e-5)
    generator, weights, biases = np.random.default_rng(0), np.array([0.8, -0.5]), np.array([0.3, -0.4])
    features_NKF = generator.normal(0, 1.5, (20_000, 2, 2))
    accepted_NK = generator.random((20_000, 2)) < sigmoid(features_NKF @ weights + biases)
    accepted_N = np.cumprod(accepted_NK, axis=1).sum(axis=1)
    rounds = Rounds(np.full((20_000, 2), 0.5), accepted_N, np.full(20_000, 2), features_NKF)
    found = fit_estimator(rounds)
    assert found.weights == pytest.approx(weights, abs=0.07) and found.biases == pytest.approx(biases, abs=0.07)


@pytest.mark.parametrize("peeks", [False, True])
def test_an_estimator_that_knew_the_drawn_token_would_show(monkeypatch: pytest.MonkeyPatch, peeks: bool) -> None:
    """Peeking: the policy is shown the probability of the token that was drawn, in place of the estimate."""
    drafter = toy(SamplingParams(temperature=1.0), 2, None)
    drafter.confidence = None  # type: ignore[assignment]
    estimator = CertaintyEstimator([1.0, -0.4], [0.2, -0.1])
    monkeypatch.setattr(proof_toys, "ChainHeads", partial(ChainHeads, scaling=ConfidenceScaling(estimator=estimator)))
    if peeks:
        real = proof_toys.sample_chain

        def peeking(*args: Any) -> list[Draft]:
            (found,) = real(*args[:-1])  # no min_confidence
            return [dataclasses.replace(found, confidences=drafted_with(found))]

        monkeypatch.setattr(proof_toys, "sample_chain", peeking)
    error = deviation(requests_of(drafter), drafter.target, [(0,)], ThresholdPolicy(0.4), 3)
    assert error > VISIBLE if peeks else error <= TOLERANCE


def test_the_sweep_replays_decoding_and_is_monotone() -> None:
    rounds = Rounds(np.array([[0.9, 0.6], [0.9, 0.9], [0.3, 0.8], [0.7, 0.2]]), np.array([1, 2, 0, 1]), np.full(4, 2))
    points = sweep({"t": [[rounds]]}, Scaling.identity(2), True, [0.0, 0.5, 0.95])
    assert [p.steps for p in points] == [2 + 1, 3, 4] and points[2].acceptance_rate is None
    assert points[0].tokens_per_step == pytest.approx(4 / 3) and points[1].acceptance_rate == pytest.approx(1 / 3)
    many = sweep({"t": [[drawn(4000, [1.0, 1.0, 1.0])]]}, Scaling.identity(3), False)
    for a, b in pairwise(many):
        assert a.tokens_per_step >= b.tokens_per_step and a.verified_per_step >= b.verified_per_step
    rates = [p.acceptance_rate for p in many if p.acceptance_rate is not None]
    assert rates[-1] > rates[0] + 0.1


def test_rounds_survive_a_file_and_foreign_ones_are_refused(tmp_path: Path) -> None:
    tasks = {"a": [[drawn(5, [1.0], 1), drawn(3, [1.0], 2)], [drawn(2, [1.0], 3)]], "b": [[drawn(4, [1.0], 4)]]}
    save_rounds(tmp_path / "r.npz", tasks, {"drafter": "x"})
    found = load_rounds(tmp_path / "r.npz", {"drafter": "x"})
    assert [[len(t.accepted_N) for t in c] for c in found["a"]] == [[5, 3], [2]] and len(found["b"]) == 1
    np.testing.assert_array_equal(found["a"][0][1].confidences_NK, tasks["a"][0][1].confidences_NK)
    with pytest.raises(ValueError, match="collected with drafter 'x', not 'y'"):
        load_rounds(tmp_path / "r.npz", {"drafter": "y"})
    (tmp_path / "bad.npz").write_text("no")
    with pytest.raises(ValueError, match="not a file of rounds"):
        load_rounds(tmp_path / "bad.npz", {})


def test_files_for_sglang(tmp_path: Path) -> None:
    write_confidence_sts(tmp_path / "c.json", [1.5, 0.7], [0.0, 0.0], "math", 9, [0.2, 0.1], [0.1, 0.1])
    assert json.loads((tmp_path / "c.json").read_text()) == {
        "temperatures": [1.5, 0.7],
        "dataset": "math",
        "num_samples": 9,
        "ece_before": [0.2, 0.1],
        "ece_after": [0.1, 0.1],
    }
    with pytest.raises(ValueError, match=r"offsets \[0.1\]"):
        write_confidence_sts(tmp_path / "d.json", [1.5], [0.1], "math", 9, [0.2], [0.1])
    write_sps_table(tmp_path / "s.json", [(1, 0.5), (4, 0.8)])
    table = json.loads((tmp_path / "s.json").read_text())
    assert table == {"sample_batch_tokens": [1, 4], "sample_steps_per_sec": [2.0, 1.25], "max_batch_tokens": 4}
    with pytest.raises(ValueError, match="strictly increasing"):
        write_sps_table(tmp_path / "s.json", [(4, 0.5), (4, 0.8)])
