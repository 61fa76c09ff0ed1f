"""`outrider report`: one self-contained HTML page of what the verbs measured.

    find_sources -> KINDS: a function reads each kind of file, another describes it -> PageSection -> report.html

The files are found in directories and told apart by their fields:

comparison.json    outrider compare               a file whose fields are those of a kind is read as one,
results.json       outrider eval                  whatever it is called; a file with the name of a kind must be one;
frontier.json      outrider bench, simulate       other files are passed over
validation.json    outrider simulate --validate
draft_cost.json    outrider bench-drafters
any name           outrider profile, calibrate --sweep, generate --trace, an answer of outrider serve with traces
outrider.json      the calibrations in it: of greedy requests, of sampled ones, or both
metrics.jsonl      outrider train

A summary comes first, then a section for each file, then what is needed to measure the same again. Pictures are those
of the verbs, as SVG inside the page. Traces are shown by the inspector's view, which is in serving/page/trace.js. The
page loads nothing: its content security policy forbids it.
"""

from __future__ import annotations

import json
import os
import tempfile
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from pydantic import BaseModel, TypeAdapter, ValidationError

from outrider.checkpoints.checkpoint import CALIBRATION, SAMPLED_CALIBRATION
from outrider.decoding.cost import Profile
from outrider.decoding.profile import PLAIN_WIDTH, break_even
from outrider.evaluation import comparison as compared
from outrider.evaluation import figures as evaluated
from outrider.evaluation.calibration.fit import Calibration, SweepPoint
from outrider.evaluation.comparison import Comparison, figures_of, load_comparison
from outrider.evaluation.draft_cost import DraftCosts, cost_cells, cost_title, load_costs, plot_draft_cost
from outrider.evaluation.loadtest import plots as loads
from outrider.evaluation.loadtest.metrics import Frontier, histogram_rows, speedups, table_rows
from outrider.evaluation.loadtest.simulate import PointError, errors_of, load_validation, validation_rows
from outrider.evaluation.model_card import calibration_rows, eval_command
from outrider.evaluation.plots import MOST_SERIES, short_name
from outrider.evaluation.results import Results
from outrider.evaluation.verdict import comparison_verdict, cost_verdict, drafter_verdict, load_verdict, pooled
from outrider.training.logging import Groups, read_metrics
from outrider.utils.documents import read_json, read_mapping
from outrider.utils.files import file_sha256, invalid_fields
from outrider.utils.measure import today
from outrider.utils.packaged import PACKAGE

_PAGE = PACKAGE / "serving" / "page"  # the template, and the view of traces
_MOST_DIRECTORIES = 20_000
_MOST_BYTES = 64 * 2**20  # a larger file is none of ours: weights, tokenizers


class Picture(NamedTuple):
    """A picture as SVG. `alt` says what it shows, `note` which figure of a paper it follows."""

    svg: bytes
    alt: str
    note: str

    @property
    def url(self) -> str:
        return f"data:image/svg+xml;base64,{b64encode(self.svg).decode()}"


@dataclass(frozen=True)
class PageSection:
    """What the page says of one file."""

    title: str  # of the section, after the kind's heading
    lines: list[str]  # the verdict first
    pictures: list[Picture] = field(default_factory=list)
    caption: str = ""  # of the table
    cells: list[list[str]] = field(default_factory=list)  # of the table, headings first
    names: int = 1  # how many of the first columns are text
    key: tuple[str, str] | None = None  # the figure to remember and what it is
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the measurement, as far as they are recorded
    command: str = ""  # that measures the same again, if the settings say so


def drawn(draw: Callable[..., Any], content: Any, alt: str, *, note: str = "", **options: Any) -> Picture:
    """The picture that `draw(content, path, **options)` writes."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "picture.svg"
        draw(content, path, **options)
        return Picture(path.read_bytes(), alt, note=note and f"as {note}")


# ----------------------------------------------------------------------------
# Contents of the files that have no type elsewhere, and readers.
# ----------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainingRecord:
    """metrics.jsonl of a training, and the recipe and versions in its drafter's outrider.json; {} if there are none."""

    metrics: Path
    groups: Groups
    recipe: dict[str, Any]
    versions: dict[str, str]


class _Likely(BaseModel):
    id: int
    text: str
    target: float


class _Token(_Likely):
    in_text: bool
    origin: str
    draft: int | None
    top: list[_Likely]


class _Draft(BaseModel):
    text: str
    outcome: str


class _Round(BaseModel):
    round: int
    source: str | None
    reason: str
    drafts: list[_Draft]
    tokens: list[_Token]


