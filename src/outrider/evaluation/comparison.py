"""Compare evaluations: results of several drafters of one target side by side, where their conditions are the same.

    LABEL=DIR  ->  DIR/results.json  ->  conditions: target, sampling, prompts, acceptance rule, machine, versions

Figures compare only under the same conditions, so other ones are refused. What belongs to the drafter is reported
instead: its training budget, and how much of its drafts is verified (`Group.verified`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from pydantic import BaseModel
from rich.box import SIMPLE_HEAD
from rich.table import Table

from outrider.evaluation.draft_cost import DraftCosts, cost_markdown
from outrider.evaluation.model_card import WHOLE, listed, verified
from outrider.evaluation.results import DrafterInfo, Results, TaskResult
from outrider.evaluation.verdict import Speedup
from outrider.utils.plots import save_figure
from outrider.utils.tables import markdown_table, terminal_table

_DATA = {"anchors", "samples", "response_tokens", "samples_sha256"}


@dataclass(frozen=True)
class LabelledResults:
    """The results in directory `path`, and the label they are compared under."""

    label: str
    path: Path
    results: Results

    @property
    def drafter(self) -> DrafterInfo:
        """The drafter of the results, under this label."""
        return self.results.drafter.model_copy(update={"label": self.label})


def split_label(argument: str) -> tuple[str, str]:
    """`NAME=WHERE` -> (NAME, WHERE), or ("", WHERE) without a name; the name of a directory may contain a `=`."""
    name, found, where = argument.partition("=")
    return (name, where) if found and not Path(argument).is_dir() else ("", argument)


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


def conditions_of(results: Results) -> dict[str, Any]:
    """The conditions that results must share to be compared, as a flat mapping; the policy is not among them."""
    settings = results.settings
    found = {name: settings.get(name) for name in ("target", "device", "dtype", "thinking", "max_new_tokens")}
    found |= {f"sampling {name}": value for name, value in settings.get("sampling", {}).items()}
    found["verification"] = results.lossy or "lossless"
    found["tasks"] = ", ".join(task.task for task in results.tasks)
    for task in results.tasks:
        found[f"samples of {task.task}"] = task.samples
        found[f"prompts of {task.task}"] = task.prompts_sha256
    found |= {f"machine {name}": value for name, value in results.machine.items()}
    return found | {f"version of {name}": value for name, value in results.versions.items()}


def cost_differences(costs: DraftCosts, conditions: Mapping[str, Any]) -> list[str]:
    """List where draft costs were measured with another target or machine than the results."""
    theirs = {"target": costs.target, **{f"machine {name}": value for name, value in costs.machine.items()}}
    ours = {name: conditions.get(name) for name in theirs}
    return differences(["results", "draft costs"], [ours, theirs])


def budgets_of(loaded: Sequence[LabelledResults]) -> list[str]:
    """List where training budgets differ. Anchors depend on the seed, so data are compared seed by seed."""
    trained = [(one.label, one.drafter.training) for one in loaded]
    known = [(label, training) for label, training in trained if training is not None]
    found = differences([label for label, _ in known], [{"steps": training.steps} for _, training in known])
    for seed in dict.fromkeys(training.seed for _, training in known):
        same = [(label, training) for label, training in known if training.seed == seed]
        fields = [training.model_dump(include=_DATA) for _, training in same]
        found += [f"seed {seed}, {line}" for line in differences([label for label, _ in same], fields)]
    return found


def differences(labels: Sequence[str], found: Sequence[Mapping[str, Any]]) -> list[str]:
    """`name: a (labels), b (labels)` for each name with more than one value; a missing value is no difference."""
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
    """A value of at most 60 characters; longer ones keep both ends, because versions differ at the end."""
    return value if len(value) <= 60 else f"{value[:28]}...{value[-28:]}"


# ----------------------------------------------------------------------------
# Figures per task, grouped by label (the seeds of one drafter). A group's figure is the mean over its results, with the
# lowest and the highest. The row "mean" is the unweighted mean over tasks, as in the papers. Speedup is over plain
# decoding of the same run.
# ----------------------------------------------------------------------------


MEAN = "mean"
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


class Spread(BaseModel):
    """Mean, lowest and highest of a figure over the results of a group."""

    mean: float
    low: float
    high: float


class GroupMember(BaseModel):
    """One result of a group: the drafter of one seed."""

    path: str
    drafter: DrafterInfo
    figures: list[Figures]  # per task, the mean last


class Group(BaseModel):
    """All results of one label. `spreads`: by task and name of the figure, None where a result does not record it."""

    label: str
    lossy: str  # `Results.lossy`
    verified: str  # what of each draft is verified
    entries: list[GroupMember]
    spreads: dict[str, dict[str, Spread | None]]

    @property
    def name(self) -> str:
        """The name in tables and legends."""
        return f"{self.label} (LOSSY)" if self.lossy else self.label


class Comparison(BaseModel):
    """The contents of comparison.json.

    Args:
        conditions: those of the first result.
        differences: conditions that are not the same throughout.
        budgets: where training budgets differ.
        draft_cost: the cost of drafting by draft length, where it was measured.
    """

    conditions: dict[str, Any]
    differences: list[str]
    budgets: list[str]
    groups: list[Group]
    draft_cost: DraftCosts | None = None


def compare(
    loaded: Sequence[LabelledResults], allow_different: bool = False, costs: DraftCosts | None = None
) -> Comparison:
    """Compare results, in the order given.

    Raises:
        ValueError: conditions differ and that is not allowed; no task in common; or one label for two drafters.
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
    return Comparison(
        conditions=conditions[0],
        differences=found,
        budgets=budgets_of(loaded),
        groups=groups,
        draft_cost=costs,
    )


