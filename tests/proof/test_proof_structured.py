"""Constrained responses are lossless: every outcome, masks on both sides, and broken versions show.

Case           engine and `stream` over tiny Llama models and real grammars of llguidance; what is allowed is looked
               up in a list of all texts (`TinyLanguage`)
MaskedTarget   one round after another over tables of numbers and draws with draft heads, warps, fewer draft tokens
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import outrider.decoding.drafting as drafting_module
import outrider.drafters.chain as chain_module
import tests.proof.toys as toys_module
from outrider.decoding.cost import Floats, Ints
from outrider.decoding.policies import FixedPolicy, LookAhead, Policy, PrefixScheduler, SkipDrafting, ThresholdPolicy
from outrider.decoding.structured import GrammarState
from outrider.drafters.base import DraftCall
from outrider.drafters.draft import Draft, allowed_part
from outrider.sampling import Constraint, SamplingParams
from tests.proof.cases import HEADS, POLICIES, TABLES, VISIBLE, WARPS, DraftsCost, deviation, requests_of
from tests.proof.engine_cases import TIGHT, Case, Tally, TinyLanguage
from tests.proof.enumeration import Tokens
from tests.proof.toys import ToyDrafter, ToyTarget

TOLERANCE = 1e-12
LANGUAGE = TinyLanguage("a(b|ab)*b|ba", ["a", "b", "ab"], longest=10)
BINARY = TinyLanguage("a{1,3}", ["a"], longest=4)
GATED = DraftsCost(TABLES["jagged"], per_draft=0.2)
BY_NAME: dict[str, Policy] = {
    "fixed": FixedPolicy(),
    "threshold": ThresholdPolicy(0.4),
    "prefix": PrefixScheduler(TABLES["smooth"]),
    "look-ahead": LookAhead(GATED),
}


@pytest.fixture(scope="module")
def tally() -> Iterator[Tally]:
    counts = Tally()
    yield counts
    print(f"\nstructured: {counts.cases} cases, {counts.traces} traces, total variation {counts.largest:.1e} at most")


@pytest.mark.parametrize("kind", ["chain", "drawn", "chosen", "hybrid chain"])
@pytest.mark.parametrize("name", BY_NAME)
def test_one_request_in_a_stream(name: str, kind: str, tally: Tally) -> None:
    case = Case(BY_NAME[name], kind, tokens=(3,), vocab=4, language=LANGUAGE)
    assert tally.deviation(case, case.in_stream) <= TOLERANCE


FOUR_TOKENS = [
    ("fixed", "drawn"),
    ("threshold", "chain"),
    ("threshold", "hybrid chain"),
    ("prefix", "chosen"),
    ("look-ahead", "chosen"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), FOUR_TOKENS)
def test_a_second_round_may_draft_whole_trees(name: str, kind: str, tally: Tally) -> None:
    """With one token more. Every policy and every kind of draft, not each with each: policies see lengths and
    confidences only."""
    case = Case(BY_NAME[name], kind, tokens=(4,), vocab=4, language=LANGUAGE)
    assert tally.deviation(case, case.in_stream) <= TOLERANCE


@pytest.mark.parametrize("name", ["prefix", "look-ahead"])
def test_a_drafter_without_confidences(name: str, tally: Tally) -> None:
    case = Case(BY_NAME[name], "unsure", tokens=(3,), vocab=4, language=LANGUAGE)
    assert tally.deviation(case, case.in_stream) <= TOLERANCE


@pytest.mark.parametrize("kind", ["chain", "drawn", "chosen", "hybrid chain"])
def test_beside_a_free_request_in_the_engine(kind: str, tally: Tally) -> None:
    case = Case(BY_NAME["prefix"], kind, tokens=(3, 1), vocab=4, language=LANGUAGE)
    assert tally.deviation(case, case.in_engine) <= TOLERANCE


@pytest.mark.parametrize("coupled", [False, True])
def test_two_requests_of_which_one_is_preempted(coupled: bool, tally: Tally) -> None:
    case = Case(BY_NAME["threshold"], config=TIGHT, coupled=coupled, tokens=(4, 3), language=BINARY)
    assert tally.deviation(case, case.in_engine) <= TOLERANCE


@pytest.mark.parametrize("kind", ["chain", "drawn", "chosen"])
def test_coupled_sampling(kind: str, tally: Tally) -> None:
    case = Case(BY_NAME["prefix"], kind, coupled=True, tokens=(4, 2), language=BINARY)
    assert tally.deviation(case, case.in_engine) <= TOLERANCE


def test_requests_that_may_skip_their_drafts(tally: Tally) -> None:
    case = Case(LookAhead(GATED), gate=SkipDrafting(GATED, probe_share=0.3), tokens=(3,), vocab=4, language=LANGUAGE)
    assert tally.deviation(case, case.in_stream) <= TOLERANCE


# ----------------------------------------------------------------------------
# Rounds over tables: every warp and head, and draft tokens of which none may come.
# ----------------------------------------------------------------------------


def after(context: Tokens) -> Tensor | None:
    """Behind 0 anything, behind 1 no 1, behind 2 a 0 or a 3, behind 3 a 2."""
    rows = {1: [1, 0, 1, 1], 2: [1, 0, 0, 1], 3: [0, 0, 1, 0]}
    return None if context[-1] == 0 else torch.tensor(rows[context[-1]], dtype=torch.bool)


def toy(params: SamplingParams, gamma: int, head: str | None, ids: list[int] | None = None) -> ToyDrafter:
    return ToyDrafter(ToyTarget(4, params, constraint=after), gamma, head, ids)


@pytest.mark.parametrize("name", WARPS)
@pytest.mark.parametrize("head", HEADS)
def test_warps_and_heads(head: str | None, name: str) -> None:
    drafter = toy(WARPS[name], 2, head)
    for policy in POLICIES:
        assert deviation(requests_of(drafter), drafter.target, [(1,)], policy, 3) <= TOLERANCE


@pytest.mark.parametrize("policy", [*POLICIES, LookAhead(GATED)])
@pytest.mark.parametrize("ids", [[1], [1, 2], [0, 3]])
def test_draft_tokens_of_which_none_may_come(ids: list[int], policy: Policy) -> None:
    """Always, at its second token, or behind one of its first tokens and not behind the other."""
    drafter = toy(WARPS["plain"], 3, "rnn", ids)
    assert deviation(requests_of(drafter), drafter.target, [(1,)], policy, 3) <= TOLERANCE


# ----------------------------------------------------------------------------
# Broken versions. Each must show.
# ----------------------------------------------------------------------------


def broken(kind: str = "chain", name: str = "fixed", tokens: tuple[int, ...] = (3,)) -> float:
    case = Case(BY_NAME[name], kind, tokens=tokens, vocab=4, language=LANGUAGE)
    return Tally().deviation(case, case.in_stream)


def test_mutation_the_mask_of_a_row_forgets_the_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = GrammarState.allowed
    monkeypatch.setattr(GrammarState, "allowed", lambda self, drafts=(): allowed(self))
    with pytest.raises(ValueError, match="does not follow"):
        broken()


def test_mutation_a_round_begins_with_the_mask_of_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    commit = GrammarState.commit

    def keeping(self: Any, token: int) -> None:
        masks = dict(self._masks)
        commit(self, token)
        self._masks.update(masks)

    monkeypatch.setattr(GrammarState, "commit", keeping)
    with pytest.raises(ValueError, match="does not follow"):
        broken()


def test_mutation_the_draft_is_masked_when_drawn_and_not_when_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    choose, masked = chain_module._choose, DraftCall.constrained
    monkeypatch.setattr(DraftCall, "constrained", lambda self, logits_C, ids_C, drafts: logits_C)

    def from_masked(chain: Any, probs_C: Tensor, ids_C: Tensor | None) -> int:
        return choose(chain, masked(chain.call, probs_C.log(), ids_C, chain.tokens).softmax(-1), ids_C)

    monkeypatch.setattr(chain_module, "_choose", from_masked)
    assert broken() > VISIBLE


def test_mutation_a_drawn_token_that_may_not_come_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Instead of being rejected: then the next token is drawn from p_t where the residual is due."""
    monkeypatch.setattr(DraftCall, "constrained", lambda self, logits_C, ids_C, drafts: logits_C)
    case = Case(BY_NAME["fixed"], tokens=(2,), vocab=4, language=LANGUAGE)
    assert Tally().deviation(case, case.in_stream) <= TOLERANCE  # as others draft, who know nothing of masks

    def shortened(draft: Draft, constraint: Constraint) -> Draft:
        return draft.truncated(len(allowed_part(replace(draft, siblings={}), constraint).tokens))

    monkeypatch.setattr(drafting_module, "allowed_part", shortened)
    assert broken() > VISIBLE


