"""Figures of a window, the journal of a sweep's points, their summary over repeats, and gains over another variant.

tokens/s      all tokens of the window / its seconds
user speed    (tokens - those of the first output) / (last - first output) of a request; p95 is what 95 % at least get
TTFT          first output - arrival
generation    tokens / (last - first output) of a request: mlx-lm's generation_tps, which counts the first output, too
budget        (admitted + requests) / requests: rows verified per request and step        tau  committed / requests
acceptance    accepted / admitted
histogram     rounds of all requests by accepted drafts, 0, 1, 2 ...; servers count those with drafts alone
draft share   of the steps' seconds: blocks, and what drafters take to read committed tokens
goodput       finished requests per second * share of the counted that met the limits
"""

from __future__ import annotations

import json
import math
import os
import statistics
import warnings
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from pydantic import BaseModel, Field, NonNegativeInt, TypeAdapter, ValidationError, field_validator

from outrider.backends.base import Acceptance
from outrider.backends.local import NO_SPECULATION, is_adaptive, variant_of
from outrider.decoding.cost import Floats
from outrider.evaluation.loadtest.config import Sla
from outrider.evaluation.loadtest.load import MeasuredRequest, Window
from outrider.evaluation.verdict import Speedup
from outrider.utils.documents import read_json, read_mapping
from outrider.utils.files import invalid_fields, write_atomically
from outrider.utils.measure import Quartiles, machine, quartiles, today, versions


class Metrics(BaseModel):
    """Figures of one window, defined above; times in seconds.

    None where there was nothing to take it from (one output per request, no draft), or the backend does not show it.
    """

    seconds: float
    tokens: int
    requests: int
    steps: int
    tokens_per_second: float
    user_p50: float | None
    user_p95: float | None
    ttft_p50: float | None
    ttft_p95: float | None
    gap_p50: float | None  # between two outputs of a request
    gap_p95: float | None
    goodput: float
    attainment: float
    rounds_per_request: float
    budget: float | None
    acceptance: float | None
    tau: float | None
    draft_share: float | None
    drafting_share: float | None  # of the requests of a step, how many drafted
    generation_tps: float | None = None  # the median request's


class RequestFigures(BaseModel):
    """Figures of one counted request, of the prompt `index`; `gaps`: seconds between outputs of `sizes` tokens.

    `accepted_length` is None where an engine does not tell it of single requests.
    """

    index: int
    tokens: int
    ttft: float
    gaps: list[float]
    sizes: list[int]
    tokens_per_second: float | None  # after the first output
    accepted_length: float | None

    @staticmethod
    def of(served: MeasuredRequest) -> RequestFigures:
        assert served.index is not None
        speed = user_speed(served)
        return RequestFigures(
            index=served.index,
            tokens=len(served.tokens),
            ttft=round(ttft(served), 6),
            gaps=[round(later - earlier, 6) for earlier, later in pairwise(served.times)],
            sizes=served.sizes,
            tokens_per_second=None if speed is None else round(speed, 3),
            accepted_length=served.accepted_length,
        )


def ttft(served: MeasuredRequest) -> float:
    return served.times[0] - served.arrived


def user_speed(served: MeasuredRequest) -> float | None:
    """Tokens per second after the first output; None where there was only one."""
    span = served.times[-1] - served.times[0]
    return (len(served.tokens) - served.sizes[0]) / span if span > 0 else None


def meets(served: MeasuredRequest, sla: Sla) -> bool:
    """Whether a request had the service level."""
    speed = user_speed(served)
    return ttft(served) <= sla.ttft and (speed is None or speed >= sla.tokens_per_second)


