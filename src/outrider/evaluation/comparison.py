"""Compares evaluations of several drafters of one target, if they were measured under the same conditions.

    LABEL=DIR  ->  DIR/results.json  ->  conditions: target, sampling, prompts, acceptance rule, machine, versions

Results of different conditions are refused. Training budgets, and the part of each draft that is verified
(`Group.verified`), may differ and are reported.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
    LineEnd,
    draw_band,
    label_ends,
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
    if not results.tasks:
        raise ValueError(f"{path} has no tasks: run outrider eval again.")
    return LabelledResults(label or results.drafter.label, Path(directory), results)


def compare_directories(config: CompareConfig) -> Comparison:
    """Compare what `outrider eval` wrote into directories.

    Raises:
        ValueError: no results there, one directory twice, or results that are not comparable.
    """
    loaded = [load_results(argument) for argument in config.results]
    known: set[Path] = set()
    for results in loaded:
        if results.path.resolve() in known:
            raise ValueError(f"{results.path} is given twice; the results of one directory are those of one seed.")
        known.add(results.path.resolve())
    costs = None if config.draft_cost is None else load_costs(config.draft_cost)
    return compare(loaded, config.allow_different, costs, questions=config.questions)


def conditions_of(results: Results) -> dict[str, Any]:
    """The conditions that compared results must share, as a flat mapping; the policy is not among them."""
    settings = results.settings
    found = {name: settings.get(name) for name in ("target", "device", "dtype", "thinking", "max_new_tokens")}
    found["concurrency"] = settings.get("concurrency", 1)
    found |= {f"sampling {name}": value for name, value in settings.get("sampling", {}).items()}
    found["verification"] = results.lossy or "lossless"
    found["tasks"] = ", ".join(task.task for task in results.tasks)
    for task in results.tasks:
        found[f"samples of {task.task}"] = task.samples
        found[f"prompts of {task.task}"] = task.prompts_sha256
    found |= {f"machine {name}": value for name, value in results.machine.items()}
    return found | {f"version of {name}": value for name, value in results.versions.items()}


def cost_differences(costs: DraftCosts, conditions: Mapping[str, Any]) -> list[str]:
    """List the differences in target and machine between draft costs and results."""
    theirs = {"target": costs.target, **{f"machine {name}": value for name, value in costs.machine.items()}}
    ours = {name: conditions.get(name) for name in theirs}
    return differences(["results", "draft costs"], [ours, theirs])


def budgets_of(loaded: Sequence[LabelledResults]) -> list[str]:
    """List the differences in training budgets. Anchors depend on the seed, so data are compared seed by seed."""
    trained = [(one.label, one.drafter.training) for one in loaded]
    known = [(label, training) for label, training in trained if training is not None]
    found = differences([label for label, _ in known], [{"steps": training.steps} for _, training in known])
    for seed in dict.fromkeys(training.seed for _, training in known):
        same = [(label, training) for label, training in known if training.seed == seed]
        fields = [training.model_dump(include=_DATA) for _, training in same]
        found += [f"seed {seed}, {line}" for line in differences([label for label, _ in same], fields)]
    return found


def differences(labels: Sequence[str], found: Sequence[Mapping[str, Any]]) -> list[str]:
    """List each name that has several values, as `name: a (labels), b (labels)`; missing values do not count."""
    lines = []
    for name in dict.fromkeys(name for one in found for name in one):
        who: dict[str, list[str]] = {}
        for label, one in zip(labels, found, strict=True):
            if one.get(name) is not None:
                who.setdefault(str(one[name]), []).append(label)
        if len(who) > 1:
            found_here = (f"{_shortened(v)} ({', '.join(dict.fromkeys(w))})" for v, w in who.items())
            lines.append(f"{name}: " + ", ".join(found_here))
    return lines


def _shortened(value: str) -> str:
    """Shorten a value to 60 characters, of both ends, because versions differ at the end."""
    return value if len(value) <= 60 else f"{value[:28]}...{value[-28:]}"


# ----------------------------------------------------------------------------
# Figures by task, grouped by label (the seeds of one drafter): mean, lowest and highest over the results of a group.
# The row "mean" is the unweighted mean over tasks, as in the papers. Speedup is over plain decoding of the same run.
# ----------------------------------------------------------------------------


MEAN = "mean"
_REPLICATES = 4000  # of the bootstrap
FIGURES = ("accepted_length", "acceptance_rate", "speedup", "draft_ms", "verify_ms")


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
    """The contents of comparison.json.

    Attributes:
        conditions: of the first result.
        differences: conditions that differ between results.
        budgets: differences in training budgets.
        draft_cost: cost of drafting by draft length, if it was measured.
        dates: recorded in the results, sorted.
        questions: as in `compare`.
    """

    conditions: dict[str, Any]
    differences: list[str]
    budgets: list[str]
    groups: list[Group]
    draft_cost: DraftCosts | None = None
    dates: list[str] = []
    questions: dict[str, list[str]] = {}


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
    found = differences([one.label for one in loaded], conditions)
    found += [] if costs is None else cost_differences(costs, conditions[0])
    if found and not allow_different:
        raise ValueError(f"not comparable: {'; '.join(found)}. --allow-different shows them all the same.")
    tasks = [name for name in _tasks(loaded[0]) if all(name in _tasks(one) for one in loaded)]
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
        differences=found,
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


def _tasks(one: LabelledResults) -> list[str]:
    return [task.task for task in one.results.tasks]


def _group(label: str, loaded: Sequence[LabelledResults], tasks: Sequence[str]) -> Group:
    mine = [one for one in loaded if one.label == label]
    kinds = [_identity(one) for one in mine]
    found = differences([str(one.path) for one in mine], kinds)
    if found:
        raise ValueError(f"{label!r} names different drafters: {'; '.join(found)}. Name them: NAME=DIR OTHER=DIR.")
    entries = [
        GroupMember(path=str(one.path), drafter=one.drafter, figures=_figures(one, tasks), curve=_curve(one))
        for one in mine
    ]
    spreads = {}
    for i, task in enumerate([*tasks, MEAN]):
        rows = [entry.figures[i] for entry in entries]
        spreads[task] = {name: _spread([getattr(row, name) for row in rows]) for name in FIGURES}
    first = mine[0].results
    return Group(label=label, lossy=first.lossy, verified=first.verified, entries=entries, spreads=spreads)


def _curve(one: LabelledResults) -> list[tuple[int, float]]:
    """Held-out expected length by step, from the metrics of the drafter's training; [] if they are gone."""
    metrics = Path(str(one.results.settings.get("drafter"))).parent / "metrics.jsonl"
    entries = read_metrics(metrics).get("held_out", []) if metrics.is_file() else []
    return [(entry["step"], entry["expected_length_greedy"]) for entry in entries if "expected_length_greedy" in entry]


