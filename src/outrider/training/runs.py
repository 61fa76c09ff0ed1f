"""The trainings below a directory, how far they are and how good.

    OUT/state/state.json       step, steps, target, algorithm, the best drafter so far
    OUT/metrics.jsonl          later steps than the saved one, held-out expected length
    OUT/.lock                  held while it is trained (training/trainer.py); responses have a lock of their own
    .../results.json           of outrider eval, whose drafter is in OUT or that is in OUT itself

Read as JSON: no PyTorch is imported.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from outrider.utils.documents import parse_json, read_mapping
from outrider.utils.locks import LOCK, is_held

Kind = TypeVar("Kind")
_MOST_DIRECTORIES = 20_000  # a run has some ten
_MARKS = ("state/state.json", "metrics.jsonl", "responses.jsonl", "responses.journal.jsonl")


@dataclass(frozen=True)
class TrainingRun:
    """One training. `best`: tokens per round, decoded (`decode_tau`) or expected on held-out text; `speedup`: of all
    tasks of the latest evaluation, tokens per second over plain decoding's; `seconds`: since it last wrote."""

    run: str
    target: str | None
    algorithm: str | None
    step: int
    steps: int | None
    status: str
    best: float | None
    metric: str | None
    speedup: float | None
    seconds: float
    bytes: int


def find_runs(top: Path) -> Iterator[TrainingRun]:
    """The trainings at and below a directory, in the order of names.

    Raises:
        ValueError: far more directories are below it than runs have: it is the root of a disk, say.
    """
    trainings: list[Path] = []
    evaluations: list[Path] = []
    for count, (name, below, files) in enumerate(os.walk(top)):
        if count == _MOST_DIRECTORIES:
            raise ValueError(f"{top} has more than {count} directories below it: give the one that holds the runs.")
        below.sort()
        directory = Path(name)
        if "results.json" in files:
            evaluations.append(directory / "results.json")
        inside = trainings and directory.is_relative_to(trainings[-1])
        if not inside and any((directory / mark).is_file() for mark in _MARKS):
            trainings.append(directory)
    evaluations.sort(key=lambda path: path.stat().st_mtime)
    measured = [(path, _mapping(path)) for path in evaluations]
    for directory in trainings:
        yield read_run(directory, top, measured)


def read_run(directory: Path, top: Path, measured: Sequence[tuple[Path, dict[str, Any]]] = ()) -> TrainingRun:
    """What the files of a training say. `measured`: results.json files, the latest last."""
    state, recorded = _mapping(directory / "state/state.json"), _mapping(directory / "drafter/outrider.json")
    settings, watch = _section(state, "settings"), _section(state, "watch")
    entries = _entries(directory / "metrics.jsonl")
    step = max([_value(state, "step", int) or 0, *(_value(entry, "step", int) or 0 for entry in entries)])
    steps = _value(_section(settings, "optimizer"), "steps", int)
    best, metric = _value(watch, "best", float), _value(_section(watch, "measure"), "metric", str)
    if best is None:
        found = (_value(entry, "expected_length_greedy", float) for entry in entries)
        lengths = [length for length in found if length is not None]
        best, metric = (max(lengths), "expected_length_greedy") if lengths else (None, None)
    files = [path for path in directory.rglob("*") if path.is_file()]
    ours = [results for path, results in measured if _is_of(directory, path, results)]
    return TrainingRun(
        run=directory.resolve().name if directory == top else str(directory.relative_to(top)),
        target=_value(settings, "target", str) or _value(recorded, "target", str),
        algorithm=_value(_section(settings, "drafter"), "algorithm", str),
        step=step,
        steps=steps,
        status=_status(directory, step, steps),
        best=best,
        metric=metric,
        speedup=_speedup(ours[-1]) if ours else None,
        seconds=time.time() - max(path.stat().st_mtime for path in files),
        bytes=sum(path.stat().st_size for path in files),
    )


def _status(directory: Path, step: int, steps: int | None) -> str:
    if is_held(directory / LOCK) or any(map(is_held, directory.glob(".*.jsonl.lock"))):
        return "running"
    return "done" if steps is not None and step >= steps else "stopped"


def _is_of(directory: Path, path: Path, results: dict[str, Any]) -> bool:
    """Whether results are in this run or of its drafter."""
    drafter = _value(_section(results, "settings"), "drafter", str)
    return any(Path(place).resolve().is_relative_to(directory.resolve()) for place in (path, drafter) if place)


def _speedup(results: dict[str, Any]) -> float | None:
    try:
        seconds, plain = (
            sum(task["tokens"] / task[name] for task in results.get("tasks", []))
            for name in ("tokens_per_second", "baseline_tokens_per_second")
        )
        return plain / seconds if seconds else None
    except (TypeError, KeyError, ArithmeticError):  # damaged, or no results of outrider eval
        return None


def _mapping(path: Path) -> dict[str, Any]:
    """The fields of a JSON file; none where it is missing or damaged."""
    try:
        return read_mapping(path)
    except (OSError, ValueError):
        return {}


def _section(fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A field that is a mapping; none where it is missing or something else."""
    found = fields.get(name)
    return found if isinstance(found, dict) else {}


def _value(fields: Mapping[str, Any], name: str, kind: type[Kind]) -> Kind | None:
    """A field of that kind; None where it is missing or something else. A whole number is a float, too."""
    found = fields.get(name)
    found = float(found) if kind is float and type(found) is int else found
    return found if type(found) is kind else None


def _entries(path: Path) -> list[dict[str, Any]]:
    """Entries of metrics.jsonl; a line that is cut short or damaged is left out."""
    entries: list[dict[str, Any]] = []
    for line in path.read_bytes().splitlines(keepends=True) if path.is_file() else []:
        with suppress(ValueError):
            if line.endswith(b"\n") and isinstance(found := parse_json(line), dict):
                entries.append(found)
    return entries
