"""seconds of a step  =  draft(drafting requests)  +  verify(rows, requests, context)  +  other(requests), part by part

What the simulator charges. A measured `Profile` is a machine; so are a profile scaled part by part (another processor,
a larger target) and a plain table somebody published.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from outrider.scheduling import SpsTable, StepCost
from outrider.scheduling.profile import Profile
from outrider.scheduling.view import Floats, Ints


class Machine(StepCost, Protocol):
    """A step cost that says what each part takes; `seconds` is their sum."""

    def draft_seconds(self, drafting: int, depth: int | None = None) -> float:
        """A block of `depth` tokens (None: a whole one) for each of `drafting` requests; 0 for none."""
        ...

    def verify_seconds(self, tokens_N: Ints, requests: int, context: float) -> Floats:
        """Target forwards of `tokens_N` rows in all, [N]."""
        ...

    def other_seconds(self, requests: int) -> float:
        """Sampling and bookkeeping."""
        ...

    def plain(self) -> Machine:
        """The same machine serving without a drafter."""
        ...


@dataclass(frozen=True)
class Scaled:
    """A machine whose parts take so many times as long."""

    machine: Machine
    draft: float = 1.0
    verify: float = 1.0

    def __post_init__(self) -> None:
        for name in ("draft", "verify"):
            if getattr(self, name) <= 0:
                raise ValueError(f"--scale-{name} {getattr(self, name)} must be above 0: it multiplies seconds.")

    def seconds(self, tokens_N: Ints, requests: int, drafting: int, context: float, depth: int | None = None) -> Floats:
        fixed = self.draft_seconds(drafting, depth) + self.other_seconds(requests)
        return fixed + self.verify_seconds(tokens_N, requests, context)

    def draft_seconds(self, drafting: int, depth: int | None = None) -> float:
        return self.draft * self.machine.draft_seconds(drafting, depth)

    def verify_seconds(self, tokens_N: Ints, requests: int, context: float) -> Floats:
        return self.verify * self.machine.verify_seconds(tokens_N, requests, context)

    def other_seconds(self, requests: int) -> float:
        return self.machine.other_seconds(requests)

    def plain(self) -> Scaled:
        return replace(self, machine=self.machine.plain())


class Table(BaseModel):
    """`{"sps": [...], "draft_seconds": [...], "other_seconds": s}`: rates by rows, drafts by requests, both from 1 on.

    Beyond its end a list goes on as it ended: the rate stays, and so do the seconds of one more drafting request.
    """

    model_config = ConfigDict(extra="forbid")

    sps: list[float] = Field(min_length=1)
    draft_seconds: list[float] = Field(default=[0.0], min_length=1)
    per_step_seconds: float = Field(default=0.0, ge=0, alias="other_seconds")

    @field_validator("sps")
    @classmethod
    def _positive(cls, sps: list[float]) -> list[float]:
        SpsTable(sps)
        return sps


class TableMachine:
    """The machine a `Table` describes, whatever the context."""

    def __init__(self, table: Table) -> None:
        self._forward, self._other = SpsTable(table.sps), table.per_step_seconds
        self._draft = np.concatenate(([0.0], table.draft_seconds))

    def seconds(self, tokens_N: Ints, requests: int, drafting: int, context: float, depth: int | None = None) -> Floats:
        return self.draft_seconds(drafting, depth) + self._other + self.verify_seconds(tokens_N, requests, context)

    def draft_seconds(self, drafting: int, depth: int | None = None) -> float:
        last = len(self._draft) - 1
        if drafting <= last:
            return float(self._draft[drafting])
        return float(self._draft[last] + (drafting - last) * (self._draft[last] - self._draft[last - 1]))

    def verify_seconds(self, tokens_N: Ints, requests: int, context: float) -> Floats:
        return self._forward.seconds(tokens_N, requests, 0, context)

    def other_seconds(self, requests: int) -> float:
        return self._other

    def plain(self) -> TableMachine:
        return self


def load_machine(path: Path, recorded: Mapping[str, Any], draft: float = 1.0, verify: float = 1.0) -> Machine:
    """A profile or a table file, scaled.

    Args:
        recorded: the setting of the traces; a profile must be of the same target and drafter.

    Raises:
        ValueError: missing, neither of the two, or of something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"no profile at {path}: measure one (outrider profile --out {path}).") from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}).") from None
    found: Machine
    if isinstance(content, dict) and "sps" in content:
        try:
            found = TableMachine(Table.model_validate(content))
        except ValidationError as error:
            first = error.errors()[0]
            raise ValueError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}.") from None
    else:
        found = profile = Profile.load(path)
        for name in ("target", "drafter"):
            mine, theirs = getattr(profile.setting, name), recorded.get(name)
            if mine != theirs:
                raise ValueError(f"{path}: {name} is {mine}, the traces are of {theirs}: record and profile the same.")
    return found if draft == verify == 1.0 else Scaled(found, draft, verify)
