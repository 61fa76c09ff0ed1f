"""Losslessness by enumeration of the production code, and proof that the tool would see it broken."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

import outrider.decoding.acceptance as acceptance_module
import outrider.decoding.policies as lookahead_module
import outrider.decoding.verification as chain_module
import outrider.decoding.verification as verification_module
import tests.proof.enumeration as enumeration_module
from outrider.decoding.acceptance import Acceptance
from outrider.decoding.cost import Floats, Ints, SpsTable
from outrider.decoding.policies import (
    BY_COST,
    AsyncScheduler,
    CausalPolicy,
    FixedPolicy,
    LookAhead,
    PastStep,
    Policy,
    PrefixScheduler,
    SkipDrafting,
    StepView,
    ThresholdPolicy,
    gains,
    step_seconds,
)
from outrider.decoding.verification import PendingVerdict, RoundResult, TargetRows, Verdict, verify
from outrider.drafters.draft import Draft
from outrider.sampling import RandomSource, SamplingParams, residual, warp
from tests.proof.cases import (
    BY_NAME,
    HEADS,
    MEMORYLESS,
    POLICIES,
    TABLES,
    TOLERANCE,
    VISIBLE,
    WARPS,
    DraftsCost,
    Watched,
    WatchedGate,
    deviation,
    requests_of,
    toy,
)
from tests.proof.enumeration import (
    EnumeratedBatch,
    EnumeratedRequest,
    EnumeratingSource,
    Tokens,
    enumerate_traces,
    exact_output_distribution,
    exact_target_distribution,
    max_deviation,
    run_round,
)
from tests.proof.toys import ForgetfulRequest, ToyDrafter, ToyLattice, ToyRequest, ToyTarget
from tests.toys.oracle import chain_of, drafted_with, row_of


@pytest.mark.parametrize("name", WARPS)
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("gamma", [1, 2, 3])
def test_one_request(gamma: int, head: str | None, name: str) -> None:
    drafter = toy(WARPS[name], gamma, head)
    for policy in POLICIES:
        assert deviation(requests_of(drafter), drafter.target, [(0,)], policy, 4) <= TOLERANCE


@pytest.mark.parametrize("name", WARPS)
@pytest.mark.parametrize("head", HEADS)
def test_reduced_draft_vocabulary(head: str | None, name: str) -> None:
    drafter = toy(WARPS[name], 2, head, vocab=4, ids=[1, 3])
    for policy in POLICIES:
        assert deviation(requests_of(drafter), drafter.target, [(0,)], policy, 3) <= TOLERANCE


@pytest.mark.parametrize(
    ("count", "name"), [*((2, name) for name in WARPS), (1, "plain"), (3, "plain"), (3, "greedy"), (3, "all")]
)
def test_steps_between_candidates(count: int, name: str) -> None:
    drafter = ToyLattice(ToyTarget(3, WARPS[name]), 2, count)
    for policy in POLICIES:
        assert deviation(requests_of(drafter), drafter.target, [(0,)], policy, 3) <= TOLERANCE
    reduced = ToyLattice(ToyTarget(4, WARPS[name]), 2, min(count, 2), [1, 3])
    assert deviation(requests_of(reduced), reduced.target, [(0,)], POLICIES[1], 3) <= TOLERANCE


class OneStepBehind(ToyLattice):
    """A wrong one: says of every token that it was drawn by the scores of the first position's candidates."""

    def _sample(self, *arguments: Any) -> Draft:
        drawn = super()._sample(*arguments)
        rows = [0.8 * row_of(drawn, k) + 0.2 * row_of(drawn, 0) for k in range(len(drawn.tokens))]
        return chain_of(drawn.tokens, torch.stack(rows), drawn.confidences)


def test_a_lattice_that_reports_other_scores_is_caught() -> None:
    drafter = OneStepBehind(ToyTarget(3, WARPS["plain"]), 2, 2)
    assert deviation(requests_of(drafter), drafter.target, [(0,)], FixedPolicy(), 3) > VISIBLE