def summarise(window: Window, sla: Sla) -> Metrics:
    """The figures of a window with at least one finished request.

    Raises:
        ValueError: no counted request finished.
    """
    requests, steps = window.requests, window.steps
    if not requests:
        raise ValueError(
            f"no request was answered within {window.seconds:.3g} s; give --seconds-per-point more, or count requests."
        )
    speeds = [speed for served in requests if (speed := user_speed(served)) is not None]
    spans = [(len(served.tokens), served.times[-1] - served.times[0]) for served in requests]
    rates = [tokens / span for tokens, span in spans if span > 0]
    firsts = [ttft(served) for served in requests]
    gaps = [later - earlier for served in requests for earlier, later in pairwise(served.times)]
    decoded, admitted = sum(s.requests for s in steps), sum(s.admitted for s in steps)
    attainment = sum(meets(served, sla) for served in requests) / len(requests)
    acceptance = window.acceptance or Acceptance(
        _ratio(sum(s.committed for s in steps), decoded), _ratio(sum(s.accepted for s in steps), admitted)
    )
    return Metrics(
        seconds=window.seconds,
        tokens=window.tokens,
        requests=len(requests),
        steps=len(steps),
        tokens_per_second=window.tokens / window.seconds,
        user_p50=_quantile(speeds, 0.5),
        user_p95=_quantile(speeds, 0.05),
        ttft_p50=_quantile(firsts, 0.5),
        ttft_p95=_quantile(firsts, 0.95),
        gap_p50=_quantile(gaps, 0.5),
        gap_p95=_quantile(gaps, 0.95),
        goodput=attainment * window.finished / window.seconds,
        attainment=attainment,
        rounds_per_request=sum(len(served.times) for served in requests) / len(requests),
        budget=_ratio(admitted + decoded, decoded),
        acceptance=acceptance.acceptance,
        tau=acceptance.accepted_length,
        draft_share=_ratio(sum(s.draft_seconds for s in steps), sum(s.seconds for s in steps)),
        drafting_share=_ratio(sum(s.drafting for s in steps), decoded),
        generation_tps=_quantile(rates, 0.5),
    )


def _quantile(values: Sequence[float], share: float) -> float | None:
    return float(np.quantile(values, share)) if values else None


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


# ----------------------------------------------------------------------------
# What a sweep has measured, on disk as it goes: OUT/settings.json, OUT/reference.json, OUT/points.jsonl;
# of conversations also OUT/said.json: the responses that later turns follow.
#
# A point is one line and counts once its newline is there, so a sweep that was stopped goes on after its last whole
# line. Levels, variants, repeats and drafters may grow from run to run; whatever changes a single measurement may not.
# ----------------------------------------------------------------------------


_REFERENCE, _SAID = "reference.json", "said.json"


class Point(BaseModel):
    """One measurement of a variant under a load. `level`: concurrent users, or requests per second.

    `same`, `ties`, `mismatches`: its responses against plain decoding's (evaluation/evaluate.py). Those of
    requests that are sampled without coupled noise are in none of the three.
    `requests` is empty where the point is simulated.
    """

    variant: str
    level: float
    repeat: int
    metrics: Metrics
    same: int
    ties: int
    mismatches: int
    requests: list[RequestFigures] = []
    acceptance_histogram: tuple[int, ...] | None = None  # None: not told

    @property
    def key(self) -> tuple[str, float, int]:
        return self.variant, self.level, self.repeat


Responses = TypeVar("Responses")
_DRAFTERS, _DRAFTER = "drafters", "drafter "


