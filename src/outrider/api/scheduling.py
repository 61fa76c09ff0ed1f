"""How much is drafted and verified: what the options say, and what decoding chooses by itself.

--confidence-threshold X    the longest prefix whose confidences are all >= X
--draft-length K            K drafts; as many as the drafter has and more: whole drafts
neither                     per round, by what a step costs here and what is expected to be accepted: `LookAhead`
                            and, if a draft costs something or prompt lookup may take its place, `SkipDrafting`, over
                            the machine's profile
neither, trees              whole trees: no policy plans the nodes of trees
neither, no profile         the drafter's recommended threshold, else whole drafts: targets that cannot be timed here
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from outrider.api.drafter import OpenedDrafter
from outrider.backends.local import SKIP, build_variant
from outrider.config import split
from outrider.decoding.policies import FixedPolicy, Policy, ThresholdPolicy
from outrider.decoding.profile import MachineProfile, machine_profile
from outrider.decoding.verification import TypicalAcceptance
from outrider.drafters.base import Drafter
from outrider.target.model import DecodingTarget, Target

UNGATED = "look-ahead"
BY_PROFILE = f"{UNGATED}{SKIP}"
_NEGLIGIBLE = 0.01  # share of a plain step: whether to make a draft that costs less need not be decided


@dataclass(frozen=True)
class Scheduling:
    """A policy and how it was chosen.

    Attributes:
        name: of the policy, in reports.
        costs: what measured the step costs that it decides by; "": it weighs none.
        profile: the file of these costs.
    """

    policy: Policy
    name: str = ""
    costs: str = ""
    profile: Path | None = None

    def __str__(self) -> str:
        """`draft lengths by look-ahead+skip: step costs measured on ..., FILE`; "" without such costs."""
        if not self.costs:
            return ""
        return f"draft lengths by {self.name}: {self.costs}, {self.profile or 'not kept'}"


def by_profile(drafter: Drafter, known: MachineProfile) -> Scheduling:
    """The choice by measured step costs, for a drafter of chains.

    Who drafts is decided if a draft costs something, or if it takes the place of a prompt lookup.
    """
    profile = known.profile
    draft, step = profile.draft_seconds(1), profile.verify_seconds(np.array([1]), 1, 0.0).item()
    name = BY_PROFILE if drafter.sources.lookup is not None or draft > _NEGLIGIBLE * step else UNGATED
    variant = build_variant(name, drafter.gamma, None, cost=profile)
    return Scheduling(variant.policy, name, costs=known.facts, profile=known.path)


def given(policy: Policy) -> Scheduling:
    """What a caller asks for."""
    return Scheduling(policy, repr(policy))


def choose_scheduling(
    target: DecodingTarget, opened: OpenedDrafter | None, say: Callable[[str], None] | None = None
) -> Scheduling:
    """What decoding chooses by itself; costs are measured where they are not known on this machine.

    Args:
        say: told in one line before anything is measured; the logger `outrider` by default.
    """
    if opened is None or opened.drafter.trees:
        return given(FixedPolicy())
    if isinstance(target, Target):
        say = say or logging.getLogger("outrider").info
        try:
            found = machine_profile(target, opened.drafter, say)
        except ValueError as error:
            say(f"what a step costs cannot be measured here: {error}")
        else:
            return by_profile(opened.drafter, found)
    threshold = opened.recommended_threshold
    return given(FixedPolicy() if threshold is None else ThresholdPolicy(threshold))


# ----------------------------------------------------------------------------
# What --draft-length, --confidence-threshold and --typical say.
# ----------------------------------------------------------------------------


def given_policy(draft_length: int | None, confidence_threshold: float | None) -> Policy | None:
    """The policy of these options; None if neither is given."""
    if confidence_threshold is not None:
        return ThresholdPolicy(confidence_threshold)
    return None if draft_length is None else FixedPolicy(draft_length)


def given_typical(text: str | None) -> TypicalAcceptance | None:
    """The lossy rule that `--typical` asks for, if any.

    Raises:
        ValueError: not two numbers in (0, 1].
    """
    if text is None or text == "default":
        return None if text is None else TypicalAcceptance()
    thresholds = split("--typical", text, float)
    if len(thresholds) != 2:
        raise ValueError(f"--typical {text!r}: give EPSILON,DELTA, as 0.09,0.3, or `default`.")
    return TypicalAcceptance(*thresholds)
