"""The random source and the coupled noise that serve: exact over grids of uniform numbers, and statistically sound.

    u = 0, 1/N, .. (N-1)/N       accept(p): N p of them       choose(p_V): N (p_0 + .. + p_v) give v or less

Shapes: V vocab.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise, product

import numpy as np
import pytest
import torch
from torch import Tensor

from outrider.sampling import PositionNoise, SeededSource

GRID = 4096  # a power of two: boundaries of dyadic probabilities are met exactly
LARGEST = 1 - 2**-53  # of the uniform numbers that a generator gives


class GridSource(SeededSource):
    """The production source with given uniform numbers in place of its generator's."""

    def __init__(self, uniforms: Iterable[float]) -> None:
        super().__init__(0)
        self.left = iter(uniforms)

    def uniform(self) -> float:
        return next(self.left)


def grid() -> GridSource:
    return GridSource(step / GRID for step in range(GRID))


@pytest.mark.parametrize(
    "probability", [0.0, 1e-9, 0.001, 0.05, 0.099, 0.25, 1 / 3, 0.5, 0.75, 0.901, 0.95, 0.999, 1.0]
)
def test_accept_accepts_its_share_of_a_grid(probability: float) -> None:
    source = grid()
    accepted = sum(source.accept(probability) for _ in range(GRID))
    assert 0 <= accepted - probability * GRID < 1  # every u below the probability, and no other


def test_accept_is_certain_at_the_ends() -> None:
    for uniform in (0.0, 0.5, LARGEST):
        assert GridSource([uniform]).accept(1.0) and GridSource([uniform]).accept(1.0 + 1e-7)
        assert not GridSource([uniform]).accept(0.0) and not GridSource([uniform]).accept(-1e-7)


def softmax(vocab: int, spread: float, dtype: torch.dtype = torch.float32) -> Tensor:
    return (spread * torch.randn(vocab, generator=torch.Generator().manual_seed(vocab))).to(dtype).softmax(-1)


ROWS = {
    "halves and quarters": torch.tensor([0.25, 0.5, 0.125, 0.125]),
    "ties": torch.full((8,), 0.125),
    "one is certain": torch.tensor([0.0, 0.0, 1.0, 0.0]),
    "above 0.9": torch.tensor([0.02, 0.93, 0.0, 0.05]),
    "nearly certain": torch.tensor([0.0005, 0.999, 0.0005]),
    "all below 0.1": torch.full((20,), 0.05),
    "zeros first, last and between": torch.tensor([0.0, 0.0, 0.3, 0.0, 0.6, 0.0, 0.1, 0.0]),
    "sum below one": 0.97 * torch.tensor([0.3, 0.6, 0.1]),
    "sum above one": 1.003 * torch.tensor([0.3, 0.6, 0.1]),
    "sum of a residual's mass": 0.02 * torch.tensor([0.0, 0.7, 0.3]),
    "float32 of a large vocabulary": softmax(50_000, 2.0),
    "float64": softmax(300, 1.0, torch.float64),
    "smallest float32 numbers": torch.tensor([1e-40, 0.5, 1e-45, 0.5]),
}


@pytest.mark.parametrize("name", ROWS)
def test_choose_gives_every_token_its_share_of_a_grid(name: str) -> None:
    probs_V = ROWS[name]
    source = grid()
    chosen = torch.tensor([source.choose(probs_V) for _ in range(GRID)])
    counts_V = torch.bincount(chosen, minlength=len(probs_V))
    assert len(counts_V) == len(probs_V) and not counts_V[probs_V == 0].any()
    shares_V = probs_V.double().cumsum(0) / probs_V.double().sum() * GRID
    assert ((counts_V.cumsum(0) - shares_V).abs() <= 1).all()  # one more where a boundary is met
    assert not name.startswith("halves") or counts_V.tolist() == [1024, 2048, 512, 512]


@pytest.mark.parametrize("name", ROWS)
def test_choose_at_the_ends_of_the_uniform_numbers(name: str) -> None:
    possible = ROWS[name].nonzero().flatten().tolist()
    for uniform in (0.0, 2**-53, LARGEST):
        assert GridSource([uniform]).choose(ROWS[name]) in possible


def test_rare_tokens_behind_a_likely_one_keep_their_share() -> None:
    """A sum in float32 would stand still on them: there 0.99 + 1e-8 is 0.99."""
    probs_V = torch.cat((torch.tensor([0.99]), torch.full((1000,), 1e-8)))
    likely = 0.99 / (0.99 + 1e-5)
    for share in (0.001, 0.5, 0.999):
        chosen = GridSource([likely + share * (1 - likely)]).choose(probs_V)
        assert chosen == pytest.approx(1000 * share, abs=3)


