"""Variants by name: what serves, how many drafts it verifies, who drafts.

none                                no speculation
fixed-K                             K drafts of everybody; no more than K are drawn (fixed-1: as an MTP head of depth 1)
threshold                           while confidence holds, at the drafter's recommended threshold
prefix, async, goodput, look-ahead  chosen by cost, from a profile of this machine; NAME+skip: may skip drafting too
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from outrider.drafters.base import Draft, DraftCall, Drafter
from outrider.scheduling import (
    AlwaysDraft,
    AsyncScheduler,
    DraftGate,
    FixedPolicy,
    GoodputPolicy,
    LookAhead,
    Policy,
    PrefixScheduler,
    SkipDrafting,
    StepCost,
    ThresholdPolicy,
)

NO_SPECULATION = "none"
BY_COST: dict[str, Callable[[StepCost], Policy]] = {
    "prefix": PrefixScheduler,
    "async": AsyncScheduler,
    "goodput": GoodputPolicy,
    "look-ahead": LookAhead,
}
FIXED = (1, 2, 3, 5, 7)
SKIP = "+skip"


@dataclass(frozen=True)
class Variant:
    """A way to serve. `drafter` None: no speculation."""

    name: str
    drafter: Drafter | None
    policy: Policy
    gate: DraftGate


@dataclass(frozen=True)
class Shortened:
    """A drafter asked for no more than `gamma` tokens: a fixed length pays for no draft it never verifies."""

    drafter: Drafter
    gamma: int

    @property
    def taps(self) -> tuple[int, ...]:
        return self.drafter.taps

    def new_session(self, capacity: int) -> Any:
        return self.drafter.new_session(capacity)

    def extend(self, sessions: Sequence[Any], tokens: Sequence[Sequence[int]], taps_TLD: Tensor | None) -> None:
        self.drafter.extend(sessions, tokens, taps_TLD)

    def propose(self, calls: Sequence[DraftCall], floor: float = 0.0) -> Sequence[Draft]:
        assert all(call.limit is not None and call.limit <= self.gamma for call in calls), "engines plan with our gamma"
        return self.drafter.propose(calls, floor)


def is_adaptive(name: str) -> bool:
    """It looks at the load."""
    return name.removesuffix(SKIP) in BY_COST


def default_variants(gamma: int, threshold: float | None, confident: bool) -> list[str]:
    """All that this drafter allows; without confidences, fixed lengths."""
    fixed = [f"fixed-{k}" for k in FIXED if k <= gamma]
    if not confident:
        return [NO_SPECULATION, *fixed]
    recommended = [] if threshold is None else ["threshold"]
    return [NO_SPECULATION, *fixed, *recommended, *BY_COST, f"look-ahead{SKIP}"]


def build_variant(name: str, drafter: Drafter, threshold: float | None, cost: StepCost | None) -> Variant:
    """The variant of that name.

    Args:
        threshold: what the drafter was found to serve best with, if anything.
        cost: of steps on this machine; only adaptive variants need it.

    Raises:
        ValueError: unknown, or it needs what is not there.
    """
    always = AlwaysDraft()
    if name == NO_SPECULATION:
        return Variant(name, None, FixedPolicy(), always)
    if name == "threshold":
        if threshold is None:
            raise ValueError(
                "variant threshold: the drafter recommends none; give --confidence-threshold, store one "
                "(outrider package --confidence-threshold), or leave the variant out."
            )
        return Variant(name, drafter, ThresholdPolicy(threshold), always)
    if found := re.fullmatch(r"fixed-(\d+)", name):
        length = int(found[1])
        if not 1 <= length <= drafter.gamma:
            raise ValueError(f"variant {name}: this drafter drafts 1 to {drafter.gamma} tokens; choose among those.")
        return Variant(name, Shortened(drafter, length), FixedPolicy(), always)
    if not is_adaptive(name):
        known = ", ".join([NO_SPECULATION, "fixed-K", "threshold", *BY_COST])
        raise ValueError(f"no variant {name!r}; there are {known}, and NAME{SKIP} for those chosen by cost.")
    if cost is None:
        raise ValueError(
            f"variant {name} decides by what steps cost here: measure that (outrider profile --out FILE) and give "
            "--profile FILE, or leave the variant out."
        )
    gate = SkipDrafting(cost) if name.endswith(SKIP) else always
    return Variant(name, drafter, BY_COST[name.removesuffix(SKIP)](cost), gate)
