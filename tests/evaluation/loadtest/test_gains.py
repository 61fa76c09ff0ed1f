"""Gains at equal throughput and equal user speed: known curves, values outside of them, intervals."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from outrider.cli.bench import show_gains
from outrider.evaluation.loadtest.metrics import (
    Curve,
    Frontier,
    Gain,
    Measured,
    Metrics,
    Point,
    gains,
    summarise_points,
)
from outrider.evaluation.loadtest.plots import highlighted, write_plots
from outrider.utils.terminal import Terminal

LOADS = (1.0, 2.0, 4.0, 8.0)


def hyperbola(area: float, first: float = 10.0, repeats: int = 1, noise: float = 0.0) -> Measured:
    """Throughput = area / user speed, from user speed `first` halving with the load: straight in logarithms."""
    speeds = [first / load for load in LOADS]
    draw = np.random.default_rng(3)
    return {
        load: {r: (speed, area / speed * math.exp(noise * draw.standard_normal())) for r in range(repeats)}
        for load, speed in zip(LOADS, speeds, strict=True)
    }


def by_figure(found: list[Gain], figure: str) -> list[Gain]:
    return [gain for gain in found if gain.figure == figure]


def test_gains_between_straight_curves_are_exact() -> None:
    """30 / s over 20 / s, measured at other speeds: 1.5 at any speed, and 1.5 at any throughput."""
    found = gains({"base": hyperbola(20.0), "fast": hyperbola(30.0, first=20.0)}, "base", speeds=[7.0, 3.0])
    assert {(gain.variant, gain.against) for gain in found} == {("fast", "base")}
    promised, matched = by_figure(found, "throughput"), by_figure(found, "speed")
    assert [(gain.at, gain.ratio) for gain in promised] == [(7.0, pytest.approx(1.5)), (3.0, pytest.approx(1.5))]
    assert [gain.at for gain in matched] == [2.0, 4.0, 8.0, 16.0]
    assert [gain.ratio for gain in matched[:3]] == [pytest.approx(1.5)] * 3 or matched[0].outside
    assert all(gain.low is None and gain.high is None for gain in found), "one repeat has no spread"


def test_what_is_outside_of_a_curve_is_said() -> None:
    """The fast variant has user speeds 20 to 2.5 and throughputs 1.5 to 12; the baseline 10 to 1.25 and 2 to 16."""
    found = gains({"base": hyperbola(20.0), "fast": hyperbola(30.0, first=20.0)}, "base", speeds=[15.0, 5.0, 2.0])
    above, inside, below = by_figure(found, "throughput")
    assert above.ratio is None and above.outside == "base has 1.25 to 10"
    assert inside.ratio == pytest.approx(1.5) and not inside.outside
    assert below.ratio is None and below.outside == "fast has 2.5 to 20"
    most = by_figure(found, "speed")[-1]
    assert (most.at, most.ratio, most.outside) == (16.0, None, "fast has 1.5 to 12")


def test_the_baselines_own_speeds_are_the_default_and_belong_to_its_curve() -> None:
    found = gains({"base": hyperbola(20.0), "same": hyperbola(20.0)}, "base")
    assert [gain.at for gain in by_figure(found, "throughput")] == [10.0, 5.0, 2.5, 1.25]
    assert all(gain.ratio == pytest.approx(1.0, abs=1e-12) for gain in found), "ends are part of a curve"


def test_a_load_that_gives_less_of_both_is_no_part_of_the_curve() -> None:
    points = np.array([[10.0, 10.0], [5.0, 8.0], [4.0, 20.0], [2.0, 20.0], [np.nan, 30.0]])
    curve = Curve(points)
    assert curve.points_L2.tolist() == [[10.0, 10.0], [4.0, 20.0]]
    assert curve.read(0, math.sqrt(40.0)) == pytest.approx(math.sqrt(200.0))
    assert curve.read(1, math.sqrt(200.0)) == pytest.approx(math.sqrt(40.0)), "read from either side it is one curve"
    assert curve.covers(0, 4.0) and not curve.covers(0, 3.9) and not curve.covers(1, 20.1)


def test_intervals_hold_what_repeats_vary_together() -> None:
    """A machine that is slower in one repeat is slower for all: gains do not vary. Noise of one variant does."""
    drift = {0: 1.0, 1: 0.7, 2: 1.2}

    def drifting(area: float) -> Measured:
        once = {load: found[0] for load, found in hyperbola(area).items()}
        return {load: {r: (s * f, t * f) for r, f in drift.items()} for load, (s, t) in once.items()}

    base, fast = drifting(20.0), drifting(30.0)
    for gain in gains({"base": base, "fast": fast}, "base", speeds=[5.0]):
        if gain.ratio is not None:
            assert (gain.low, gain.high) == (pytest.approx(1.5), pytest.approx(1.5))
    noisy = hyperbola(30.0, first=20.0, repeats=5, noise=0.1)
    (gain,) = by_figure(gains({"base": hyperbola(20.0, repeats=5), "fast": noisy}, "base", speeds=[5.0]), "throughput")
    assert gain.low is not None and gain.high is not None and gain.ratio is not None
    assert 1.2 < gain.low < gain.ratio < gain.high < 1.8 and gain.high - gain.low > 0.02
    assert gains({"base": base, "fast": fast}, "base") == gains({"base": base, "fast": fast}, "base")


def test_a_stopped_sweep_has_gains_of_what_is_there() -> None:
    base, fast = hyperbola(20.0, repeats=3), hyperbola(30.0, first=20.0, repeats=3)
    del fast[4.0][2], fast[8.0][2], fast[8.0][1]  # type: ignore[attr-defined]
    gain = by_figure(gains({"base": base, "fast": fast}, "base", speeds=[5.0]), "throughput")[0]
    assert gain.ratio == pytest.approx(1.5) and (gain.low, gain.high) == (pytest.approx(1.5), pytest.approx(1.5))
    assert gains({"fast": fast, "base": {}}, "base") == [], "no curve to compare with"


def points(**areas: float) -> list[Point]:
    """Two repeats of variants on hyperbolas; `__` in a name stands for the `/` behind a drafter."""
    names = dict.fromkeys(Metrics.model_fields, 1.0) | {"tokens": 1, "requests": 1, "steps": 1}
    return [
        Point(
            variant=variant.replace("__", "/").replace("_", "-"), level=load, repeat=repeat,
            same=1, ties=0, mismatches=0,
            metrics=Metrics(**names | {"user_p50": speed, "tokens_per_second": throughput}),
        )
        for variant, area in areas.items()
        for load, found in hyperbola(area, repeats=2).items()
        for repeat, (speed, throughput) in found.items()
    ]  # fmt: skip


@pytest.mark.slow
def test_the_frontier_has_gains_over_mtp_1_by_default(tmp_path: Path) -> None:
    drafters = {"m": {"algorithm": "mtp", "choice": "runs/m"}, "d": {"algorithm": "dspark", "choice": "auto"}}
    measured = points(none=10.0, m__fixed_1=20.0, d__fixed_1=22.0, d__fixed_3=30.0)
    found = Frontier.of("closed", measured, {"drafters": drafters})
    ratios = {gain.variant: gain.ratio for gain in found.gains if gain.at == 5.0}
    assert ratios == {"none": pytest.approx(0.5), "d/fixed-1": pytest.approx(1.1), "d/fixed-3": pytest.approx(1.5)}
    assert {gain.against for gain in found.gains} == {"m/fixed-1"}
    assert set(highlighted(found)) == {"none", "m/fixed-1", "d/fixed-3"}, "the best of each drafter"
    plain = Frontier.of("closed", measured, {})
    assert {gain.against for gain in plain.gains} == {"none"}
    asked = Frontier.of("closed", measured, {}, against="d/fixed-1", user_speeds=[4.0])
    assert {(gain.against, gain.at) for gain in asked.gains if gain.figure == "throughput"} == {("d/fixed-1", 4.0)}
    assert Frontier.of("poisson", measured, {}).gains == [], "a rate of arrivals is no throughput"
    assert Frontier.of("closed", measured, {}, against="m/fixed-2").gains == []
    assert [path.name for path in write_plots(found, tmp_path)] == ["frontier.png", "load.png", "gains.png"]
    found.save(tmp_path)
    assert Frontier.load(tmp_path / "frontier.json") == found and len(summarise_points(measured)) == len(found.points)


def test_gains_are_printed_or_the_reason_why_not(capsys: pytest.CaptureFixture[str]) -> None:
    """The best variant of each drafter, six values at most, with intervals; what is outside is blank."""
    console = Terminal(width=80)
    frontier = Frontier.of("closed", points(none=10.0, d__fixed_1=22.0, d__fixed_3=30.0), {})
    show_gains(frontier, console)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("throughput over that of none, by tokens/s promised to a user (below: 90 % interval")
    assert lines[1].split() == ["variant", "1.25", "2.5", "5", "10"]
    assert lines[2].split() == ["d/fixed-3", *["3.00"] * 4] and lines[3].split() == ["3.00-3.00"] * 4
    near = hyperbola(20.0)
    far = {load: {r: (100 * s, 100 * t) for r, (s, t) in found.items()} for load, found in near.items()}
    frontier.gains = gains({"none": near, "d/fixed-3": far}, "none")
    show_gains(frontier, console)
    assert capsys.readouterr().out.splitlines() == [
        "throughput over that of none: the curves have no tokens/s promised to a user in common; measure more loads",
        "tokens/s of the median user over those with none: the curves have no tokens/s of all users in common; "
        "measure more loads",
    ]
    frontier.gains = []
    show_gains(frontier, console)
    assert not capsys.readouterr().out
