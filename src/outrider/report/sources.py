"""What a report is made of: files that the verbs wrote, found in directories and told apart by their fields.

comparison.json    outrider compare               a file whose fields are those of a kind is read as one,
results.json       outrider eval                  whatever it is called; a file with the name of a kind must be one;
frontier.json      outrider bench, simulate       other files are passed over
validation.json    outrider simulate --validate
draft_cost.json    outrider bench-drafters
any name           outrider profile, calibrate --sweep, generate --trace, an answer of outrider serve with traces
outrider.json      the calibration in it
metrics.jsonl      outrider train
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from outrider.calibration.fit import Calibration, SweepPoint
from outrider.evaluation.comparison import Comparison, figures_of, load_comparison
from outrider.evaluation.draft_cost import DraftCosts, load_costs
from outrider.evaluation.results import Results
from outrider.loadtest.metrics import Frontier
from outrider.loadtest.simulate import load_validation
from outrider.scheduling.cost import Profile
from outrider.training.logging import Groups, read_metrics
from outrider.utils.documents import read_json, read_mapping
from outrider.utils.files import file_sha256, invalid_fields

_MOST_DIRECTORIES = 20_000
_MOST_BYTES = 64 * 2**20  # a larger file is none of ours: weights, tokenizers


@dataclass(frozen=True)
class Training:
    """metrics.jsonl of a training, and what its drafter's outrider.json records; {} where there is none."""

    metrics: Path
    groups: Groups
    about: dict[str, Any]


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


@dataclass(frozen=True)
class Answer:
    """A saved answer of `outrider serve` or `generate --trace`; of each choice the rounds as docs/serving.md has them.

    `settings`: the metrics of a server's answer, or what `generate` was called with.
    """

    model: str
    traces: list[list[dict[str, Any]]]
    settings: dict[str, Any]
    machine: dict[str, Any]
    versions: dict[str, str]


@dataclass(frozen=True)
class Kind:
    """A kind of file.

    Args:
        heading: of its sections.
        fields: of a mapping that is one; of a list, those of its first entry; empty: its name alone tells.
        name: files of this name must be one.
    """

    heading: str
    fields: frozenset[str]
    read: Callable[[Path], Any]
    name: str = ""


@dataclass(frozen=True)
class Source:
    """One file of a report. `content` is what `kind.read` gives."""

    kind: Kind
    path: Path
    content: Any
    sha256: str


def _results(path: Path) -> Results:
    found = Results.load(path)
    if not found.tasks:
        raise ValueError(f"{path} has no tasks: run outrider eval again.")
    return found


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


def _sweep(path: Path) -> list[SweepPoint]:
    found: list[SweepPoint] = _validated(path, list[SweepPoint], read_json(path), what="a sweep of outrider calibrate")
    return found


def _calibration(path: Path) -> Calibration:
    raw = read_mapping(path)
    found: Calibration = _validated(path, Calibration, raw.get("calibration", raw), what="a calibration")
    return found


def _training(path: Path) -> Training:
    about = path.parent / "drafter" / "outrider.json"
    return Training(path, read_metrics(path), read_mapping(about) if about.is_file() else {})


def _answer(path: Path) -> Answer:
    raw = read_mapping(path)
    traces = [
        choice.get("trace") for choice in _validated(path, list[dict[str, Any]], raw["choices"], what="an answer")
    ]
    if None in traces:
        raise ValueError(f'{path}: an answer without a trace: ask with "trace": true (docs/serving.md).')
    _validated(path, list[list[_Round]], traces, what="a trace of outrider serve")
    settings, recorded, versions = (
        _validated(path, dict[str, Any], raw.get(name) or {}, what="an answer")
        for name in ("settings", "machine", "versions")
    )
    metrics = _validated(path, dict[str, Any], raw.get("metrics") or {}, what="an answer")
    return Answer(str(raw.get("model", "")), traces, metrics | settings, machine=recorded, versions=versions)


KINDS = (
    Kind("Drafters compared", frozenset({"conditions", "groups"}), load_comparison, name="comparison.json"),
    Kind("Evaluation", frozenset({"tasks", "drafter", "settings"}), _results, name="results.json"),
    Kind("Load", frozenset({"arrivals", "points"}), _frontier, name="frontier.json"),
    Kind("Simulated load", frozenset({"points", "worst"}), load_validation, name="validation.json"),
    Kind("Cost of a draft", frozenset({"drafters", "context", "repeats"}), load_costs, name="draft_cost.json"),
    Kind("Cost of a step", frozenset({"setting", "cells", "fit"}), Profile.load),
    Kind("Calibration", frozenset({"temperatures", "before", "after"}), _calibration),
    Kind("Thresholds", frozenset({"threshold", "tokens_per_step"}), _sweep),
    Kind("Training", frozenset(), _training, name="metrics.jsonl"),
    Kind("Generation", frozenset({"choices", "object"}), _answer),
)


def find_sources(places: Sequence[Path]) -> list[Source]:
    """The files of a report at and below these places, in the order of `KINDS`, then of their paths.

    Raises:
        ValueError: nothing is there, nothing of it belongs into a report, or a file is damaged; the message names it.
    """
    found: dict[Path, Source] = {}
    for place in places:
        if not place.exists():
            raise ValueError(f"no file or directory {place}.")
        for path in [place] if place.is_file() else list(_files(place)):
            if path.resolve() not in found and (kind := _kind_of(path, asked=path == place)) is not None:
                found[path.resolve()] = Source(kind, path, kind.read(path), sha256=file_sha256(path))
    if not found:
        raise ValueError(
            f"{', '.join(map(str, places))}: nothing that a report is made of. Give directories that outrider eval, "
            "compare, bench, simulate, calibrate, profile or train wrote, or saved answers with traces."
        )
    return sorted(found.values(), key=lambda source: (KINDS.index(source.kind), str(source.path)))


def _files(top: Path) -> Iterator[Path]:
    for count, (name, below, files) in enumerate(os.walk(top)):
        if count == _MOST_DIRECTORIES:
            raise ValueError(f"{top} has more than {count} directories below it: give those that hold the results.")
        below[:] = sorted(directory for directory in below if not directory.startswith("."))
        yield from (Path(name) / file for file in sorted(files) if file.endswith((".json", ".jsonl")))


def _kind_of(path: Path, asked: bool) -> Kind | None:
    """What a file is; None: nothing for a report.

    `asked`: it was named itself.

    Raises:
        ValueError: no JSON, or named itself and of no kind.
    """
    for kind in KINDS:
        if path.name == kind.name:
            return kind
    if path.suffix == ".json" and path.stat().st_size <= _MOST_BYTES:
        content = read_json(path)
        if isinstance(content, list) and content:
            content = content[0]
        if isinstance(content, dict) and path.name == "outrider.json":
            content = content.get("calibration")
        for kind in KINDS:
            if isinstance(content, dict) and kind.fields and kind.fields <= content.keys():
                return kind
    if asked:
        raise ValueError(f"{path}: nothing that a report is made of.")
    return None


def is_within(content: Any, comparisons: Sequence[Comparison]) -> bool:
    """Whether one of the comparisons has these results, or costs of drafts, among its own."""
    if isinstance(content, DraftCosts):
        return any(content == comparison.draft_cost for comparison in comparisons)
    if not isinstance(content, Results):
        return False
    figures = [figures_of(task) for task in content.tasks]
    entries = [entry for comparison in comparisons for group in comparison.groups for entry in group.entries]
    return any(all(one in entry.figures for one in figures) for entry in entries)