@pytest.mark.parametrize("policy", POLICIES)
def test_four_tokens_in_the_vocabulary(policy: Policy) -> None:
    drafter = toy(WARPS["all"], 2, "rnn", vocab=4)
    assert deviation(requests_of(drafter), drafter.target, [(3,)], policy, 4) <= TOLERANCE


@pytest.mark.parametrize("name", ["plain", "penalty", "all"])
@pytest.mark.parametrize("policy", POLICIES)
def test_two_requests_stay_independent(policy: Policy, name: str) -> None:
    short, long = toy(WARPS[name], 1, "vanilla", vocab=2), toy(WARPS[name], 2, "rnn", vocab=2)
    prompts = [(0,), (1, 1)]
    assert deviation(requests_of(short), short.target, prompts, policy, 3) <= TOLERANCE
    assert deviation(requests_of(long), long.target, prompts, policy, 2) <= TOLERANCE


@pytest.mark.parametrize("policy", POLICIES[1:])
@torch.inference_mode()
def test_the_policies_of_these_tests_follow_the_draft(policy: Policy) -> None:
    """A policy whose answer does not depend on the drafted tokens would prove nothing about admission."""
    drafter = toy(WARPS["plain"], 3, "rnn")

    def lengths(context: Tokens) -> set[int]:
        def admitted(source: RandomSource) -> int:
            (result,) = run_round(EnumeratedBatch([requests_of(drafter)(context, source)]), policy)
            return len(result.verified.tokens)

        return {length for length, _ in enumerate_traces(admitted)}

    assert max(len(lengths((token,))) for token in range(3)) >= 2


def test_enumeration_visits_every_trace_once() -> None:
    def run(source: RandomSource) -> tuple[int, ...]:
        first = source.choose(torch.tensor([0.5, 0.0, 0.5]))
        if source.accept(1.0) and first == 0 and source.accept(0.25):
            return (first,)
        return first, source.choose(torch.tensor([1.0, 3.0]))  # weights are normalised, as SeededSource does

    assert dict(enumerate_traces(run)) == {(0,): 0.125, (0, 0): 0.09375, (0, 1): 0.28125, (2, 0): 0.125, (2, 1): 0.375}


def test_rows_behind_a_rejection_are_not_asked_for() -> None:
    asked: list[int] = []

    def row(k: int) -> Tensor:
        asked.append(k)
        return torch.tensor([0.0, 1.0])

    one_hot_KV = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.0, 1.0]])
    verdict = verify(chain_of([1, 0, 1], one_hot_KV, []), TargetRows(row), EnumeratingSource())
    assert verdict == Verdict(path=[0], next_token=1)
    assert asked == [0, 1]


# Several rounds, with what a policy and a gate remember of them.

SHAPES = {1: 4, 2: 3, 3: 2}  # gamma -> new tokens


def two_requests(
    policy: Policy,
    gamma: int,
    gate: Policy | None = None,
    remember: bool = True,
    request_type: type[ToyRequest] = ToyRequest,
    prompts: Sequence[Tokens] = ((0,), (1, 1)),
) -> float:
    """Deviation of the joint distribution, over rounds that remember."""
    drafter = ToyDrafter(ToyTarget(2, WARPS["plain"]), gamma, "vanilla", seed=2)
    history = Acceptance(gamma, decay=0.5) if remember else None
    new_request = requests_of(drafter, request_type)
    actual = exact_output_distribution(new_request, prompts, policy, SHAPES[gamma], history, gate)
    assert abs(sum(actual.values()) - 1) < TOLERANCE
    return max_deviation(actual, exact_target_distribution(drafter.target.row, prompts, SHAPES[gamma]))


@pytest.mark.parametrize("gamma", SHAPES)
@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("name", BY_NAME)
def test_two_requests_over_rounds(name: str, table: str, gamma: int) -> None:
    watched = Watched(BY_NAME[name](TABLES[table]))
    assert two_requests(watched, gamma, remember=name not in MEMORYLESS) <= TOLERANCE
    if name != "fixed" and (table, gamma) == ("jagged", 2):  # a policy that always answers alike would prove little
        assert len({lengths for lengths in watched.decisions if len(lengths) == 2}) >= 2