class _Answer(BaseModel):
    """A saved answer, apart from its traces."""

    model: str = ""
    choices: list[dict[str, Any]]
    metrics: dict[str, Any] | None = None
    settings: dict[str, Any] | None = None
    machine: dict[str, Any] | None = None
    versions: dict[str, str] | None = None


@dataclass(frozen=True)
class TracedAnswer:
    """A saved answer of `outrider serve` or `generate --trace`; of each choice the rounds as docs/serving.md has them.

    `settings`: the metrics of a server's answer, or what `generate` was called with.
    """

    traces: list[list[dict[str, Any]]]
    settings: dict[str, Any]
    machine: dict[str, Any]
    versions: dict[str, str]


def _frontier(path: Path) -> Frontier:
    found = Frontier.load(path)
    if not found.points:
        raise ValueError(f"{path} has no points: run outrider bench again.")
    return found


def _validated(path: Path, kind: Any, value: object, *, what: str) -> Any:
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        raise ValueError(f"{path}: not {what}: {invalid_fields(error, 'the file')[0]}.") from error


def _sweep(path: Path) -> Any:
    return _validated(path, list[SweepPoint], read_json(path), what="a sweep of outrider calibrate")


def _calibrations(path: Path) -> list[Calibration]:
    """One of a file of its own, or those that an outrider.json holds."""
    raw = read_mapping(path)
    stored = [raw[name] for name in (CALIBRATION, SAMPLED_CALIBRATION) if raw.get(name)]
    return [_validated(path, Calibration, found, what="a calibration") for found in stored or [raw]]


def _training(path: Path) -> TrainingRecord:
    about = path.parent / "drafter" / "outrider.json"
    recorded = read_mapping(about) if about.is_file() else {}
    return TrainingRecord(path, read_metrics(path), recorded.get("recipe", {}), versions=recorded.get("versions", {}))


def _answer(path: Path) -> TracedAnswer:
    found: _Answer = _validated(path, _Answer, read_mapping(path), what="an answer")
    traces = [choice.get("trace") for choice in found.choices]
    if None in traces:
        raise ValueError(f'{path}: an answer without a trace: ask with "trace": true (docs/serving.md).')
    _validated(path, list[list[_Round]], traces, what="a trace of outrider serve")
    settings = {"model": found.model} | (found.metrics or {}) | (found.settings or {})
    return TracedAnswer(traces, settings, found.machine or {}, versions=found.versions or {})  # type: ignore[arg-type]


# ----------------------------------------------------------------------------
# A function for each kind of section.
# ----------------------------------------------------------------------------


def _comparison_section(content: Comparison) -> PageSection:
    found = compared.speedups_of(content)
    best = max(found, key=lambda name: pooled(found[name])[0])
    pictures = [
        drawn(compared.plot_tau_and_speedup, content, "Accepted length and speedup of each drafter by task",
              most=MOST_SERIES),
        drawn(compared.plot_conditional, content, "Acceptance by draft position, a panel per task",
              note="Figure 2 of DSpark, arXiv 2607.05147"),
    ]  # fmt: skip
    if content.draft_cost is not None:
        pictures.append(_draft_cost(content.draft_cost, [group.label for group in compared.ranked(content)]))
    return PageSection(
        f"{len(content.groups)} drafters of {short_name(content.conditions.get('target'))}",
        [*comparison_verdict(found), *compared.notes(content)[1:]],
        pictures,
        caption="Figures by task",
        cells=[list(compared.HEADINGS), *compared.rows(content)],
        names=2,
        key=(f"{pooled(found[best])[0]:.2f}x", f"plain decoding with {best}, the fastest of {len(found)} drafters"),
        settings=content.conditions,
    )


def _results_section(content: Results) -> PageSection:
    found = evaluated.speedups(content)
    name, tasks = short_name(content.settings.get("drafter", content.drafter.label)), len(content.tasks)
    temperature = f"temperature {content.settings.get('temperature', 0):g}"
    pictures = [
        drawn(evaluated.plot_acceptance, content, "Acceptance by draft position, a line per task",
              note="Figure 2 of DSpark, arXiv 2607.05147"),
        drawn(evaluated.plot_histogram, content, "Share of rounds by accepted drafts"),
    ]  # fmt: skip
    key = f"plain decoding with {name} over {tasks} task{'s' * (tasks > 1)}, {temperature}"
    return PageSection(
        f"{name} on {short_name(content.settings.get('target'))}, {temperature}",
        [*drafter_verdict(found, {}), *([f"{content.lossy}."] if content.lossy else [])],
        pictures,
        caption="Speculative against plain decoding, same run",
        cells=[list(evaluated.HEADINGS), *evaluated.rows(content)],
        key=(f"{pooled(found)[0]:.2f}x", key),
        settings=content.settings | content.drafter.model_dump(),
        command=eval_command(content),
    )


