"""The cost of a step, which policies weigh expected tokens against.

    seconds of one step  =  drafting for D requests  +  one target forward of B tokens  +  the rest;   SPS = 1 / seconds

What is spent whatever a policy decides (drafting, bookkeeping) counts too: tau / (fixed + forward(B)) peaks at a larger
B than tau / forward(B). `Profile` holds these costs as measured on one machine (decoding/profile.py measures them).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from outrider.utils.files import invalid_fields, write_atomically

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]


class StepCost(Protocol):
    """Seconds of engine steps on some machine: `seconds`, and `draft_seconds` in addition where requests draft."""

    def seconds(self, tokens_N: Ints, requests: int, context: float) -> Floats:
        """Seconds [N] of steps with forwards of `tokens_N` tokens, without drafting.

        Args:
            requests: sequences in the step.
            context: their mean number of committed tokens.
        """
        ...

    def draft_seconds(self, drafting: int, depth: int | None = None) -> float:
        """Seconds of drafting.

        Args:
            drafting: how many requests a block is drafted for; 0 costs nothing.
            depth: tokens of the longest draft, if drafts are kept short; None: a whole block.
        """
        ...


def decoding_seconds(cost: StepCost, verified_N: Ints, requests: int, *, other_tokens: int, context: float) -> Floats:
    """Seconds [N] of steps that verify so many drafts, without drafting them and without reading prompts.

    Rows of prompts (`other_tokens`) have to be read in one step or another, so what they take alone does not depend on
    what is verified beside them. They do change what a draft more takes: a forward of many rows may be bound by
    arithmetic where one of few waits for memory. Counted in full, they would make every draft look cheap beside them.
    """
    seconds_N = cost.seconds(requests + other_tokens + verified_N, requests, context)
    if not other_tokens:
        return seconds_N
    alone_2 = cost.seconds(np.array([requests, requests + other_tokens]), requests, context)
    found_N: Floats = np.maximum(seconds_N - (alone_2[1] - alone_2[0]), alone_2[0])  # a given table may fall
    return found_N


class SpsTable:
    """Target forward passes per second at 1, 2, 3, ... tokens, whatever the requests; beyond its end the last rate."""

    def __init__(self, sps: Sequence[float]) -> None:
        rates = np.asarray(sps, dtype=np.float64)
        if not rates.size or not (rates > 0).all():
            raise ValueError(f"SPS values {list(sps)} must be positive numbers, one per token count from 1.")
        self._seconds = 1.0 / rates

    def seconds(self, tokens_N: Ints, requests: int, context: float) -> Floats:
        found_N: Floats = self._seconds[np.minimum(tokens_N, len(self._seconds)) - 1]
        return found_N

    def draft_seconds(self, drafting: int, depth: int | None = None) -> float:
        return 0.0


# ----------------------------------------------------------------------------
# The additive form:   seconds of a forward  ~  bias + alpha R + theta B + sigma R S
#
# Four numbers: per forward, per request, per token, per cached token read. Least squares on *relative* errors, so that
# the short forwards, where policies decide, count as much as the long ones. Real curves are staircases and this is a
# line, so its residuals are kept. A profile interpolates between what it measured and uses the form only beyond.
# Shapes: N cells, R requests, B tokens in all, S mean cached tokens per request.
# ----------------------------------------------------------------------------


class Cell(BaseModel):
    """One measured forward: its shape, and the quartiles of its seconds."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    requests: int = Field(ge=1, le=2**20)
    tokens: int = Field(ge=1, le=2**20)  # the table has a row of so many
    context: int = Field(ge=0, lt=2**31)
    low: float = Field(gt=0)
    median: float = Field(gt=0)
    high: float = Field(gt=0)