# Policies that look at what they must not, in the same harness.


class GlobalSearch(CausalPolicy):
    """Looks for the best lengths among all, current confidences included."""

    def admitted(self, view: StepView, survival_RK: Floats, order_N: Ints) -> int:
        seconds = step_seconds(self.cost, view, np.arange(len(order_N) + 1))
        throughput = (len(survival_RK) + gains(survival_RK)[: len(seconds)]) / seconds
        return int(throughput.argmax())


class ImpatientAsync(AsyncScheduler):
    """Takes its budget from the confidences of this very step."""

    def lengths(self, view: StepView) -> Ints:
        return super().lengths(replace(view, past=(PastStep(view.confidences_RK, view.drafted_R),)))


@pytest.mark.parametrize("policy", [GlobalSearch, ImpatientAsync])
def test_a_search_over_current_confidences_is_caught(policy: type[GlobalSearch] | type[ImpatientAsync]) -> None:
    assert two_requests(policy(TABLES["jagged"]), 2, remember=False) > VISIBLE


def test_look_ahead_at_realised_confidences_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def realised(survival_RK: Floats, lengths_R: Ints, drafted_R: Ints, predicted_RK: Floats) -> Floats:
        return np.where(np.arange(survival_RK.shape[1]) >= lengths_R[:, None], survival_RK, 0.0)

    monkeypatch.setattr(lookahead_module, "expected_survival", realised)
    assert two_requests(LookAhead(TABLES["jagged"]), 2) > VISIBLE


class PeekingEstimatorRequest(ToyRequest):
    """Confidence = the probability of the token that was drawn."""

    def draft(self, min_confidence: float) -> Draft:
        proposal = super().draft(0.0)
        return replace(proposal, confidences=drafted_with(proposal))


@pytest.mark.parametrize("name", ["threshold", "prefix", "async", "look-ahead"])
def test_an_estimator_that_peeks_at_the_drawn_token_is_caught(name: str) -> None:
    drafter = toy(WARPS["plain"], 2, "vanilla", vocab=2)
    new_request, policy = requests_of(drafter, PeekingEstimatorRequest), BY_NAME[name](TABLES["smooth"])
    assert deviation(new_request, drafter.target, [(0,), (1, 1)], policy, 2) > VISIBLE


class TiedConfidences(ToyRequest):
    """Drafts one token with the same confidence for all, and shows it to `TiesByToken`."""

    drawn: ClassVar[list[int]] = []

    def draft(self, min_confidence: float) -> Draft:
        proposal = replace(super().draft(min_confidence).truncated(1), confidences=[0.5])
        self.drawn.append(proposal.tokens[0])
        return proposal


class TiesByToken(PrefixScheduler):
    """Where survivals tie, the request whose drafted token is larger goes first."""

    def lengths(self, view: StepView) -> Ints:
        turned = len(view.drafted_R) == 2 and TiedConfidences.drawn[-2] < TiedConfidences.drawn[-1]
        return super().lengths(view)[::-1] if turned else super().lengths(view)


@pytest.mark.parametrize(("policy", "lossless"), [(PrefixScheduler, True), (TiesByToken, False)])
def test_ties_broken_by_token_values_are_caught(policy: type[PrefixScheduler], lossless: bool) -> None:
    one_token = policy(SpsTable([1.0, 1.0, 1.0, 1e-9]))  # two requests may verify one draft token between them
    drafter = toy(WARPS["plain"], 1, "vanilla", vocab=2)
    found = deviation(requests_of(drafter, TiedConfidences), drafter.target, [(0,), (1, 1)], one_token, 2)
    assert found <= TOLERANCE if lossless else found > VISIBLE


