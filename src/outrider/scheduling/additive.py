"""seconds of a forward  ~  bias + alpha R + theta B + sigma R S

What a machine costs in four numbers: per forward, per request, per token, per cached token read. Least squares on
*relative* errors, so that the short forwards, where policies decide, count as much as the long ones. Real curves are
staircases and this is a line, so its residuals are kept: they say how far it may be trusted. A profile
(scheduling/profile.py) interpolates between what it measured and asks this only beyond.
Shapes: N cells, R requests, B tokens in all, S mean cached tokens per request.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from pydantic import BaseModel, ConfigDict, Field


class Cell(BaseModel):
    """One measured forward: its shape, and the quartiles of its seconds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    requests: int = Field(ge=1)
    tokens: int = Field(ge=1)
    context: int = Field(ge=0)
    low: float = Field(gt=0)
    median: float = Field(gt=0)
    high: float = Field(gt=0)


class Additive(BaseModel):
    """The four numbers, in seconds, and (fitted - measured) / measured per cell."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    bias: float
    alpha: float
    theta: float
    sigma: float
    residuals: list[float]

    @staticmethod
    def fit(cells: Sequence[Cell]) -> Additive:
        """Of at least one cell; where all cells agree on an axis, its cost is shared out (smallest coefficients)."""
        shape_N4 = np.array([(1, c.requests, c.tokens, c.requests * c.context) for c in cells], dtype=np.float64)
        seconds_N = np.array([c.median for c in cells])
        # Columns of one size: lstsq drops directions by singular value, and R S is thousands of times larger than 1.
        size_4 = shape_N4.max(axis=0).clip(min=1)
        weighted_N4 = shape_N4 / size_4 / seconds_N[:, None]
        found_4 = np.linalg.lstsq(weighted_N4, np.ones(len(cells)), rcond=None)[0] / size_4
        bias, alpha, theta, sigma = found_4.tolist()
        residuals_N = shape_N4 @ found_4 / seconds_N - 1
        return Additive(bias=bias, alpha=alpha, theta=theta, sigma=sigma, residuals=residuals_N.tolist())

    @property
    def spread(self) -> float:
        """Root mean square of the residuals."""
        return float(np.sqrt(np.mean(np.square(self.residuals))))
