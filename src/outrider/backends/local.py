"""Our engine under load: its variants by name, and an engine of the right size for each level of a load.

none                                no speculation
fixed-K                             K drafts (of a tree: nodes) for every request; no more than K are drawn
fixed-*                             several fixed-K
threshold                           while confidence holds, at the drafter's recommended threshold
prefix, async, goodput, look-ahead  chosen by cost, from a profile of this machine; NAME+skip: may skip drafting too
DRAFTER/VARIANT                     that variant of one drafter, where several are measured together
"""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from outrider.decoding.cost import StepCost
from outrider.decoding.engine import Engine
from outrider.decoding.learned_cost import LearnedCost
from outrider.decoding.policies import BY_COST, FixedPolicy, Policy, SkipDrafting, ThresholdPolicy
from outrider.decoding.scheduler import EngineConfig
from outrider.drafters.base import Drafter, draft_slots
from outrider.target.model import Target

NO_SPECULATION = "none"
FIXED = (1, 2, 3, 5, 7)
SKIP = "+skip"
_FIXED = "fixed-"
_EVERY_FIXED = f"{_FIXED}*"
KNOWN = f"{', '.join([NO_SPECULATION, 'fixed-K', 'threshold', *BY_COST])}, and NAME{SKIP} for those chosen by cost"


@dataclass(frozen=True)
class Variant:
    """A policy and a draft length under one name. `drafts`: most draft tokens; 0: no drafter."""

    name: str
    drafts: int
    policy: Policy


def is_adaptive(name: str) -> bool:
    """Whether the variant, of whichever drafter, chooses by the load."""
    return name.rpartition("/")[2].removesuffix(SKIP) in BY_COST


def drafter_of(name: str) -> str:
    """The drafter in a variant's name; "" where it has none."""
    return name.rpartition("/")[0]


def variant_of(drafter: str, kind: str) -> str:
    """The name of a drafter's variant; of the only drafter, which has the name "", the kind alone."""
    return f"{drafter}/{kind}" if drafter else kind


def default_variants(gamma: int, threshold: float | None, confident: bool) -> list[str]:
    """Names of the variants that a drafter allows; without confidences, fixed lengths alone."""
    fixed = [f"fixed-{k}" for k in FIXED if k <= gamma]
    if not confident:
        return [NO_SPECULATION, *fixed]
    recommended = [] if threshold is None else ["threshold"]
    return [NO_SPECULATION, *fixed, *recommended, *BY_COST, f"look-ahead{SKIP}"]


def fixed_length(name: str, gamma: int) -> int:
    """K of fixed-K.

    Raises:
        ValueError: it is not such a name, or K is none of 1..gamma.
    """
    found = re.fullmatch(rf"{_FIXED}(\d+)", name)
    if found is None:
        raise ValueError(f"no variant {name!r} here; there are {NO_SPECULATION} and {_FIXED}K.")
    if not 1 <= int(found[1]) <= gamma:
        raise ValueError(f"variant {name}: this drafter drafts 1 to {gamma} tokens; choose among those.")
    return int(found[1])


def build_variant(name: str, gamma: int, threshold: float | None, cost: StepCost | None) -> Variant:
    """The variant of that name.

    Args:
        gamma: most tokens the drafter drafts; of a tree drafter, the nodes.
        threshold: what the drafter was found to serve best with, if anything.
        cost: of steps on this machine; only adaptive variants need it.
    """
    if name == NO_SPECULATION:
        return Variant(name, 0, FixedPolicy())
    if name == "threshold":
        if threshold is None:
            raise ValueError("variant threshold: the drafter recommends none; give --confidence-threshold.")
        return Variant(name, gamma, ThresholdPolicy(threshold))
    if name.startswith(_FIXED):
        return Variant(name, fixed_length(name, gamma), FixedPolicy())
    if not is_adaptive(name):
        raise ValueError(f"no variant {name!r}; there are {KNOWN}.")
    if cost is None:
        raise ValueError(f"variant {name} decides by what steps cost here: give --profile FILE (outrider profile).")
    if not name.endswith(SKIP):
        return Variant(name, gamma, BY_COST[name](cost))
    learned = LearnedCost(cost)
    return Variant(name, gamma, SkipDrafting(learned, BY_COST[name.removesuffix(SKIP)](learned)))


