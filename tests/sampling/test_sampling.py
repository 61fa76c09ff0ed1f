"""Warps against Hugging Face's logits processors, residual identities, sources."""

from __future__ import annotations

import itertools
import re

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from outrider.sampling import PositionNoise, SamplingParams, SeededSource, SeenTokens, likeliest, residual, warp

TOKENS = [3, 5, 5, 17]
WARPS = {
    "plain": SamplingParams(temperature=1.0),
    "temperature": SamplingParams(temperature=0.7),
    "hot": SamplingParams(temperature=3.0),
    "top_k": SamplingParams(temperature=1.0, top_k=7),
    "top_k=1": SamplingParams(temperature=1.0, top_k=1),
    "top_k > V": SamplingParams(temperature=1.0, top_k=10**6),
    "top_p": SamplingParams(temperature=1.0, top_p=0.8),
    "top_p tiny": SamplingParams(temperature=1.0, top_p=1e-6),
    "top_p wide": SamplingParams(temperature=5.0, top_p=0.99),
    "min_p": SamplingParams(temperature=1.0, min_p=0.05),
    "penalty": SamplingParams(temperature=1.0, repetition_penalty=1.7),
    "reward": SamplingParams(temperature=1.0, repetition_penalty=0.6),
    "all": SamplingParams(temperature=1.3, top_k=20, top_p=0.9, min_p=0.03, repetition_penalty=1.2),
}


def huggingface(logits_KV: Tensor, params: SamplingParams) -> Tensor:
    processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(params.repetition_penalty)])
    processors.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        processors.append(TopKLogitsWarper(params.top_k))
    processors.append(TopPLogitsWarper(params.top_p))
    processors.append(MinPLogitsWarper(params.min_p))
    ids = torch.LongTensor([TOKENS] * logits_KV.shape[0])
    return processors(ids, logits_KV.clone()).softmax(-1)


@pytest.mark.parametrize("vocab", [20, 3000])
@pytest.mark.parametrize("name", WARPS)
def test_warp_equals_huggingface(name: str, vocab: int) -> None:
    params = WARPS[name]
    logits_KV = 3 * torch.randn(4, vocab, dtype=torch.float64, generator=torch.Generator().manual_seed(vocab))
    seen = SeenTokens(vocab, params, TOKENS).with_tokens()
    expected_KV = huggingface(logits_KV, params)
    actual_KV = warp(logits_KV, params, seen)
    assert torch.equal(actual_KV > 0, expected_KV > 0)
    torch.testing.assert_close(actual_KV, expected_KV, rtol=1e-12, atol=1e-14)
    for k in range(4):  # a row is warped alike alone and in a block
        torch.testing.assert_close(warp(logits_KV[k], params, seen), actual_KV[k], rtol=1e-13, atol=0)
    assert warp(logits_KV.float(), params, seen).dtype == torch.float32


def test_temperature_zero_is_the_limit() -> None:
    logits_KV = torch.randn(5, 100, generator=torch.Generator().manual_seed(0))
    greedy_KV = warp(logits_KV, SamplingParams())
    assert torch.equal(greedy_KV.argmax(-1), logits_KV.argmax(-1))
    assert torch.equal(greedy_KV.sum(-1), torch.ones(5)) and torch.equal(greedy_KV.amax(-1), torch.ones(5))
    for temperature in (1e-4, 1e-39):  # logits / 1e-39 overflows float32
        torch.testing.assert_close(warp(logits_KV, SamplingParams(temperature=temperature)), greedy_KV)
    tied_V = torch.tensor([0.0, 2.0, 2.0])
    assert warp(tied_V, SamplingParams()).tolist() == [0, 1, 0]
    assert warp(tied_V, SamplingParams(top_k=1, top_p=0.1, min_p=1.0)).tolist() == [0, 1, 0]