def _by_drafter(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with one entry for each drafter."""
    drafters = {f"{_DRAFTER}{name}".rstrip(): about for name, about in settings.get(_DRAFTERS, {}).items()}
    return {name: value for name, value in settings.items() if name != _DRAFTERS} | drafters


class Journal:
    """The points measured so far, in one directory.

    Raises:
        ValueError: it holds points measured with other settings, or a line that is none.
    """

    def __init__(self, directory: Path, settings: dict[str, Any]) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory, self._path = directory, directory / "points.jsonl"
        self.points = self._read()
        self.settings = self._checked(settings)

    def _checked(self, settings: dict[str, Any]) -> dict[str, Any]:
        """The settings of all points: these, with the drafters of before."""
        path, settings = self.directory / "settings.json", json.loads(json.dumps(settings))
        if not path.exists():
            self._write(path, settings)
            return settings
        earlier = read_mapping(path)
        before, now = _by_drafter(earlier), _by_drafter(settings)
        compared = {name for name in now.keys() | before.keys() if not name.startswith(_DRAFTER)}
        differing = [
            f"{name} was {before.get(name)}, now {now.get(name)}"
            for name in sorted(compared | (now.keys() & before.keys()))
            if before.get(name) != now.get(name)
        ]
        if differing and not self.points:  # an engine that never started, say: there is nothing to go on with
            for name in (_REFERENCE, _SAID):
                (self.directory / name).unlink(missing_ok=True)
        elif differing:
            raise ValueError(
                f"{self.directory} holds a sweep with other settings: {'; '.join(differing)}. "
                "Choose another --out, or repeat the settings to go on with it."
            )
        elif _DRAFTERS in settings:
            settings[_DRAFTERS] = earlier[_DRAFTERS] | settings[_DRAFTERS]
        if settings != earlier:
            self._write(path, settings)
        return settings

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
        """Plain decoding's responses to the prompts; None before they are made."""
        path = self.directory / _REFERENCE
        return self._responses(path, TypeAdapter(list[list[int]])) if path.exists() else None

    def keep_reference(self, responses: list[list[int]]) -> None:
        self._write(self.directory / _REFERENCE, responses)

    def said(self) -> list[list[list[int]]]:
        """The baseline's responses that later turns follow, turn by turn; [] before there are any."""
        path = self.directory / _SAID
        return self._responses(path, TypeAdapter(list[list[list[int]]])) if path.exists() else []

    def keep_said(self, turns: list[list[list[int]]]) -> None:
        self._write(self.directory / _SAID, turns)

    @staticmethod
    def _responses(path: Path, kind: TypeAdapter[Responses]) -> Responses:
        try:
            return kind.validate_python(read_json(path), strict=True)
        except ValidationError as error:
            raise ValueError(f"{path}: not the responses of a sweep; choose another --out.") from error

    @staticmethod
    def _write(path: Path, content: Any) -> None:
        write_atomically(path, json.dumps(content) + "\n")


# ----------------------------------------------------------------------------
# Gains of one way to serve over another at equal throughput and at equal speed per user, read off their frontiers.
#
#     tokens/s of all users
#       |  x--.                      gain at a promised speed s        Theta_x(s) / Theta_o(s)
#       |      `--x-----.            gain at a matched throughput t    S_x(t) / S_o(t)
#       |  o--.          `--x
#       |      `--o---.              Theta and S are one curve, read from either side: straight lines between the
#       |              `--o           measured loads, in logarithms
#       +------------------------ tokens/s of the median user
#
# DSpark (arXiv 2607.05147) reports its serving results like this. Load moves along a curve; a load at which another one
# gives users more speed and the machine more throughput is left out of it. Nothing is read beyond the ends of a curve.
#
# Intervals come from the repeats: one repeat holds every variant at every load, minutes apart, so repeats are drawn as
# wholes, with replacement, and both curves are made again of the medians (Efron's percentile bootstrap). Where such a
# curve ends before a value that the curve of all repeats has, its last line is prolonged.
# Shapes: B bootstrap draws, R repeats, L loads, 2 (tokens/s of the median user, tokens/s of all users).
# ----------------------------------------------------------------------------


Measured = Mapping[float, Mapping[int, tuple[float, float]]]  # load -> repeat -> (user speed, throughput)
Figure = Literal["throughput", "speed"]
INTERVAL = 0.9  # of the draws are within a gain's low and high
_DRAWS = 1000


class Gain(BaseModel):
    """What a variant gives in multiples of what `against` gives, where the other figure is `at` for both.

    `figure` "throughput": tokens per second of all users at a promised speed per user; "speed": tokens per second of
    the median user at a matched throughput. `ratio` is None where `at` is outside one of the curves, and `outside` says
    of which; `low` and `high` are None for fewer than two repeats.
    """

    variant: str
    against: str
    figure: Figure
    at: float
    ratio: float | None
    low: float | None = None
    high: float | None = None
    outside: str = ""


class Curve:
    """The frontier of points (user speed, throughput), [L, 2]; those that are not finite are left out."""

    def __init__(self, points_L2: Floats) -> None:
        known_L2 = points_L2[np.isfinite(points_L2).all(axis=1)]
        kept: list[Floats] = []
        for point in known_L2[np.lexsort((-known_L2[:, 1], -known_L2[:, 0]))]:  # the fastest for users first
            if not kept or point[1] > kept[-1][1]:
                kept.append(point)
        self.points_L2 = np.array(kept).reshape(-1, 2)

    def covers(self, axis: int, value: float) -> bool:
        """Whether figure `axis` (0: user speed, 1: throughput) takes this value between the ends."""
        values = self.points_L2[:, axis]
        return bool(values.min() <= value <= values.max())

    def read(self, axis: int, value: float) -> float:
        """The other figure where figure `axis` has this value; beyond an end, on the prolonged last line."""
        logs_L2 = np.log(self.points_L2[np.argsort(self.points_L2[:, axis])])
        x_L, y_L, x = logs_L2[:, axis], logs_L2[:, 1 - axis], np.log(value)
        if len(x_L) == 1:
            return float(np.exp(y_L[0]))
        place = int(np.clip(np.searchsorted(x_L, x), 1, len(x_L) - 1))
        slope = (y_L[place] - y_L[place - 1]) / (x_L[place] - x_L[place - 1])
        return float(np.exp(y_L[place] + slope * (x - x_L[place])))


def gains(measured: Mapping[str, Measured], against: str, speeds: Sequence[float] = ()) -> list[Gain]:
    """Gains of every variant over `against`: at `speeds`, and at the throughputs that `against` has at its loads.

    Args:
        speeds: promised to users, in tokens per second; those of `against` at its loads by default.
    """
    repeats = sorted({repeat for loads in measured.values() for found in loads.values() for repeat in found})
    draws_BR = np.random.default_rng(0).integers(0, len(repeats), (_DRAWS if len(repeats) > 1 else 0, len(repeats)))
    curves = {}
    for variant, loads in measured.items():
        points_RL2 = _points(loads, repeats)
        curves[variant] = [Curve(points) for points in (_medians(points_RL2[None])[0], *_medians(points_RL2[draws_BR]))]
    known = {variant: found for variant, found in curves.items() if len(found[0].points_L2)}
    if against not in known:
        return []
    own_L2 = known[against][0].points_L2
    wanted: list[tuple[Figure, float]] = [("throughput", speed) for speed in speeds or own_L2[:, 0].tolist()]
    wanted += [("speed", throughput) for throughput in own_L2[:, 1].tolist()]
    return [
        _gain(Gain(variant=variant, against=against, figure=figure, at=at, ratio=None), found, known[against])
        for figure, at in wanted
        for variant, found in known.items()
        if variant != against
    ]


def _points(loads: Measured, repeats: Sequence[int]) -> Floats:
    """[R, L, 2], NaN where a load was not measured in a repeat."""
    missing = (np.nan, np.nan)
    points = [[loads[level].get(repeat, missing) for level in sorted(loads)] for repeat in repeats]
    return np.array(points).reshape(len(repeats), len(loads), 2)


def _medians(points_BRL2: Floats) -> Floats:
    """Medians over repeats, [B, L, 2]; NaN where no repeat has the load."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        medians: Floats = np.nanmedian(points_BRL2, axis=1)
    return medians


def _gain(asked: Gain, mine: Sequence[Curve], theirs: Sequence[Curve]) -> Gain:
    """`asked`, answered: the first curve of each is that of all repeats, the others are the bootstrap's."""
    axis = 0 if asked.figure == "throughput" else 1
    for name, curve in ((asked.variant, mine[0]), (asked.against, theirs[0])):
        if not curve.covers(axis, asked.at):
            values = curve.points_L2[:, axis]
            return asked.model_copy(update={"outside": f"{name} has {values.min():.3g} to {values.max():.3g}"})
    first, *drawn = (
        my.read(axis, asked.at) / their.read(axis, asked.at)
        for my, their in zip(mine, theirs, strict=True)
        if len(my.points_L2) and len(their.points_L2)
    )
    low, high = np.quantile(drawn, [(1 - INTERVAL) / 2, (1 + INTERVAL) / 2]).tolist() if drawn else (None, None)
    return asked.model_copy(update={"ratio": first, "low": low, "high": high})


# ----------------------------------------------------------------------------
# frontier.json: medians and quartiles over repeats, and who won.
#
#     at a level      best adaptive / best static variant, by median throughput
#     over the sweep  mean over levels of throughput / that without speculation, and the worst of these ratios
#
# Static variants are chosen once, adaptive ones look at the load (backends/local.py). Verdicts are of the closed
# loop: Poisson throughput is the rate of arrivals until a variant gives way, so there goodput is what to read.
# ----------------------------------------------------------------------------


class PointSummary(BaseModel):
    """A variant at a level, over its repeats. `quartiles`: (low, median, high) of each of `Metrics`; None: unknown.

    `acceptance_histogram`: rounds of all repeats by accepted drafts; None: not told.
    """

    variant: str
    level: float = Field(gt=0, allow_inf_nan=False)
    repeats: int
    quartiles: dict[str, Quartiles | None]
    same: int
    ties: int
    mismatches: int
    acceptance_histogram: tuple[NonNegativeInt, ...] | None = None

    @field_validator("quartiles")
    @classmethod
    def _complete(cls, quartiles: dict[str, Quartiles | None]) -> dict[str, Quartiles | None]:
        needed = {name for name, field in Metrics.model_fields.items() if field.is_required()}
        if missing := sorted(needed - {*quartiles}):
            raise ValueError(f"no {', '.join(missing)}")
        if quartiles["tokens_per_second"] is None:
            raise ValueError("no tokens_per_second")
        return quartiles

    def median(self, figure: str) -> float | None:
        found = self.quartiles.get(figure)
        return None if found is None else found[1]

    def shown(self, figure: str, scale: float = 1.0, form: str = ".1f") -> str:
        """The scaled median as text; blank where it is unknown."""
        found = self.median(figure)
        return "" if found is None else format(scale * found, form)

    @property
    def throughput(self) -> float:
        """Median tokens per second."""
        found = self.median("tokens_per_second")
        assert found is not None
        return found


class LevelVerdict(BaseModel):
    """The best static and the best adaptive variant at one level; `ratio` is adaptive / static throughput."""

    level: float
    static: str
    adaptive: str
    ratio: float


class VariantVerdict(BaseModel):
    """Throughput of one variant over all levels, in multiples of no speculation."""

    variant: str
    adaptive: bool
    mean_ratio: float
    worst_ratio: float


class Frontier(BaseModel):
    """The content of frontier.json. `levels`, `overall` and `gains` are empty where there is nothing to compare."""

    arrivals: str
    points: list[PointSummary]
    levels: list[LevelVerdict]
    overall: list[VariantVerdict]
    gains: list[Gain] = []
    settings: dict[str, Any]
    machine: dict[str, Any]
    versions: dict[str, str]
    date: str | None = None  # of the last point; None: not recorded

    @staticmethod
    def of(
        arrivals: str,
        points: Sequence[Point],
        settings: dict[str, Any],
        against: str | None = None,
        user_speeds: Sequence[float] = (),
    ) -> Frontier:
        """The frontier of points made on this machine.

        Args:
            against: the variant that gains are over; an MTP drafter's one token by default, else no speculation.
            user_speeds: promised, see `gains`.
        """
        found, closed = summarise_points(points), arrivals == "closed"
        over = _baseline(points, settings) if against is None else against
        return Frontier(
            arrivals=arrivals,
            points=found,
            levels=level_verdicts(found) if closed else [],
            overall=overall_verdicts(found) if closed else [],
            gains=gains(_speeds(points), over, user_speeds) if closed and over is not None else [],
            settings=settings,
            machine=machine(),
            versions=versions(),
            date=today(),
        )

    def save(self, directory: Path) -> Path:
        """Write frontier.json and return its path."""
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
        except ValidationError as error:
            wrong = invalid_fields(error, "the file")[0]
            raise ValueError(f"{path} is no frontier.json of outrider bench ({wrong}).") from None


def _baseline(points: Sequence[Point], settings: Mapping[str, Any]) -> str | None:
    """MTP-1 where it was measured, else no speculation, else nothing."""
    there = {point.variant for point in points}
    drafters = settings.get(_DRAFTERS, {})
    single = [variant_of(name, "fixed-1") for name, about in drafters.items() if about["algorithm"] == "mtp"]
    return next((variant for variant in (*single, NO_SPECULATION) if variant in there), None)


def _speeds(points: Sequence[Point]) -> dict[str, dict[float, dict[int, tuple[float, float]]]]:
    """What `gains` reads: {variant: {level: {repeat: (user speed, throughput)}}}."""
    found: dict[str, dict[float, dict[int, tuple[float, float]]]] = {}
    for point in points:
        if point.metrics.user_p50:
            figures = point.metrics.user_p50, point.metrics.tokens_per_second
            found.setdefault(point.variant, {}).setdefault(point.level, {})[point.repeat] = figures
    return found


def summarise_points(points: Sequence[Point]) -> list[PointSummary]:
    """A summary for each variant and level, in order of level, then of first appearance."""
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
                acceptance_histogram=summed(p.acceptance_histogram for p in group),
            )
        )
    return found


