"""Backoff: steps in which nobody is considered for drafting.

Considering drafts costs as much as a row of the forward: look-ups, the plan, the policy, the update of the estimates.
After n steps in a row in which no draft was verified, 2^n - 1 steps go without, at most 7, or 31 with four requests or
more. A pause ends early if a quarter of the requests are new, or if half of them have left: fewer requests make drafts
cheaper. If nothing is verified then either, the next pause is as long as if this one had not ended early. A step also
does as `LearnedCost.trial` says, if the cost of one sort of steps is not known well enough to compare with.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from outrider.decoding.learned_cost import learned
from outrider.decoding.policies import Policy

SOME, MANY = 4, 8  # requests of a step
# Steps of the longest pause. If several requests decode, drafts seldom pay, and planning for all of them takes longer.
_LONGEST, _LONGEST_OF_SOME = 7, 31


@dataclass(frozen=True)
class Pause:
    """A step without the drafter.

    Attributes:
        reason: why, for people.
        shortest_suffix: tokens of the shortest suffix that prompt lookup searches for meanwhile; 0: it searches for
            none. With some requests it passes over one and two tokens, which occur often and promise little. With fewer
            a lookup gains more than searching takes.
    """

    reason: str
    shortest_suffix: int


class Backoff:
    """Decides in which steps drafts are considered at all. A policy that always drafts never backs off."""

    def __init__(self, policy: Policy) -> None:
        self._enabled = policy.skips
        self._learned_cost = learned(policy.step_cost)
        self._considered: set[Hashable] = set()
        self._count = 0  # of requests that were considered
        self._length = self._left = 0  # steps: of the latest pause, and what is left of it

    def pause(self, ids: Sequence[Hashable], decoding: int, other_tokens: int) -> Pause | None:
        """Whether the next step pauses, and why; call it once per step.

        Args:
            ids: requests that may use drafts.
            decoding: requests of the step, those included that may not.
            other_tokens: rows of the step's forward that verify nothing.
        """
        trial = None if self._learned_cost is None or other_tokens else self._learned_cost.trial(decoding)
        if trial is not None and not trial.drafts:
            return Pause("the round went without drafts, to learn what they cost", 0)
        if trial is not None or not self._pauses(ids):
            return None
        shortest = 0 if decoding >= MANY else 3 if decoding >= SOME else 1
        return Pause("no draft was worth verifying in the rounds before, so none was looked for", shortest)

    def _pauses(self, ids: Sequence[Hashable]) -> bool:
        if not self._left:
            return False
        known = sum(id in self._considered for id in ids)
        if 4 * (len(ids) - known) >= len(ids) or 2 * known <= self._count:
            self._left = 0
            return False
        self._left -= 1
        return True

    def observe(self, ids: Sequence[Hashable], verified: bool) -> None:
        """Update after a step in which drafts were considered for these requests: whether any was verified."""
        if not self._enabled or not ids:
            return
        longest = _LONGEST_OF_SOME if len(ids) >= SOME else _LONGEST
        self._length = self._left = 0 if verified else min(2 * self._length + 1, longest)
        self._considered, self._count = set(ids), len(ids)

    def forget(self, id: Hashable) -> None:
        """A request has left, and another may come under its id."""
        self._considered.discard(id)
