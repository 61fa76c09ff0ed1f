"""Trees are lossless: enumerated through the production code, and every broken rule shows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

import outrider.decoding.verification as tree_module
import outrider.decoding.verification as verification_module
from outrider.decoding.cost import SpsTable
from outrider.decoding.policies import FixedPolicy, LookAhead, Policy, PrefixScheduler
from outrider.decoding.verification import TargetRows, Verdict, accept, verify
from outrider.drafters.draft import Draft, Siblings, conditional_confidences, draw_siblings, rerank
from outrider.sampling import RandomSource, residual
from tests.proof.cases import POLICIES, TOLERANCE, VISIBLE, WARPS, requests_of
from tests.proof.enumeration import EnumeratedBatch, EnumeratingSource, enumerate_traces, run_round
from tests.proof.toys import ForgetfulRequest, ToyRequest, ToyTarget
from tests.proof.tree_cases import ALL, KINDS, off, toy
from tests.toys.oracle import chain_of

SHAPES = {
    "siblings": (-1, -1, -1),
    "pairs": (-1, -1, 0, 0),
    "mixed depth": (-1, 0, -1, 1, 0),  # siblings apart from each other, in the order of their draws
}
SPS = SpsTable([1.0, 0.68, 0.55, 0.46, 0.4, 0.36, 0.33, 0.3])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kinds", KINDS)
def test_every_shape_and_kind(kinds: str, shape: str) -> None:
    """Several rounds: four tokens need two at least wherever the second is rejected."""
    tokens = 4 if shape == "siblings" else 3
    assert off(toy(WARPS["plain"], SHAPES[shape], KINDS[kinds]), tokens=tokens) <= TOLERANCE


@pytest.mark.parametrize("name", WARPS)
@pytest.mark.parametrize("kinds", KINDS)
def test_every_warp(kinds: str, name: str) -> None:
    assert off(toy(WARPS[name], (-1, -1, 0, 0), KINDS[kinds]), tokens=2) <= TOLERANCE


@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("nodes", [0, 1, 2, 3])
def test_a_beginning_of_a_tree(kinds: str, nodes: int) -> None:
    assert off(toy(WARPS["all"], (-1, 0, -1, 0), KINDS[kinds]), FixedPolicy(nodes), 3) <= TOLERANCE


@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("policy", [ALL, PrefixScheduler(SPS), LookAhead(SPS)], ids=lambda p: type(p).__name__)
def test_trees_grown_and_admitted_by_what_is_known_before_a_draw(policy: Policy, kinds: str) -> None:
    drafter = toy(WARPS["plain"], range(4), KINDS[kinds], grown=True)
    assert off(drafter, policy) <= TOLERANCE


@torch.inference_mode()
def test_grown_trees_differ_in_shape_and_policies_cut_them() -> None:
    """Otherwise the test above would prove nothing about either."""
    drafter = toy(WARPS["plain"], range(4), grown=True)
    policy = PrefixScheduler(SPS)

    def one(source: RandomSource) -> tuple[tuple[int, ...], int]:
        result = run_round(EnumeratedBatch([requests_of(drafter)((0,), source)]), policy)[0]
        return tuple(result.draft.parents), len(result.verified.tokens)

    found = {outcome for outcome, _ in enumerate_traces(one)}
    assert len({parents for parents, _ in found}) >= 3 and len({admitted for _, admitted in found}) >= 2


@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("policy", [ALL, PrefixScheduler(SPS)], ids=["all", "prefix"])
def test_two_requests_stay_independent(policy: Policy, kinds: str) -> None:
    drafter = toy(WARPS["penalty"], range(3), KINDS[kinds], vocab=2, grown=True)
    assert off(drafter, policy, 2, prompts=[(0,), (1, 1)]) <= TOLERANCE


def test_greedy_trees_follow_the_pick() -> None:
    """At temperature 0 the rule's limit and the shortcut agree."""
    target = ToyTarget(3, WARPS["greedy"])
    for tokens in ([0, 1, 2, 0, 1], [2, 1, 0, 0, 2], [1, 1, 0, 2, 2]):
        tree = Draft(tokens, [-1, -1, 0, 0, 1])

        def row(k: int, tree: Draft = tree) -> Tensor:
            return target.row((0, *tree.tokens_before(k)))

        def judged(source: RandomSource, tree: Draft = tree, row: Callable[[int], Tensor] = row) -> Verdict:
            return verify(tree, TargetRows(row), source)

        (by_rule, weight), *more = enumerate_traces(judged)
        assert not more and weight == 1.0
        assert by_rule == verify(tree, TargetRows(row, lambda k: int(row(k).argmax())), EnumeratingSource())


