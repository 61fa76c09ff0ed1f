"""Compares evaluations of several drafters of one target, if they were measured under the same conditions.

    LABEL=DIR  ->  DIR/results.json  ->  conditions: target, sampling, prompts, acceptance rule, machine, versions

Results of different conditions are refused. Training budgets, and the part of each draft that is verified
(`Group.verified`), may differ and are reported.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray
from pydantic import BaseModel, ValidationError
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from outrider.api.drafter import split_label
from outrider.checkpoints.describe import DrafterInfo
from outrider.evaluation.config import CompareConfig
from outrider.evaluation.draft_cost import DraftCosts, cost_markdown, load_costs, plot_draft_cost
from outrider.evaluation.plots import (
    COLOURS,
    FEWEST_ROUNDS,
    GREY,
    MOST_SERIES,
    draw_band,
    label_point,
    save_figure,
    short_name,
    small_multiples,
)
from outrider.evaluation.results import WHOLE, Results, TaskResult, listed
from outrider.evaluation.verdict import Speedup
from outrider.training.logging import read_metrics
from outrider.utils.files import invalid_fields
from outrider.utils.terminal import markdown_table, terminal_table

_DATA = {"anchors", "samples", "response_tokens", "samples_sha256"}


@dataclass(frozen=True)
class LabelledResults:
    """Results of directory `path`, and their label in the comparison."""

    label: str
    path: Path
    results: Results

    @property
    def drafter(self) -> DrafterInfo:
        """The drafter of the results, under this label."""
        return self.results.drafter.model_copy(update={"label": self.label})


def load_results(argument: str) -> LabelledResults:
    """Read the results of `DIR` or `LABEL=DIR`.

    Raises:
        ValueError: no results there, or not such a file.
    """
    label, directory = split_label(argument)
    path = Path(directory) / "results.json"
    if not path.is_file():
        raise ValueError(f"{directory} has no results.json: give directories that outrider eval --out wrote.")
    results = Results.load(path)
    return LabelledResults(label or results.drafter.label, Path(directory), results)


def compare_directories(config: CompareConfig) -> Comparison:
    """Compare what `outrider eval` wrote into directories.

    Raises:
        ValueError: no results there, one directory twice, or results that are not comparable.
    """
    loaded = [load_results(argument) for argument in config.results]
    places = [one.path.resolve() for one in loaded]
    if twice := [one.path for one, place in zip(loaded, places, strict=True) if places.count(place) > 1]:
        raise ValueError(f"{twice[0]} is given twice; the results of one directory are those of one seed.")
    costs = None if config.draft_cost is None else load_costs(config.draft_cost)
    return compare(loaded, config.allow_different, costs, questions=config.questions)


def conditions_of(results: Results) -> dict[str, Any]:
    """The conditions that compared results must share, as a flat mapping; the policy is not among them."""
    settings = results.settings
    return {
        **{name: settings.get(name) for name in ("target", "device", "dtype", "thinking", "max_new_tokens")},
        "concurrency": settings.get("concurrency", 1),
        **{f"sampling {name}": value for name, value in settings.get("sampling", {}).items()},
        "verification": results.lossy or "lossless",
        "tasks": ", ".join(task.task for task in results.tasks),
        **{f"samples of {task.task}": task.samples for task in results.tasks},
        **{f"prompts of {task.task}": task.prompts_sha256 for task in results.tasks},
        **_machine(results.machine),
        **{f"version of {name}": value for name, value in results.versions.items()},
    }


def _machine(machine: Mapping[str, Any]) -> dict[str, Any]:
    return {f"machine {name}": value for name, value in machine.items()}


def budgets_of(loaded: Sequence[LabelledResults]) -> list[str]:
    """List the differences in training budgets. Anchors depend on the seed, so data are compared seed by seed."""
    trained = [(one.label, training) for one in loaded if (training := one.drafter.training) is not None]
    lines = differences([label for label, _ in trained], [{"steps": training.steps} for _, training in trained])
    for seed in dict.fromkeys(training.seed for _, training in trained):
        labels = [label for label, training in trained if training.seed == seed]
        fields = [training.model_dump(include=_DATA) for _, training in trained if training.seed == seed]
        lines += [f"seed {seed}, {line}" for line in differences(labels, fields)]
    return lines


def differences(labels: Sequence[str], fields: Sequence[Mapping[str, Any]]) -> list[str]:
    """List each name that has several values, as `name: a (labels), b (labels)`; missing values do not count."""
    lines = []
    for name in dict.fromkeys(chain.from_iterable(fields)):
        who: dict[str, list[str]] = {}
        for label, mine in zip(labels, fields, strict=True):
            if (value := mine.get(name)) is not None:
                who.setdefault(str(value), []).append(label)
        if len(who) > 1:
            lines.append(f"{name}: " + ", ".join(f"{_shortened(v)} ({', '.join(dict.fromkeys(w))})"
                                                 for v, w in who.items()))  # fmt: skip
    return lines


def _shortened(value: str) -> str:
    """A value of at most 60 characters, of both ends, because versions differ at the end."""
    return value if len(value) <= 60 else f"{value[:28]}...{value[-28:]}"


# ----------------------------------------------------------------------------
# Figures by task, grouped by label (the seeds of one drafter): mean, lowest and highest over the results of a group.
# The row "mean" is the unweighted mean over tasks, as in the papers. Speedup is over plain decoding of the same run.
# ----------------------------------------------------------------------------


MEAN = "mean"
_REPLICATES = 4000  # of the bootstrap
FIGURES: dict[str, Callable[[float], str]] = {
    "accepted_length": "{:.2f}".format,
    "acceptance_rate": lambda value: f"{100 * value:.1f} %",
    "speedup": "{:.2f}x".format,
    "draft_ms": "{:.1f}".format,
    "verify_ms": "{:.1f}".format,
}


class Figures(BaseModel):
    """One result on one task, or its mean over tasks. Milliseconds are per round.

    `acceptance_rate` is accepted / verified drafts (of trees: nodes), None where verified drafts were not recorded.
    """

    task: str
    accepted_length: float
    acceptance_rate: float | None
    speedup: float
    draft_ms: float
    verify_ms: float
    turns: int
    ties: int
    mismatches: int
    sampled: bool  # temperature > 0: not compared with plain decoding
    conditional_acceptance: list[float | None] = []  # [] in a mean
    reached: list[int] = []  # rounds in which position k was verified after k-1 accepted drafts; [] in a mean
    speedup_quartiles: list[float] = []  # over turns; [] in a mean
    by_prompt: list[tuple[int, int]] = []  # tokens and rounds of each prompt; [] in a mean, or not recorded


class Spread(BaseModel):
    """Mean, lowest and highest value of a figure over the results of a group."""

    mean: float
    low: float
    high: float


class GroupMember(BaseModel):
    """A result of a group: the drafter of one seed."""

    path: str
    drafter: DrafterInfo
    figures: list[Figures]  # per task, the mean last
    curve: list[tuple[int, float]] = []  # (step, expected tokens per round on held-out text) of its training


class Group(BaseModel):
    """All results of one label. `spreads`: by task and name of the figure, None where a result does not record it."""

    label: str
    lossy: str  # `Results.lossy`
    verified: str  # the part of each draft that is verified
    entries: list[GroupMember]
    spreads: dict[str, dict[str, Spread | None]]

    @property
    def name(self) -> str:
        """The name in tables and legends."""
        return f"{self.label} (LOSSY)" if self.lossy else self.label


class Comparison(BaseModel):
    """The contents of comparison.json."""

    conditions: dict[str, Any]  # of the first result
    differences: list[str]  # conditions that differ between results
    budgets: list[str]  # differences in training budgets
    groups: list[Group]
    draft_cost: DraftCosts | None = None  # by draft length, if it was measured
    dates: list[str] = []  # recorded in the results, sorted
    questions: dict[str, list[str]] = {}  # as in `compare`


def compare(
    loaded: Sequence[LabelledResults],
    allow_different: bool = False,
    costs: DraftCosts | None = None,
    questions: Mapping[str, Sequence[str]] | None = None,
) -> Comparison:
    """Compare results, in the order given.

    Args:
        questions: labels by the name of the question; the others are compared with the first.

    Raises:
        ValueError: conditions differ and that is not allowed; no task in common; one label for two drafters; or a
            question about no label, or one that there is not.
    """
    conditions = [conditions_of(one.results) for one in loaded]
    differing = differences([one.label for one in loaded], conditions)
    if costs is not None:
        theirs = {"target": costs.target, **_machine(costs.machine)}
        ours = {name: conditions[0].get(name) for name in theirs}
        differing += differences(["results", "draft costs"], [ours, theirs])
    if differing and not allow_different:
        raise ValueError(f"not comparable: {'; '.join(differing)}. --allow-different shows them all the same.")
    first, *others = ([task.task for task in one.results.tasks] for one in loaded)
    tasks = [name for name in first if all(name in other for other in others)]
    if not tasks:
        raise ValueError(f"no task is in all of {', '.join(str(one.path) for one in loaded)}.")
    groups = [_group(label, loaded, tasks) for label in dict.fromkeys(one.label for one in loaded)]
    for question, labels in (questions or {}).items():
        if unknown := sorted(set(labels) - {group.label for group in groups}):
            raise ValueError(f"question {question!r}: no results are called {', '.join(unknown)}.")
        if not labels:
            raise ValueError(f"question {question!r}: name the results that it compares.")
    return Comparison(
        conditions=conditions[0],
        differences=differing,
        budgets=budgets_of(loaded),
        groups=groups,
        draft_cost=costs,
        dates=sorted({one.results.date for one in loaded if one.results.date}),
        questions={question: list(labels) for question, labels in (questions or {}).items()},
    )


def load_comparison(path: Path) -> Comparison:
    """Read the comparison.json that `outrider compare --out` wrote.

    Raises:
        ValueError: something else; the message names the file and the field.
    """
    try:
        found = Comparison.model_validate_json(path.read_bytes())
    except ValidationError as error:
        reason = invalid_fields(error, "the file")[0]
        raise ValueError(f"{path} is no comparison.json of outrider compare ({reason}); compare again.") from error
    figures = [one for group in found.groups for entry in group.entries for one in entry.figures]
    if not figures or any(len(one.speedup_quartiles) != 3 for one in figures if one.task != MEAN):
        raise ValueError(f"{path} has no quartiles of the speedups; compare again (outrider compare).")
    return found


def _group(label: str, loaded: Sequence[LabelledResults], tasks: Sequence[str]) -> Group:
    mine = [one for one in loaded if one.label == label]
    if differing := differences([str(one.path) for one in mine], [_identity(one) for one in mine]):
        raise ValueError(f"{label!r} names different drafters: {'; '.join(differing)}. Name them: NAME=DIR OTHER=DIR.")
    entries = [
        GroupMember(path=str(one.path), drafter=one.drafter, figures=_figures(one, tasks), curve=_curve(one))
        for one in mine
    ]
    spreads = {
        task: {name: _spread([getattr(entry.figures[i], name) for entry in entries]) for name in FIGURES}
        for i, task in enumerate([*tasks, MEAN])
    }
    first = mine[0].results
    return Group(label=label, lossy=first.lossy, verified=first.verified, entries=entries, spreads=spreads)


def _curve(one: LabelledResults) -> list[tuple[int, float]]:
    """Held-out expected length by step, from the metrics of the drafter's training; [] if they are gone."""
    metrics = Path(str(one.results.settings.get("drafter"))).parent / "metrics.jsonl"
    entries = read_metrics(metrics).get("held_out", []) if metrics.is_file() else []
    return [(entry["step"], entry["expected_length_greedy"]) for entry in entries if "expected_length_greedy" in entry]