def _identity(one: LabelledResults) -> dict[str, Any]:
    """The fields that results of one label must share."""
    drafter, settings = one.drafter, one.results.settings
    found = {"algorithm": drafter.algorithm, "gamma": drafter.gamma, "parameters": drafter.parameters}
    found |= {"nodes": drafter.nodes, "verification": one.results.lossy or "lossless"}
    found |= {
        name: settings.get(name) for name in ("policy", "confidence_threshold", "draft_length", "block_size", "tree")
    }
    return found | ({} if drafter.training is None else {"recipe": drafter.training.recipe_sha256})


def _figures(one: LabelledResults, tasks: Sequence[str]) -> list[Figures]:
    of_task = {task.task: task for task in one.results.tasks}
    rows = [figures_of(of_task[name]) for name in tasks]
    mean: dict[str, Any] = {name: _mean([getattr(row, name) for row in rows]) for name in FIGURES}
    mean |= {name: sum(getattr(row, name) for row in rows) for name in ("turns", "ties", "mismatches")}
    return [*rows, Figures(task=MEAN, **mean, sampled=any(row.sampled for row in rows))]


def figures_of(task: TaskResult) -> Figures:
    """The figures of one task."""
    accepted = sum(k * count for k, count in enumerate(task.acceptance_histogram))
    return Figures(
        task=task.task,
        accepted_length=task.accepted_length,
        acceptance_rate=accepted / task.verified_drafts if task.verified_drafts else None,
        speedup=task.speedup,
        draft_ms=1e3 * task.draft_seconds / task.rounds,
        verify_ms=1e3 * task.verify_seconds / task.rounds,
        turns=task.turns,
        ties=task.greedy_ties,
        mismatches=task.greedy_mismatches,
        sampled=task.greedy_identical is None,
        conditional_acceptance=task.conditional_acceptance,
        reached=task.reached,
        speedup_quartiles=task.speedup_quartiles,
        by_prompt=task.by_prompt or [],
    )