@pytest.mark.parametrize("gamma", SHAPES)
@pytest.mark.parametrize("table", TABLES)
def test_two_requests_that_may_skip_their_drafts(table: str, gamma: int) -> None:
    cost = DraftsCost(TABLES[table], per_draft=0.1)
    gate = WatchedGate(SkipDrafting(cost, probe_share=0.3))
    assert two_requests(LookAhead(cost), gamma, gate) <= TOLERANCE
    if gamma < 3:
        assert len(gate.decisions) >= 2


# LogisticEstimates learned from outcomes, of a drafter without confidences and of a head that is corrected.


class UnsureRequest(ToyRequest):
    """Its drafter has no confidences."""

    def draft(self, min_confidence: float) -> Draft:
        return replace(super().draft(min_confidence), confidences=[])


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """LogisticEstimates that a few outcomes change, so that decisions depend on them."""
    monkeypatch.setattr(acceptance_module, "_MOST_42", np.full((4, 2), 4.0))


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("gamma", [2, *(pytest.param(gamma, marks=pytest.mark.slow) for gamma in (1, 3))])
@pytest.mark.parametrize("request_type", [UnsureRequest, ToyRequest])
@pytest.mark.parametrize("name", BY_COST)
def test_beliefs_learned_from_outcomes(name: str, request_type: type[ToyRequest], gamma: int) -> None:
    gentle = SpsTable([1 / (1 + 0.2 * tokens) for tokens in range(10)])  # on the others Algorithm 1 admits nothing
    watched = Watched(BY_NAME[name](gentle if name == "prefix" else TABLES["jagged"]))
    assert two_requests(watched, gamma, request_type=request_type) <= TOLERANCE
    if gamma == 2:
        assert len({lengths for lengths in watched.decisions if len(lengths) == 2}) >= 2


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("gamma", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_gate_over_beliefs_learned_from_outcomes(gamma: int) -> None:
    cost = DraftsCost(TABLES["jagged"], per_draft=0.1)
    gate = WatchedGate(SkipDrafting(cost, probe_share=0.3))
    assert two_requests(LookAhead(cost), gamma, gate, request_type=UnsureRequest) <= TOLERANCE
    assert len(gate.decisions) >= 2


class ReadsTheToken(EnumeratedBatch):
    """The estimator's feature is the probability of the drafted token itself."""

    def view(self, proposals: Sequence[Draft]) -> StepView:
        return super().view([replace(draft, confidences=drafted_with(draft)) for draft in proposals])


class ReadsTheVerdict(EnumeratedBatch):
    """The estimator learns from the drafts of this very round which of them the target likes, then plans it."""

    def view(self, proposals: Sequence[Draft]) -> StepView:
        assert self.history is not None
        self.history = copy.deepcopy(self.history)
        liked = [self._liked(request, draft) for request, draft in zip(self.requests, proposals, strict=True)]
        drafted_R = np.array([len(draft.tokens) for draft in proposals])
        view = super().view(proposals)
        self.history.observe(self.ids, view, verified_R=drafted_R, accepted_R=np.array(liked))
        return super().view(proposals)

    def _liked(self, request: EnumeratedRequest, draft: Draft) -> int:
        count = 0
        for token, probability in zip(draft.tokens, drafted_with(draft), strict=True):
            if request.score(draft.tokens[:count])(count)[token].item() < probability:
                break
            count += 1
        return count


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("name", ["prefix", "look-ahead"])
@pytest.mark.parametrize("batch", [ReadsTheToken, ReadsTheVerdict])
def test_an_estimator_that_reads_this_round_is_caught(
    batch: type[EnumeratedBatch], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(enumeration_module, "EnumeratedBatch", batch)
    policy = BY_NAME[name](TABLES["smooth"])
    assert two_requests(policy, 2, request_type=UnsureRequest, prompts=[(0,)]) > VISIBLE


# The counterexample: c_2 tells x_1: a search that reads it verifies exactly the lucky drafts.


class CounterexampleRequest:
    def __init__(self, source: RandomSource) -> None:
        self.source = source

    def draft(self, min_confidence: float) -> Draft:
        probs_KV = torch.full((2, 2), 0.5, dtype=torch.float64)
        tokens = [self.source.choose(probs_KV[0]), self.source.choose(probs_KV[1])]
        return chain_of(tokens, probs_KV, [0.8, 1.0 if tokens[0] == 0 else 0.0])

    def score(self, tokens: list[int]) -> Callable[[int], Tensor]:
        return lambda k: torch.tensor([0.7, 0.3], dtype=torch.float64)


PAPER_SPS = SpsTable([1.0, 0.5, 0.45])


def test_global_search_is_caught() -> None:
    def output(policy: Policy) -> list[float]:
        outputs = exact_output_distribution(lambda context, source: CounterexampleRequest(source), [(0,)], policy, 1)
        return [outputs[((token,),)] for token in range(2)]

    assert output(GlobalSearch(PAPER_SPS)) == pytest.approx([0.85, 0.15], abs=TOLERANCE)
    assert output(PrefixScheduler(PAPER_SPS)) == pytest.approx([0.7, 0.3], abs=TOLERANCE)


# Deliberately broken rules. Each must show.


def with_verify(monkeypatch: pytest.MonkeyPatch, accept: Callable[..., bool], bonus: Callable[..., int]) -> None:
    """Put an `accept` for chains with other acceptance or bonus rules into production's verify_all."""

    def broken(draft: Draft, rows: TargetRows, source: RandomSource, typical: None) -> PendingVerdict:
        nodes = list(range(len(draft.tokens)))
        for k, token in enumerate(draft.tokens):
            target_V, draft_V = rows.row(k), row_of(draft, k)
            if not accept(target_V, draft_V, token, source):
                return PendingVerdict(nodes[:k], source.choose(residual(target_V, draft_V)))
        return PendingVerdict(nodes, bonus(draft, rows.row, source))

    monkeypatch.setattr(verification_module, "accept", broken)


def fair_accept(target_V: Tensor, draft_V: Tensor, token: int, source: RandomSource) -> bool:
    return source.accept((target_V[token] / draft_V[token]).item())


def fair_bonus(proposal: Draft, row: Callable[[int], Tensor], source: RandomSource) -> int:
    return source.choose(row(len(proposal.tokens)))


def broken_deviation(
    params: SamplingParams = WARPS["plain"], policy: Policy = POLICIES[0], request_type: type[ToyRequest] = ToyRequest
) -> float:
    drafter = toy(params, 2, "vanilla")
    return deviation(requests_of(drafter, request_type), drafter.target, [(0,)], policy, 3)


def test_the_unbroken_rule_passes_the_same_harness(monkeypatch: pytest.MonkeyPatch) -> None:
    with_verify(monkeypatch, fair_accept, fair_bonus)
    assert broken_deviation() <= TOLERANCE


def test_mutation_residual_is_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain_module, "residual", lambda target_V, draft_V: target_V)
    assert broken_deviation() > VISIBLE


def test_mutation_residual_is_symmetric(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain_module, "residual", lambda target_V, draft_V: (target_V - draft_V).abs())
    assert broken_deviation() > VISIBLE


def test_mutation_argmax_is_always_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    with_verify(monkeypatch, lambda t, d, x, s: int(t.argmax()) == x or fair_accept(t, d, x, s), fair_bonus)
    assert broken_deviation() > VISIBLE


def test_mutation_likely_tokens_are_always_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Medusa's "typical acceptance" in one line: fast, and not the target's distribution."""
    with_verify(monkeypatch, lambda t, d, x, s: t[x].item() > 0.3 or fair_accept(t, d, x, s), fair_bonus)
    assert broken_deviation() > VISIBLE


def test_mutation_acceptance_ignores_the_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    with_verify(monkeypatch, lambda t, d, x, s: s.accept(t[x].item()), fair_bonus)
    assert broken_deviation() > VISIBLE


def test_mutation_bonus_from_the_row_before(monkeypatch: pytest.MonkeyPatch) -> None:
    with_verify(monkeypatch, fair_accept, lambda p, row, s: s.choose(row(len(p.tokens) - 1)))
    assert broken_deviation() > VISIBLE


def test_mutation_bonus_repeats_the_last_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    with_verify(monkeypatch, fair_accept, lambda p, row, s: p.tokens[-1])
    assert broken_deviation() > VISIBLE


def test_mutation_bonus_left_to_the_drafter(monkeypatch: pytest.MonkeyPatch) -> None:
    with_verify(monkeypatch, fair_accept, lambda p, row, s: s.choose(row_of(p, len(p.tokens) - 1)))
    assert broken_deviation() > VISIBLE


class TiedRequest:
    """Greedy decoding of two tokens whose logits tie: the answer is token 0, the draft is token 1."""

    def __init__(self, source: RandomSource) -> None:
        self.source = source

    def draft(self, min_confidence: float) -> Draft:
        return chain_of([1], torch.tensor([[0.0, 1.0]], dtype=torch.float64), [])

    def score(self, tokens: list[int]) -> Callable[[int], Tensor]:
        return lambda k: warp(torch.zeros(2, dtype=torch.float64), SamplingParams())


def test_mutation_accepting_on_ties(monkeypatch: pytest.MonkeyPatch) -> None:
    def deviation() -> float:
        policy = FixedPolicy()
        output = exact_output_distribution(lambda context, source: TiedRequest(source), [(0,)], policy, 1)
        return max_deviation(output, {((0,),): 1.0})

    assert deviation() <= 1e-12
    tied_V = torch.zeros(2)
    with_verify(monkeypatch, lambda t, d, x, s: bool(tied_V[x] >= tied_V.max()), fair_bonus)
    assert deviation() > VISIBLE


class PeekingPolicy:
    """Admits x_k by the confidence after it, which has seen x_k."""

    min_confidence = 0.0

    def lengths(self, view: StepView) -> Ints:
        peeked_RK = np.roll(view.confidences_RK, -1, axis=1)
        peeked_RK[:, -1] = 0.0
        return ThresholdPolicy(0.5).lengths(replace(view, confidences_RK=peeked_RK))


def test_mutation_policy_peeks() -> None:
    assert broken_deviation(policy=PeekingPolicy()) > VISIBLE


class UnwarpedDraftRequest(ToyRequest):
    """Samples at the temperature, reports the distribution without it."""

    def draft(self, min_confidence: float) -> Draft:
        proposal = super().draft(min_confidence)
        rows_KV = torch.stack([row_of(proposal, k) for k in range(len(proposal.tokens))])
        unwarped_KV = rows_KV**self.target.params.temperature
        unwarped_KV = unwarped_KV / unwarped_KV.sum(-1, keepdim=True)
        return chain_of(proposal.tokens, unwarped_KV, proposal.confidences)


def test_mutation_draft_reports_unwarped_probabilities() -> None:
    assert broken_deviation(WARPS["temperature"], request_type=UnwarpedDraftRequest) > VISIBLE


def test_mutation_penalty_forgets_the_block() -> None:
    assert broken_deviation(WARPS["penalty"], request_type=ForgetfulRequest) > VISIBLE


def test_mutation_two_requests_share_their_luck(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request alone is right; only the joint distribution shows it."""
    real = run_round

    def shared(batch: EnumeratedBatch, policy: Policy, typical: None) -> list[RoundResult]:
        return real(EnumeratedBatch(batch.requests[:1]), policy, typical) * len(batch.requests)

    monkeypatch.setattr("tests.proof.enumeration.run_round", shared)
    drafter = toy(WARPS["plain"], 1, "vanilla", vocab=2)
    assert deviation(requests_of(drafter), drafter.target, [(0,)], POLICIES[0], 2) <= TOLERANCE
    assert deviation(requests_of(drafter), drafter.target, [(0,), (0,)], POLICIES[0], 1) > VISIBLE