class Additive(BaseModel):
    """The additive form's four numbers, in seconds, and (fitted - measured) / measured per cell."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    bias: float
    alpha: float
    theta: float
    sigma: float
    residuals: list[float]

    @staticmethod
    def fit(cells: Sequence[Cell]) -> Additive:
        """Fit at least one cell; where all cells agree on an axis, the smallest coefficients are taken."""
        shape_N4 = np.array([(1, c.requests, c.tokens, c.requests * c.context) for c in cells], dtype=np.float64)
        seconds_N = np.array([c.low for c in cells])
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


# ----------------------------------------------------------------------------
# Seconds of a target forward by (R requests, B tokens, S mean context), interpolated between measured cells. Of a cell
# the lower quartile counts, because other work on the machine only adds:
#
#        B = 1 2 3 4 5 6 7 8 ...      16        32        64        128
#     R = 1  o o o o o o o o o o o o o o o o o o o         o          o . . theta      o cells
#     R = 2    o   o   o   o    o     o . . . . . . as R = 1 . . . . . . .
#     R = 4        o       o          o         o . as R = 2 . . . . . . .
#
# Cells of one row rise with the tokens: where measurements fall, the nearest rising line in squares takes their place
# (isotonic regression), because a policy that searches the table would choose just those cells that noise made cheap.
#
# A row is the row of fewer requests plus their difference, which is linear between cells and constant outside of them:
# steps of the staircase come from matrix products over all B rows, whichever request they belong to, and need to be
# measured one by one only once. For the same reason the first row of a longer context is that of the next shorter one
# plus their difference. Below the first row of all lies the additive form's theta B. Requests and contexts in between
# are linear; beyond the last cells the additive form goes on. Shapes: N token counts asked for; B = 0..edge.
# ----------------------------------------------------------------------------


# What one more row of a forward usually costs, in forwards of one row: of models of some hundred million parameters on
# two cores, and of larger ones on a GPU.
_USUAL_ROW = {"cpu": 0.04, "gpu": 0.003}
_USUAL_SPREAD = 0.5  # of the logarithm of a cell around it


def believed(cells: Sequence[Cell], row: float) -> list[Cell]:
    """The cells, drawn to what rows usually cost the more, the less their repeats agree.

    Both are normal in the logarithm: the measurement with a standard deviation of its quartiles' distance, the usual
    cost with `_USUAL_SPREAD`. A cell of 4 % moves by less than 1 % of the way, one of 60 % by more than a half.

    Args:
        row: what one more row usually costs, in forwards of one row.
    """
    anchor = min(cells, key=lambda cell: (cell.tokens, cell.context))
    drawn = []
    for cell in cells:
        usual = anchor.low * (1 + row * (cell.tokens - 1)) / (1 + row * (anchor.tokens - 1))
        weight = _USUAL_SPREAD**2 / (_USUAL_SPREAD**2 + ((cell.high - cell.low) / cell.median) ** 2)
        drawn.append(cell.model_copy(update={"low": cell.low**weight * usual ** (1 - weight)}))
    return drawn


class ForwardTable:
    """Seconds of target forwards, interpolated between cells.

    Raises:
        ValueError: cells are no grid: twice the same, or requests not measured at some context.
    """

    def __init__(self, cells: Sequence[Cell], fit: Additive) -> None:
        # Slopes below zero are noise: they must not run on.
        self.alpha, self.theta, self.sigma = max(fit.alpha, 0.0), max(fit.theta, 0.0), max(fit.sigma, 0.0)
        self.requests = sorted({c.requests for c in cells})
        self.contexts = sorted({c.context for c in cells})
        self.edge = max(c.tokens for c in cells)
        self._seconds_RSB = np.empty((len(self.requests), len(self.contexts), self.edge + 1))
        measured = _by_row(cells)
        for s, context in enumerate(self.contexts):
            row_B: Floats = self._seconds_RSB[0, s - 1] if s else self.theta * np.arange(self.edge + 1.0)
            for r, requests in enumerate(self.requests):
                if (requests, context) not in measured:
                    raise ValueError(f"cells: {requests} requests were not measured at context {context}")
                row_B = self._seconds_RSB[r, s] = _row(measured[requests, context], row_B)

    def seconds(self, tokens_N: Ints, requests: int, context: float) -> Floats:
        """Seconds [N]; contexts shorter than the shortest cost as much as that."""
        r, r_next, along_r = _between(self.requests, requests)
        s, s_next, along_s = _between(self.contexts, context)
        table, at_N = self._seconds_RSB, np.minimum(tokens_N, self.edge)
        found_N: Floats = ((1 - along_r) * (1 - along_s)) * table[r, s][at_N]
        if along_s:
            found_N += ((1 - along_r) * along_s) * table[r, s_next][at_N]
        if along_r:
            found_N += (along_r * (1 - along_s)) * table[r_next, s][at_N]
            if along_s:
                found_N += (along_r * along_s) * table[r_next, s_next][at_N]
        more_requests = max(requests - self.requests[-1], 0)
        more_context = max(context - self.contexts[-1], 0.0)
        if more_requests or more_context:
            more_read = more_requests * context + (requests - more_requests) * more_context
            found_N += self.alpha * more_requests + self.sigma * more_read
        if tokens_N.size and tokens_N.max() > self.edge:
            found_N += self.theta * np.maximum(tokens_N - self.edge, 0)
        return found_N

    def prompt_seconds(self, prompts: Sequence[tuple[int, int]]) -> float:
        """What chunks of prompts add to a forward, each given as (tokens cached, tokens of the chunk).

        As many rows of one request cost as much, where they see as many keys on average: its forwards have no logits
        for them either. Chunks of several short prompts see fewer keys than one request of the shortest context, for
        which seconds go on as they fell between the two shortest.
        """
        rows = sum(count for _, count in prompts)
        if not rows:
            return 0.0
        keys = sum(count * (cached + count / 2) for cached, count in prompts) / rows
        most = max(self.edge - 1, 1)
        seconds = self._added_seconds(min(rows, most), keys)
        if rows > most > 1:  # beyond the cells, as their second half rises
            half = most // 2
            seconds += (rows - most) * max(seconds - self._added_seconds(half, keys), 0.0) / (most - half)
        return seconds

    def _added_seconds(self, rows: int, keys: float) -> float:
        """What `rows` more of one request cost that see so many keys each, on average."""
        shortest, counts = self.contexts[0], np.array([1, 1 + rows])
        context = keys - rows / 2
        without, beside = self.seconds(counts, 1, max(context, shortest))
        if context < shortest and len(self.contexts) > 1:
            longer = self.seconds(counts, 1, self.contexts[1])[1]
            beside -= max(longer - beside, 0.0) * (shortest - context) / (self.contexts[1] - shortest)
        return max(float(beside - without), 0.0)


def _by_row(cells: Sequence[Cell]) -> dict[tuple[int, int], dict[int, float]]:
    measured: dict[tuple[int, int], dict[int, float]] = {}
    for c in cells:
        row = measured.setdefault((c.requests, c.context), {})
        if c.tokens in row:
            raise ValueError(f"cells: {c.requests} requests, {c.tokens} tokens at context {c.context} come twice")
        row[c.tokens] = c.low
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


# ----------------------------------------------------------------------------
# A measured machine:   seconds of one step  =  draft(D)  +  verify(R, B, S)  +  other(R, B - R)
#
#     verify     `ForwardTable` over requests R, tokens B >= R and mean context S
#     draft      for each of D requests the drafter reads its new tokens, then drafts a block of some depth (linear
#                between one token and gamma); 0 for none
#     other      what else a step does for R requests and for each of the B - R drafts: rows are warped and verified,
#                text is written
#
# SPS(B) = 1 / seconds is the curve of DSpark, arXiv 2607.05147. Shapes: N token counts asked for.
# ----------------------------------------------------------------------------


class Setting(BaseModel):
    """What was measured: costs depend on it. `threads` is None off the CPU; `drafter` None without one."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    target: str
    dtype: str
    processor: str
    threads: int | None
    drafter: str | None


