"""Policies: what they admit, and that they read nothing unrevealed."""

from collections.abc import Iterator, Sequence
from typing import overload

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from outrider.scheduling import FixedPolicy, Policy, PrefixScheduler, ThresholdPolicy


class Sealed(Sequence[float]):
    """Confidences that note how far they have been read."""

    def __init__(self, values: list[float]) -> None:
        self.values, self.read = values, 0

    @overload
    def __getitem__(self, index: int) -> float: ...
    @overload
    def __getitem__(self, index: slice) -> list[float]: ...
    def __getitem__(self, index: int | slice) -> float | list[float]:
        assert isinstance(index, int) and index >= 0, "only single positions can be followed"
        self.read = max(self.read, index + 1)
        return self.values[index]

    def __iter__(self) -> Iterator[float]:
        raise AssertionError("iterating reads everything")

    def __len__(self) -> int:
        return len(self.values)


def test_fixed() -> None:
    assert FixedPolicy().lengths([[], []], [7, 3]) == [7, 3]
    assert FixedPolicy(4).lengths([[], [0.1] * 3], [7, 3]) == [4, 3]
    assert FixedPolicy(0).lengths([[]], [7]) == [0]
    with pytest.raises(ValueError, match="length=-1"):
        FixedPolicy(-1)


def test_threshold() -> None:
    confidences = [[0.9, 0.5, 0.4, 0.9], [0.4, 0.9], [], [0.5, 0.5]]
    assert ThresholdPolicy(0.5).lengths(confidences, [4, 2, 0, 2]) == [2, 0, 0, 2]
    assert ThresholdPolicy(0.0).lengths(confidences, [4, 2, 0, 2]) == [4, 2, 0, 2]
    with pytest.raises(ValueError, match=r"threshold=1\.5"):
        ThresholdPolicy(1.5)


@pytest.mark.parametrize("policy", [ThresholdPolicy(0.5), PrefixScheduler(lambda tokens: 1.0)])
def test_a_drafter_without_confidences_is_refused(policy: Policy) -> None:
    with pytest.raises(ValueError, match=r"request 1 has 0 confidences for 3 draft tokens.*verify a fixed length"):
        policy.lengths([[0.5], []], [1, 3])


def test_prefix_by_hand() -> None:
    # SPS halves with every token: no draft token can pay for itself, since tau at most doubles.
    assert PrefixScheduler(lambda tokens: 0.5**tokens).lengths([[1.0, 1.0]], [2]) == [0]
    # Free tokens: all are admitted.
    assert PrefixScheduler(lambda tokens: 1.0).lengths([[0.1, 0.1], [0.2]], [2, 1]) == [2, 1]
    # A survival of 0 improves nothing, and "strictly" means it.
    assert PrefixScheduler(lambda tokens: 1.0).lengths([[0.5, 0.0, 1.0]], [3]) == [1]
    # R = 2, B = 2: Theta = 2. Admitting 0.9 gives 2.9 * 0.8 = 2.32, then 0.81 gives 3.71 * 0.7 = 2.597, then 0.5 gives
    # 4.21 * 0.6 = 2.526: stop.
    sps = {2: 1.0, 3: 0.8, 4: 0.7, 5: 0.6, 6: 0.5}
    assert PrefixScheduler(sps.__getitem__).lengths([[0.9, 0.9], [0.5, 0.9]], [2, 2]) == [2, 0]
    assert PrefixScheduler(sps.__getitem__).lengths([], []) == []
    assert PrefixScheduler(sps.__getitem__).lengths([[], []], [0, 0]) == [0, 0]


def test_prefix_stops_at_the_first_dip() -> None:
    """The counterexample of test_proof.py: 1 + 0.8 at SPS 0.5 loses, so nothing behind it is looked at."""
    sealed = Sealed([0.8, 1.0])
    assert PrefixScheduler(lambda tokens: (1.0, 0.5, 0.45)[tokens - 1]).lengths([sealed], [2]) == [0]
    assert sealed.read == 1


def test_ties_resolve_by_position_then_request() -> None:
    one_more = {2: 1.0, 3: 1.0, 4: 0.0}
    assert PrefixScheduler(one_more.__getitem__).lengths([[0.5, 1.0], [0.5, 1.0]], [2, 2]) == [1, 0]
    two_more = {2: 1.0, 3: 1.0, 4: 1.0, 5: 0.0}
    assert PrefixScheduler(two_more.__getitem__).lengths([[0.5, 1.0], [0.5, 1.0]], [2, 2]) == [1, 1]


def algorithm_1(confidences: list[list[float]], sps: list[float]) -> list[int]:
    """The paper's statement: sort all (r, j) by survival, then admit in that order until the first non-improvement."""
    candidates = []
    for request, row in enumerate(confidences):
        survival = 1.0
        for position, confidence in enumerate(row):
            survival *= confidence
            candidates.append((-survival, position, request))
    lengths = [0] * len(confidences)
    tau, budget = float(len(confidences)), len(confidences)
    for negative, _, request in sorted(candidates):
        if (tau - negative) * sps[budget + 1] <= tau * sps[budget]:
            break
        tau, budget = tau - negative, budget + 1
        lengths[request] += 1
    return lengths


blocks = st.lists(st.lists(st.sampled_from([0.0, 0.25, 0.5, 0.9, 1.0]), max_size=4), min_size=1, max_size=4)
speeds = st.lists(st.floats(0.1, 1.0), min_size=21, max_size=21)


@given(blocks, speeds, st.booleans())
@settings(max_examples=300, deadline=None)
def test_the_heap_is_algorithm_1(confidences: list[list[float]], sps: list[float], staircase: bool) -> None:
    sps = sorted(sps, reverse=True) if staircase else [1 / (40 + b) + 0.001 * s for b, s in enumerate(sps)]
    drafted = [len(row) for row in confidences]
    assert PrefixScheduler(sps.__getitem__).lengths(confidences, drafted) == algorithm_1(confidences, sps)


@given(blocks, speeds, st.floats(0, 1))
@settings(max_examples=200, deadline=None)
def test_nothing_unrevealed_is_read(confidences: list[list[float]], sps: list[float], threshold: float) -> None:
    for policy in (ThresholdPolicy(threshold), PrefixScheduler(sorted(sps, reverse=True).__getitem__), FixedPolicy(2)):
        sealed = [Sealed(row) for row in confidences]
        lengths = policy.lengths(sealed, [len(row) for row in confidences])
        for row, length in zip(sealed, lengths, strict=True):
            assert row.read <= length + 1