@torch.inference_mode()
def test_a_chain_asks_the_questions_of_speculative_sampling() -> None:
    """Against Leviathan's algorithm 1, written out: every trace has the same weight and outcome."""
    rows = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64).softmax(-1)
    drafts = torch.randn(3, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64).softmax(-1)
    tokens = [2, 0, 1]
    chain = chain_of(tokens, drafts, [])
    without_first = replace(chain, siblings={node: Siblings(drawn.row) for node, drawn in chain.siblings.items()})
    assert chain.row_parents is None and chain.depth == 3

    def leviathan(source: RandomSource) -> Verdict:
        for k, token in enumerate(tokens):
            if not source.accept(rows[k, token].item() / drafts[k, token].item()):
                return Verdict(list(range(k)), source.choose(residual(rows[k], drafts[k])))
        return Verdict([0, 1, 2], source.choose(rows[3]))

    expected = list(enumerate_traces(leviathan))
    assert len(expected) > 4
    for draft in (chain, without_first):
        assert (
            list(enumerate_traces(lambda source, d=draft: verify(d, TargetRows(rows.__getitem__), source))) == expected
        )


def test_siblings_without_replacement_have_the_distribution_of_successive_draws() -> None:
    probs = torch.tensor([0.5, 0.3, 0.2, 0.0], dtype=torch.float64)
    found = dict(enumerate_traces(lambda source: tuple(draw_siblings(probs, 2, source))))
    assert found[1, 0] == pytest.approx(0.3 * 0.5 / 0.7) and sum(found.values()) == pytest.approx(1)
    assert {len(order) for order, _ in enumerate_traces(lambda source: tuple(draw_siblings(probs, 9, source)))} == {3}


def test_reranking_chosen_nodes_is_lossless() -> None:
    class Reranked(ToyRequest):
        def draft(self, min_confidence: float) -> Draft:
            proposal = super().draft(min_confidence)
            survivals: list[float] = []
            for node in range(len(proposal.tokens)):
                way = tuple(proposal.tokens_before(node + 1))
                above = proposal.parents[node]
                probability = self.drafter.table.row(self.context + way[:-1])[way[-1]].item()
                survivals.append(probability * (1.0 if above < 0 else survivals[above]))
            return rerank(proposal, survivals, 3)

    assert off(toy(WARPS["plain"], (-1, -1, 0, 0, 1), KINDS["chosen"]), request_type=Reranked) <= TOLERANCE
    with pytest.raises(AssertionError, match="reranking drawn nodes"):
        off(toy(WARPS["plain"], (-1, -1), KINDS["without"]), request_type=Reranked)


# Deliberately broken rules. Each must show.


def test_mutation_a_rejected_choice_stays_in_the_residual(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_module, "_without_chosen", lambda target_V, token: target_V)
    assert off(toy(WARPS["plain"], (-1, -1), KINDS["chosen"])) > VISIBLE


def test_mutation_siblings_treated_as_independent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_module, "without", lambda probs_V, token: probs_V)
    assert off(toy(WARPS["plain"], (-1, -1))) > VISIBLE


def test_mutation_the_target_forgets_the_first_sibling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_module, "residual", lambda target_V, draft_V: target_V)
    assert off(toy(WARPS["plain"], (-1, -1))) > VISIBLE


class Mistaken(ToyRequest):
    """Drawn with replacement, reported as without."""

    def draft(self, min_confidence: float) -> Draft:
        proposal = super().draft(min_confidence)
        return replace(proposal, siblings={node: Siblings(drawn.row) for node, drawn in proposal.siblings.items()})


def test_mutation_duplicates_reported_as_drawn_without_replacement(monkeypatch: pytest.MonkeyPatch) -> None:
    def nearly_without(probs_V: Tensor, token: int) -> Tensor:
        rest_V = probs_V.clone()
        rest_V[token] = 1e-300  # a duplicate would stop the check of what it was drawn from
        return rest_V / rest_V.sum()

    monkeypatch.setattr(tree_module, "without", nearly_without)
    assert off(toy(WARPS["plain"], (-1, -1), KINDS["replaced"]), request_type=Mistaken) > VISIBLE


class PendingVerdict(ToyRequest):
    """Drawn, reported as chosen."""

    def draft(self, min_confidence: float) -> Draft:
        return replace(super().draft(min_confidence), siblings={})


def test_drawn_nodes_judged_as_chosen_are_lossless_but_worse() -> None:
    """Given the draw, accepting with p_t(x) is exact for any x: the price is acceptance, not the distribution."""
    assert off(toy(WARPS["plain"], (-1, -1, 0)), request_type=PendingVerdict) <= TOLERANCE


def with_order(monkeypatch: pytest.MonkeyPatch, key: Callable[[Tensor, int], float]) -> None:
    real = tree_module._try_children

    def reordered(draft: Draft, node: int, rows: TargetRows, source: RandomSource) -> Any:
        target_V = rows.row(node + 1)
        order = sorted(draft.children(node), key=lambda child: -key(target_V, draft.tokens[child]))
        shown = SimpleNamespace(siblings=draft.siblings, tokens=draft.tokens, children=lambda node: order)
        return real(cast(Draft, shown), node, rows, source)

    monkeypatch.setattr(tree_module, "_try_children", reordered)