class Curve(BaseModel):
    """Seconds by number of requests: quartiles (low, median, high) at each measured count."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    requests: list[int] = Field(min_length=1)
    seconds: list[tuple[float, float, float]]

    @model_validator(mode="after")
    def _ascending(self) -> Curve:
        if any(a >= b for a, b in pairwise([0, *self.requests])) or len(self.seconds) != len(self.requests):
            raise ValueError("needs ascending requests from 1 on, with three quartiles of seconds each")
        return self

    def at(self, requests: int) -> float:
        """The lower quartile, linear between counts and, with the last slope, beyond them; 0 for no request."""
        if requests <= 0:
            return 0.0
        counts = self.requests
        if requests <= counts[0] or len(counts) == 1:
            return self.seconds[0][0] * max(1.0, requests / counts[0])
        i = min(bisect_right(counts, requests), len(counts) - 1)
        low, high = self.seconds[i - 1][0], self.seconds[i][0]
        # Noise may tilt the last piece down, and no number of requests is free.
        slope = (high - low) / (counts[i] - counts[i - 1])
        return low + (slope if requests <= counts[i] else max(slope, 0.0)) * (requests - counts[i - 1])


class Profile(BaseModel):
    """Measured costs of steps on one machine, a `StepCost`.

    `draft` are whole blocks of `gamma` tokens, `draft_one` blocks kept to one; `extend` is the drafter's reading of new
    tokens, which comes with each block. `verified`: seconds beside drafter and target for each draft that is verified;
    profiles that were made before it was measured apart have these in `other`. `temperatures`: of the requests, which
    took turns with them.

    Raises:
        ValueError: cells that are no grid (some requests were not measured at some context), or twice the same.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal[2] = 2
    setting: Setting
    cells: list[Cell] = Field(min_length=1)
    fit: Additive
    gamma: int = Field(ge=0)
    draft: Curve | None
    draft_one: Curve | None
    extend: Curve | None
    other: Curve
    verified: float = Field(default=0.0, ge=0)
    repeats: int
    temperatures: list[float] = [0.0]
    machine: dict[str, Any]
    versions: dict[str, str]
    date: str | None = None  # of the measurement; None: not recorded

    @cached_property
    def table(self) -> ForwardTable:
        """Target forwards, interpolated between the cells."""
        row = _USUAL_ROW["gpu" if self.setting.threads is None else "cpu"]
        return ForwardTable(believed(self.cells, row), self.fit)

    @model_validator(mode="after")
    def _complete(self) -> Profile:
        assert self.table  # building it checks the cells
        return self

    @property
    def spread(self) -> float:
        """How much seconds varied, (upper - lower quartile) / median: of forwards the median over the cells, of drafts
        the larger one of one request's, and of both the larger.
        """
        forwards = np.median([(c.high - c.low) / c.median for c in self.cells])
        drafts = [curve.seconds[0] for curve in (self.draft, self.draft_one) if curve is not None]
        return float(max([forwards, *((high - low) / median for low, median, high in drafts)]))

    def seconds(self, tokens_N: Ints, requests: int, context: float) -> Floats:
        """See `StepCost`."""
        return self.verify_seconds(tokens_N, requests, context) + self.other_seconds(requests, tokens_N - requests)

    def verify_seconds(
        self, tokens_N: Ints, requests: int, context: float, prompts: Sequence[tuple[int, int]] = ()
    ) -> Floats:
        """Target forwards [N] of `tokens_N` tokens of requests that decode, and of prefill chunks.

        Args:
            prompts: (tokens of the prompt that are cached, tokens of the chunk) of each chunk.
        """
        return self.table.seconds(tokens_N, requests, context) + self.table.prompt_seconds(prompts)

    def draft_seconds(self, drafting: int, depth: int | None = None) -> float:
        """Reading, and a block of `depth` tokens (None: gamma), for each of `drafting` requests."""
        if self.draft is None or self.draft_one is None or self.extend is None or depth == 0:
            return 0.0
        reading, whole = self.extend.at(drafting), self.draft.at(drafting)
        if depth is None or depth >= self.gamma:
            return reading + whole
        one = self.draft_one.at(drafting)
        return reading + one + (whole - one) * (depth - 1) / (self.gamma - 1)

    def other_seconds(self, requests: int, verified_N: Ints) -> Floats:
        """What steps of `requests` that verify so many drafts cost besides drafting and the target, [N]."""
        return self.other.at(requests) + self.verified * verified_N.astype(np.float64)

    def plain(self) -> Profile:
        """The same machine serving without a drafter."""
        setting = self.setting.model_copy(update={"drafter": None})
        return self.model_copy(update={"setting": setting, "draft": None, "draft_one": None, "extend": None})

    def check(self, used: Setting) -> None:
        """Check that the profile was measured with what it is used with; without a drafter in use, any drafter fits.

        Raises:
            ValueError: naming each field that differs.
        """
        differing = [
            f"{name} is {mine}, here it is {theirs}"
            for name, mine in self.setting.model_dump().items()
            if mine != (theirs := getattr(used, name)) and not (name == "drafter" and theirs is None)
        ]
        if differing:
            raise ValueError(
                f"this profile was measured with something else: {'; '.join(differing)}. "
                "Measure what you use: outrider profile --target ... --drafter ... --out FILE."
            )

    def save(self, path: Path) -> None:
        """Write JSON: the old file or the new one is there at any moment."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, self.model_dump_json(indent=1) + "\n")

    @staticmethod
    def load(path: Path) -> Profile:
        """Read what `save` wrote.

        Raises:
            ValueError: not there, not JSON, or not a profile of this format (the message names the field).
        """
        if not path.is_file():
            raise ValueError(f"{path}: no such profile; write one with outrider profile --out {path}.")
        try:
            return Profile.model_validate_json(path.read_bytes())
        except ValidationError as error:
            reason = invalid_fields(error, "the file")[0]
            raise ValueError(
                f"{path}: not a profile this version reads: {reason}. Measure again with outrider profile."
            ) from error