def summed(histograms: Iterable[tuple[int, ...] | None]) -> tuple[int, ...] | None:
    """Histograms added up, the shorter ones with zeros at their ends; None if there is none."""
    known = [histogram for histogram in histograms if histogram is not None]
    return tuple(map(sum, zip_longest(*known, fillvalue=0))) if known else None


def level_verdicts(points: Sequence[PointSummary]) -> list[LevelVerdict]:
    """A verdict for each level at which static and adaptive variants were measured."""
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
    """Verdicts, best first, of the variants measured at every level that plain decoding was."""
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


def speedups(frontier: Frontier) -> dict[str, list[Speedup]]:
    """By variant and load, throughput (of Poisson arrivals: goodput) over that without speculation, for a verdict.

    Of the variants that were measured wherever no speculation was; {} where it was not, or met no limit.
    """
    closed = frontier.arrivals == "closed"
    figure = "tokens_per_second" if closed else "goodput"
    unit, plural = ("user", "users") if closed else ("request/s", "requests/s")
    found: dict[str, list[Speedup]] = {}
    plain = {p.level: p for p in frontier.points if p.variant == NO_SPECULATION and p.median(figure)}
    for point in frontier.points:
        if point.variant == NO_SPECULATION or point.level not in plain:
            continue
        mine, base = point.quartiles[figure], plain[point.level].quartiles[figure]
        assert mine is not None and base is not None
        ratio = mine[1] / base[1]
        # Quartiles of a ratio of two independent figures: their relative widths add up in squares.
        width = ratio * math.hypot(*((high - low) / (2 * median) for low, median, high in (mine, base) if median))
        name = f"{point.level:g} {unit if point.level == 1 else plural}"
        found.setdefault(point.variant, []).append(
            Speedup(name, ratio, ratio - width, high=ratio + width, samples=point.repeats)
        )
    return {variant: levels for variant, levels in found.items() if len(levels) == len(plain)}


