"""The same for drafts that are trees: how their siblings are drawn, and how far the output is from the target's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outrider.sampling import SamplingParams
from outrider.scheduling.policies import FixedPolicy, Policy
from tests.proof.cases import deviation
from tests.proof.enumeration import RequestFactory, Tokens
from tests.proof.toys import Kind, ToyTarget, ToyTreeDrafter, ToyTreeRequest

ALL = FixedPolicy()

KINDS: dict[str, tuple[Kind, ...]] = {
    "without": ("without",),
    "replaced": ("replaced",),
    "chosen": ("chosen",),
    "mixed": ("without", "chosen", "replaced"),
}


def toy(
    params: SamplingParams, parents: Sequence[int], kinds: Sequence[Kind] = ("without",), vocab: int = 3, **more: Any
) -> ToyTreeDrafter:
    return ToyTreeDrafter(ToyTarget(vocab, params), parents, kinds, **more)


def requests_of(drafter: ToyTreeDrafter, request_type: type[ToyTreeRequest] = ToyTreeRequest) -> RequestFactory:
    return lambda context, source: request_type(drafter.target, drafter, context, source)


def off(
    drafter: ToyTreeDrafter,
    policy: Policy = ALL,
    tokens: int = 3,
    request_type: type[ToyTreeRequest] = ToyTreeRequest,
    prompts: Sequence[Tokens] = ((0,),),
) -> float:
    return deviation(requests_of(drafter, request_type), drafter.target, prompts, policy, tokens)
