"""A policy made of two, for tests that vary who drafts and what is verified apart."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.decoding.cost import Ints, StepCost
from outrider.decoding.policies import PlanView, Policy, StepView


@dataclass(frozen=True)
class Gated(Policy):
    """Drafts as `gate` says and verifies as `policy` does."""

    policy: Policy
    gate: Policy

    @property
    def skips(self) -> bool:
        return self.gate.skips

    @property
    def min_confidence(self) -> float:
        return self.policy.min_confidence

    @property
    def step_cost(self) -> StepCost | None:
        return self.policy.step_cost

    def depths(self, view: PlanView) -> Ints:
        return self.gate.depths(view)

    def lengths(self, view: StepView) -> Ints:
        return self.policy.lengths(view)

    def reason(self, view: StepView, lengths_R: Ints, request: int) -> str:
        return self.policy.reason(view, lengths_R, request)


def gated(policy: Policy, gate: Policy | None) -> Policy:
    """The policy alone, or with `gate` deciding who drafts."""
    return policy if gate is None else Gated(policy, gate)