def _known_quartiles(values: Sequence[float | None]) -> Quartiles | None:
    known = [value for value in values if value is not None]
    return quartiles(known) if known else None


# ----------------------------------------------------------------------------
# A table of a frontier. Of engines whose steps are seen it shows rows verified and the drafts' share, of others what
# users see instead: the time between outputs.
# ----------------------------------------------------------------------------


_Column = tuple[str, float, str]  # heading, scale, format
_COLUMNS: dict[str, _Column] = {
    "tokens_per_second": ("tok/s", 1.0, ".1f"),
    "user_p50": ("user", 1.0, ".1f"),
    "user_p95": ("p95", 1.0, ".1f"),
    "ttft_p50": ("TTFT", 1e3, ".0f"),
    "ttft_p95": ("p95", 1e3, ".0f"),
    "goodput": ("good/s", 1.0, ".2f"),
}
_INSIDE: dict[str, _Column] = {
    "budget": ("rows", 1.0, ".2f"),
    "tau": ("tau", 1.0, ".2f"),
    "draft_share": ("draft", 100.0, ".0f"),
}
_OUTSIDE: dict[str, _Column] = {
    "gap_p50": ("gap", 1e3, ".0f"),
    "gap_p95": ("p95", 1e3, ".0f"),
    "tau": ("tau", 1.0, ".2f"),
}