def _tasks(one: LabelledResults) -> list[str]:
    return [task.task for task in one.results.tasks]


def _group(label: str, loaded: Sequence[LabelledResults], tasks: Sequence[str]) -> Group:
    mine = [one for one in loaded if one.label == label]
    kinds = [_identity(one) for one in mine]
    found = differences([str(one.path) for one in mine], kinds)
    if found:
        raise ValueError(f"{label!r} names different drafters: {'; '.join(found)}. Name them: NAME=DIR OTHER=DIR.")
    entries = [GroupMember(path=str(one.path), drafter=one.drafter, figures=_figures(one, tasks)) for one in mine]
    spreads = {}
    for i, task in enumerate([*tasks, MEAN]):
        rows = [entry.figures[i] for entry in entries]
        spreads[task] = {name: _spread([getattr(row, name) for row in rows]) for name in FIGURES}
    first = mine[0].results
    return Group(label=label, lossy=first.lossy, verified=verified(first.settings), entries=entries, spreads=spreads)


def _identity(one: LabelledResults) -> dict[str, Any]:
    """What the results of one label must have in common."""
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
    )


def speedups_of(comparison: Comparison) -> dict[str, list[Speedup]]:
    """The speedups of each drafter, one of each result and task, for a verdict."""
    found: dict[str, list[Speedup]] = {}
    for group in comparison.groups:
        mine = found.setdefault(group.name, [])
        for figures in (figures for entry in group.entries for figures in entry.figures if figures.task != MEAN):
            low, _, high = figures.speedup_quartiles
            mine.append(Speedup(figures.task, figures.speedup, low, high=high, samples=figures.turns))
    return found


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if len(known) == len(values) else None


def _spread(values: Sequence[float | None]) -> Spread | None:
    known = [value for value in values if value is not None]
    mean = _mean(values)
    return None if mean is None else Spread(mean=mean, low=min(known), high=max(known))


# ----------------------------------------------------------------------------
# Plots of a comparison: acceptance by position (as Figure 2 of DSpark, arXiv 2607.05147), tau, accepted per verified
# draft and speedup by task, and the cost of a draft by its length (as Figure 3 of DFlash, arXiv 2602.06036).
#
# A line (over all rounds) or a bar (mean) is one drafter, a small point one of its results. From the eleventh drafter
# on colours repeat, with dashes and hatches.
# ----------------------------------------------------------------------------


_COLOURS = 10  # of matplotlib's cycle
_MARKERS = "osD^vP*Xd<>h"
_NAME_INCHES = 0.26  # height of a legend's line
_DASHES, _HATCHES = ("-", "--", ":"), ("", "////", "xxxx")
_FEWEST_ROUNDS = 20  # positions that fewer rounds reached are not drawn: their rate is mostly noise