def _frontier_section(content: Frontier) -> PageSection:
    ratios, plain = speedups(content), "plain" if content.arrivals == "closed" else "plain's goodput"
    pictures = [
        drawn(loads.plot_frontier, content, "Throughput against user speed, a line per variant",
              note="Figure 7 of DSpark, arXiv 2607.05147"),
        drawn(loads.plot_load, content, "Throughput and rows verified against the load",
              note="Figure 8 of DSpark, arXiv 2607.05147"),
    ]  # fmt: skip
    if histogram_rows(content):
        pictures.append(drawn(loads.plot_accepted, content, "Share of rounds by accepted drafts, a line per variant"))
    if any(gain.ratio for gain in content.gains):
        pictures.append(drawn(loads.plot_gains, content, "Gains at equal user speed and throughput"))
    means = {name: sum(level.ratio for level in levels) / len(levels) for name, levels in ratios.items()}
    key = None
    if means:
        best = max(means, key=lambda name: means[name])
        key = f"{means[best]:.2f}x", f"plain decoding with {best}, {content.arrivals} arrivals, mean of the loads"
    kind = "simulated" if "simulated" in content.settings else "measured"
    return PageSection(
        f"{short_name(content.settings.get('target', 'recorded drafts'))}, {kind}, {content.arrivals} arrivals",
        load_verdict(ratios, plain) if ratios else ["No verdict: no plain decoding."],
        pictures,
        caption="Medians over repeats; times in ms, drafts in per cent of the time",
        cells=table_rows(content),
        names=2,
        key=key,
        settings=content.settings,
    )


def _costs_section(content: DraftCosts) -> PageSection:
    seconds, gamma, least = min((one.points[-1].whole[1], one.points[-1].gamma, one.info.label)
                                for one in content.drafters)  # fmt: skip
    return PageSection(
        f"{short_name(content.target)}, after {content.context} tokens",
        [f"The longest draft costs least with {least}: {1e3 * seconds:.1f} ms for {gamma} tokens."],
        [_draft_cost(content, [])],
        caption=cost_title(content),
        cells=cost_cells(content),
        settings=content.model_dump(include={"target", "context", "repeats"}),
    )


def _draft_cost(costs: DraftCosts, first: Sequence[str]) -> Picture:
    alt, note = "Milliseconds of a round's draft by its length", "Figure 3 of DFlash, arXiv 2602.06036"
    return drawn(plot_draft_cost, costs, alt, note=note, first=first)


