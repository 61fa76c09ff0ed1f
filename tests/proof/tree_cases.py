"""Trees are lossless: enumerated through the production code, and every broken rule shows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outrider.sampling import SamplingParams
from outrider.scheduling.policies import FixedPolicy, Policy
from tests.proof.cases import deviation
from tests.proof.enumeration import LaneFactory, Tokens
from tests.proof.toys import Kind, ToyTarget, ToyTreeDrafter, ToyTreeLane

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


def lanes_of(drafter: ToyTreeDrafter, lane: type[ToyTreeLane] = ToyTreeLane) -> LaneFactory:
    return lambda context, source: lane(drafter.target, drafter, context, source)


def off(
    drafter: ToyTreeDrafter,
    policy: Policy = ALL,
    tokens: int = 3,
    lane: type[ToyTreeLane] = ToyTreeLane,
    prompts: Sequence[Tokens] = ((0,),),
) -> float:
    return deviation(lanes_of(drafter, lane), drafter.target, prompts, policy, tokens)
