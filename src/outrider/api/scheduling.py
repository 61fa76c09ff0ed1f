"""Choose the scheduling policy from the options, or by default from measured costs.

--confidence-threshold X    the longest prefix whose confidences are all >= X
--draft-length K            K drafts, or whole drafts if the drafter has at most K
neither                     per round, by measured step costs and acceptance estimates: `LookAhead` and, if a draft
                            has a cost or prompt lookup may replace it, `SkipDrafting`
neither, trees              whole trees: no policy plans the nodes of trees
neither, no profile         the drafter's recommended threshold, else whole drafts; for targets that cannot be timed
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
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
from outrider.sampling import SamplingParams
from outrider.target.model import DecodingTarget, Target

UNGATED = "look-ahead"
BY_PROFILE = f"{UNGATED}{SKIP}"
_NEGLIGIBLE = 0.01  # share of a plain step; a draft that costs less is always made


@dataclass(frozen=True)
class Scheduling:
    """A policy and how it was chosen.

    Attributes:
        name: name of the policy in reports.
        costs: origin of the measured step costs; "" if the policy weighs none.
        profile: file of these costs.
        uneven: whether they were measured while other work ran.
    """

    policy: Policy
    name: str = ""
    costs: str = ""
    profile: Path | None = None
    uneven: bool = False

    def policy_for(self, params: Sequence[SamplingParams]) -> Policy:
        """The policy for requests sampled like this: where a seed must give the same tokens again, no clock decides."""
        return self.policy.reproducible() if any(own.reproducible for own in params) else self.policy

    def __str__(self) -> str:
        """Write `draft lengths by look-ahead+skip: step costs measured on ..., FILE`; "" without costs."""
        if not self.costs:
            return ""
        return f"draft lengths by {self.name}: {self.costs}, {self.profile or 'not kept'}"


def by_profile(drafter: Drafter, known: MachineProfile) -> Scheduling:
    """Choose a policy by measured step costs, for a drafter of chains.

    The policy may skip drafting if a draft has a cost or competes with prompt lookup.
    """
    profile = known.profile
    draft, step = profile.draft_seconds(1), profile.verify_seconds(np.array([1]), 1, 0.0).item()
    name = BY_PROFILE if drafter.sources.lookup is not None or draft > _NEGLIGIBLE * step else UNGATED
    variant = build_variant(name, drafter.gamma, None, cost=profile)
    return Scheduling(variant.policy, name, costs=known.facts, profile=known.path, uneven=known.uneven)


def given(policy: Policy) -> Scheduling:
    """Wrap a caller's policy."""
    return Scheduling(policy, repr(policy))


def choose_scheduling(
    target: DecodingTarget,
    opened: OpenedDrafter | None,
    say: Callable[[str], None] | None = None,
    *,
    again: bool = False,
) -> Scheduling:
    """Choose the default policy; measure step costs if this machine has no profile.

    Args:
        say: called with one line before a measurement; None: the logger `outrider`.
        again: measure step costs even if they are known.
    """
    if opened is None or opened.drafter.trees:
        return given(FixedPolicy())
    if isinstance(target, Target):
        say = say or logging.getLogger("outrider").info
        try:
            profile = machine_profile(target, opened.drafter, say, again=again)
        except ValueError as error:
            say(f"step costs cannot be measured here: {error}")
        else:
            return by_profile(opened.drafter, profile)
    threshold = opened.recommended_threshold
    return given(FixedPolicy() if threshold is None else ThresholdPolicy(threshold))


# ----------------------------------------------------------------------------
# Options --draft-length, --confidence-threshold and --typical.
# ----------------------------------------------------------------------------


def given_policy(draft_length: int | None, confidence_threshold: float | None) -> Policy | None:
    """Return the policy of these options; None if neither is given."""
    if confidence_threshold is not None:
        return ThresholdPolicy(confidence_threshold)
    return None if draft_length is None else FixedPolicy(draft_length)


def given_typical(text: str | None) -> TypicalAcceptance | None:
    """Parse `--typical`; None if it is not given.

    Raises:
        ValueError: the value is not two numbers in (0, 1].
    """
    if text is None or text == "default":
        return None if text is None else TypicalAcceptance()
    thresholds = split("--typical", text, float)
    if len(thresholds) != 2:
        raise ValueError(f"--typical {text!r}: give EPSILON,DELTA, such as 0.09,0.3, or `default`.")
    return TypicalAcceptance(*thresholds)