def _identity(one: LabelledResults) -> dict[str, Any]:
    """The fields that results of one label must share."""
    options = ("policy", "confidence_threshold", "draft_length", "block_size", "tree")
    training = one.drafter.training
    return {
        **one.drafter.model_dump(include={"algorithm", "gamma", "parameters", "nodes"}),
        "verification": one.results.lossy or "lossless",
        **{name: one.results.settings.get(name) for name in options},
        "recipe": training and training.recipe_sha256,
    }


def _figures(one: LabelledResults, tasks: Sequence[str]) -> list[Figures]:
    of_task = {task.task: task for task in one.results.tasks}
    rows = [figures_of(of_task[name]) for name in tasks]
    mean: dict[str, Any] = {name: _mean([getattr(row, name) for row in rows]) for name in FIGURES}
    mean |= {name: sum(getattr(row, name) for row in rows) for name in ("turns", "ties", "mismatches")}
    return [*rows, Figures(task=MEAN, **mean, sampled=any(row.sampled for row in rows))]


def figures_of(task: TaskResult) -> Figures:
    """The figures of one task."""
    accepted = sum(k * count for k, count in enumerate(task.acceptance_histogram))
    same = ("task", "accepted_length", "speedup", "turns", "conditional_acceptance", "reached", "speedup_quartiles")
    return Figures(
        **{name: getattr(task, name) for name in same},
        acceptance_rate=accepted / task.verified_drafts if task.verified_drafts else None,
        draft_ms=1e3 * task.draft_seconds / task.rounds,
        verify_ms=1e3 * task.verify_seconds / task.rounds,
        ties=task.greedy_ties,
        mismatches=task.greedy_mismatches,
        sampled=task.greedy_identical is None,
        by_prompt=task.by_prompt or [],
    )


