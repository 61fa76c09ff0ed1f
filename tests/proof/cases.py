"""Warps, heads and policies of the proof, and how far an enumerated distribution is from the target's."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.sampling import SamplingParams
from outrider.scheduling.cost import SpsTable
from outrider.scheduling.policies import FixedPolicy, Policy, PrefixScheduler, ThresholdPolicy
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
    "greedy": SamplingParams(),
    "all": SamplingParams(temperature=1.4, top_k=3, top_p=0.9, min_p=0.1, repetition_penalty=1.3),
}
HEADS = ["vanilla", "gated", "rnn", None]
POLICIES: list[Policy] = [
    FixedPolicy(),
    ThresholdPolicy(0.5),
    PrefixScheduler(SpsTable([1.0, 0.68, 0.56, 0.5, 0.46, 0.43, 0.41, 0.39])),
]


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