def table_rows(frontier: Frontier) -> list[list[str]]:
    """Headings, then a row of medians for each load and variant; times in ms, shares in per cent."""
    seen = any(point.median("budget") is not None for point in frontier.points)
    columns = _COLUMNS | (_INSIDE if seen else _OUTSIDE)
    found = [["load", "variant", *(heading for heading, _, _ in columns.values()), "other"]]
    for point in frontier.points:
        cells = [point.shown(figure, scale, form) for figure, (_, scale, form) in columns.items()]
        found.append([f"{point.level:g}", point.variant, *cells, str(point.mismatches)])
    return found


_MOST_ACCEPTED = 10  # with a column of its own; longer drafts share one


def histogram_rows(frontier: Frontier) -> list[list[str]]:
    """Headings, then for each load and variant the share of rounds, in per cent, that accepted 0, 1, 2 ... drafts.

    Without the points of which it is not known, or that drafted nothing; [] where that is all of them.
    """
    shown = [(p, p.acceptance_histogram) for p in frontier.points if any((p.acceptance_histogram or ())[1:])]
    if not shown:
        return []
    longest = max(len(histogram) for _, histogram in shown if histogram) - 1
    names = [*map(str, range(min(longest, _MOST_ACCEPTED) + 1))]
    found = [["load", "variant", *names[:-1], f"{names[-1]}+" if longest > _MOST_ACCEPTED else names[-1]]]
    for point, histogram in shown:
        assert histogram is not None
        rest = histogram[_MOST_ACCEPTED:]
        counts = [*histogram[:_MOST_ACCEPTED], *([sum(rest)] if rest else [])]
        shares = [100 * count / sum(histogram) for count in counts]
        cells = [f"{share:.0f}" if share >= 0.5 or not share else "<1" for share in shares]
        found.append([f"{point.level:g}", point.variant, *cells, *[""] * (len(names) - len(cells))])
    return found