def chi_square_p(counts: Tensor) -> float:
    """The chance of counts at least as uneven, were all cells equally likely."""
    expected = counts.sum().double() / counts.numel()
    statistic = ((counts.double() - expected) ** 2).sum() / expected
    return float(torch.special.gammaincc(torch.tensor((counts.numel() - 1) / 2).double(), statistic / 2))


def kolmogorov_p(uniforms: Tensor) -> float:
    """The chance of an empirical distribution at least as far from that of U[0, 1); for many numbers."""
    count = len(uniforms)
    ranks = torch.arange(count + 1, dtype=torch.float64) / count
    sorted_u = uniforms.double().sort().values
    distance = max((sorted_u - ranks[:-1]).max().item(), (ranks[1:] - sorted_u).max().item())
    k = torch.arange(1, 101, dtype=torch.float64)
    signs = torch.where(k % 2 == 1, 1.0, -1.0)
    return float(2 * (signs * torch.exp(-2 * k**2 * count * distance**2)).sum().clamp(0, 0.5))


def pairs_p(first: Tensor, second: Tensor) -> float:
    """As `chi_square_p`, of pairs of numbers in [0, 1) in 32 x 32 cells: whether the ones tell of the others."""
    cells = (32 * first).long().clamp(max=31) * 32 + (32 * second).long().clamp(max=31)
    return chi_square_p(torch.bincount(cells, minlength=1024))


def check_uniform(uniforms: Tensor) -> None:
    assert ((uniforms >= 0) & (uniforms <= 1)).all()
    assert kolmogorov_p(uniforms) > 1e-3
    assert chi_square_p(torch.bincount((1000 * uniforms).long().clamp(max=999), minlength=1000)) > 1e-3
    assert pairs_p(uniforms[:-1], uniforms[1:]) > 1e-3


def test_the_tests_of_uniform_numbers_refuse_others() -> None:
    uniforms = torch.rand(100_000, generator=torch.Generator().manual_seed(0))
    check_uniform(uniforms)
    for wrong in (uniforms**1.02, 0.99 * uniforms, (uniforms * 900).floor() / 900):
        with pytest.raises(AssertionError):
            check_uniform(wrong)
    assert pairs_p(uniforms, (uniforms + 0.9) % 1) < 1e-3


def test_every_bit_of_a_seed_counts() -> None:
    seeds = [7, *(7 + 2**bit for bit in range(3, 64))]
    alike = torch.full((10**6,), 1e-6)
    assert len({SeededSource(seed).choose(alike) for seed in seeds}) == len(seeds)


MANY = [pytest.param(1), pytest.param(100, marks=pytest.mark.slow)]


@pytest.mark.parametrize("times", MANY)
def test_the_source_draws_uniform_numbers(times: int) -> None:
    """One after another they are those that its generator draws at once, which is a hundred times as fast."""
    source, count = SeededSource(3), 100_000 * times
    first = [source.uniform() for _ in range(10_000)]
    following = torch.rand(count - 10_000, generator=source._generator, dtype=torch.float64)
    assert [source.uniform() for _ in range(3)] == torch.rand(
        count + 3, generator=SeededSource(3)._generator, dtype=torch.float64
    )[count:].tolist()
    check_uniform(torch.cat((torch.tensor(first, dtype=torch.float64), following)))


# Noise of (seed, position). 1 - exp(-E) of an exponential number E is uniform.


def noise(seed: int, positions: Iterable[int], vocab: int = 10_000) -> Tensor:
    source = PositionNoise(seed, vocab)
    return torch.cat([-torch.expm1(-source.row(position).double()) for position in positions])


@pytest.mark.parametrize("times", MANY)
def test_coupled_noise_is_exponential(times: int) -> None:
    check_uniform(noise(5, range(10 * times)))


@pytest.mark.parametrize("times", MANY)
def test_noise_of_neighbours_is_independent(times: int) -> None:
    """Between positions, seeds, and a seed and the position of the same number."""
    count = 10 * times
    base = noise(7, range(count))
    assert pairs_p(base, noise(7, range(1, count + 1))) > 1e-3
    assert pairs_p(base, noise(8, range(count))) > 1e-3
    assert pairs_p(base, noise(7 + 2**32, range(count))) > 1e-3
    swapped = torch.cat([noise(position, [7]) for position in range(count)])
    assert pairs_p(base[10_000 * 8 :], swapped[10_000 * 8 :]) > 1e-3


