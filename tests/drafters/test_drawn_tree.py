"""Static shapes drawn for sampling: exact by enumeration, and what is drawn is what a chain would have drawn from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import outrider.drafters.trees as drawn_module
from outrider.decoding.generate import generate
from outrider.decoding.policies import FixedPolicy
from outrider.decoding.request import StopRules
from outrider.drafters.base import DraftCall, DrafterWeights
from outrider.drafters.confidence import ChainHeads
from outrider.drafters.draft import Draft, draw_siblings
from outrider.drafters.hydra import Hydra, HydraConfig, HydraDrafter
from outrider.drafters.medusa import Medusa, MedusaDrafter, StaticTreeDrafter
from outrider.drafters.trees import CandidateTree, Level
from outrider.sampling import PositionNoise, RandomSource, SamplingParams, SeededSource, SeenTokens
from tests.proof.cases import TOLERANCE, VISIBLE, WARPS, deviation
from tests.proof.enumeration import DraftTree, Tokens
from tests.proof.toys import ToyRequest, ToyTarget
from tests.toys.heads import VOCAB, fit_to_decoding, forced_call, last_row, toy_heads, toy_texts
from tests.toys.targets import randomise, toy_target

SHAPE = CandidateTree(((0,), (1,), (1, 0), (0, 0)))
SAMPLED = [name for name in WARPS if name != "greedy"]


class TableHeads:
    """Draft logits from a table of random rows, by the whole path (as Hydra) or by the depth alone (as Medusa)."""

    aux_layers, gamma, device = (), 2, torch.device("cpu")

    def __init__(self, vocab: int, sees_tokens: bool, ids: list[int] | None = None) -> None:
        self.table, self.sees_tokens = ToyTarget(vocab, SamplingParams(temperature=1.0), 1), sees_tokens
        ids_Vd = None if ids is None else torch.tensor(ids)
        self.heads = ChainHeads(vocab, draft_ids_Vd=ids_Vd)
        self.kept = torch.arange(vocab) if ids_Vd is None else ids_Vd
        self.config = SimpleNamespace(draft_vocab_size=len(self.kept))

    def levels(self, calls: Sequence[DraftCall], depth: int) -> Level:
        def level(k: int, paths_RPk: Tensor) -> Tensor:
            paths: list[list[list[int]]] = paths_RPk.tolist()
            if not self.sees_tokens:
                paths = [[[call.anchor, k]] for call in calls]
            contexts = [[(*call.session, *path) for path in own] for call, own in zip(calls, paths, strict=True)]
            return torch.stack([torch.stack([self.table.row(c).log()[self.kept] for c in own]) for own in contexts])

        return level


class Drafts:
    """What a `ToyRequest` asks: every tree that may be drawn after a context, drawn once."""

    def __init__(self, heads: TableHeads, target: ToyTarget, shape: CandidateTree = SHAPE) -> None:
        self.drafter = StaticTreeDrafter(heads, shape)  # type: ignore[arg-type]
        self.target, self.trees = target, dict[Tokens, DraftTree]()

    def draft(self, context: Tokens, source: RandomSource, min_confidence: float = 0.0) -> Draft:
        if context not in self.trees:
            self.trees[context] = DraftTree(lambda recorder: self.propose(context, recorder))
        return self.trees[context].draw(source)

    def propose(self, context: Tokens, source: RandomSource) -> Draft:
        params = self.target.params
        seen = SeenTokens(self.target.vocab_size, params, output=context)
        (found,) = self.drafter.propose([DraftCall(context[:-1], context[-1], params, seen, source)])
        return found


def off(name: str, sees_tokens: bool = True, ids: list[int] | None = None, tokens: int = 2) -> float:
    target = ToyTarget(3, WARPS[name])
    drafts: Any = Drafts(TableHeads(3, sees_tokens, ids), target)
    return deviation(lambda c, source: ToyRequest(target, drafts, c, source), target, [(0,)], FixedPolicy(), tokens)


@pytest.mark.parametrize("name", SAMPLED)
def test_drawn_trees_are_lossless(name: str) -> None:
    assert off(name) <= TOLERANCE


def test_over_several_rounds_and_without_tokens_to_see() -> None:
    assert off("plain", sees_tokens=False, tokens=3) <= TOLERANCE


@pytest.mark.parametrize("name", ["plain", "all"])
def test_a_reduced_vocabulary_is_lossless(name: str) -> None:
    assert off(name, ids=[2, 0]) <= TOLERANCE


def test_mutation_the_likeliest_are_passed_off_as_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    def likeliest(probs_V: Tensor, count: int, source: RandomSource, **_: object) -> list[int]:
        found: list[int] = probs_V.topk(count).indices.tolist()
        return found

    monkeypatch.setattr(drawn_module, "draw_siblings", likeliest)
    assert off("plain") > VISIBLE


def test_mutation_siblings_are_tried_by_likelihood(monkeypatch: pytest.MonkeyPatch) -> None:
    def sorted_draws(probs_V: Tensor, *rest: Any, **coupling: Any) -> list[int]:
        return sorted(draw_siblings(probs_V, *rest, **coupling), key=lambda index: -probs_V[index].item())

    monkeypatch.setattr(drawn_module, "draw_siblings", sorted_draws)
    assert off("plain") > VISIBLE


def test_mutation_the_penalty_forgets_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafter then draws from another distribution than it reports."""
    real = drawn_module._Drawing.result

    def forgetful(drawing: drawn_module._Drawing) -> Draft:
        drawing.rows = dict.fromkeys(drawing.rows, drawing.rows[-1])
        return real(drawing)

    monkeypatch.setattr(drawn_module._Drawing, "result", forgetful)
    assert off("penalty") > VISIBLE