def speedups_of(comparison: Comparison) -> dict[str, list[Speedup]]:
    """Speedups of each drafter, one for each result and task, for a verdict."""
    found: dict[str, list[Speedup]] = {}
    for group in comparison.groups:
        mine = found.setdefault(group.name, [])
        for figures in (figures for entry in group.entries for figures in entry.figures if figures.task != MEAN):
            low, _, high = figures.speedup_quartiles
            mine.append(Speedup(figures.task, figures.speedup, low, high=high, samples=figures.turns))
    return found


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
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if len(known) == len(values) else None


def _spread(values: Sequence[float | None]) -> Spread | None:
    known = [value for value in values if value is not None]
    mean = _mean(values)
    return None if mean is None else Spread(mean=mean, low=min(known), high=max(known))


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
    means = {group.label: group.spreads[MEAN]["speedup"] for group in comparison.groups}
    return sorted(comparison.groups, key=lambda group: -(found.mean if (found := means[group.label]) else 0.0))


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
    for i, (task, axes) in enumerate(zip(tasks, panels, strict=True)):
        axes.set(xlabel="draft position k", ylim=(0, 1))
        axes.set_title(task, fontsize=10)
        gamma = max(group.entries[0].drafter.gamma for group in groups)
        axes.set_xticks(range(1, gamma + 1))
        axes.set_xlim(0.5, gamma + 0.5)
        axes.grid(alpha=0.3)
        ends = [_conditional_line(axes, group, i, rank=rank) for rank, group in enumerate(groups)]
        label_ends(axes, [end for end in ends if end is not None])
    note = f"positions that fewer than {FEWEST_ROUNDS} rounds reached are left out; bold: the fastest drafter"
    figure.supxlabel(note, fontsize=8, color="grey")
    panels[0].set_ylabel("P(accept k | 1..k-1 accepted)")
    save_figure(figure, path, "Conditional acceptance by position", *_facts(comparison, MOST_SERIES))


def _conditional_line(axes: Axes, group: Group, task: int, rank: int) -> LineEnd | None:
    """Draw a drafter's line, rank 0 in front, and return its end; None if few rounds reached every position."""
    color, order = COLOURS[rank], 3 + (MOST_SERIES - rank) / 100
    found = [entry.figures[task] for entry in group.entries]
    drawn: list[tuple[int, float]] = []
    for k in range(max(len(figures.reached) for figures in found)):
        known = [(f.conditional_acceptance[k], f.reached[k]) for f in found if k < len(f.reached)]
        judged = [(height, rounds) for height, rounds in known if height is not None and rounds]
        rounds = sum(count for _, count in judged)
        if rounds < FEWEST_ROUNDS:
            continue
        drawn.append((k + 1, sum(height * count for height, count in judged) / rounds))
        if len(found) > 1:
            axes.scatter([k + 1] * len(judged), [height for height, _ in judged], s=8, color=color, alpha=0.5)
    width, size = (2.6, 5) if rank == 0 else (1.2, 3)
    positions, heights = [k for k, _ in drawn], [height for _, height in drawn]
    axes.plot(positions, heights, "o-", color=color, zorder=order, linewidth=width, markersize=size)
    return LineEnd(*drawn[-1], text=group.name, color=color) if drawn else None


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
    save_figure(
        figure, path, "Accepted length and speedup (grey: slower than plain decoding)", *_facts(comparison, most)
    )