@dataclass(frozen=True)
class Kinds:
    """The kinds of variants that a drafter allows: fixed lengths up to `slots`, and the others of its `defaults`."""

    slots: int
    defaults: Sequence[str]

    def expanded(self, kind: str) -> list[str]:
        """What a kind stands for: itself, or the fixed lengths by default."""
        return [one for one in self.defaults if one.startswith(_FIXED)] if kind == _EVERY_FIXED else [kind]

    def allows(self, kind: str) -> bool:
        fixed = re.fullmatch(rf"{_FIXED}(\d+)", kind)
        if fixed is not None:
            return 1 <= int(fixed[1]) <= self.slots
        return kind in self.defaults or kind.removesuffix(SKIP) in self.defaults


def match_variants(names: Sequence[str] | None, drafters: Mapping[str, Kinds]) -> list[tuple[str, str]]:
    """(drafter, kind) of every variant that `names` ask for, but the one without speculation.

    A kind that no drafter of those asked allows is there for each of them: building it says why not.

    Args:
        names: KIND for every drafter that allows it, DRAFTER/KIND for one; None: the defaults of all.
    """
    asked = [] if names is not None else [(name, kind) for name, kinds in drafters.items() for kind in kinds.defaults]
    for text in names or ():
        prefix, _, kind = text.rpartition("/")
        if prefix and prefix not in drafters:
            raise ValueError(f"variant {text}: no drafter is called {prefix}; there are {', '.join(drafters)}.")
        named = [prefix] if prefix else list(drafters)
        every = [(name, one) for name in named for one in drafters[name].expanded(kind)]
        asked += [(name, one) for name, one in every if drafters[name].allows(one)] or every
    return [pair for pair in dict.fromkeys(asked) if pair[1] != NO_SPECULATION]


@dataclass(frozen=True)
class NamedDrafter:
    """A drafter of a sweep, and what its variants are built with.

    Attributes:
        name: "" where it is the only one and has none.
        threshold: of variant threshold, if anything.
        cost: what variants that choose by cost read, if anything.
        about: what else decides its figures, for the journal.
    """

    name: str
    drafter: Drafter
    threshold: float | None = None
    cost: StepCost | None = None
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def kinds(self) -> Kinds:
        slots, heads = draft_slots(self.drafter), self.drafter.heads
        if self.drafter.trees:
            return Kinds(slots, [NO_SPECULATION, f"{_FIXED}{slots}"])
        confident = heads is not None and heads.confident
        return Kinds(slots, default_variants(self.drafter.gamma, self.threshold, confident))

    def build(self, kind: str) -> Variant:
        """Its variant of that kind, under its own name; see `build_variant`."""
        try:
            built = build_variant(kind, draft_slots(self.drafter), self.threshold, cost=self.cost)
        except ValueError as error:
            raise ValueError(f"drafter {self.name}: {error}" if self.name else str(error)) from None
        return replace(built, name=variant_of(self.name, kind))


def choose_variants(drafters: Sequence[NamedDrafter], names: Sequence[str] | None) -> list[tuple[Drafter, Variant]]:
    """The variants of those names (`match_variants`), each with its drafter; the one without speculation first."""
    by_name = {one.name: one for one in drafters}
    plain = build_variant(NO_SPECULATION, 0, None, cost=None)
    chosen = match_variants(names, {name: one.kinds for name, one in by_name.items()})
    built = [(by_name[name].drafter, by_name[name].build(kind)) for name, kind in chosen]
    return [(drafters[0].drafter, plain), *built]


def limited(drafter: Drafter, drafts: int) -> Drafter | None:
    """The drafter, asked for at most so many draft tokens (of a tree: nodes); None for 0."""
    return None if drafts == 0 else drafter.limited(drafts)


# ----------------------------------------------------------------------------
# An engine for each point of a load test.
# ----------------------------------------------------------------------------


def engine_config(longest: int, users: int, token_budget: int) -> EngineConfig:
    """Blocks for `users` requests of at most `longest` tokens at once, none of which is ever preempted.

    Raises:
        ValueError: `token_budget` is below `users`.
    """
    blocks = users * -(-longest // EngineConfig.block_size)
    return EngineConfig(users, token_budget, num_blocks=max(blocks, EngineConfig.num_blocks))


def local_engines(
    target: Target, variants: Sequence[tuple[Drafter, Variant]], config_at: Callable[[float], EngineConfig]
) -> Callable[[str, float], Engine]:
    """A function of variant and level that makes a new engine; `config_at`: its size at a level."""
    by_name = {variant.name: (drafter, variant) for drafter, variant in variants}

    def serve(name: str, level: float) -> Engine:
        drafter, variant = by_name[name]
        gc.collect()  # the last engine's memory comes back now, not inside the window
        return Engine(target, limited(drafter, variant.drafts), variant.policy, config=config_at(level))

    return serve
