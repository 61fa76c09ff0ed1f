"""(lower quartile, median, upper quartile): the spread that every measured figure is given with."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

Quartiles = tuple[float, float, float]


def quartiles(values: Sequence[float]) -> Quartiles:
    """Of at least one value, ends included: quartiles of few values lie between them. Of one, that value thrice."""
    if len(values) == 1:
        return (values[0],) * 3
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, median, high