def plot_questions(comparison: Comparison, path: Path) -> None:
    """Plot tau, the mean over tasks, of the labels of each question: a panel per question.

    A large dot is the mean over a label's results, small dots are the results. A line is the first label's mean plus
    the 95 % interval of the difference (`difference_interval`).
    """
    groups, asked = {group.label: group for group in comparison.groups}, comparison.questions
    columns = min(3, len(asked))
    lines = math.ceil(len(asked) / columns)
    most = max(map(len, asked.values()))
    size = (max(7.2, 4.4 * columns), lines * (0.24 * most + 0.9) + 0.6)
    figure, grid = plt.subplots(lines, columns, figsize=size, sharex=True, squeeze=False, layout="constrained")
    intervals = False
    for axes in grid.flat[len(asked) :]:
        axes.set_axis_off()
    for axes, (question, labels) in zip(grid.flat, asked.items(), strict=False):
        for place, label in enumerate(labels):
            tau = groups[label].spreads[MEAN]["accepted_length"]
            assert tau is not None
            right = tau.high
            if not place:
                first = tau.mean
                axes.axvline(first, color=GREY, linewidth=1)
            elif (interval := difference_interval(groups[labels[0]], groups[label])) is not None:
                low, high = first + interval[0], first + interval[1]
                axes.plot([low, high], [place, place], color=COLOURS[0], linewidth=1.6)
                right, intervals = max(right, high), True
            seeds = [entry.figures[-1].accepted_length for entry in groups[label].entries]
            axes.plot(seeds, [place] * len(seeds), "o", color=COLOURS[0], markersize=2.5)
            axes.plot([tau.mean], [place], "o", color=COLOURS[0], markersize=5)
            label_point(axes, f"{tau.mean:.2f}", x=right, y=place)
        axes.set_title(question, fontsize=10)
        axes.set_yticks(range(len(labels)), [groups[label].name for label in labels], fontsize=8)
        axes.invert_yaxis()
        axes.margins(x=0.2, y=0.15)
        axes.grid(alpha=0.3, axis="x")
        axes.tick_params(labelbottom=True)
    lines_are = "; lines: 95 % of the difference to the first" if intervals else ""
    figure.supxlabel(f"\u03c4, tokens per target pass, mean over tasks; small dots: seeds{lines_are}", fontsize=9)
    save_figure(figure, path, "Accepted length by question", *_facts(comparison, len(comparison.groups)))


def _curves(comparison: Comparison, labels: Sequence[str]) -> dict[str, tuple[list[int], list[list[float]]]]:
    """{label: (steps, held-out expected lengths of all its seeds at each step)}.

    Steps that not all seeds of a label have are left out, and labels without a step.
    """
    found = {}
    for group in comparison.groups:
        curves = [dict(entry.curve) for entry in group.entries]
        steps = sorted(set.intersection(*map(set, curves)))
        if steps and group.label in labels:
            found[group.label] = steps, [[curve[step] for curve in curves] for step in steps]
    return found


def plot_convergence(comparison: Comparison, path: Path) -> bool:
    """Plot held-out expected length by training step: a panel per question, a line per label, its seeds as a band.

    Figure 5 of DFlash (arXiv 2602.06036) is such a panel.

    Returns:
        False, and nothing is written, if no label of a question has a curve.
    """
    known = {question: _curves(comparison, labels) for question, labels in comparison.questions.items()}
    known = {question: curves for question, curves in known.items() if curves}
    if not known:
        return False
    figure, panels = small_multiples(len(known), 3, panel=(4.4, 2.8))
    ends: list[list[LineEnd]] = []
    for axes, (question, curves) in zip(panels, known.items(), strict=True):
        drawn = [label for label in comparison.questions[question] if label in curves][:MOST_SERIES]
        ends.append([])
        for label, color in zip(drawn, COLOURS, strict=False):
            steps, heights = curves[label]
            band = [min(found) for found in heights], [max(found) for found in heights]
            means = [sum(found) / len(found) for found in heights]
            ends[-1].append(draw_band(axes, steps, means, band=band, color=color, text=label))
        axes.set_title(question, fontsize=10)
        axes.grid(alpha=0.3)
    for axes, mine in zip(panels, ends, strict=True):  # when the limits, which all panels share, are set
        label_ends(axes, mine)
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
_FORMATS: dict[str, Callable[[float], str]] = {
    "accepted_length": lambda value: f"{value:.2f}",
    "acceptance_rate": lambda value: f"{100 * value:.1f} %",
    "speedup": lambda value: f"{value:.2f}x",
    "draft_ms": lambda value: f"{value:.1f}",
    "verify_ms": lambda value: f"{value:.1f}",
}


