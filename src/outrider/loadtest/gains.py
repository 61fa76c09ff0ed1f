"""Gains of one way to serve over another at equal throughput and at equal speed per user, read off their frontiers.

    tokens/s of all users
      |  x--.                      gain at a promised speed s        Theta_x(s) / Theta_o(s)
      |      `--x-----.            gain at a matched throughput t    S_x(t) / S_o(t)
      |  o--.          `--x
      |      `--o---.              Theta and S are one curve, read from either side: straight lines between the
      |              `--o           measured loads, in logarithms
      +------------------------ tokens/s of the median user

DSpark (arXiv 2607.05147) reports its serving results like this. Load moves along a curve; a load at which another one
gives users more speed and the machine more throughput is left out of it. Nothing is read beyond the ends of a curve.

Intervals come from the repeats: one repeat holds every variant at every load, minutes apart, so repeats are drawn as
wholes, with replacement, and both curves are made again of the medians (Efron's percentile bootstrap). Where such a
curve ends before a value that the curve of all repeats has, its last line is prolonged.
Shapes: B bootstrap draws, R repeats, L loads, 2 (tokens/s of the median user, tokens/s of all users).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
from pydantic import BaseModel

from outrider.scheduling.cost import Floats

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