@pytest.mark.parametrize("times", [pytest.param(1), pytest.param(10, marks=pytest.mark.slow)])
def test_picks_of_the_race_follow_the_distribution(times: int) -> None:
    probs_V = torch.tensor([0.93, 0.0, 0.04, 0.02, 0.01])
    source, draws = PositionNoise(11, 5), 10_000 * times
    counts_V = torch.bincount(torch.tensor([source.pick(probs_V, n) for n in range(draws)]), minlength=5).double()
    possible = probs_V > 0
    expected = probs_V[possible].double() * draws
    statistic = ((counts_V[possible] - expected) ** 2 / expected).sum()
    assert counts_V[1] == 0
    assert float(torch.special.gammaincc(torch.tensor(1.5).double(), statistic / 2)) > 1e-3


def test_a_race_of_two_tokens_compares_one_uniform_number_with_the_probability() -> None:
    """What the enumeration of the engine puts in its place (tests/proof/enumeration.py)."""
    source = PositionNoise(2, 2)
    rows = torch.stack([source.row(n) for n in range(5000)]).double()
    uniforms = rows[:, 0] / rows.sum(-1)
    assert kolmogorov_p(uniforms) > 1e-3
    for probability in (0.05, 0.5, 0.95):
        probs_V = torch.tensor([probability, 1 - probability], dtype=torch.float64)
        assert [source.pick(probs_V, n) == 0 for n in range(5000)] == (uniforms < probability).tolist()


def test_noise_among_some_tokens_is_that_of_their_ids() -> None:
    source, ids = PositionNoise(3, 40), torch.randperm(40, generator=torch.Generator().manual_seed(0))
    probs_V = softmax(40, 1.0)
    for n in range(50):
        assert int(ids[source.pick(probs_V[ids], n, ids)]) == source.pick(probs_V, n)
        assert ids[source.ranking(probs_V[ids], n, 5, ids)].tolist() == source.ranking(probs_V, n, 5)


def test_a_ranking_leaves_out_what_is_impossible() -> None:
    probs_V = torch.tensor([0.0, 0.5, 0.0, 0.2, 0.3])
    assert {tuple(sorted(PositionNoise(1, 5).ranking(probs_V, n, 4))) for n in range(20)} == {(1, 3, 4)}


# Pairs that shared their noise while 32 bits of a hash seeded it.
ONCE_SHARED = [
    ((18, 137), (33, 6377)),
    ((10, 5074), (12, 456)),
    ((20, 2640), (2**64 - 1, 342)),
    ((19, 5901), (2**32, 7487)),
]


def windows(seed: int, position: int, vocab: int) -> list[tuple[float, ...]]:
    """Neighbours in a row, two float32 numbers each: 2^46 of them or more are possible."""
    row = PositionNoise(seed, vocab).row(position).tolist()
    return list(pairwise(row))


def test_no_two_pairs_of_seed_and_position_have_noise_in_common() -> None:
    for one, other in ONCE_SHARED:
        assert not set(windows(*one, vocab=8)) & set(windows(*other, vocab=8))
    large = [2**31, 2**32 - 1, 2**32, 2**32 + 1, 2**63 - 1]
    seeds, positions = [*range(12), *large, 2**63, 2**64 - 1], [*range(120), *large]
    pairs = set(product(seeds, positions))
    pairs |= {(2**bits, position) for bits in range(64) for position in (0, 1)}  # seed + (position << bits)
    found = [window for seed, position in pairs for window in windows(seed, position, vocab=8)]
    assert len(set(found)) == len(found)


@pytest.mark.slow
def test_two_hundred_thousand_pairs_have_no_noise_in_common() -> None:
    """Of hashes of 32 bits some two would be alike with a chance of 99.1 %."""
    found = {tuple(PositionNoise(seed, 4).row(n).tolist()) for seed, n in product(range(450), range(450))}
    assert len(found) == 450 * 450


def test_small_noise_is_drawn_finely() -> None:
    """Steps of 2^-23 would let any token of a large vocabulary win now and then, however improbable."""
    row = PositionNoise(0, 1_000_000).row(0)
    small = row[row < 2**-8]
    assert len(small) > 3000 and len(small.unique()) > len(small) - 10


def test_noise_of_zero_does_not_make_an_impossible_token_win(monkeypatch: pytest.MonkeyPatch) -> None:
    class Zeros:
        def __init__(self, _: object) -> None: ...

        def standard_exponential(self, size: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
            return np.zeros(size)

    monkeypatch.setattr(np.random, "Generator", Zeros)
    assert PositionNoise(0, 3).pick(torch.tensor([0.0, 1.0, 0.0]), 5) == 1