EXTREMES = {
    "temperature": (0.0, 5e-324, 1e-50, 1e-38, 1e-7, 1e-6, 1e-3, 1.0, 1e30, 3e38, 1e39, 1.7e308),
    "top_k": (0, 1, 10**30),
    "top_p": (5e-324, 1e-50, 1e-46, 1e-38, 0.5, 1 - 1e-16, 1.0),
    "min_p": (0.0, 5e-324, 1e-50, 1e-40, 0.1, 1.0),
    "repetition_penalty": (0.01, 1.0, 100.0),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_parameters_give_a_distribution(dtype: torch.dtype) -> None:
    """Values that are 0 or infinite in float32 behave as their limits; a row may have tokens that are ruled out."""
    logits_KV = 4 * torch.randn(3, 40, dtype=dtype, generator=torch.Generator().manual_seed(0))
    logits_KV[1] = 0
    logits_KV[2, 5:] = -torch.inf
    seen = SeenTokens(40, SamplingParams(repetition_penalty=2.0), range(20)).with_tokens()
    source = SeededSource(0)
    for values in itertools.product(*EXTREMES.values()):
        params = SamplingParams(**dict(zip(EXTREMES, values, strict=True)))
        probs_KV = warp(logits_KV, params, seen)
        assert probs_KV.isfinite().all() and (probs_KV >= 0).all(), params
        assert (probs_KV.sum(-1) - 1).abs().max() < 1e-5, params
        assert probs_KV[0, source.choose(probs_KV[0])] > 0, params
        if params.temperature < 1e-3 or (params.temperature <= 1 and (params.top_p < 1e-6 or params.min_p == 1.0)):
            assert probs_KV[0].max() == 1.0, f"{params}: the likeliest token alone, which is nobody's equal"


@pytest.mark.parametrize("row", [[float("nan"), 0.5], [0.0, 0.0]])
def test_what_is_no_distribution_is_not_drawn_from(row: list[float]) -> None:
    with pytest.raises(ValueError, match="logits are not finite"):
        SeededSource(0).choose(torch.tensor(row))


def test_a_temperature_that_float32_cannot_tell_from_0_is_0() -> None:
    assert SamplingParams(temperature=1e-50) == SamplingParams(temperature=9e-7) == SamplingParams()
    assert SamplingParams(temperature=1e-6).temperature == 1e-6


def test_greedy_obeys_the_repetition_penalty() -> None:
    params = SamplingParams(repetition_penalty=2.0)
    seen = SeenTokens(3, params, [1])
    assert warp(torch.tensor([1.0, 1.5, 0.0]), params, seen.with_tokens()).tolist() == [1, 0, 0]
    assert warp(torch.tensor([-0.9, -0.5, -1.5]), params, seen.with_tokens()).tolist() == [1, 0, 0]


def test_ties_at_the_cut_are_kept_together() -> None:
    probs_V = torch.tensor([0.2, 0.4, 0.2, 0.2]).log()
    assert (warp(probs_V, SamplingParams(temperature=1.0, top_k=2)) > 0).all()
    assert (warp(probs_V, SamplingParams(temperature=1.0, top_p=0.5)) > 0).all()
    assert (warp(probs_V, SamplingParams(temperature=1.0, top_p=0.39)) > 0).tolist() == [False, True, False, False]


def test_the_nucleus_ends_where_its_mass_reaches_top_p() -> None:
    """Exact in binary: the likeliest token alone has the mass asked for, so nothing else is kept."""
    halves_V = torch.tensor([0.5, 0.25, 0.25]).log()
    assert (warp(halves_V, SamplingParams(temperature=1.0, top_p=0.5)) > 0).tolist() == [True, False, False]
    quarters_V = torch.tensor([0.25, 0.5, 0.125, 0.125]).log()
    assert (warp(quarters_V, SamplingParams(temperature=1.0, top_p=0.75)) > 0).tolist() == [True, True, False, False]


def test_a_nucleus_of_most_of_the_vocabulary_beside_one_of_few_tokens() -> None:
    """Rows of a block share the search for the nucleus; one row must not end it for another."""
    logits_KV = torch.randn(2, 3000, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    logits_KV[0] *= 8
    params = SamplingParams(temperature=1.0, top_p=0.95)
    together_KV = warp(logits_KV, params)
    assert (together_KV > 0).sum(-1)[0] < 200 and (together_KV > 0).sum(-1)[1] > 1500
    for k in range(2):
        torch.testing.assert_close(warp(logits_KV[k], params), together_KV[k], rtol=1e-13, atol=0)


def test_seen_tokens() -> None:
    assert SeenTokens(10).with_tokens([3]) is None
    for params in (
        SamplingParams(repetition_penalty=1.1),
        SamplingParams(presence_penalty=1),
        SamplingParams(frequency_penalty=-1),
    ):
        seen = SeenTokens(6, params, [0, 0, 2], output=[2])
        seen.add(2)
        found = seen.with_tokens([4, 0, 4])
        assert found is not None and found.tolist() == [1 + 2, 0, 1 + 4, 0, 4, 0]
        later = seen.with_tokens()
        assert later is not None and later.tolist() == [1, 0, 1 + 4, 0, 0, 0]


def test_presence_and_frequency_penalties() -> None:
    """Of the output's tokens alone: logits - presence [n > 0] - frequency n, after the repetition penalty."""
    logits_V = torch.tensor([1.0, -2.0, 0.5, 3.0, 0.25], dtype=torch.float64)
    params = SamplingParams(temperature=1.0, repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=-0.25)
    seen = SeenTokens(5, params, [0, 3], output=[1, 1, 3])
    seen.add(1)
    expected_V = torch.tensor([1 / 2, -2 * 2 - 0.5 + 0.25 * 3, 0.5, 3 / 2 - 0.5 + 0.25, 0.25 / 2 - 0.5 + 0.25])
    torch.testing.assert_close(warp(logits_V, params, seen.with_tokens([4])), expected_V.double().softmax(-1))
    greedy = SamplingParams(frequency_penalty=2.0)
    seen = SeenTokens(5, greedy, [3], output=[3, 3])
    assert warp(logits_V, greedy, seen.with_tokens()).tolist() == [1, 0, 0, 0, 0]
    for wrong in (2.1, -2.1, float("nan")):
        with pytest.raises(ValueError, match="must be from -2 to 2"):
            SamplingParams(presence_penalty=wrong)
        with pytest.raises(ValueError, match="must be from -2 to 2"):
            SamplingParams(frequency_penalty=wrong)


@pytest.mark.parametrize(
    "field, value",
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 1e-50),
        ("repetition_penalty", 1e30),
        ("repetition_penalty", float("nan")),
    ],
)
def test_bad_parameters_are_named(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{field}={value}")):
        SamplingParams(**{field: value})


weights = st.lists(st.floats(0, 1), min_size=5, max_size=5).filter(lambda w: sum(w) > 0.01)


@given(weights, weights)
@settings(deadline=None)
def test_acceptance_and_residual_make_the_target(target: list[float], draft: list[float]) -> None:
    target_V, draft_V = (torch.tensor(w, dtype=torch.float64) / sum(w) for w in (target, draft))
    residual_V = residual(target_V, draft_V)
    accepted_V = torch.minimum(target_V, draft_V)
    assert (residual_V >= 0).all() and abs(residual_V.sum() - 1) < 1e-12
    torch.testing.assert_close(accepted_V + (1 - accepted_V.sum()) * residual_V, target_V, rtol=0, atol=1e-12)
    total_variation = 0.5 * (target_V - draft_V).abs().sum()
    assert abs(1 - accepted_V.sum() - total_variation) < 1e-12


def test_residual_without_mass_is_the_target() -> None:
    target_V = torch.tensor([0.25, 0.75])
    assert torch.equal(residual(target_V, target_V), target_V)
    assert torch.equal(residual(target_V, target_V + 1e-7), target_V)


def test_seeds_reproduce() -> None:
    probs_V = torch.rand(50)

    def draws(seed: int) -> list[int]:
        source = SeededSource(seed)
        return [source.choose(probs_V) if i % 2 else int(source.accept(0.5)) for i in range(60)]

    assert draws(7) == draws(7)
    assert draws(7) != draws(8)


def test_certain_answers_spend_no_randomness() -> None:
    one, other = SeededSource(0), SeededSource(0)
    assert one.accept(1.0) and one.accept(1.5) and not one.accept(0.0) and not one.accept(-1.0)
    assert one.choose(torch.tensor([0.0, 0.0, 1.0])) == 2
    probs_V = torch.rand(1000)
    assert [one.choose(probs_V) for _ in range(5)] == [other.choose(probs_V) for _ in range(5)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_choose_has_the_right_frequencies(dtype: torch.dtype) -> None:
    probs_V = torch.tensor([0.0, 0.1, 0.0, 0.6, 0.3, 0.0], dtype=dtype)
    source = SeededSource(1)
    draws = 20_000
    counts_V = torch.bincount(torch.tensor([source.choose(probs_V) for _ in range(draws)]), minlength=6)
    assert counts_V[[0, 2, 5]].sum() == 0
    assert (counts_V / draws - probs_V).abs().max() < 0.015  # > 4 standard deviations
    accepted = sum(source.accept(0.3) for _ in range(draws))
    assert abs(accepted / draws - 0.3) < 0.015


def uniforms(seed: int, count: int) -> list[float]:
    """What a `SeededSource` draws: float64 from a generator of its own."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand((), generator=generator, dtype=torch.float64).item() for _ in range(count)]


@pytest.mark.parametrize("probability", [1e-3, 0.05, 0.3, 0.5, 0.92, 0.999])
def test_accept_compares_one_uniform_number_with_the_probability(probability: float) -> None:
    """Near 0 and near 1 too, where a shortcut would hardly change a frequency."""
    source = SeededSource(5)
    assert [source.accept(probability) for _ in range(2000)] == [u < probability for u in uniforms(5, 2000)]


@pytest.mark.parametrize("mass", [1.0, 0.25])
@pytest.mark.parametrize("peak", [0.0, 3.0, 6.0, 9.0])
def test_choose_inverts_the_cumulative_distribution(peak: float, mass: float) -> None:
    """With one uniform number, for flat rows and for rows whose likeliest token has all but one in a thousand."""
    logits_V = torch.randn(40, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    logits_V[17] = logits_V.max() + peak
    probs_V = logits_V.softmax(-1).masked_fill(torch.arange(40) % 5 == 0, 0.0)
    probs_V *= mass / probs_V.sum()  # what rounding leaves is not quite 1: the total is part of the draw
    source, cumulative = SeededSource(9), probs_V.cumsum(-1).tolist()
    expected = [next(v for v, c in enumerate(cumulative) if u * cumulative[-1] < c) for u in uniforms(9, 2000)]
    assert [source.choose(probs_V) for _ in range(2000)] == expected


def test_the_smallest_uniform_number_skips_impossible_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SeededSource, "uniform", lambda self: 0.0)
    assert SeededSource(0).choose(torch.tensor([0.0, 0.0, 0.4, 0.6])) == 2


def test_the_noise_of_a_seed_and_position_is_that_of_no_other_pair() -> None:
    pairs = [(1, 23), (12, 3), (123, 0), (0, 123), (23, 1), (1, 2), (2, 1), (12, 0), (1, 20), (120, 0)]
    rows = {tuple(PositionNoise(seed, 8).row(position).tolist()) for seed, position in pairs}
    assert len(rows) == len(pairs)


def test_coupled_picks_follow_the_distribution() -> None:
    probs_V = torch.tensor([0.5, 0.0, 0.3, 0.15, 0.05])
    noise = PositionNoise(seed=3, vocab_size=5)
    counts = torch.bincount(torch.tensor([noise.pick(probs_V, n) for n in range(20_000)]), minlength=5).double()
    expected = probs_V.double() * 20_000
    assert counts[1] == 0
    chi_square = ((counts - expected)[expected > 0] ** 2 / expected[expected > 0]).sum()
    assert chi_square < 16.3, "three degrees of freedom, p = 0.001"


def test_coupled_noise_belongs_to_seed_and_position() -> None:
    noise = PositionNoise(7, 50)
    first = noise.row(3).clone()
    for position in range(4, 60):  # forgotten and made again
        noise.row(position)
    assert torch.equal(noise.row(3), first)
    assert not torch.equal(PositionNoise(8, 50).row(3), first) and not torch.equal(PositionNoise(8, 50).row(2), first)
    ids = torch.tensor([4, 9, 30])
    probs = torch.tensor([0.2, 0.5, 0.3])
    whole = torch.zeros(50).scatter_(0, ids, probs)
    assert all(int(ids[noise.pick(probs, n, ids)]) == noise.pick(whole, n) for n in range(100))


def test_coupled_drafts_agree_as_often_as_the_bound_says() -> None:
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.randn(30, generator=generator).softmax(-1) for _ in range(2))
    distance = float((p - q).abs().sum() / 2)
    noise = PositionNoise(1, 30)
    agreed = sum(noise.pick(p, n) == noise.pick(q, n) for n in range(5000)) / 5000
    assert (1 - distance) / (1 + distance) - 0.02 <= agreed <= 1 - distance + 0.02


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_likeliest_token_is_that_of_argmax(dtype: torch.dtype) -> None:
    """Ties, values that are no numbers and infinite ones included; of rows that do not lie together, too."""
    logits = torch.randint(-3, 3, (40, 64), generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[3, 7] = logits[4, [5, 9]] = float("nan")
    logits[5, 60], logits[6] = float("inf"), float("-inf")
    assert likeliest(logits) == logits.argmax(-1).tolist()
    assert likeliest(logits[::2, 3:]) == logits[::2, 3:].argmax(-1).tolist()
