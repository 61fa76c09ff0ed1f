"""seconds of a target forward by (R requests, B tokens, S mean context), from measured cells

       B = 1 2 3 4 5 6 7 8 ...      16        32        64        128
    R = 1  o o o o o o o o o o o o o o o o o o o         o          o . . theta      o cells
    R = 2    o   o   o   o    o     o . . . . . . as R = 1 . . . . . . .
    R = 4        o       o          o         o . as R = 2 . . . . . . .

Cells of one row rise with the tokens: where measurements fall, the nearest rising line in squares takes their place
(isotonic regression). More tokens are not cheaper by more than noise, and a policy that searches the table would find
just those cells that noise made cheap, and pay what they really cost. Cliffs upward stay as they are.

A row is the row of fewer requests plus their difference, which is linear between cells and constant outside of them:
steps of the staircase come from matrix products over all B rows, whoever they belong to, and need to be measured one by
one only once. Below the first row lies the additive form's theta B (scheduling/additive.py). Requests and contexts in
between are linear; beyond the last cells the additive form goes on. Shapes: N token counts asked for; B = 0..edge.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

from outrider.scheduling.additive import Additive, Cell
from outrider.scheduling.view import Floats, Ints


class ForwardTable:
    """Raises ValueError where cells are no grid: twice the same, or requests not measured at some context."""

    def __init__(self, cells: Sequence[Cell], fit: Additive) -> None:
        # Slopes below zero are noise: they must not run on.
        self.alpha, self.theta, self.sigma = max(fit.alpha, 0.0), max(fit.theta, 0.0), max(fit.sigma, 0.0)
        self.requests = sorted({c.requests for c in cells})
        self.contexts = sorted({c.context for c in cells})
        self.edge = max(c.tokens for c in cells)
        self._seconds_RSB = np.empty((len(self.requests), len(self.contexts), self.edge + 1))
        measured = _by_row(cells)
        for s, context in enumerate(self.contexts):
            row_B: Floats = self.theta * np.arange(self.edge + 1.0)
            for r, requests in enumerate(self.requests):
                if (requests, context) not in measured:
                    raise ValueError(f"cells: {requests} requests were not measured at context {context}")
                row_B = self._seconds_RSB[r, s] = _row(measured[requests, context], row_B)

    def seconds(self, tokens_N: Ints, requests: int, context: float) -> Floats:
        """Medians [N]; contexts shorter than the shortest cost as much as that."""
        r, r_next, along_r = _between(self.requests, requests)
        s, s_next, along_s = _between(self.contexts, context)
        table = self._seconds_RSB
        curve_B = ((1 - along_r) * (1 - along_s)) * table[r, s]
        if along_s:
            curve_B += ((1 - along_r) * along_s) * table[r, s_next]
        if along_r:
            curve_B += (along_r * (1 - along_s)) * table[r_next, s]
            if along_s:
                curve_B += (along_r * along_s) * table[r_next, s_next]
        found_N: Floats = curve_B[np.minimum(tokens_N, self.edge)]
        more_requests = max(requests - self.requests[-1], 0)
        more_context = max(context - self.contexts[-1], 0.0)
        if more_requests or more_context:
            more_read = more_requests * context + (requests - more_requests) * more_context
            found_N += self.alpha * more_requests + self.sigma * more_read
        if tokens_N.size and tokens_N.max() > self.edge:
            found_N += self.theta * np.maximum(tokens_N - self.edge, 0)
        return found_N


def _by_row(cells: Sequence[Cell]) -> dict[tuple[int, int], dict[int, float]]:
    measured: dict[tuple[int, int], dict[int, float]] = {}
    for c in cells:
        row = measured.setdefault((c.requests, c.context), {})
        if c.tokens in row:
            raise ValueError(f"cells: {c.requests} requests, {c.tokens} tokens at context {c.context} come twice")
        row[c.tokens] = c.median
    return measured


def _row(measured: dict[int, float], base_B: Floats) -> Floats:
    """Seconds of 0, 1, 2, ... tokens: the cells, and between them as `base_B`."""
    counts = np.array(sorted(measured))
    over = _rising([measured[count] for count in counts.tolist()]) - base_B[counts]
    row_B: Floats = np.maximum.accumulate(base_B + np.interp(np.arange(len(base_B)), counts, over))
    return row_B


def _rising(values: Sequence[float]) -> Floats:
    """Isotonic regression: neighbours that fall are pooled into their mean until none do."""
    pools: list[tuple[float, int]] = []
    for value in values:
        mean, count = value, 1
        while pools and pools[-1][0] > mean:
            before, size = pools.pop()
            mean, count = (mean * count + before * size) / (count + size), count + size
        pools.append((mean, count))
    return np.repeat([mean for mean, _ in pools], [count for _, count in pools])


def _between(grid: Sequence[int], value: float) -> tuple[int, int, float]:
    """The places around `value`, and how far along it is from the first to the second; at an end, that end twice."""
    after = bisect_right(grid, value)
    if after in (0, len(grid)):
        end = max(after - 1, 0)
        return end, end, 0.0
    return after - 1, after, (value - grid[after - 1]) / (grid[after] - grid[after - 1])