def speedups_of(comparison: Comparison) -> dict[str, list[Speedup]]:
    """Speedups of each drafter, one for each result and task, for a verdict."""
    return {
        group.name: [
            Speedup(f.task, f.speedup, f.speedup_quartiles[0], high=f.speedup_quartiles[2], samples=f.turns)
            for entry in group.entries for f in entry.figures if f.task != MEAN
        ]
        for group in comparison.groups
    }  # fmt: skip


def difference_interval(first: Group, other: Group) -> tuple[float, float] | None:
    """95 % interval of the difference of two mean accepted lengths, `other` less `first`, by a paired bootstrap.

    Each replicate draws the prompts of every task, the same for both groups, and the results (seeds) of each group.
    With two seeds the spread over seeds is underestimated.

    Returns:
        None if a result does not record its prompts, or a prompt had no round.
    """
    random, taus = np.random.default_rng(0), []
    for place in range(len(first.entries[0].figures) - 1):  # without the mean
        found = [[entry.figures[place].by_prompt for entry in group.entries] for group in (first, other)]
        sizes = {len(one) for mine in found for one in mine}
        if len(sizes) > 1 or 0 in sizes or not all(rounds for mine in found for one in mine for _, rounds in one):
            return None
        (prompts,) = sizes
        times_RP = random.multinomial(prompts, [1 / prompts] * prompts, size=_REPLICATES)
        taus.append([_resampled(mine, times_RP) for mine in found])
    means = []
    for tau_TRS in zip(*taus, strict=True):
        tau_RS = np.mean(tau_TRS, axis=0)
        seeds_RS = random.integers(tau_RS.shape[1], size=tau_RS.shape)
        means.append(np.take_along_axis(tau_RS, seeds_RS, axis=1).mean(axis=1))
    low, high = np.quantile(means[1] - means[0], [0.025, 0.975])
    return float(low), float(high)


