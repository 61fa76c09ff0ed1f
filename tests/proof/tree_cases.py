"""The same for drafts that are trees: how their siblings are drawn, and how far the output is from the target's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outrider.decoding.policies import FixedPolicy, Policy
from outrider.sampling import SamplingParams
from tests.proof.cases import deviation, requests_of
from tests.proof.enumeration import Tokens
from tests.proof.toys import Kind, ToyRequest, ToyTarget, ToyTreeDrafter

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


def off(
    drafter: ToyTreeDrafter,
    policy: Policy = ALL,
    tokens: int = 3,
    request_type: type[ToyRequest] = ToyRequest,
    prompts: Sequence[Tokens] = ((0,),),
) -> float:
    return deviation(requests_of(drafter, request_type), drafter.target, prompts, policy, tokens)
