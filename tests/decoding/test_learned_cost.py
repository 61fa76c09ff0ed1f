"""Step costs are learned from what steps take: relative to each other, whatever the machine's pace."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from outrider.decoding.cost import Floats, SpsTable
from outrider.decoding.learned_cost import LearnedCost, Trial
from outrider.decoding.policies import FixedPolicy, LookAhead, SkipDrafting
from tests.toys.profiles import cells_of, linear, profile_of

FLAT = SpsTable([1.0] * 512)


def taught(cost: LearnedCost, plain: float, drafts: float, steps: int, requests: int = 4, verified: int = 4) -> None:
    """Steps that take so many times what is predicted, with drafts and without."""
    for _ in range(steps):
        cost.observe(drafts, requests, 100.0, verified=verified, drafting=0, depth=1)
        cost.observe(plain, requests, 100.0, verified=0, drafting=0, depth=1)


def relative(cost: LearnedCost, requests: int, *verified: int) -> Floats:
    """Seconds of steps that verify so many drafts, in those of a step that verifies none."""
    seconds_N = cost.seconds(requests + np.array([0, *verified]), requests, 100.0)
    result: Floats = seconds_N[1:] / seconds_N[0]
    return result


@pytest.mark.parametrize("requests", [1, 4, 40])
def test_what_drafts_cost_is_learned_beside_steps_without_any(requests: int) -> None:
    """A machine of half the speed changes nothing, dearer rows do, and nearer numbers of rows and requests more."""
    even, dear = LearnedCost(FLAT), LearnedCost(FLAT)
    taught(even, 2.0, 2.0, 9, requests, verified=requests)
    assert relative(even, requests, requests, 3 * requests) == pytest.approx([1, 1], abs=0.02)
    taught(dear, 2.0, 3.0, 9, requests, verified=requests)
    half, whole, more = relative(dear, requests, requests // 2 if requests > 1 else 1, requests, 3 * requests)
    assert whole == pytest.approx(1.5, abs=0.02) and 1.2 < more < 1.5 and (1.1 < half < 1.4 or requests == 1)
    near, far = relative(dear, 2 * requests, 2 * requests)[0], relative(dear, 64 * requests, 64 * requests)[0]
    assert 1.1 < far < near < 1.5, "other numbers of requests"
    seconds = dear.seconds(np.array([requests, 2 * requests]), requests, 100.0)
    assert seconds == pytest.approx([2.0, 3.0], rel=0.02), "and seconds are those of the machine as it is"


def test_one_stray_step_changes_little_and_a_change_is_followed() -> None:
    cost = LearnedCost(FLAT)
    taught(cost, 1.0, 1.2, 30)
    cost.observe(60.0, 4, 100.0, verified=4, drafting=0, depth=1)
    assert relative(cost, 4, 4) == pytest.approx([1.2], rel=0.15)
    taught(cost, 1.0, 1.0, 60)
    assert relative(cost, 4, 4) == pytest.approx([1.0], abs=0.06)


def test_a_slow_phase_does_not_count_for_the_steps_in_it() -> None:
    """Drafts measured while the machine is slow are not compared with steps measured before."""
    cost = LearnedCost(FLAT)
    taught(cost, 1.0, 1.2, 10)
    for _ in range(40):
        cost.observe(2.4, 4, 100.0, verified=4, drafting=0, depth=1)
    assert relative(cost, 4, 4) == pytest.approx([1.2], rel=0.06)


def test_seconds_of_drafts_are_learned_apart() -> None:
    inner = profile_of(cells_of(linear))
    cost = LearnedCost(inner)
    for _ in range(6):
        plain, drafted = inner.seconds(np.array([4, 7]), 4, 100.0).tolist()
        draft = 10 * inner.draft_seconds(3, 1)
        cost.observe(plain, 4, 100.0, verified=0, drafting=0, depth=1)
        cost.observe(drafted + draft, 4, 100.0, verified=3, drafting=3, depth=1, draft_seconds=draft)
    right = inner.seconds(np.array([4, 7]), 4, 100.0)
    assert cost.seconds(np.array([4, 7]), 4, 100.0) == pytest.approx(right, rel=0.02)
    assert cost.draft_seconds(3, 1) == pytest.approx(10 * inner.draft_seconds(3, 1), rel=0.03)
    assert 5 < cost.draft_seconds(3, 7) / inner.draft_seconds(3, 7) < 10, "longer drafts are likely dearer as well"
    assert cost.draft_seconds(0) == LearnedCost(FLAT).draft_seconds(3) == 0.0


def test_both_sorts_of_steps_are_tried_and_tried_again() -> None:
    """In turns at first; then the sort that is not chosen, ever more seldom."""
    cost = LearnedCost(FLAT)
    first, later = list[Trial](), list[int]()
    for step in range(2000):
        trial = cost.trial(5)
        if trial is not None and step < 6:
            first.append(trial)
        elif trial is not None:
            assert not trial.drafts
            later.append(step)
        drafts = trial is None or trial.drafts
        cost.observe(1.0, 5, 100.0, verified=2 * drafts, drafting=0, depth=1)
    assert [(trial.drafts, trial.halvings) for trial in first] == [
        (True, 0), (False, 0), (True, 1), (False, 0), (True, 2), (False, 0)
    ]  # fmt: skip
    assert [b - a for a, b in pairwise(later)] == [33, 65, 129, 257, 513] + [513] * (len(later) - 6)
    assert cost.trial(16) == Trial(True), "other numbers of requests are tried for themselves"


def test_a_sort_that_paid_again_is_tried_soon_after_it_stops() -> None:
    cost = LearnedCost(FLAT)
    taught(cost, 1.0, 1.0, 3)

    def until_trial(verified: int) -> int:
        for step in range(1000):
            if cost.trial(4) is not None:
                return step
            cost.observe(1.0, 4, 100.0, verified=verified, drafting=0, depth=1)
        raise AssertionError("no trial")

    assert until_trial(0) == 15  # of drafts, one step after the last
    cost.observe(1.0, 4, 100.0, verified=4, drafting=0, depth=1)
    assert until_trial(0) == 32
    for _ in range(16):
        cost.observe(1.0, 4, 100.0, verified=4, drafting=0, depth=1)
    assert cost.trial(4) == Trial(False)
    cost.observe(1.0, 4, 100.0, verified=0, drafting=0, depth=1)
    assert until_trial(0) == 15


def test_what_is_learned_stays_bounded() -> None:
    """Over many steps of unequal pace, in which pace and errors can be traded for each other."""
    random, cost = np.random.default_rng(0), LearnedCost(FLAT)
    pace = 0.0
    for _ in range(20_000):
        pace += random.choice([0.0, 0.0, 0.7, -0.7]) * (random.random() < 0.1)
        pace = min(max(pace, -2.0), 2.0)
        requests, drafts = int(random.choice([1, 2, 4, 8])), bool(random.random() < 0.9)
        seconds = float(np.exp(pace + random.normal(0, 0.1))) * (1.3 if drafts else 1.0)
        cost.observe(seconds, requests, 100.0, verified=requests * drafts, drafting=0, depth=1)
    errors = cost._errors
    assert np.abs(errors.mean).max() < 5 and np.linalg.eigvalsh(errors.covariance).min() > 0
    assert errors.covariance.max() < 20
    for requests in (1, 2, 4, 8):
        assert relative(cost, requests, requests) == pytest.approx([1.3], rel=0.1)


def test_seeds_are_decided_by_costs_that_no_clock_corrects() -> None:
    cost = LearnedCost(FLAT)
    policy = SkipDrafting(cost, LookAhead(cost))
    assert policy.reproducible() == SkipDrafting(FLAT, LookAhead(FLAT))
    assert SkipDrafting(cost, FixedPolicy(2)).reproducible() == SkipDrafting(FLAT, FixedPolicy(2))
    assert (
        policy.reproducible().reproducible() == policy.reproducible() and FixedPolicy().reproducible() == FixedPolicy()
    )
