"""The page of a report: a summary first, then a section for each file, then what is needed to measure the same again.

    find_sources -> Section (verdict, pictures, tables, settings) -> report.html, a Jinja template -> one file

Pictures are those of the verbs, as SVG inside the page. Traces are shown by the inspector's view, which is in
serving/page/trace.js. The page loads nothing: its content security policy forbids it.
"""

from __future__ import annotations

import json
import tempfile
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, singledispatch
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from outrider.calibration.fit import Calibration
from outrider.evaluation import comparison as compared
from outrider.evaluation import report as evaluated
from outrider.evaluation.comparison import Comparison
from outrider.evaluation.draft_cost import DraftCosts, cost_cells, cost_title
from outrider.evaluation.model_card import calibration_rows, eval_command
from outrider.evaluation.profile import PLAIN_WIDTH, break_even
from outrider.evaluation.results import Results
from outrider.evaluation.verdict import comparison_verdict, cost_verdict, drafter_verdict, load_verdict, pooled
from outrider.loadtest import plots as loads
from outrider.loadtest.metrics import Frontier, speedups, table_rows
from outrider.loadtest.simulate import errors_of, validation_rows
from outrider.report.sources import Answer, Source, Training, is_within
from outrider.scheduling.cost import Profile
from outrider.training.logging import plot_training
from outrider.utils.measure import today
from outrider.utils.packaged import PACKAGE
from outrider.utils.plots import MOST_SERIES, short_name

_VIEW = PACKAGE / "serving" / "page"  # of traces


@dataclass(frozen=True)
class Picture:
    """A picture as SVG. `alt` says what it shows, `note` what it follows."""

    svg: bytes
    alt: str
    note: str = ""

    @property
    def url(self) -> str:
        return f"data:image/svg+xml;base64,{b64encode(self.svg).decode()}"


@dataclass(frozen=True)
class Figures:
    """A table: headings, then rows; the first `names` columns are text."""

    caption: str
    cells: list[list[str]]
    names: int = 1


@dataclass(frozen=True)
class Section:
    """What the page says of one file.

    Attributes:
        title: of the section, after the kind's heading.
        lines: the verdict first.
        key: the figure to remember and what it is; None: none.
        settings, machine, versions: of the measurement, as far as they are recorded.
        command: that measures the same again, where it follows from the settings.
    """

    title: str
    lines: list[str]
    pictures: list[Picture] = field(default_factory=list)
    tables: list[Figures] = field(default_factory=list)
    key: tuple[str, str] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    machine: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    command: str = ""


def drawn(draw: Callable[[Path], None], alt: str, note: str = "") -> Picture:
    """The picture that a function of a path writes."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "picture.svg"
        draw(path)
        return Picture(path.read_bytes(), alt, note)


@singledispatch
def describe(content: Any) -> Section:
    """The section of a file's content; one function per type."""
    raise TypeError(f"no section for {type(content).__name__}")


@describe.register
def _(content: Comparison) -> Section:
    found = compared.speedups_of(content)
    best = max(found, key=lambda name: pooled(found[name])[0])
    pictures = [
        drawn(
            partial(compared.plot_tau_and_speedup, content, most=MOST_SERIES),
            "Accepted length and speedup of each drafter by task",
        ),
        drawn(
            partial(compared.plot_conditional, content),
            "Acceptance by draft position, a panel per task",
            "as Figure 2 of DSpark, arXiv 2607.05147",
        ),
    ]
    if content.draft_cost is not None:
        pictures.append(_draft_cost(content.draft_cost, [group.label for group in compared.ranked(content)]))
    figures = Figures("Figures by task", [list(compared.HEADINGS), *compared.rows(content)], names=2)
    return Section(
        f"{len(content.groups)} drafters of {short_name(content.conditions.get('target'))}",
        [*comparison_verdict(found), *compared.notes(content)[1:]],
        pictures,
        tables=[figures],
        key=(f"{pooled(found[best])[0]:.2f}x", f"plain decoding with {best}, the fastest of {len(found)} drafters"),
        settings=content.conditions,
    )


@describe.register
def _(content: Results) -> Section:
    found = evaluated.speedups(content)
    name, tasks = short_name(content.settings.get("drafter", content.drafter.label)), len(content.tasks)
    target, temperature = short_name(content.settings.get("target")), content.settings.get("temperature", 0)
    pictures = [
        drawn(
            partial(evaluated.plot_acceptance, content),
            "Acceptance by draft position, a line per task",
            "as Figure 2 of DSpark, arXiv 2607.05147",
        ),
        drawn(partial(evaluated.plot_histogram, content), "Share of rounds by accepted drafts"),
    ]
    return Section(
        f"{name} on {target}, temperature {temperature:g}",
        [*drafter_verdict(found, {}), *([f"{content.lossy}."] if content.lossy else [])],
        pictures,
        tables=[
            Figures(
                "Speculative against plain decoding, same run", [list(evaluated.HEADINGS), *evaluated.rows(content)]
            )
        ],
        key=(f"{pooled(found)[0]:.2f}x", f"plain decoding with {name} over {tasks} task{'s' * (tasks > 1)}"),
        settings=content.settings | content.drafter.model_dump(),
        machine=content.machine,
        versions=content.versions,
        command=eval_command(content),
    )


