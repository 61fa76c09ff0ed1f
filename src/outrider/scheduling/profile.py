"""seconds of one step  =  draft(D)  +  verify(R, B, S)  +  other(R)          measured on the machine that serves

    verify     a table over requests R, tokens B >= R and mean context S (scheduling/forward_table.py)
    draft      for each of D requests: the drafter reads its new tokens, then a block of some depth (linear between one
               token and gamma); 0 for none
    other      what else a step does for R requests: rows are warped and judged, text

SPS(B) = 1 / seconds is the curve of DSpark, arXiv 2607.05147. Shapes: N token counts asked for.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from outrider.formats.files import write_atomically
from outrider.scheduling.additive import Additive, Cell
from outrider.scheduling.forward_table import ForwardTable
from outrider.scheduling.view import Floats, Ints


class Setting(BaseModel):
    """What costs depend on. `threads` is None off the CPU; `drafter` None where nothing is drafted."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    target: str
    dtype: str
    processor: str
    threads: int | None
    drafter: str | None


class Curve(BaseModel):
    """Seconds by number of requests: quartiles (low, median, high) at each measured count."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    requests: list[int] = Field(min_length=1)
    seconds: list[tuple[float, float, float]]

    @model_validator(mode="after")
    def _ascending(self) -> Curve:
        if any(a >= b for a, b in pairwise([0, *self.requests])) or len(self.seconds) != len(self.requests):
            raise ValueError("needs ascending requests from 1 on, with three quartiles of seconds each")
        return self

    def at(self, requests: int) -> float:
        """The median, linear between counts and, with the last slope, beyond them; 0 for no request."""
        if requests <= 0:
            return 0.0
        counts = self.requests
        if requests <= counts[0] or len(counts) == 1:
            return self.seconds[0][1] * max(1.0, requests / counts[0])
        i = min(bisect_right(counts, requests), len(counts) - 1)
        low, high = self.seconds[i - 1][1], self.seconds[i][1]
        # Noise may tilt the last piece down, and no number of requests is free.
        slope = (high - low) / (counts[i] - counts[i - 1])
        return low + (slope if requests <= counts[i] else max(slope, 0.0)) * (requests - counts[i - 1])


class Profile(BaseModel):
    """A measured machine; a `StepCost`.

    `draft` are whole blocks of `gamma` tokens, `draft_one` blocks kept to one; `extend` is the drafter's reading of new
    tokens, which comes with each block.

    Raises:
        ValueError: cells that are no grid (some requests were not measured at some context), or twice the same.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal[2] = 2
    setting: Setting
    cells: list[Cell] = Field(min_length=1)
    fit: Additive
    gamma: int
    draft: Curve | None
    draft_one: Curve | None
    extend: Curve | None
    other: Curve
    repeats: int
    machine: dict[str, Any]
    versions: dict[str, str]

    @cached_property
    def table(self) -> ForwardTable:
        """The cells, ready to be asked."""
        return ForwardTable(self.cells, self.fit)

    @model_validator(mode="after")
    def _complete(self) -> Profile:
        assert self.table  # building it checks the cells
        return self

    def seconds(self, tokens_N: Ints, requests: int, drafting: int, context: float, depth: int | None = None) -> Floats:
        """Whole steps, [N]; see `StepCost`."""
        around = self.draft_seconds(drafting, depth) + self.other_seconds(requests)
        seconds_N: Floats = self.verify_seconds(tokens_N, requests, context) + around
        return seconds_N

    def verify_seconds(self, tokens_N: Ints, requests: int, context: float) -> Floats:
        """Target forwards [N] of `tokens_N` tokens, those of prefill chunks included."""
        return self.table.seconds(tokens_N, requests, context)

    def draft_seconds(self, drafting: int, depth: int | None = None) -> float:
        """Reading, and a block of `depth` tokens (None: gamma), for each of `drafting` requests."""
        if self.draft is None or self.draft_one is None or self.extend is None or depth == 0:
            return 0.0
        reading, whole = self.extend.at(drafting), self.draft.at(drafting)
        if depth is None or depth >= self.gamma:
            return reading + whole
        one = self.draft_one.at(drafting)
        return reading + one + (whole - one) * (depth - 1) / (self.gamma - 1)

    def other_seconds(self, requests: int) -> float:
        """What a step of `requests` costs besides drafting and the target."""
        return self.other.at(requests)

    def plain(self) -> Profile:
        """The same machine serving without a drafter."""
        return self.model_copy(
            update={
                "setting": self.setting.model_copy(update={"drafter": None}),
                "draft": None,
                "draft_one": None,
                "extend": None,
            }
        )

    def check(self, used: Setting) -> None:
        """The profile is of what it is used with. Without a drafter in use, the profiled one does not matter.

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
            first = error.errors()[0]
            field = ".".join(str(part) for part in first["loc"]) or "the file"
            raise ValueError(
                f"{path}: not a profile this version reads: {field}: {first['msg']}. "
                "Measure again with outrider profile."
            ) from error
