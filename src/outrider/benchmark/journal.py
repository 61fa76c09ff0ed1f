"""What a sweep has measured, on disk as it goes: OUT/settings.json, OUT/reference.json, OUT/points.jsonl;
of conversations also OUT/said.json: what later turns were asked after.

A point is one line and counts once its newline is there, so a sweep that was stopped goes on after its last whole line.
Levels, variants and repeats may grow from run to run; whatever changes a single measurement may not.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from outrider.benchmark.metrics import Metrics, RequestFigures
from outrider.formats.files import write_atomically

_REFERENCE, _SAID = "reference.json", "said.json"


class Point(BaseModel):
    """One variant under one load, once. `level`: concurrent users, or requests per second.

    `same`, `ties`, `mismatches`: its responses against plain decoding of the same prompts (evaluation/run.py).
    `requests` came later: points without them are still read.
    """

    variant: str
    level: float
    repeat: int
    metrics: Metrics
    same: int
    ties: int
    mismatches: int
    requests: list[RequestFigures] = []

    @property
    def key(self) -> tuple[str, float, int]:
        return self.variant, self.level, self.repeat


class Journal:
    """The points of one directory.

    Raises:
        ValueError: it holds points measured with other settings, or a line that is none.
    """

    def __init__(self, directory: Path, settings: dict[str, Any]) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory, self._path = directory, directory / "points.jsonl"
        self.points = self._read()
        self._check(settings)

    def _check(self, settings: dict[str, Any]) -> None:
        path, settings = self.directory / "settings.json", json.loads(json.dumps(settings))
        if not path.exists():
            self._write(path, settings)
            return
        earlier = json.loads(path.read_text(encoding="utf-8"))
        differing = [
            f"{name} was {earlier.get(name)}, now {settings.get(name)}"
            for name in sorted(settings.keys() | earlier.keys())
            if earlier.get(name) != settings.get(name)
        ]
        if differing and not self.points:  # an engine that never started, say: there is nothing to go on with
            for name in (_REFERENCE, _SAID):
                (self.directory / name).unlink(missing_ok=True)
            self._write(path, settings)
        elif differing:
            raise ValueError(
                f"{self.directory} holds a sweep with other settings: {'; '.join(differing)}. "
                "Choose another --out, or repeat the settings to go on with it."
            )

    def _read(self) -> list[Point]:
        if not self._path.exists():
            return []
        whole, newline, torn = self._path.read_bytes().rpartition(b"\n")
        if torn:
            os.truncate(self._path, len(whole) + len(newline))
        points = []
        for number, line in enumerate(whole.splitlines(), start=1):
            try:
                points.append(Point.model_validate_json(line))
            except ValidationError as error:
                raise ValueError(
                    f"{self._path}:{number}: not a point of this version; choose another --out."
                ) from error
        return points

    def append(self, point: Point) -> None:
        """Keep a point; it is on disk when this returns."""
        with self._path.open("ab") as file:
            file.write(point.model_dump_json().encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self.points.append(point)

    def reference(self) -> list[list[int]] | None:
        """The plain responses of the prompts, once there."""
        path = self.directory / _REFERENCE
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    def keep_reference(self, responses: list[list[int]]) -> None:
        self._write(self.directory / _REFERENCE, responses)

    def said(self) -> list[list[list[int]]]:
        """The baseline's responses that later turns were asked after, turn by turn; [] before there are any."""
        path = self.directory / _SAID
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else []

    def keep_said(self, turns: list[list[list[int]]]) -> None:
        self._write(self.directory / _SAID, turns)

    @staticmethod
    def _write(path: Path, content: Any) -> None:
        write_atomically(path, json.dumps(content) + "\n")