def test_mutation_the_order_of_trial_depends_on_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    with_order(monkeypatch, lambda target_V, token: target_V[token].item())
    assert off(toy(WARPS["plain"], (-1, -1))) > VISIBLE


def test_mutation_the_order_of_trial_is_by_token(monkeypatch: pytest.MonkeyPatch) -> None:
    with_order(monkeypatch, lambda target_V, token: token)
    assert off(toy(WARPS["plain"], (-1, -1))) > VISIBLE


def test_mutation_bonus_from_the_row_before(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(draft: Draft, rows: TargetRows, source: RandomSource, typical: None) -> Any:
        verdict = accept(draft, rows, source)
        last = verdict.path[-1] if verdict.path else -1
        if draft.children(last) or last < 0:
            return verdict
        return verification_module.PendingVerdict(verdict.path, rows.row(draft.parents[last] + 1))

    monkeypatch.setattr(verification_module, "accept", late)
    assert off(toy(WARPS["plain"], (-1, -1, 0))) > VISIBLE


def test_mutation_rows_in_the_order_of_nodes_instead_of_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Draft, "tokens_before", lambda self, row: self.tokens[:row])
    assert off(toy(WARPS["plain"], (-1, -1, 0, 1))) > VISIBLE


def test_mutation_a_sibling_is_accepted_under_its_brother(monkeypatch: pytest.MonkeyPatch) -> None:
    """The path goes on under the first sibling whichever of them was accepted."""

    def swapped(draft: Draft, rows: TargetRows, source: RandomSource, typical: None) -> Any:
        return accept(draft, TargetRows(lambda k: rows.row(1 if k == 2 else k)), source)

    monkeypatch.setattr(verification_module, "accept", swapped)
    assert off(toy(WARPS["plain"], (-1, -1, 1))) > VISIBLE


def test_mutation_penalty_forgets_the_path() -> None:
    assert off(toy(WARPS["penalty"], (-1, -1, 0)), request_type=ForgetfulRequest) > VISIBLE


class LuckyFirst(ToyRequest):
    """Keeps of two drawn nodes the one that turned out likelier."""

    def draft(self, min_confidence: float) -> Draft:
        proposal = super().draft(min_confidence)
        row_V = proposal.siblings[-1].row()
        best = max(proposal.tokens, key=lambda token: row_V[token].item())
        return replace(proposal, tokens=[best], parents=[-1])


@pytest.mark.parametrize("kinds", ["without", "replaced"])
def test_mutation_drawn_nodes_reranked_by_what_was_drawn(kinds: str) -> None:
    assert off(toy(WARPS["plain"], (-1, -1), KINDS[kinds]), request_type=LuckyFirst) > VISIBLE


class YoungerDecides(ToyRequest):
    """Admits the first sibling by the value of the second."""

    def draft(self, min_confidence: float) -> Draft:
        proposal = super().draft(min_confidence)
        return proposal.truncated(2 if proposal.tokens[1] == 0 else 0)


class OlderDecides(ToyRequest):
    """Admits the second sibling by the value of the first."""

    def draft(self, min_confidence: float) -> Draft:
        proposal = super().draft(min_confidence)
        return proposal.truncated(2 if proposal.tokens[0] == 0 else 1)


@pytest.mark.parametrize(("request_type", "lossless"), [(OlderDecides, True), (YoungerDecides, False)])
@pytest.mark.parametrize("kinds", ["without", "replaced"])
def test_an_older_sibling_may_decide_about_a_younger_and_not_the_other_way(
    kinds: str, request_type: type[ToyRequest], lossless: bool
) -> None:
    found = off(toy(WARPS["plain"], (-1, -1), KINDS[kinds]), request_type=request_type)
    assert found <= TOLERANCE if lossless else found > VISIBLE


class PeekingRequest(ToyRequest):
    """A node's survival is the probability of the token that was drawn for it."""

    def draft(self, min_confidence: float) -> Draft:
        proposal = super().draft(min_confidence)
        row_V = proposal.siblings[-1].row()
        return replace(proposal, confidences=[row_V[proposal.tokens[0]].item(), 0.0]).truncated(1)


def test_mutation_survival_peeks_at_the_token() -> None:
    assert (
        off(toy(WARPS["plain"], (-1, -1)), PrefixScheduler(SpsTable([1.0, 0.7])), request_type=PeekingRequest) > VISIBLE
    )


def test_policies_for_chains_know_trees_by_survival() -> None:
    proposal = Draft([5, 6, 7], [-1, -1, 0], confidences=conditional_confidences([0.8, 0.4, 0.2]))
    assert proposal.confidences == pytest.approx([0.8, 0.5, 0.5])
    assert [len(policy.lengths(EnumeratedBatch([]).view([proposal]))) for policy in POLICIES] == [1, 1, 1]


def test_a_verdict_counts_its_path() -> None:
    assert Verdict([0, 3], 9).accepted == 2