def _resampled(results: Sequence[Sequence[tuple[int, int]]], times_RP: NDArray[np.int64]) -> NDArray[np.float64]:
    """Accepted length [replicates, results] of prompts (tokens, rounds) that are drawn `times_RP` times."""
    tokens_SP, rounds_SP = np.moveaxis(np.array(results, dtype=np.float64), 2, 0)
    return (times_RP @ tokens_SP.T) / (times_RP @ rounds_SP.T)


def _mean(values: Sequence[float | None]) -> float | None:
    spread = _spread(values)
    return None if spread is None else spread.mean


def _spread(values: Sequence[float | None]) -> Spread | None:
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return None
    return Spread(mean=sum(known) / len(known), low=min(known), high=max(known))


# ----------------------------------------------------------------------------
# Plots of a comparison: acceptance by position (as Figure 2 of DSpark, arXiv 2607.05147), tau and speedup by task, and
# the cost of a draft by its length (as Figure 3 of DFlash, arXiv 2602.06036).
#
# Drafters are ranked by mean speedup. The first eight have lines, the first five bars; tau_speedup_all has all bars. A
# line (over all rounds) or bar (mean) is a drafter, a small point one of its results.
# ----------------------------------------------------------------------------


BEST = 5  # drafters with bars


def ranked(comparison: Comparison) -> list[Group]:
    """The groups in the order of their mean speedup, the fastest first."""

    def speed(group: Group) -> float:
        spread = group.spreads[MEAN]["speedup"]
        return spread.mean if spread else 0.0

    return sorted(comparison.groups, key=speed, reverse=True)


def _facts(comparison: Comparison, most: int) -> tuple[str | None, ...]:
    """Facts for a title: target, temperature, that only the `most` fastest drafters are shown, and dates."""
    count, dates = len(comparison.groups), comparison.dates
    temperature = comparison.conditions.get("sampling temperature")
    shown = f"the {most} fastest of {count} drafters" if count > most else None
    days = " to ".join(dict.fromkeys((dates[0], dates[-1]))) if dates else None
    return short_name(comparison.conditions["target"]), f"temperature {temperature or 0:g}", shown, days


