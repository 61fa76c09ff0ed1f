"""frontier.json: medians and quartiles over repeats, and who won.

    at a level      best adaptive / best static variant, by median throughput
    over the sweep  mean over levels of throughput / that without speculation, and the worst of these ratios

Static variants are chosen once, adaptive ones look at the load (benchmark/variants.py). Verdicts are of the closed
loop: Poisson throughput is the rate of arrivals until a variant gives way, so there goodput is what to read.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from outrider.benchmark.journal import Point
from outrider.benchmark.metrics import Metrics
from outrider.benchmark.variants import NO_SPECULATION, is_adaptive
from outrider.evaluation.quartiles import Quartiles, quartiles
from outrider.evaluation.results import machine
from outrider.formats import versions


class PointSummary(BaseModel):
    """One variant at one level. `quartiles`: of each figure of `Metrics`, (low, median, high); None: never known."""

    variant: str
    level: float
    repeats: int
    quartiles: dict[str, Quartiles | None]
    same: int
    ties: int
    mismatches: int

    def median(self, figure: str) -> float | None:
        found = self.quartiles[figure]
        return None if found is None else found[1]

    @property
    def throughput(self) -> float:
        """Median tokens per second."""
        found = self.median("tokens_per_second")
        assert found is not None
        return found


class LevelVerdict(BaseModel):
    """The best of both kinds at one level; `ratio` is adaptive / static."""

    level: float
    static: str
    adaptive: str
    ratio: float


class VariantVerdict(BaseModel):
    """One variant over all levels, in multiples of no speculation."""

    variant: str
    adaptive: bool
    mean_ratio: float
    worst_ratio: float


class Frontier(BaseModel):
    """The whole file. `levels` and `overall` are empty where there is nothing to compare."""

    arrivals: str
    points: list[PointSummary]
    levels: list[LevelVerdict]
    overall: list[VariantVerdict]
    settings: dict[str, Any]
    machine: dict[str, Any]
    versions: dict[str, str]

    @staticmethod
    def of(arrivals: str, points: Sequence[Point], settings: dict[str, Any]) -> Frontier:
        """Points made on this machine, summed up."""
        found, closed = summarise_points(points), arrivals == "closed"
        return Frontier(
            arrivals=arrivals,
            points=found,
            levels=level_verdicts(found) if closed else [],
            overall=overall_verdicts(found) if closed else [],
            settings=settings,
            machine=machine(),
            versions=versions(),
        )

    def save(self, directory: Path) -> Path:
        """Write frontier.json; says where it is."""
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / "frontier.json"
        path.write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")
        return path

    @staticmethod
    def load(path: Path) -> Frontier:
        """Read what `save` wrote.

        Raises:
            ValueError: missing, or something else.
        """
        if not path.is_file():
            raise ValueError(f"no measured points at {path}: measure them (outrider bench --out {path.parent}).")
        try:
            return Frontier.model_validate_json(path.read_bytes())
        except ValueError as error:
            raise ValueError(f"{path} is no frontier.json of outrider bench ({str(error).splitlines()[0]}).") from None


def summarise_points(points: Sequence[Point]) -> list[PointSummary]:
    """Repeats together, in order of level, variants as they first came."""
    groups: dict[tuple[str, float], list[Point]] = {}
    for point in points:
        groups.setdefault((point.variant, point.level), []).append(point)
    found = []
    for (variant, level), group in sorted(groups.items(), key=lambda entry: entry[0][1]):
        figures = {name: _known_quartiles([getattr(p.metrics, name) for p in group]) for name in Metrics.model_fields}
        found.append(
            PointSummary(
                variant=variant,
                level=level,
                repeats=len(group),
                quartiles=figures,
                same=sum(p.same for p in group),
                ties=sum(p.ties for p in group),
                mismatches=sum(p.mismatches for p in group),
            )
        )
    return found


def level_verdicts(points: Sequence[PointSummary]) -> list[LevelVerdict]:
    """Where both kinds were measured."""
    verdicts = []
    for level in sorted({p.level for p in points}):
        here = sorted((p for p in points if p.level == level), key=lambda p: -p.throughput)
        static = next((p for p in here if not is_adaptive(p.variant)), None)
        adaptive = next((p for p in here if is_adaptive(p.variant)), None)
        if static and adaptive:
            ratio = adaptive.throughput / static.throughput
            verdicts.append(LevelVerdict(level=level, static=static.variant, adaptive=adaptive.variant, ratio=ratio))
    return verdicts


def overall_verdicts(points: Sequence[PointSummary]) -> list[VariantVerdict]:
    """Best first; only variants measured at every level that plain decoding was."""
    plain = {p.level: p.throughput for p in points if p.variant == NO_SPECULATION}
    if not plain:
        return []
    verdicts = []
    for variant in dict.fromkeys(p.variant for p in points):
        mine = {p.level: p.throughput for p in points if p.variant == variant}
        if plain.keys() <= mine.keys():
            ratios = [mine[level] / plain[level] for level in plain]
            verdicts.append(
                VariantVerdict(
                    variant=variant,
                    adaptive=is_adaptive(variant),
                    mean_ratio=statistics.mean(ratios),
                    worst_ratio=min(ratios),
                )
            )
    return sorted(verdicts, key=lambda v: -v.mean_ratio)


def _known_quartiles(values: Sequence[float | None]) -> Quartiles | None:
    known = [value for value in values if value is not None]
    return quartiles(known) if known else None