@pytest.mark.parametrize("name", ["medusa", "hydra", "reduced"])
def test_rows_are_those_of_the_chain(name: str) -> None:
    """Of two requests at once, one with limits: each node's siblings come from p after the tokens on its way."""
    target, ids = toy_target(), torch.arange(1, VOCAB, 2) if name == "reduced" else None
    size = VOCAB if ids is None else len(ids)
    medusa = name == "medusa"
    module = Medusa(toy_heads()) if medusa else Hydra(toy_heads(HydraConfig, draft_vocab_size=size))
    randomise(module)
    inner = (MedusaDrafter if name == "medusa" else HydraDrafter)(DrafterWeights(module, ids), target)  # type: ignore[arg-type]
    shape = CandidateTree(((0,), (0, 0), (1,), (0, 1), (1, 0), (0, 0, 0), (2,)))
    drafter, sessions = StaticTreeDrafter(inner, shape), [inner.new_session(9) for _ in range(2)]
    inner.extend(sessions, [[4], [5]], torch.randn(2, 1, 32, generator=torch.Generator().manual_seed(1)))
    calls = [forced_call(inner, t, 2, s) for t, s in zip(toy_texts(2), sessions, strict=True)]
    calls = [replace(call, source=SeededSource(r)) for r, call in enumerate(calls)]
    calls[1] = replace(calls[1], limit=2, nodes=5)
    for call, proposal in zip(calls, drafter.propose(calls), strict=True):
        parents = proposal.parents
        assert parents == ([-1, 0, -1, 0, 2, 1, -1] if call is calls[0] else [-1, 0, -1, 0, 2])
        assert set(proposal.siblings) == set(parents)
        for node, drawn in proposal.siblings.items():
            siblings = [proposal.tokens[child] for child in proposal.children(node)]
            assert len(set(siblings)) == len(siblings)
            expected_V = last_row(inner, call, proposal.tokens_before(node + 1))
            torch.testing.assert_close(drawn.row(), expected_V, atol=1e-5, rtol=1e-4)
            assert not drawn.replaced and all(drawn.row()[token] > 0 for token in siblings)


def test_requests_choose_and_draw_side_by_side() -> None:
    """Each by its own temperature; and a support of two leaves out what there is nothing to draw for."""
    heads: Any = TableHeads(4, sees_tokens=True)
    drafter = StaticTreeDrafter(heads, CandidateTree(((0,), (1,), (2,), (2, 0), (0, 0))))
    params = [SamplingParams(), SamplingParams(1.0, seed=1), SamplingParams(1.0, top_k=2), SamplingParams()]
    calls = [DraftCall((r,), 1, p, SeenTokens(4), SeededSource(r)) for r, p in enumerate(params)]
    found = drafter.propose(calls)
    assert [bool(proposal.siblings) for proposal in found] == [False, True, True, False]
    assert [len(proposal.tokens) for proposal in found] == [5, 5, 3, 5]
    assert found[2].parents == [-1, -1, 0]
    assert [drafter.propose([call])[0] for call in (calls[0], calls[3])] == [found[0], found[3]]


def test_coupled_drafts_follow_the_noise_of_their_positions() -> None:
    heads: Any = TableHeads(4, sees_tokens=True)
    noise = PositionNoise(3, 4)
    params = SamplingParams(1.0, seed=3, coupled=True)
    call = DraftCall((), 1, params, SeenTokens(4), SeededSource(0), None, noise, 7)
    (proposal,) = StaticTreeDrafter(heads, SHAPE).propose([call])
    for node, drawn in proposal.siblings.items():
        way = proposal.tokens_before(node + 1)
        siblings = [proposal.tokens[child] for child in proposal.children(node)]
        assert siblings == noise.ranking(drawn.row(), 7 + len(way), len(siblings))


def test_sampling_accepts_drawn_nodes() -> None:
    target, rules = toy_target(), StopRules(30, stop_ids=())
    module = Hydra(toy_heads(HydraConfig))
    fit_to_decoding(module, target, [7, 8, 9])
    drafter = StaticTreeDrafter(HydraDrafter(DrafterWeights(module), target), SHAPE)
    params = SamplingParams(0.5, seed=2)
    first, second = (generate(target, [7, 8, 9], drafter, params, rules) for _ in range(2))
    assert first.tokens == second.tokens and sum(r.accepted for r in first.rounds) > 3
