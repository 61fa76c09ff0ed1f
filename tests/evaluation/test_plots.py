"""What the pictures show: ticks, titles, which lines are drawn and which are highlighted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

import outrider.evaluation.plots as plots
from outrider.decoding.cost import Profile
from outrider.evaluation.comparison import BEST, Comparison, plot_tau_and_speedup, ranked
from outrider.evaluation.figures import plot_acceptance, plot_profile
from outrider.evaluation.loadtest.metrics import Frontier
from outrider.evaluation.loadtest.plots import plot_frontier, plot_load
from outrider.evaluation.results import Results

MEASURED = Path(__file__).parents[2] / "docs" / "results"
SMOLLM2 = "SmolLM2-135M-Instruct"


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Where to draw; figures stay open."""
    with monkeypatch.context() as patch:
        patch.setattr(plots.plt, "close", lambda figure: None)
        yield tmp_path / "plot.png"
    plt.close("all")


def title(figure: Figure) -> str:
    return figure.get_suptitle()


@pytest.mark.parametrize(
    ("heights", "moved"),
    [
        ([0.1, 0.5, 0.9], [0.1, 0.5, 0.9]),
        ([0.5, 0.5], [0.45, 0.55]),
        ([0.2, 0.5, 0.5, 0.52], [0.2, 0.406667, 0.506667, 0.606667]),
    ],
)
def test_labels_move_apart_as_little_as_possible(heights: list[float], moved: list[float]) -> None:
    assert plots.apart(heights, 0.1) == pytest.approx(moved, abs=1e-5)


def test_positions_that_few_rounds_reached_are_hidden(drawn: Path) -> None:
    found = Results.load(MEASURED / "shipped-greedy" / "results.json")
    plot_acceptance(found, drawn)
    lines = [bars.lines[0] for bars in plt.gcf().axes[0].containers]
    for task, line in zip(found.tasks, lines, strict=True):
        enough = [c for c, rounds in zip(task.conditional_acceptance, task.reached, strict=True) if rounds >= 20]
        assert list(line.get_ydata()) == enough
    assert min(len(line.get_ydata()) for line in lines) < 7, "some are, in this file"
    named = title(plt.gcf())
    assert all(fact in named for fact in (SMOLLM2, "drafter smollm2-135m-dspark", "temperature 0", "2026-11-27"))


def test_the_frontier_highlights_three_variants(drawn: Path) -> None:
    found = Frontier.load(MEASURED / "load" / "frontier.json")
    for plot in (plot_frontier, plot_load):
        plot(found, drawn)
        axes = plt.gcf().axes[0]
        colours = [to_hex(line.get_color()).upper() for line in axes.lines]
        assert colours[-3:] == [plots.COLOURS[1], plots.COLOURS[0], "#000000"] and set(colours[:-3]) == {plots.GREY}
        assert SMOLLM2 in title(plt.gcf()) and "2026-11-21" in title(plt.gcf())
    assert [text.get_text() for text in axes.texts if text.get_color() == "#000000"] == ["none"]
    assert [int(tick) for tick in axes.get_xticks()] == [1, 2, 4, 8, 16, 32]


def test_a_profile_has_ticks_at_powers_of_two_and_break_even(drawn: Path) -> None:
    plot_profile(Profile.load(MEASURED / "load" / "profile.json"), drawn, 256, rows=8)
    left, middle, right = plt.gcf().axes
    assert [int(tick) for tick in left.get_xticks()] == [1 << i for i in range(9)]
    assert (
        [int(tick) for tick in middle.get_xticks()]
        == [int(tick) for tick in right.get_xticks()]
        == [1, 2, 4, 8, 16, 32]
    )
    assert list(right.lines[0].get_ydata()) == sorted(right.lines[0].get_ydata()) and "pay above" in right.get_title()


def test_bars_are_those_of_the_fastest_in_order(drawn: Path) -> None:
    found = Comparison.model_validate_json((MEASURED / "drafters" / "comparison.json").read_text())
    plot_tau_and_speedup(found, drawn)
    mean = plt.gcf().axes[-1]
    widths = [bar.get_width() for bar in mean.patches]
    assert len(widths) == BEST and widths == sorted(widths, reverse=True) and mean.yaxis_inverted()
    assert [text.get_text() for text in plt.gcf().axes[0].get_yticklabels()] == [g.name for g in ranked(found)[:BEST]]
    assert f"the {BEST} fastest of 17 drafters" in title(plt.gcf())