def plot_conditional(comparison: Comparison, path: Path) -> None:
    """Plot P(accept k | 1..k-1 accepted): a panel per task, a line per drafter."""
    tasks, groups = [task for task in comparison.groups[0].spreads if task != MEAN], ranked(comparison)[:MOST_SERIES]
    figure, panels = small_multiples(len(tasks), 3, panel=(5.2, 3.6))
    gamma = max(group.entries[0].drafter.gamma for group in groups)
    for i, (task, axes) in enumerate(zip(tasks, panels, strict=True)):
        axes.set(xlabel="draft position k", ylim=(0, 1), xticks=range(1, gamma + 1), xlim=(0.5, gamma + 0.5))
        axes.set_title(task, fontsize=10)
        axes.grid(alpha=0.3)
        for rank, group in enumerate(groups):
            _conditional_line(axes, group, i, rank=rank)
    note = f"positions that fewer than {FEWEST_ROUNDS} rounds reached are left out; bold: the fastest drafter"
    figure.supxlabel(note, fontsize=8, color="grey")
    panels[0].set_ylabel("P(accept k | 1..k-1 accepted)")
    save_figure(figure, path, "Conditional acceptance by position", *_facts(comparison, MOST_SERIES))


def _conditional_line(axes: Axes, group: Group, task: int, rank: int) -> None:
    """Draw a drafter's line over the positions that enough rounds reached, rank 0 in front."""
    color, figures = COLOURS[rank], [entry.figures[task] for entry in group.entries]
    heights: dict[int, float] = {}
    for k in range(max(len(f.reached) for f in figures)):
        known = [(f.conditional_acceptance[k], f.reached[k]) for f in figures if k < len(f.reached)]
        judged = [(height, rounds) for height, rounds in known if height is not None and rounds]
        rounds = sum(count for _, count in judged)
        if rounds < FEWEST_ROUNDS:
            continue
        heights[k + 1] = sum(height * count for height, count in judged) / rounds
        if len(figures) > 1:
            axes.scatter([k + 1] * len(judged), [height for height, _ in judged], s=8, color=color, alpha=0.5)
    width, size = (2.6, 5) if rank == 0 else (1.2, 3)
    order = 3 + (MOST_SERIES - rank) / 100
    axes.plot(list(heights), list(heights.values()), "o-", color=color, linewidth=width, markersize=size, zorder=order,
              label=group.name)  # fmt: skip


def plot_tau_and_speedup(comparison: Comparison, path: Path, most: int = BEST) -> None:
    """Plot tau and speedup by task as bars of the `most` fastest drafters, sorted by their mean speedup."""
    tasks, groups = list(comparison.groups[0].spreads), ranked(comparison)[:most]
    size = (2.6 * len(tasks) + 2.2, 2 * (0.27 * len(groups) + 0.9) + 0.6)
    figure, grid = plt.subplots(2, len(tasks), figsize=size, sharey=True, squeeze=False, layout="constrained")
    names = {"accepted_length": "\u03c4, tokens per target pass", "speedup": "speedup over plain decoding"}
    places = list(range(len(groups)))
    for panels, (name, title) in zip(grid, names.items(), strict=True):
        for axes, task in zip(panels, tasks, strict=True):
            spreads = [group.spreads[task][name] for group in groups]
            heights = [math.nan if spread is None else spread.mean for spread in spreads]
            colours = [GREY if name == "speedup" and height < 1 else COLOURS[0] for height in heights]
            axes.barh(places, heights, height=0.75, color=colours)
            for place, group, height in zip(places, groups, heights, strict=True):
                points = [getattr(f, name) for entry in group.entries for f in entry.figures if f.task == task]
                if len(points) > 1:
                    axes.scatter(points, [place] * len(points), s=7, color="black", alpha=0.7, zorder=3)
                label_point(axes, f"{height:.2f}", x=max([height, *points]), y=place)
            axes.axvline(1, color="black", linewidth=0.8)
            axes.set_title(task, fontsize=10)
            axes.set_xlabel(title, fontsize=8)
            axes.margins(x=0.18)
            axes.set_xlim(0, None)
            axes.grid(alpha=0.3, axis="x")
        panels[0].set_yticks(places, [group.name for group in groups], fontsize=8)
    grid[0][0].invert_yaxis()  # of all panels, which share it
    title = "Accepted length and speedup (grey: slower than plain decoding)"
    save_figure(figure, path, title, *_facts(comparison, most))