def _profile_section(content: Profile) -> PageSection:
    contexts = sorted({cell.context for cell in content.cells})
    context, rows = contexts[len(contexts) // 2], (content.gamma or PLAIN_WIDTH - 1) + 1
    even, setting = break_even(content, context, rows), content.setting
    alt = "Milliseconds of a step, and the accepted length at which drafts pay"
    return PageSection(
        f"{short_name(setting.target)} with {short_name(setting.drafter or 'no drafter')}",
        cost_verdict(even, rows),
        [drawn(evaluated.plot_profile, content, alt, context=context, rows=rows)],
        caption=f"Accepted length from which {rows - 1} drafts pay",
        cells=[["requests", "accepted length"], *([str(count), f"{tau:.2f}"] for count, tau in even.items())],
        settings=setting.model_dump(),
    )


def _calibration_section(content: Calibration) -> PageSection:
    before, after = (sum(quality.ece) / len(quality.ece) for quality in (content.before, content.after))
    whose, tasks = "sampled" if content.sampling.get("temperature") else "greedy", ", ".join(content.measured_on)
    facts = f"fitted on {', '.join(content.fitted_on)}", f"measured on {tasks}"
    pictures = [drawn(evaluated.plot_calibration, content, "Calibration error by draft position", facts=facts)]
    if content.after.reliability:
        alt = "Predicted against observed survival, a panel per draft position; the line is perfect calibration"
        pictures.insert(0, drawn(evaluated.plot_reliability, content, alt, facts=facts))
    return PageSection(
        f"confidences of {whose} requests on {tasks}",
        [f"Mean error of the survival over all positions: {before:.3f} before, {after:.3f} after."],
        pictures,
        caption="Survival to position k against what was accepted",
        cells=calibration_rows(content),
        key=(f"{before:.3f} to {after:.3f}", "mean calibration error of the survival"),
        settings={
            name: getattr(content, name) for name in ("sampling", "max_new_tokens", "fit_rounds", "measured_rounds")
        },
    )


def _validation_section(content: list[PointError]) -> PageSection:
    title = "simulated against measured tokens per second"
    return PageSection(title, errors_of(content), caption="By variant and load", cells=validation_rows(content))


def _sweep_section(content: list[SweepPoint]) -> PageSection:
    best: dict[str, SweepPoint] = {}
    cells = [["task", "threshold", "tokens per step", "verified", "accepted / verified"]]
    for point in content:
        best[point.task] = max(best.get(point.task, point), point, key=lambda one: one.tokens_per_step)
        rate = "-" if point.acceptance_rate is None else f"{point.acceptance_rate:.3f}"
        numbers = f"{point.threshold:.2f}", f"{point.tokens_per_step:.3f}", f"{point.verified_per_step:.2f}", rate
        cells.append([point.task, *numbers])
    line = ", ".join(f"{task} {point.tokens_per_step:.2f} at {point.threshold:g}" for task, point in best.items())
    return PageSection(
        ", ".join(best),
        [f"Most tokens per step: {line}."],
        [drawn(evaluated.plot_sweep, content, "Tokens per step and acceptance rate by threshold", facts=())],
        caption="Verify while c_k >= threshold",
        cells=cells,
    )


def _training_section(content: TrainingRecord) -> PageSection:
    groups, length = content.groups, "expected_length_greedy"
    held_out = groups.get("held_out", [])
    steps = max(entry["step"] for entries in groups.values() for entry in entries)
    best = max(((entry[length], entry["step"]) for entry in held_out if length in entry), default=(None, None))
    named = ("step", "loss", length, "expected_length_sampled")
    entries = held_out or groups.get("train", [])[-1:]
    rows = [[f"{entry[name]:g}" if name in entry else "-" for name in named] for entry in entries]
    known = best[0] is not None
    line = f"; the best held-out expected length is {best[0]:.2f}, at step {best[1]}" if known else ""
    alt = "Loss, tokens per round, acceptance and learning rate by step"
    return PageSection(
        f"{content.metrics.resolve().parent.name}, {steps} steps",
        [f"{steps} steps{line}."],
        [drawn(evaluated.plot_training, content.metrics, alt, best_step=best[1])],
        caption="Held-out figures",
        cells=[["step", "loss", "expected length, T = 0", "T = 1"], *rows],
        key=(f"{best[0]:.2f}", "tokens per round expected on held-out text") if known else None,
        settings=content.recipe,
    )


def _answer_section(content: TracedAnswer) -> PageSection:
    rounds = [one for trace in content.traces for one in trace]
    tokens = sum(len(one["tokens"]) for one in rounds)
    return PageSection(
        f"{short_name(content.settings['model'])}, {tokens} tokens",
        [f"{tokens} tokens in {len(rounds)} rounds, {tokens / max(1, len(rounds)):.2f} a round."],
        settings=content.settings,
    )


# ----------------------------------------------------------------------------
# Which files are shown.
# ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """A kind of file."""

    heading: str  # of its sections
    fields: str  # words: of a mapping that is one; of a list, those of its first entry; "": its name alone tells
    read: Callable[[Path], Any]
    describe: Callable[[Any], PageSection]
    name: str = ""  # files of this name must be one
    several: bool = False  # `read` gives a list whose entries have a section each


@dataclass(frozen=True)
class Source:
    """One section's part of a file."""

    kind: Kind
    path: Path
    content: Any
    sha256: str

    def recorded(self, name: str) -> Mapping[str, Any]:
        """The machine or the versions of the measurement; {} if they are not recorded."""
        found: Mapping[str, Any] = getattr(self.content, name, {})
        return found


KINDS = (
    Kind("Drafters compared", "conditions groups",
         read=load_comparison, describe=_comparison_section, name="comparison.json"),
    Kind("Evaluation", "tasks drafter settings", read=Results.load, describe=_results_section, name="results.json"),
    Kind("Load", "arrivals points", read=_frontier, describe=_frontier_section, name="frontier.json"),
    Kind("Simulated load", "points worst",
         read=load_validation, describe=_validation_section, name="validation.json"),
    Kind("Cost of a draft", "drafters context repeats",
         read=load_costs, describe=_costs_section, name="draft_cost.json"),
    Kind("Cost of a step", "setting cells fit", read=Profile.load, describe=_profile_section),
    Kind("Calibration", "temperatures before after",
         read=_calibrations, describe=_calibration_section, several=True),
    Kind("Thresholds", "threshold tokens_per_step", read=_sweep, describe=_sweep_section),
    Kind("Training", "", read=_training, describe=_training_section, name="metrics.jsonl"),
    Kind("Generation", "choices object", read=_answer, describe=_answer_section),
)  # fmt: skip


def find_sources(places: Sequence[Path]) -> list[Source]:
    """The files of a report at and below these places, in the order of `KINDS`, then of their paths.

    Raises:
        ValueError: nothing is there, nothing of it belongs into a report, or a file is damaged; the message names it.
    """
    found: dict[Path, list[Source]] = {}
    for place in places:
        if not place.exists():
            raise ValueError(f"no file or directory {place}.")
        for path in [place] if place.is_file() else list(_files(place)):
            if path.resolve() not in found and (kind := _kind_of(path, asked=path == place)) is not None:
                sha256, content = file_sha256(path), kind.read(path)
                contents = content if kind.several else [content]
                found[path.resolve()] = [Source(kind, path, content, sha256=sha256) for content in contents]
    if not found:
        raise ValueError(
            f"{', '.join(map(str, places))}: nothing that a report is made of. Give directories that outrider eval, "
            "compare, bench, simulate, calibrate, profile or train wrote, or saved answers with traces."
        )
    sources = chain.from_iterable(found.values())
    return sorted(sources, key=lambda source: (KINDS.index(source.kind), str(source.path)))


def _files(top: Path) -> Iterator[Path]:
    for count, (name, below, files) in enumerate(os.walk(top)):
        if count == _MOST_DIRECTORIES:
            raise ValueError(f"{top} has more than {count} directories below it: give those that hold the results.")
        below[:] = sorted(directory for directory in below if not directory.startswith("."))
        yield from (Path(name) / file for file in sorted(files) if file.endswith((".json", ".jsonl")))


def _kind_of(path: Path, asked: bool) -> Kind | None:
    """What a file is; None: nothing for a report. One that was `asked` for itself must be of a kind."""
    for kind in KINDS:
        if path.name == kind.name:
            return kind
    if path.suffix == ".json" and path.stat().st_size <= _MOST_BYTES:
        content = read_json(path)
        if isinstance(content, list) and content:
            content = content[0]
        if isinstance(content, dict) and path.name == "outrider.json":
            content = content.get(CALIBRATION) or content.get(SAMPLED_CALIBRATION)
        for kind in KINDS if isinstance(content, dict) else ():
            if kind.fields and set(kind.fields.split()) <= content.keys():
                return kind
    if asked:
        raise ValueError(f"{path}: nothing that a report is made of.")
    return None


def is_within(content: Any, comparisons: Sequence[Comparison]) -> bool:
    """Whether one of the comparisons has these results or draft costs."""
    if isinstance(content, DraftCosts):
        return any(content == comparison.draft_cost for comparison in comparisons)
    if not isinstance(content, Results):
        return False
    figures = [figures_of(task) for task in content.tasks]
    entries = [entry for comparison in comparisons for group in comparison.groups for entry in group.entries]
    return any(all(one in entry.figures for one in figures) for entry in entries)


# ----------------------------------------------------------------------------
# The page.
# ----------------------------------------------------------------------------


def render(sources: Sequence[Source], title: str) -> str:
    """The page of these files, as HTML.

    Raises:
        ValueError: a file's figures contradict each other; the message names it.
    """
    comparisons = [source.content for source in sources if isinstance(source.content, Comparison)]
    shown: list[tuple[str, Source, PageSection]] = []
    within: list[Source] = []
    for source in sources:
        try:
            if is_within(source.content, comparisons):
                within.append(source)
            else:
                shown.append((f"part-{len(shown) + 1}", source, source.kind.describe(source.content)))
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise ValueError(f"{source.path} cannot be shown, its figures do not fit together ({error!r}).") from error
    headings: dict[str, list[str]] = {}
    for name, source, _ in shown:
        headings.setdefault(source.kind.heading, []).append(name)
    traces = {name: source.content.traces for name, source, _ in shown if isinstance(source.content, TracedAnswer)}
    environment = Environment(
        loader=FileSystemLoader(_PAGE), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    environment.filters["shown"] = lambda value: (
        value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    )
    return environment.get_template("report.html").render(
        title=title,
        date=today(),
        version=version("outrider"),
        parts=shown,
        within=within,
        headings=headings,
        keys=[(part.key, name) for name, _, part in shown if part.key is not None][:6],
        traces=traces,
        style=Markup(f"{(_PAGE / 'trace.css').read_text('utf-8')}\n{(_PAGE / 'report.css').read_text('utf-8')}"),
        script=Markup((_PAGE / "trace.js").read_text("utf-8")),
        data=Markup(json.dumps(traces).replace("<", "\\u003c")),  # a text may hold </script>
    )
