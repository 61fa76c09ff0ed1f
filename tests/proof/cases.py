"""Warps, heads and policies of the proof, and how far an enumerated distribution is from the target's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from outrider.decoding.cost import Floats, Ints, SpsTable, StepCost
from outrider.decoding.policies import (
    BY_COST,
    FixedPolicy,
    PlanView,
    Policy,
    PrefixScheduler,
    StepView,
    ThresholdPolicy,
)
from outrider.sampling import SamplingParams
from tests.proof.enumeration import (
    RequestFactory,
    Tokens,
    exact_output_distribution,
    exact_target_distribution,
    max_deviation,
)
from tests.proof.toys import ToyDrafter, ToyRequest, ToyTarget, ToyTreeDrafter

TOLERANCE, VISIBLE = 1e-12, 1e-3
WARPS = {
    "plain": SamplingParams(temperature=1.0),
    "temperature": SamplingParams(temperature=0.6),
    "top_k": SamplingParams(temperature=1.0, top_k=2),
    "top_p": SamplingParams(temperature=1.0, top_p=0.8),
    "min_p": SamplingParams(temperature=1.0, min_p=0.3),
    "penalty": SamplingParams(temperature=1.0, repetition_penalty=1.8),
    "presence": SamplingParams(temperature=1.0, presence_penalty=1.1, frequency_penalty=-0.6),
    "greedy": SamplingParams(),
    "all": SamplingParams(temperature=1.4, top_k=3, top_p=0.9, min_p=0.1, repetition_penalty=1.3),
}
HEADS = ["vanilla", "gated", "rnn", "domino", None]
POLICIES: list[Policy] = [
    FixedPolicy(),
    ThresholdPolicy(0.5),
    PrefixScheduler(SpsTable([1.0, 0.68, 0.56, 0.5, 0.46, 0.43, 0.41, 0.39])),
]

TABLES = {
    "smooth": SpsTable([1 / (1 + 0.35 * tokens) for tokens in range(10)]),
    "jagged": SpsTable([1.0, 1.0, 0.75, 0.7, 0.69, 0.68, 0.67]),
}
MEMORYLESS = ["fixed", "threshold", "prefix"]  # read this step alone, so rounds that differ in the past only may merge
BY_NAME: dict[str, Callable[[StepCost], Policy]] = {
    "fixed": lambda cost: FixedPolicy(1),
    "threshold": lambda cost: ThresholdPolicy(0.5),
    **BY_COST,
}


@dataclass(frozen=True)
class Watched(Policy):
    """A policy that notes what it decided."""

    policy: Policy
    decisions: set[tuple[int, ...]] = field(default_factory=set)

    @property
    def min_confidence(self) -> float:
        return self.policy.min_confidence

    @property
    def step_cost(self) -> StepCost | None:
        return self.policy.step_cost

    def lengths(self, view: StepView) -> Ints:
        lengths_R = self.policy.lengths(view)
        if view.drafted_R.all():
            self.decisions.add(tuple(lengths_R.tolist()))
        return lengths_R


@dataclass(frozen=True)
class DraftsCost:
    """The seconds of a table and as many again for each draft."""

    table: SpsTable
    per_draft: float

    def seconds(self, tokens_N: Ints, requests: int, context: float) -> Floats:
        return self.table.seconds(tokens_N, requests, context)

    def draft_seconds(self, drafting: int, depth: int | None = None) -> float:
        return self.per_draft * drafting


@dataclass(frozen=True)
class WatchedGate(Policy):
    gate: Policy
    decisions: set[tuple[int, ...]] = field(default_factory=set)

    @property
    def skips(self) -> bool:
        return self.gate.skips

    def depths(self, view: PlanView) -> Ints:
        depths_R = self.gate.depths(view)
        self.decisions.add(tuple(depths_R.tolist()))
        return depths_R


def deviation(
    new_request: RequestFactory, target: ToyTarget, prompts: Sequence[Tokens], policy: Policy, tokens: int
) -> float:
    actual = exact_output_distribution(new_request, prompts, policy, tokens)
    assert abs(sum(actual.values()) - 1) < TOLERANCE
    return max_deviation(actual, exact_target_distribution(target.row, prompts, tokens))


def toy(
    params: SamplingParams, gamma: int, head: str | None, vocab: int = 3, ids: list[int] | None = None
) -> ToyDrafter:
    return ToyDrafter(ToyTarget(vocab, params), gamma, head, ids)


def requests_of(drafter: ToyDrafter | ToyTreeDrafter, request_type: type[ToyRequest] = ToyRequest) -> RequestFactory:
    return lambda context, source: request_type(drafter.target, drafter, context, source)