def plot_questions(comparison: Comparison, path: Path) -> None:
    """Plot tau, the mean over tasks, of the labels of each question: a panel per question.

    A large dot is the mean over a label's results, small dots are the results. A line is the first label's mean plus
    the 95 % interval of the difference (`difference_interval`).
    """
    groups, questions = {group.label: group for group in comparison.groups}, comparison.questions
    columns = min(3, len(questions))
    lines = math.ceil(len(questions) / columns)
    size = (max(7.2, 4.4 * columns), lines * (0.24 * max(map(len, questions.values())) + 0.9) + 0.6)
    figure, grid = plt.subplots(lines, columns, figsize=size, sharex=True, squeeze=False, layout="constrained")
    for axes in grid.flat[len(questions) :]:
        axes.set_axis_off()
    intervals = [_plot_question(axes, question, [groups[label] for label in labels])
                 for axes, (question, labels) in zip(grid.flat, questions.items(), strict=False)]  # fmt: skip
    note = "; lines: 95 % of the difference to the first" if any(intervals) else ""
    figure.supxlabel(f"\u03c4, tokens per target pass, mean over tasks; small dots: seeds{note}", fontsize=9)
    save_figure(figure, path, "Accepted length by question", *_facts(comparison, len(comparison.groups)))


def _plot_question(axes: Axes, question: str, groups: Sequence[Group]) -> bool:
    """Draw a panel of `plot_questions`; returns whether it has an interval."""
    intervals = [difference_interval(groups[0], group) for group in groups[1:]]
    first = _tau(groups[0]).mean
    axes.axvline(first, color=GREY, linewidth=1)
    for place, (group, interval) in enumerate(zip(groups, [None, *intervals], strict=True)):
        tau, right = _tau(group), _tau(group).high
        if interval is not None:
            low, high = (first + end for end in interval)
            axes.plot([low, high], [place, place], color=COLOURS[0], linewidth=1.6)
            right = max(right, high)
        seeds = [entry.figures[-1].accepted_length for entry in group.entries]
        axes.plot(seeds, [place] * len(seeds), "o", color=COLOURS[0], markersize=2.5)
        axes.plot([tau.mean], [place], "o", color=COLOURS[0], markersize=5)
        label_point(axes, f"{tau.mean:.2f}", x=right, y=place)
    axes.set_title(question, fontsize=10)
    axes.set_yticks(range(len(groups)), [group.name for group in groups], fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.2, y=0.15)
    axes.grid(alpha=0.3, axis="x")
    axes.tick_params(labelbottom=True)
    return any(interval is not None for interval in intervals)


def plot_convergence(comparison: Comparison, path: Path) -> bool:
    """Plot held-out expected length by training step: a panel per question, a line per label, its seeds as a band.

    Figure 5 of DFlash (arXiv 2602.06036) is such a panel. A line has the steps that all seeds of its label have.

    Returns:
        False, and nothing is written, if no label of a question has a curve.
    """
    curves = {}
    for group in comparison.groups:
        seeds = [dict(entry.curve) for entry in group.entries]
        if steps := sorted(set.intersection(*map(set, seeds))):
            curves[group.label] = steps, [[seed[step] for seed in seeds] for step in steps]
    known = {question: [label for label in labels if label in curves][:MOST_SERIES]
             for question, labels in comparison.questions.items()}  # fmt: skip
    known = {question: labels for question, labels in known.items() if labels}
    if not known:
        return False
    figure, panels = small_multiples(len(known), 3, panel=(4.4, 2.8))
    for axes, (question, labels) in zip(panels, known.items(), strict=True):
        for label, color in zip(labels, COLOURS, strict=False):
            steps, heights = curves[label]
            low, middle, high = list(map(min, heights)), list(map(statistics.fmean, heights)), list(map(max, heights))
            draw_band(axes, steps, low=low, middle=middle, high=high, color=color, label=label)
        axes.set_title(question, fontsize=10)
        axes.grid(alpha=0.3)
    figure.supxlabel("training step", fontsize=9)
    figure.supylabel("expected tokens per round, held out", fontsize=9)
    save_figure(figure, path, "Convergence; bands: lowest to highest seed", *_facts(comparison, len(comparison.groups)))
    return True


# ----------------------------------------------------------------------------
# A comparison as a terminal table, as Markdown and as JSON.
#
# task | drafter           | gamma        | tau              | per verified | speedup | ... | parameters | minutes
# gsm8k  dspark, 3 results   7              2.51 (2.48-2.55)   21.6 %         ...
#          seed 0            7              2.48               21.1 %         ...
#        eagle3 (LOSSY)      6 (60 nodes)   2.92               3.2 %          ...
# ----------------------------------------------------------------------------