def line_style(number: int) -> dict[str, Any]:
    """Line style of the drafter with that number, the same in all plots."""
    dashes = _DASHES[number // _COLOURS % len(_DASHES)]
    marker = _MARKERS[number % len(_MARKERS)]
    return {"color": f"C{number % _COLOURS}", "linestyle": dashes, "marker": marker, "markersize": 5}


def bar_style(number: int) -> dict[str, Any]:
    """Bar style of the drafter with that number."""
    hatch = _HATCHES[number // _COLOURS % len(_HATCHES)]
    return {"color": f"C{number % _COLOURS}", "hatch": hatch, "edgecolor": "white", "linewidth": 0}


def plot_conditional(comparison: Comparison, path: Path) -> None:
    """Plot P(accept k | 1..k-1 accepted): a panel per task, a line per drafter."""
    tasks = [task for task in comparison.groups[0].spreads if task != MEAN]
    columns = min(len(tasks), 3)
    lines = math.ceil(len(tasks) / columns)
    size = (4.4 * columns + 1.6, max(3.6 * lines, _NAME_INCHES * len(comparison.groups)))
    figure, grid = plt.subplots(lines, columns, figsize=size, sharey=True, squeeze=False, layout="constrained")
    for unused in grid.flat[len(tasks) :]:
        unused.set_axis_off()
    for i, (task, axes) in enumerate(zip(tasks, grid.flat, strict=False)):
        for number, group in enumerate(comparison.groups):
            _conditional_line(axes, group, i, number=number)
        axes.set(xlabel="draft position k", ylim=(0, 1), title=task)
        axes.set_xticks(range(1, max(group.entries[0].drafter.gamma for group in comparison.groups) + 1))
        axes.grid(alpha=0.3)
    figure.supxlabel(
        f"positions that fewer than {_FEWEST_ROUNDS} rounds reached are left out", fontsize=8, color="grey"
    )
    grid[0][0].set_ylabel("P(accept k | 1..k-1 accepted)")
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, loc="outside right center")
    save_figure(figure, path)


def _conditional_line(axes: Axes, group: Group, task: int, number: int) -> None:
    found = [entry.figures[task] for entry in group.entries]
    style = line_style(number)
    heights = []
    for k in range(max(len(figures.reached) for figures in found)):
        known = [(f.conditional_acceptance[k], f.reached[k]) for f in found if k < len(f.reached)]
        judged = [(height, rounds) for height, rounds in known if height is not None and rounds]
        rounds = sum(count for _, count in judged)
        enough = rounds >= _FEWEST_ROUNDS
        heights.append(sum(height * count for height, count in judged) / rounds if enough else math.nan)
        if enough and len(found) > 1:
            axes.scatter([k + 1] * len(judged), [height for height, _ in judged], s=8, color=style["color"], alpha=0.5)
    axes.plot(range(1, len(heights) + 1), heights, label=group.name, **style)


def plot_tau_and_speedup(comparison: Comparison, path: Path) -> None:
    """Plot bars per task and drafter: tau, the accepted share of verified drafts (or nodes), and the speedup."""
    tasks = list(comparison.groups[0].spreads)
    # The width is limited, because the text of a wider figure is too small to read.
    width = min(14.0, max(6.4, 0.28 * len(tasks) * len(comparison.groups) + 2.6))
    figure, panels = plt.subplots(3, 1, figsize=(width, 8.0), sharex=True, layout="constrained")
    titles = {"accepted_length": "\u03c4, tokens per target pass", "acceptance_rate": "accepted / verified drafts"}
    titles["speedup"] = "speedup over plain decoding"
    for axes, (name, title) in zip(panels, titles.items(), strict=True):
        bar = 0.8 / len(comparison.groups)
        for number, group in enumerate(comparison.groups):
            places = [i + (number - (len(comparison.groups) - 1) / 2) * bar for i in range(len(tasks))]
            spreads = [group.spreads[task][name] for task in tasks]
            heights = [math.nan if spread is None else spread.mean for spread in spreads]
            axes.bar(places, heights, width=0.9 * bar, label=group.name, **bar_style(number))
            if len(group.entries) > 1:
                for entry in group.entries:
                    found = [getattr(figures, name) for figures in entry.figures]
                    points = [math.nan if figure is None else figure for figure in found]
                    axes.scatter(places, points, s=9, color="black", alpha=0.7, zorder=3)
        if name != "acceptance_rate":
            axes.axhline(1, color="grey", linewidth=0.8)
        axes.set(ylabel=title)
        axes.set_xticks(range(len(tasks)), tasks)
        axes.margins(x=0.02)
        axes.grid(alpha=0.3, axis="y")
    figure.legend(*panels[0].get_legend_handles_labels(), frameon=False, loc="outside right center")
    save_figure(figure, path)


def plot_draft_cost(costs: DraftCosts, path: Path) -> None:
    """Plot milliseconds per round against the length of the draft: medians, with the quartiles as a band."""
    height = max(4.0, _NAME_INCHES * len(costs.drafters))
    figure, axes = plt.subplots(figsize=(8.4, height), layout="constrained")
    for number, drafter in enumerate(costs.drafters):
        gammas = [point.gamma for point in drafter.points]
        low, middle, high = ([1e3 * point.whole[i] for point in drafter.points] for i in range(3))
        style = line_style(number)
        axes.plot(gammas, middle, label=drafter.info.label, **style)
        axes.fill_between(gammas, low, high, color=style["color"], alpha=0.15, linewidth=0)
    axes.set_xticks(range(1, max(drafter.info.gamma for drafter in costs.drafters) + 1))
    axes.set(xlabel="draft tokens in a row (of a tree: its depth)", ylabel="milliseconds per round", ylim=(0, None))
    axes.set_title(f"Cost of drafting after {costs.context} tokens ({costs.machine.get('cpu', 'unknown processor')})")
    axes.grid(alpha=0.3)
    figure.legend(frameon=False, loc="outside right center")
    save_figure(figure, path)


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
    """Cells under `HEADINGS`: for each task and the mean, each group followed by its results."""
    found = []
    for i in range(len(comparison.groups[0].spreads)):
        for group in comparison.groups:
            many = len(group.entries) > 1
            name = group.name + (f", {len(group.entries)} results" if many else "")
            found.append(_row(group, name, group.entries, task=i))
            if many:
                found += [_row(group, _entry_name(entry), [entry], task=i) for entry in group.entries]
    return found


def terminal(comparison: Comparison) -> Table:
    """The table for the terminal; wider than 80 characters."""
    title, text = "Drafters side by side", HEADINGS[:2]
    view = terminal_table(HEADINGS, text=text, title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    last = None
    for row in rows(comparison):
        if last not in (None, row[0]):
            view.add_section()
        view.add_row("" if row[0] == last else row[0], *row[1:])
        last = row[0]
    return view


def notes(comparison: Comparison) -> list[str]:
    """Notes to the table: conditions, differences, lossy rules, what is verified, training budgets."""
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
    if comparison.draft_cost is not None:
        lines += ["", *cost_markdown(comparison.draft_cost)]
    return "\n".join(lines) + "\n"


def write_comparison(comparison: Comparison, out: Path) -> list[Path]:
    """Write comparison.json, comparison.md and the plots to `out`; returns their paths."""
    out.mkdir(parents=True, exist_ok=True)
    names = ["comparison.json", "comparison.md", "conditional_acceptance.png", "tau_speedup.png"]
    paths = [out / name for name in names]
    paths[0].write_text(comparison.model_dump_json(indent=1) + "\n", encoding="utf-8")
    paths[1].write_text(markdown(comparison), encoding="utf-8")
    plot_conditional(comparison, paths[2])
    plot_tau_and_speedup(comparison, paths[3])
    if comparison.draft_cost is not None:
        paths.append(out / "draft_cost.png")
        plot_draft_cost(comparison.draft_cost, paths[-1])
    return paths


def _row(group: Group, name: str, entries: Sequence[GroupMember], task: int) -> list[str]:
    """The cells of some results of a group on one task: a figure, or their mean (lowest-highest)."""
    figures = [entry.figures[task] for entry in entries]
    cells = [_spread_cell(_spread([getattr(one, key) for one in figures]), _FORMATS[key]) for key in FIGURES]
    title = figures[0].task
    return [title, name, _gamma(entries[0]), *cells, _identical(figures, group), *_made(entries, title)]


def _entry_name(entry: GroupMember) -> str:
    training = entry.drafter.training
    return f"  seed {training.seed}" if training is not None else f"  {Path(entry.path).name}"


def _gamma(entry: GroupMember) -> str:
    """Draft tokens in a row, and all nodes where drafts branch."""
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
    """Cells of the parameters in millions and the training minutes; empty but in rows of the mean."""
    if task != MEAN:
        return ["", ""]
    parameters = entries[0].drafter.parameters
    seconds = [entry.drafter.training.seconds if entry.drafter.training else None for entry in entries]
    minutes = _mean([None if second is None else second / 60 for second in seconds])
    return [
        _UNKNOWN if parameters is None else f"{parameters / 1e6:.1f} M",
        _UNKNOWN if minutes is None else f"{minutes:.1f}",
    ]
