"""Ways to decode by name: none, fixed-1 .. fixed-N, threshold, prefix, async, goodput, look-ahead, look-ahead+skip."""

from __future__ import annotations

from dataclasses import dataclass, field

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

_SKIP = "+skip"


@dataclass(frozen=True)
class Variant:
    """`drafting` False: plain decoding."""

    name: str
    policy: Policy = field(default_factory=FixedPolicy)
    gate: DraftGate = field(default_factory=AlwaysDraft)
    drafting: bool = True


def build_variant(name: str, cost: StepCost, threshold: float) -> Variant:
    """The variant of a name; every one but `none` may have `+skip` behind it.

    Raises:
        ValueError: no such name.
    """
    if name == "none":
        return Variant(name, drafting=False)
    base = name.removesuffix(_SKIP)
    gate = SkipDrafting(cost) if name.endswith(_SKIP) else AlwaysDraft()
    kinds = {"prefix": PrefixScheduler, "async": AsyncScheduler, "goodput": GoodputPolicy, "look-ahead": LookAhead}
    length = base.removeprefix("fixed-")
    if base in kinds:
        return Variant(name, kinds[base](cost), gate)
    if base == "threshold":
        return Variant(name, ThresholdPolicy(threshold), gate)
    if base != length and length.isdigit():
        return Variant(name, FixedPolicy(int(length)), gate)
    raise ValueError(
        f"no variant {name!r}: none, fixed-N, threshold, {', '.join(kinds)}; all but none also with {_SKIP}."
    )