HEADINGS = (
    *("task", "drafter", "gamma", "tau", "per verified", "speedup", "draft ms", "verify ms", "identical", "parameters"),
    "minutes",
)
_UNKNOWN = "-"


def rows(comparison: Comparison) -> list[list[str]]:
    """Cells under `HEADINGS`: for each task and the mean, the groups, each followed by its results."""
    lines = []
    for i in range(len(comparison.groups[0].spreads)):
        for group in comparison.groups:
            many = len(group.entries) > 1
            name = group.name + (f", {len(group.entries)} results" if many else "")
            lines.append(_row(group, name, group.entries, task=i))
            for entry in group.entries if many else ():
                training = entry.drafter.training
                name = f"  seed {training.seed}" if training is not None else f"  {Path(entry.path).name}"
                lines.append(_row(group, name, [entry], task=i))
    return lines


def _row(group: Group, name: str, entries: Sequence[GroupMember], task: int) -> list[str]:
    """Cells of results of a group on one task: a figure, or the mean (lowest-highest) of several.

    Parameters, in millions, and training minutes are in rows of the mean alone.
    """
    figures, drafter = [entry.figures[task] for entry in entries], entries[0].drafter
    gamma = str(drafter.gamma)
    if drafter.nodes not in (None, drafter.gamma):
        gamma += f" ({drafter.nodes} nodes)"
    cells = [_spread_cell(_spread([getattr(one, key) for one in figures]), FIGURES[key]) for key in FIGURES]
    cells = [figures[0].task, name, gamma, *cells, _identical(figures, group)]
    if figures[0].task != MEAN:
        return [*cells, "", ""]
    parameters = _UNKNOWN if drafter.parameters is None else f"{drafter.parameters / 1e6:.1f} M"
    seconds = _mean([entry.drafter.training.seconds if entry.drafter.training else None for entry in entries])
    return [*cells, parameters, _UNKNOWN if seconds is None else f"{seconds / 60:.1f}"]


def _identical(figures: Sequence[Figures], group: Group) -> str:
    if any(one.sampled for one in figures):
        return "sampled"
    turns, ties, wrong = (sum(getattr(f, name) for f in figures) for name in ("turns", "ties", "mismatches"))
    text = f"{turns - ties - wrong}/{turns}"
    text += f", {ties} tie{'s' if ties > 1 else ''}" if ties else ""
    return text + (f", {wrong} DIFFER" if wrong and not group.lossy else "")


def _tau(group: Group) -> Spread:
    """Tokens per target pass, mean over tasks, which every result records."""
    tau = group.spreads[MEAN]["accepted_length"]
    assert tau is not None
    return tau


def _spread_cell(spread: Spread | None, text: Callable[[float], str]) -> str:
    if spread is None:
        return _UNKNOWN
    mean, low, high = map(text, (spread.mean, spread.low, spread.high))
    return mean if spread.low == spread.high else f"{mean} ({low}-{high})"


_SHOWN = ("tau", "per verified", "speedup", "draft ms", "verify ms", "identical")  # on the terminal


def terminal(comparison: Comparison) -> list[Table]:
    """Tables for a terminal of 80 columns: mean figures by task; gamma, parameters and minutes of each drafter."""
    style: dict[str, Any] = {"box": SIMPLE_HEAD, "padding": (0, 1, 0, 0)}
    figures = terminal_table(("drafter", "tau", "acc.", "speedup", "draft", "verify", "identical"), text=("drafter",),
                             title="Drafters side by side (draft, verify: ms a round)", **style)  # fmt: skip
    made = terminal_table(("drafter", "gamma", "parameters", "minutes"), text=("drafter",), **style)
    last = None
    for row in rows(comparison):
        cells = dict(zip(HEADINGS, row, strict=True))
        if row[0] != last:
            figures.add_section()
            figures.add_row(f"[bold]{escape(row[0])}[/bold]")
        last = row[0]
        figures.add_row(escape(cells["drafter"]), *(cells[name].partition(" (")[0] for name in _SHOWN))
        if cells["parameters"]:
            made.add_row(*(escape(cells[name]) for name in ("drafter", "gamma", "parameters", "minutes")))
    return [figures, made]