def rows(comparison: Comparison) -> list[list[str]]:
    """Cells under `HEADINGS`: for each task and the mean, the groups, each followed by its results."""
    found = []
    for i in range(len(comparison.groups[0].spreads)):
        for group in comparison.groups:
            many = len(group.entries) > 1
            name = group.name + (f", {len(group.entries)} results" if many else "")
            found.append(_row(group, name, group.entries, task=i))
            if many:
                found += [_row(group, _entry_name(entry), [entry], task=i) for entry in group.entries]
    return found


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
    shown = {
        name: value for name, value in comparison.conditions.items() if not name.startswith(("prompts of", "tasks"))
    }
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
    taus = {label: group.spreads[MEAN]["accepted_length"] for label, group in groups.items()}
    found = []
    for question, labels in comparison.questions.items():
        first = taus[labels[0]]
        for label in labels:
            tau = taus[label]
            assert first is not None and tau is not None
            difference, spread = tau.mean - first.mean, max(first.high - first.low, tau.high - tau.low)
            compared = ["", "", ""]
            if label != labels[0]:
                interval = difference_interval(groups[labels[0]], groups[label])
                compared = [
                    f"{difference:+.2f}",
                    _UNKNOWN if interval is None else f"{interval[0]:+.2f} to {interval[1]:+.2f}",
                    f"{abs(difference) / spread:.1f}" if spread else _UNKNOWN,
                ]
            found.append([question, label, _spread_cell(tau, _FORMATS["accepted_length"]), *compared])
    return found


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
    names = ["comparison.json", "comparison.md", "conditional_acceptance.png", "tau_speedup.png", "tau_speedup_all.png"]
    paths = [out / name for name in names]
    paths[0].write_text(comparison.model_dump_json(indent=1) + "\n", encoding="utf-8")
    paths[1].write_text(markdown(comparison), encoding="utf-8")
    plot_conditional(comparison, paths[2])
    plot_tau_and_speedup(comparison, paths[3])
    plot_tau_and_speedup(comparison, paths[4], most=len(comparison.groups))
    if comparison.questions:
        paths.append(out / "questions.png")
        plot_questions(comparison, paths[-1])
    if plot_convergence(comparison, out / "convergence.png"):
        paths.append(out / "convergence.png")
    if comparison.draft_cost is not None:
        paths.append(out / "draft_cost.png")
        plot_draft_cost(comparison.draft_cost, paths[-1], [group.label for group in ranked(comparison)])
    return paths


def _row(group: Group, name: str, entries: Sequence[GroupMember], task: int) -> list[str]:
    """Cells of results of a group on one task: a figure, or the mean (lowest-highest) of several."""
    figures = [entry.figures[task] for entry in entries]
    cells = [_spread_cell(_spread([getattr(one, key) for one in figures]), _FORMATS[key]) for key in FIGURES]
    title = figures[0].task
    return [title, name, _gamma(entries[0]), *cells, _identical(figures, group), *_made(entries, title)]


def _entry_name(entry: GroupMember) -> str:
    training = entry.drafter.training
    return f"  seed {training.seed}" if training is not None else f"  {Path(entry.path).name}"


def _gamma(entry: GroupMember) -> str:
    """The draft length, and the number of nodes of a tree."""
    gamma, nodes = entry.drafter.gamma, entry.drafter.nodes
    return str(gamma) if nodes is None or nodes == gamma else f"{gamma} ({nodes} nodes)"


def _spread_cell(found: Spread | None, text: Callable[[float], str]) -> str:
    if found is None:
        return _UNKNOWN
    return text(found.mean) if found.low == found.high else f"{text(found.mean)} ({text(found.low)}-{text(found.high)})"


def _identical(figures: Sequence[Figures], group: Group) -> str:
    if any(one.sampled for one in figures):
        return "sampled"
    turns, ties = sum(one.turns for one in figures), sum(one.ties for one in figures)
    wrong = sum(one.mismatches for one in figures)
    text = f"{turns - ties - wrong}/{turns}"
    text += f", {ties} tie{'s' if ties > 1 else ''}" if ties else ""
    return text + (f", {wrong} DIFFER" if wrong and not group.lossy else "")


def _made(entries: Sequence[GroupMember], task: str) -> list[str]:
    """Cells of parameters in millions and training minutes, which only rows of the mean have."""
    if task != MEAN:
        return ["", ""]
    parameters = entries[0].drafter.parameters
    seconds = [entry.drafter.training.seconds if entry.drafter.training else None for entry in entries]
    minutes = _mean([None if second is None else second / 60 for second in seconds])
    return [
        _UNKNOWN if parameters is None else f"{parameters / 1e6:.1f} M",
        _UNKNOWN if minutes is None else f"{minutes:.1f}",
    ]
