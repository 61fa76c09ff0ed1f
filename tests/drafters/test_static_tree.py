"""Medusa and Hydra drafting trees of a fixed shape: what is proposed, and that the output stays the target's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from outrider.drafters.base import DrafterWeights, draft_slots
from outrider.drafters.hydra import Hydra, HydraDrafter
from outrider.drafters.medusa import HeadsDrafter, HeadsModule, Medusa, MedusaDrafter, StaticTreeDrafter
from outrider.drafters.trees import CandidateTree, assumed_accuracy, best_tree
from outrider.sampling import SamplingParams
from outrider.target.model import Target
from tests.toys.heads import check_identity, fit_to_decoding, forced_call, toy_heads, toy_texts
from tests.toys.targets import randomise, toy_target

TREE = CandidateTree(((0,), (0, 0), (1,), (0, 0, 0), (0, 1), (1, 0), (2,), (0, 0, 1)))


@pytest.fixture(params=["medusa", "hydra"])
def heads(request: pytest.FixtureRequest) -> tuple[Target, HeadsModule, type[HeadsDrafter]]:
    kinds: dict[str, tuple[type[HeadsModule], type[HeadsDrafter]]] = {
        "medusa": (Medusa, MedusaDrafter),
        "hydra": (Hydra, HydraDrafter),
    }
    module, served = kinds[request.param]
    return toy_target(), module(toy_heads()), served  # type: ignore[call-arg]


def test_the_output_is_that_of_plain_decoding(heads: tuple[Target, HeadsModule, type[HeadsDrafter]]) -> None:
    target, module, served = heads
    fit_to_decoding(module, target, [7, 8, 9])
    drafter = StaticTreeDrafter(served(DrafterWeights(module), target), best_tree(assumed_accuracy(4), 16))
    assert drafter.trees and draft_slots(drafter) == 16
    check_identity(target, drafter, [7, 8, 9], least=10)


def test_the_first_path_is_the_greedy_chain(heads: tuple[Target, HeadsModule, type[HeadsDrafter]]) -> None:
    target, module, served = heads
    randomise(module)
    drafter = served(DrafterWeights(module), target)
    text, session = toy_texts(1)[0], drafter.new_session(9)
    drafter.extend([session], [[4]], torch.randn(1, 1, 32))
    greedy = replace(forced_call(drafter, text, 0, session), params=SamplingParams())
    (proposal,) = StaticTreeDrafter(drafter, TREE).propose([greedy])
    assert proposal.parents == [-1, 0, -1, 1, 0, 2, -1, 1] and not proposal.siblings and not proposal.confidences
    first = [proposal.tokens[node] for node in proposal.path(3)]
    assert first == drafter.propose([greedy])[0].tokens[:3]


def test_limits_cut_depth_and_nodes_per_request(heads: tuple[Target, HeadsModule, type[HeadsDrafter]]) -> None:
    target, module, served = heads
    randomise(module)
    inner = served(DrafterWeights(module), target)
    drafter, texts = StaticTreeDrafter(inner, TREE), toy_texts(3)
    every = [forced_call(inner, text, 0, inner.new_session(9)) for text in texts]
    whole, shallow, few = (replace(call, params=SamplingParams()) for call in every)
    calls = [whole, replace(shallow, limit=2), replace(few, limit=9, nodes=4)]
    parents = [proposal.parents for proposal in drafter.propose(calls)]
    assert parents == [[-1, 0, -1, 1, 0, 2, -1, 1], [-1, 0, -1, 0, 2, -1], [-1, 0, -1, 1]]
    alone = [drafter.propose([call])[0] for call in calls]
    assert alone == drafter.propose(calls)


def test_trees_that_the_heads_cannot_fill_are_refused(heads: tuple[Target, HeadsModule, type[HeadsDrafter]]) -> None:
    target, module, served = heads
    with pytest.raises(ValueError, match="depth 5"):
        StaticTreeDrafter(served(DrafterWeights(module), target), best_tree([[0.9]] * 5, 5))