def notes(comparison: Comparison) -> list[str]:
    """Notes to the table: conditions, differences, lossy rules, verified parts, training budgets."""
    conditions = comparison.conditions.items()
    shown = {name: value for name, value in conditions if not name.startswith(("prompts of", "tasks"))}
    lines = [f"Conditions: {listed(shown)}."]
    lines += [f"Differs: {line}." for line in comparison.differences]
    lines += [f"{g.label}: {g.lossy}; its output is not the target's." for g in comparison.groups if g.lossy]
    partly = [f"{g.label} {g.verified}" for g in comparison.groups if g.verified != WHOLE]
    if partly:
        lines.append(f"Verified where not the {WHOLE}: {'; '.join(partly)}.")
    lines += [f"Training differs: {line}." for line in comparison.budgets]
    unrecorded = [g.label for g in comparison.groups if any(entry.drafter.training is None for entry in g.entries)]
    if unrecorded:
        lines.append(f"No training recorded: {', '.join(unrecorded)}.")
    if not comparison.budgets and len(unrecorded) < len(comparison.groups):
        lines.append("Steps, anchors and training data are the same where they are recorded.")
    return lines


QUESTION_HEADINGS = ("question", "drafter", "tau", "difference", "95 %", "in spreads")


def answers(comparison: Comparison) -> list[list[str]]:
    """Cells under `QUESTION_HEADINGS`: tau, the mean over tasks, and its difference to the question's first label.

    Then its 95 % (`difference_interval`), and the difference over the larger of the two spreads (highest less lowest
    result); below 3 more seeds are wanted.
    """
    groups = {group.label: group for group in comparison.groups}
    lines = []
    for question, labels in comparison.questions.items():
        first = _tau(groups[labels[0]])
        for label in labels:
            tau, compared = _tau(groups[label]), ["", "", ""]
            if label != labels[0]:
                difference, spread = tau.mean - first.mean, max(first.high - first.low, tau.high - tau.low)
                interval = difference_interval(groups[labels[0]], groups[label])
                between = _UNKNOWN if interval is None else f"{interval[0]:+.2f} to {interval[1]:+.2f}"
                compared = [f"{difference:+.2f}", between, f"{abs(difference) / spread:.1f}" if spread else _UNKNOWN]
            lines.append([question, label, _spread_cell(tau, FIGURES["accepted_length"]), *compared])
    return lines


def markdown(comparison: Comparison) -> str:
    """The table and its notes as Markdown."""
    lines = [
        *markdown_table(HEADINGS, rows(comparison), text=HEADINGS[:2]),
        "",
        "tau: tokens per target pass, the target's own included. per verified: accepted drafts per verified draft, "
        "which in trees are nodes. speedup: over "
        "plain decoding in the same run, prefill included. ms: per round. identical: turns equal to plain greedy "
        "decoding. parameters: the drafter's own. minutes: of training. Several results of one drafter: "
        "their mean (lowest-highest), then each.",
        "",
        *(f"- {line}" for line in notes(comparison)),
    ]
    if comparison.questions:
        lines += ["", *markdown_table(QUESTION_HEADINGS, answers(comparison), text=QUESTION_HEADINGS[:2])]
        lines += ["", "tau: mean over tasks. difference: to the question's first drafter. 95 %: of it, by a bootstrap "
                  "over prompts, the same for both, and seeds. in spreads: the difference over the larger spread "
                  "(highest less lowest seed) of the two."]  # fmt: skip
    if comparison.draft_cost is not None:
        lines += ["", *cost_markdown(comparison.draft_cost)]
    return "\n".join(lines) + "\n"


def write_comparison(comparison: Comparison, out: Path) -> list[Path]:
    """Write comparison.json, comparison.md and the plots to `out`; returns their paths."""
    out.mkdir(parents=True, exist_ok=True)
    names = ("comparison.json", "comparison.md", "conditional_acceptance.png", "tau_speedup.png", "tau_speedup_all.png")
    json_file, table, conditional, best, everyone = paths = [out / name for name in names]
    json_file.write_text(comparison.model_dump_json(indent=1) + "\n", encoding="utf-8")
    table.write_text(markdown(comparison), encoding="utf-8")
    plot_conditional(comparison, conditional)
    plot_tau_and_speedup(comparison, best)
    plot_tau_and_speedup(comparison, everyone, most=len(comparison.groups))
    if comparison.questions:
        paths.append(out / "questions.png")
        plot_questions(comparison, paths[-1])
    if plot_convergence(comparison, out / "convergence.png"):
        paths.append(out / "convergence.png")
    if comparison.draft_cost is not None:
        paths.append(out / "draft_cost.png")
        plot_draft_cost(comparison.draft_cost, paths[-1], [group.label for group in ranked(comparison)])
    return paths