@describe.register
def _(content: Frontier) -> Section:
    ratios, closed = speedups(content), content.arrivals == "closed"
    lines = (
        load_verdict(ratios, "plain" if closed else "plain's goodput") if ratios else ["No verdict: no plain decoding."]
    )
    pictures = [
        drawn(
            partial(loads.plot_frontier, content),
            "Throughput against user speed, a line per variant",
            "as Figure 7 of DSpark, arXiv 2607.05147",
        ),
        drawn(
            partial(loads.plot_load, content),
            "Throughput and rows verified against the load",
            "as Figure 8 of DSpark, arXiv 2607.05147",
        ),
    ]
    if any(gain.ratio for gain in content.gains):
        pictures.append(drawn(partial(loads.plot_gains, content), "Gains at equal user speed and throughput"))
    means = {name: sum(level.ratio for level in levels) / len(levels) for name, levels in ratios.items()}
    best = max(means, key=lambda name: means[name], default=None)
    kind = "simulated" if "simulated" in content.settings else "measured"
    return Section(
        f"{short_name(content.settings.get('target', 'recorded drafts'))}, {kind}, {content.arrivals} arrivals",
        lines,
        pictures,
        tables=[
            Figures("Medians over repeats; times in ms, drafts in per cent of the time", table_rows(content), names=2)
        ],
        key=None
        if best is None
        else (f"{means[best]:.2f}x", f"plain decoding under load with {best}, mean of the loads"),
        settings=content.settings,
        machine=content.machine,
        versions=content.versions,
    )


@describe.register
def _(content: DraftCosts) -> Section:
    longest = {one.info.label: one.points[-1] for one in content.drafters}
    least = min(longest, key=lambda label: longest[label].whole[1])
    shortest = longest[least]
    line = f"The longest draft costs least with {least}: {1e3 * shortest.whole[1]:.1f} ms for {shortest.gamma} tokens."
    return Section(
        f"{short_name(content.target)}, after {content.context} tokens",
        [line],
        [_draft_cost(content, [])],
        tables=[Figures(cost_title(content), cost_cells(content))],
        settings={"target": content.target, "context": content.context, "repeats": content.repeats},
        machine=content.machine,
        versions=content.versions,
    )


def _draft_cost(costs: DraftCosts, first: Sequence[str]) -> Picture:
    return drawn(
        partial(compared.plot_draft_cost, costs, first=first),
        "Milliseconds of a round's draft by its length",
        "as Figure 3 of DFlash, arXiv 2602.06036",
    )