def test_mutation_a_chain_ends_where_no_draft_token_may_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its length tells policies what was drawn last."""

    def ending(base_logits: Any, hidden_RKH: Tensor, calls: Sequence[DraftCall], *more: Any) -> list[Draft]:
        drafts = chain_module.sample_chain(base_logits, hidden_RKH, calls, *more)
        return [
            draft.truncated(len(allowed_part(replace(draft, siblings={}), call.constraint).tokens))
            for draft, call in zip(drafts, calls, strict=True)
            if call.constraint is not None
        ]

    drafter, policy = toy(WARPS["plain"], 3, "rnn", [0, 3]), PrefixScheduler(DepthsCost())
    assert deviation(requests_of(drafter), drafter.target, [(1,)], policy, 3) <= TOLERANCE
    drafter = toy(WARPS["plain"], 3, "rnn", [0, 3])
    monkeypatch.setattr(toys_module, "sample_chain", ending)
    assert deviation(requests_of(drafter), drafter.target, [(1,)], policy, 3) > VISIBLE


class DepthsCost:
    """Seconds that grow with the drafts' length, as a drafter's that computes position after position do."""

    def seconds(self, tokens_N: Ints, requests: int, context: float) -> Floats:
        return 1.0 + 0.4 * (tokens_N - requests)

    def draft_seconds(self, drafting: int, depth: int | None = None) -> float:
        return 0.3 * (depth or 0) * (drafting > 0)


def test_the_language_of_these_tests_rules_out_and_leaves_a_choice() -> None:
    counts = {int(LANGUAGE.allowed(said).sum()) for said in [(), (0,), (1,), (2,), (0, 1), (1, 0), (2, 2)]}
    assert {1, 3} <= counts and max(counts) <= 4