@describe.register
def _(content: Profile) -> Section:
    contexts = sorted({cell.context for cell in content.cells})
    context, rows = contexts[len(contexts) // 2], (content.gamma or PLAIN_WIDTH - 1) + 1
    even = break_even(content, context, rows)
    cells = [["requests", "accepted length"], *([str(count), f"{tau:.2f}"] for count, tau in even.items())]
    draw = partial(evaluated.plot_profile, content, context, rows=rows)
    return Section(
        f"{short_name(content.setting.target)} with {short_name(content.setting.drafter or 'no drafter')}",
        cost_verdict(even, rows),
        [drawn(draw, "Milliseconds of a step, and the accepted length at which drafts pay")],
        tables=[Figures(f"Accepted length from which {rows - 1} drafts pay", cells)],
        settings=content.setting.model_dump(),
        machine=content.machine,
        versions=content.versions,
    )


@describe.register
def _(content: Calibration) -> Section:
    before, after = (sum(quality.ece) / len(quality.ece) for quality in (content.before, content.after))
    facts = f"fitted on {', '.join(content.fitted_on)}", f"measured on {', '.join(content.measured_on)}"
    pictures = [drawn(partial(evaluated.plot_calibration, content, facts=facts), "Calibration error by draft position")]
    if content.after.reliability:
        pictures.insert(
            0,
            drawn(
                partial(evaluated.plot_reliability, content, facts=facts),
                "Predicted against observed survival, a panel per draft position; the line is perfect calibration",
            ),
        )
    return Section(
        f"confidences on {', '.join(content.measured_on)}",
        [f"Mean error of the survival over all positions: {before:.3f} before, {after:.3f} after."],
        pictures,
        tables=[Figures("Survival to position k against what was accepted", calibration_rows(content))],
        key=(f"{before:.3f} to {after:.3f}", "mean calibration error of the survival"),
        settings={"sampling": content.sampling, "max_new_tokens": content.max_new_tokens}
        | {"fit_rounds": content.fit_rounds, "measured_rounds": content.measured_rounds},
        machine=content.machine,
        versions=content.versions,
    )


@describe.register(list)
def _(content: list[Any]) -> Section:
    """Points of a sweep over thresholds, or of a simulation against a measurement."""
    if hasattr(content[0], "predicted"):
        cells = validation_rows(content)
        return Section(
            "simulated against measured tokens per second",
            errors_of(content),
            tables=[Figures("By variant and load", cells)],
        )
    best = {
        task: max((p for p in content if p.task == task), key=lambda p: p.tokens_per_step) for task in _tasks(content)
    }
    cells = [["task", "threshold", "tokens per step", "verified", "accepted / verified"]]
    for point in content:
        rate = "-" if point.acceptance_rate is None else f"{point.acceptance_rate:.3f}"
        numbers = f"{point.threshold:.2f}", f"{point.tokens_per_step:.3f}", f"{point.verified_per_step:.2f}", rate
        cells.append([point.task, *numbers])
    draw = partial(evaluated.plot_sweep, content, facts=())
    line = ", ".join(f"{task} {point.tokens_per_step:.2f} at {point.threshold:g}" for task, point in best.items())
    return Section(
        ", ".join(best),
        [f"Most tokens per step: {line}."],
        [drawn(draw, "Tokens per step and acceptance rate by threshold")],
        tables=[Figures("Verify while c_k >= threshold", cells)],
    )


def _tasks(points: Sequence[Any]) -> list[str]:
    return list(dict.fromkeys(point.task for point in points))


@describe.register
def _(content: Training) -> Section:
    held_out, trained = content.groups.get("held_out", []), content.groups.get("train", [])
    steps = max(entry["step"] for entries in content.groups.values() for entry in entries)
    lengths = [
        (entry["expected_length_greedy"], entry["step"]) for entry in held_out if "expected_length_greedy" in entry
    ]
    best, recipe = max(lengths, default=None), content.about.get("recipe", {})
    named = ("step", "loss", "expected_length_greedy", "expected_length_sampled")
    cells = [["step", "loss", "expected length, T = 0", "T = 1"]]
    cells += [[f"{entry[name]:g}" if name in entry else "-" for name in named] for entry in held_out or trained[-1:]]
    draw = partial(plot_training, content.metrics, best_step=None if best is None else best[1])
    line = "" if best is None else f"; the best held-out expected length is {best[0]:.2f}, at step {best[1]}"
    return Section(
        f"{content.metrics.resolve().parent.name}, {steps} steps",
        [f"{steps} steps{line}."],
        [drawn(draw, "Loss, tokens per round, acceptance and learning rate by step")],
        tables=[Figures("Held-out figures", cells)],
        key=None if best is None else (f"{best[0]:.2f}", "tokens per round expected on held-out text"),
        settings=recipe,
        versions=content.about.get("versions", {}),
    )


@describe.register
def _(content: Answer) -> Section:
    rounds = [one for trace in content.traces for one in trace]
    tokens = sum(len(one["tokens"]) for one in rounds)
    tau = tokens / max(1, len(rounds))
    return Section(
        f"{short_name(content.model)}, {tokens} tokens",
        [f"{tokens} tokens in {len(rounds)} rounds, {tau:.2f} a round."],
        settings={"model": content.model, **content.settings},
        machine=content.machine,
        versions=content.versions,
    )


# ----------------------------------------------------------------------------
# The page.
# ----------------------------------------------------------------------------


def render(sources: Sequence[Source], title: str) -> str:
    """The page of these files, as HTML.

    Raises:
        ValueError: a file's figures contradict each other; the message names it.
    """
    comparisons = [source.content for source in sources if isinstance(source.content, Comparison)]
    shown: list[tuple[str, Source, Section]] = []
    within: list[Source] = []
    for source in sources:
        try:
            if is_within(source.content, comparisons):
                within.append(source)
            else:
                shown.append((f"part-{len(shown) + 1}", source, describe(source.content)))
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise ValueError(f"{source.path} cannot be shown, its figures do not fit together ({error!r}).") from error
    headings: dict[str, list[str]] = {}
    for name, source, _ in shown:
        headings.setdefault(source.kind.heading, []).append(name)
    traces = {name: source.content.traces for name, source, _ in shown if isinstance(source.content, Answer)}
    environment = Environment(
        loader=FileSystemLoader(PACKAGE / "report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    environment.filters["shown"] = _shown
    return environment.get_template("report.html").render(
        title=title,
        date=today(),
        version=version("outrider"),
        parts=shown,
        within=within,
        headings=headings,
        keys=[(part.key, name) for name, _, part in shown if part.key is not None][:6],
        traces=traces,
        style=Markup(
            f"{(_VIEW / 'trace.css').read_text('utf-8')}\n{(PACKAGE / 'report' / 'report.css').read_text('utf-8')}"
        ),
        script=Markup((_VIEW / "trace.js").read_text("utf-8")),
        data=Markup(json.dumps(traces).replace("<", "\\u003c")),  # a text may hold </script>
    )


def _shown(value: object) -> str:
    """A setting as text."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
