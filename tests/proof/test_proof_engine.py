"""The engine and `stream` that serve are lossless: every outcome over tiny Llama models, and every broken wiring shows.

`pytest -s` prints the number of traces and the largest deviation.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

import outrider.decoding.acceptance as acceptance_module
import outrider.decoding.engine as engine_module
import outrider.decoding.prefix_cache as prefix_cache_module
from outrider.decoding.cost import Floats, Ints, SpsTable
from outrider.decoding.drafting import Drafted, Drafting
from outrider.decoding.engine import Engine, Step
from outrider.decoding.learned_cost import LearnedCost, Trial
from outrider.decoding.policies import (
    CausalPolicy,
    CostPolicy,
    FixedPolicy,
    LookAhead,
    PlanView,
    Policy,
    PrefixScheduler,
    SkipDrafting,
    StepView,
    ThresholdPolicy,
    causal_order,
    lengths_of,
)
from outrider.decoding.request import RequestState
from outrider.decoding.scheduler import BlockAllocator, EngineConfig
from outrider.drafters.draft import Draft
from outrider.sampling import SeenTokens
from outrider.target.paged import PagedKV
from tests.proof.cases import BY_NAME, TABLES, VISIBLE, DraftsCost, Watched, WatchedGate
from tests.proof.engine_cases import CACHED, ROOMY, TIGHT, Case, Chat, Tally, next_logits, target
from tests.toys.oracle import drafted_with

TOLERANCE = 1e-10
CLIFF = SpsTable([1.0, *[1 / 2.19] * 2])  # one request: one draft alone never pays, two do where c_2 is large
POLICIES: dict[str, Policy] = {
    "fixed": FixedPolicy(),
    "threshold": ThresholdPolicy(0.65),
    "prefix": PrefixScheduler(TABLES["smooth"]),
    "goodput": BY_NAME["goodput"](TABLES["smooth"]),
    "async": BY_NAME["async"](TABLES["smooth"]),
    "look-ahead": LookAhead(TABLES["smooth"]),
}
GATED = DraftsCost(TABLES["jagged"], per_draft=0.2)
DEAR = DraftsCost(TABLES["jagged"], per_draft=0.47)  # by the prior one request's draft does not pay, a probe does
REMEMBERING = ["goodput", "async", "look-ahead"]
KINDS = ["chain", "drawn", "chosen"]


@pytest.fixture(scope="module")
def tally() -> Iterator[Tally]:
    counts = Tally()
    yield counts
    print(f"\nengine: {counts.cases} cases, {counts.traces} traces, total variation {counts.largest:.1e} at most")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """LogisticEstimates that a few outcomes change, so that decisions depend on them."""
    monkeypatch.setattr(acceptance_module, "_MOST_42", np.full((4, 2), 4.0))


@pytest.mark.parametrize("name", [name for name in POLICIES if name != "look-ahead"])
def test_policies_over_two_requests(name: str, tally: Tally) -> None:
    """Look-ahead is that of the requests that may skip their drafts."""
    watched = Watched(POLICIES[name])
    case = Case(watched)
    assert tally.deviation(case, case.in_engine) <= TOLERANCE
    if name == "prefix":  # a policy that always answers alike would prove little
        assert len({lengths for lengths in watched.decisions if len(lengths) == 2}) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("trials", [False, True])
def test_costs_learned_from_steps(trials: bool, tally: Tally, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock by which steps take unequally long corrects the cost within a response, and changes what is verified;
    so do steps that are there to learn from.
    """
    factors: set[float] = set()
    learned = LearnedCost(GATED)
    begin, seconds = Engine.__init__, LearnedCost.seconds

    class Ticking:
        """The k-th time that it is asked, it is later by 1 to 3 seconds."""

        asked = now = 0

        def perf_counter(self) -> float:
            self.asked += 1
            self.now += 1 + self.asked % 3
            return float(self.now)

    def begun(self: Engine, *parts: Any, **more: Any) -> None:
        learned._errors.__init__()  # type: ignore[misc]
        learned._trials.clear()  # every trace begins anew, after a step without drafts
        learned.observe(2.0, 2, 5.0, verified=0, drafting=0, depth=1)
        monkeypatch.setattr(engine_module, "time", Ticking())
        begin(self, *parts, **more)

    def watched(self: LearnedCost, tokens_N: Ints, requests: int, context: float) -> Floats:
        seconds_N = seconds(self, tokens_N, requests, context)
        factors.update((seconds_N / GATED.seconds(tokens_N, requests, context)).round(6).tolist())
        return seconds_N

    monkeypatch.setattr(Engine, "__init__", begun)
    monkeypatch.setattr(LearnedCost, "seconds", watched)
    trial, tried = LearnedCost.trial, set[Trial | None]()

    def noted(self: LearnedCost, requests: int) -> Trial | None:
        tried.add(trial(self, requests))
        return trial(self, requests)

    monkeypatch.setattr(LearnedCost, "trial", noted)

    class Alternating(FixedPolicy):
        """Nobody drafts where the longest text has an even number of tokens."""

        def depths(self, view: PlanView) -> Ints:
            return np.full(len(view.idle_R), view.expected_RK.shape[1] * (view.contexts_R.max() % 2))

    by_cost = LookAhead(learned, margin=0.0)
    case = (
        Case(SkipDrafting(learned, by_cost), tokens=(5,))
        if trials
        else Case(by_cost, gate=Alternating(), tokens=(4, 4))
    )
    assert tally.deviation(case, case.in_engine) <= TOLERANCE
    assert {Trial(True), Trial(False)} <= tried if trials else len(factors) > 1


@pytest.mark.parametrize("name", REMEMBERING)
def test_policies_that_remember_over_more_rounds(name: str, tally: Tally) -> None:
    watched = Watched(POLICIES[name])
    case = Case(watched, tokens=(5,))
    assert tally.deviation(case, case.in_engine) <= TOLERANCE
    assert len(watched.decisions) >= 2


@pytest.mark.parametrize("kind", ["drawn", "chosen"])
def test_trees(kind: str, tally: Tally) -> None:
    case = Case(POLICIES["prefix"], kind)
    assert tally.deviation(case, case.in_engine) <= TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
def test_three_tokens_in_the_vocabulary(kind: str, tally: Tally) -> None:
    case = Case(POLICIES["prefix"], kind, tokens=(3,), vocab=3)
    assert tally.deviation(case, case.in_engine) <= TOLERANCE


def test_requests_that_may_skip_their_drafts(tally: Tally) -> None:
    gate = WatchedGate(SkipDrafting(GATED, probe_share=0.3))
    case = Case(LookAhead(GATED), gate=gate)
    assert tally.deviation(case, case.in_engine) <= TOLERANCE
    assert len(gate.decisions) >= 2


@dataclass
class Preemptions:
    count: int = 0


@pytest.fixture
def preemptions(monkeypatch: pytest.MonkeyPatch) -> Preemptions:
    found, leave = Preemptions(), RequestState.leave

    def counted(self: RequestState) -> None:
        found.count += 1
        leave(self)

    monkeypatch.setattr(RequestState, "leave", counted)
    return found


@pytest.mark.parametrize("coupled", [False, True])
def test_requests_that_are_preempted(coupled: bool, tally: Tally, preemptions: Preemptions) -> None:
    case = Case(POLICIES["threshold"], config=TIGHT, coupled=coupled)
    assert tally.deviation(case, case.in_engine) <= TOLERANCE
    assert preemptions.count


@pytest.mark.parametrize("kind", KINDS)
def test_coupled_sampling(kind: str, tally: Tally) -> None:
    case = Case(POLICIES["prefix"], kind, coupled=True, tokens=(3, 3))
    assert tally.deviation(case, case.in_engine) <= TOLERANCE


@pytest.fixture
def hits(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """How often so many blocks of a prompt were in the prefix cache."""
    found, share = Counter[int](), BlockAllocator.share

    def counted(self: BlockAllocator, keys: Sequence[bytes]) -> list[int]:
        blocks = share(self, keys)
        found[len(blocks)] += 1
        return blocks

    monkeypatch.setattr(BlockAllocator, "share", counted)
    return found


@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_chat_whose_history_is_cached(kind: str, coupled: bool, tally: Tally, hits: Counter[int]) -> None:
    case = Chat(POLICIES["prefix"], kind, coupled=coupled)
    assert tally.deviation(case, case.in_engine) <= TOLERANCE
    assert hits[3]  # of the prompt and of two drawn tokens


@pytest.mark.parametrize("coupled", [False, True])
def test_preempted_requests_find_their_blocks_again(
    coupled: bool, tally: Tally, preemptions: Preemptions, hits: Counter[int]
) -> None:
    case = Case(POLICIES["threshold"], config=replace(TIGHT, prefix_cache=True), coupled=coupled)
    assert tally.deviation(case, case.in_engine) <= TOLERANCE
    assert preemptions.count and hits[2]


@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", POLICIES)
def test_one_request_in_a_stream(name: str, kind: str, coupled: bool, tally: Tally) -> None:
    case = Case(POLICIES[name], kind, coupled=coupled, tokens=(3,) if coupled else (4,))
    assert tally.deviation(case, case.in_stream) <= TOLERANCE


@pytest.mark.parametrize("coupled", [False, True])
def test_one_request_in_a_stream_that_may_skip_its_drafts(coupled: bool, tally: Tally) -> None:
    gate = WatchedGate(SkipDrafting(DEAR, probe_share=0.3))
    case = Case(LookAhead(DEAR), gate=gate, coupled=coupled, tokens=(5,))
    assert tally.deviation(case, case.in_stream) <= TOLERANCE
    assert len(gate.decisions) >= 2


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("tokens", [(4, 3), (6,)])
def test_steps_that_are_launched_ahead(tokens: tuple[int, ...], tally: Tally, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a GPU decides (decoding/ahead.py): how many drafts are verified, and the estimates by which they are ordered,
    follow from the step before the last; `test_drafts_in_order_of_survival` holds that the device spends them so.
    """
    view_now, known = Drafting.view, dict[str, StepView]()

    def viewed(self: Drafting, turns: Sequence[Any], drafted: Drafted, other_tokens: int = 0) -> StepView:
        kept = self.__dict__.setdefault("kept", [])
        kept.append(copy.deepcopy(self.acceptance))
        drafts = drafted.drafts
        known["view"] = kept[-2 if len(kept) > 1 else -1].step_view(
            [turn.id for turn in turns],
            [draft.confidences for draft in drafts],
            [len(draft.tokens) for draft in drafts],
            contexts=[len(turn.state.tokens) for turn in turns],
            sampled=[True] * len(drafts),
        )
        return view_now(self, turns, drafted, other_tokens)

    class Launched(CausalPolicy):
        def lengths(self, view: StepView) -> Ints:
            old = known["view"]
            budget = self.budget(replace(view, past=old.past[-1:], expected_K=old.expected_K))
            return lengths_of(causal_order(old.survival_RK(), view.drafted_R)[:budget], len(view.drafted_R))

    monkeypatch.setattr(Drafting, "view", viewed)
    watched = Watched(Launched(TABLES["smooth"]))
    case = Case(watched, tokens=tokens)
    assert tally.deviation(case, case.in_engine) <= TOLERANCE
    assert len(watched.decisions) >= 3


@pytest.mark.slow
@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize("config", [ROOMY, TIGHT], ids=["roomy", "tight"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", POLICIES)
def test_everything_with_everything(name: str, kind: str, config: EngineConfig, coupled: bool, tally: Tally) -> None:
    policy = POLICIES[name]
    gate = SkipDrafting(GATED, probe_share=0.3) if isinstance(policy, CostPolicy) else None
    case = Case(policy, kind, gate, config=config, coupled=coupled)
    assert tally.deviation(case, case.in_engine) <= TOLERANCE


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("where", ["engine", "stream"])
@pytest.mark.parametrize("name", ["prefix", "look-ahead"])
def test_a_drafter_without_confidences(name: str, where: str, tally: Tally) -> None:
    """Policies plan with what earlier outcomes let one believe."""
    watched = Watched(POLICIES[name])
    case = Case(watched, "unsure", tokens=(4,))
    assert tally.deviation(case, case.in_engine if where == "engine" else case.in_stream) <= TOLERANCE
    assert len(watched.decisions) >= 2


@pytest.mark.usefixtures("quick")
def test_requests_without_confidences_that_may_skip_their_drafts(tally: Tally) -> None:
    gate = WatchedGate(SkipDrafting(DEAR, probe_share=0.3))
    case = Case(LookAhead(DEAR), "unsure", gate, tokens=(5,))
    assert tally.deviation(case, case.in_engine) <= TOLERANCE
    assert len(gate.decisions) >= 2


# Deliberately broken wiring. Each must show.

AT = ["engine", "stream"]
view_of, draft_of, schedule_of = Drafting.view, Engine.draft, Engine.schedule


def broken(case: Case, where: str = "engine") -> float:
    return Tally().deviation(case, case.in_engine if where == "engine" else case.in_stream)


@pytest.mark.parametrize("name", ["threshold", "prefix", "look-ahead"])
@pytest.mark.parametrize("where", AT)
def test_mutation_a_policy_is_shown_the_probability_of_the_drawn_token(
    where: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def peeking(self: Drafting, turns: Any, drafted: Drafted, other_tokens: int = 0) -> StepView:
        shown = [
            replace(own, draft=replace(own.draft, confidences=drafted_with(own.draft))) for own in drafted.proposals
        ]
        return view_of(self, turns, replace(drafted, proposals=shown), other_tokens)

    monkeypatch.setattr(Drafting, "view", peeking)
    assert broken(Case(POLICIES[name], tokens=(3,)), where) > VISIBLE


@pytest.mark.parametrize("where", AT)
def test_mutation_a_draft_is_dropped_by_its_last_token(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def dropping(self: Engine, step: Step) -> list[Draft]:
        drafts = draft_of(self, step)
        return [draft.truncated(len(draft.tokens) - (draft.tokens[-1:] == [0])) for draft in drafts]

    monkeypatch.setattr(Engine, "draft", dropping)
    assert broken(Case(tokens=(3,)), where) > VISIBLE


@pytest.mark.parametrize("name", REMEMBERING)
def test_mutation_the_history_records_a_step_before_the_policy_looks(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(BY_NAME[name](CLIFF), tokens=(4,))

    def early(self: Engine, step: Step, drafts: Sequence[Draft]) -> Any:
        shown, verified = schedule_of(self, step, drafts)
        if shown is None:
            return shown, verified
        self.drafting.observe(step.turns, step.drafted, shown, results=[None] * len(drafts))
        return None, schedule_of(self, step, drafts)[1]

    monkeypatch.setattr(Engine, "schedule", early)
    assert broken(case) > VISIBLE


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("where", AT)
def test_mutation_the_estimator_learns_from_this_round(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told before planning that token 0 is accepted and token 1 is not."""

    def early(self: Drafting, turns: Any, drafted: Drafted, other_tokens: int = 0) -> StepView:
        shown = view_of(self, turns, drafted, other_tokens)
        liked_R = np.array([draft.tokens[:1] == [0] for draft in drafted.drafts]).astype(np.int64)
        acceptance, ids = self.acceptance, [turn.id for turn in turns]
        self.acceptance = copy.deepcopy(acceptance)
        self.acceptance.observe(ids, shown, verified_R=np.minimum(shown.drafted_R, 1), accepted_R=liked_R)
        peeked = view_of(self, turns, drafted, other_tokens)
        self.acceptance = acceptance
        return peeked

    monkeypatch.setattr(Drafting, "view", early)
    assert broken(Case(POLICIES["prefix"], "unsure", tokens=(3,)), where) > VISIBLE


@pytest.mark.parametrize("coupled", [False, True])
def test_mutation_two_requests_share_their_randomness(coupled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Shared(RequestState):
        def __init__(self, target: Any, prompt: Any, params: Any, **more: Any) -> None:
            super().__init__(target, prompt, replace(params, seed=params.seed & 6), **more)

    monkeypatch.setattr(engine_module, "RequestState", Shared)
    assert broken(Case(coupled=coupled, tokens=(2, 1))) > VISIBLE  # positions 1 and 2, and 2


def test_mutation_a_preempted_request_starts_its_randomness_again(monkeypatch: pytest.MonkeyPatch) -> None:
    class Restarting(RequestState):
        def __init__(self, target: Any, prompt: Any, params: Any, **more: Any) -> None:
            super().__init__(target, prompt, params, **more)
            self.restart = lambda: more["randomness"].source(params.seed)

        def leave(self) -> None:
            super().leave()
            self.source = self.restart()

    monkeypatch.setattr(engine_module, "RequestState", Restarting)
    assert broken(Case(config=TIGHT)) > VISIBLE


@pytest.mark.parametrize("where", AT)
def test_mutation_the_keys_of_an_accepted_path_stay_where_they_were(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PagedKV, "keep_paths", lambda self, kept: None)
    assert broken(Case(kind="drawn", tokens=(4,)), where) > VISIBLE


@pytest.mark.parametrize("kind", KINDS)
def test_mutation_a_cached_block_is_found_by_its_own_tokens_alone(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its second block is that of another text, where it is the first: its keys have other positions."""
    config = replace(CACHED, block_size=2)
    case = Case(
        kind=kind, config=config, tokens=(2,), prompts=[(0, 0, 0, 1, 1)], read=[(0, 0, 1, 1, 0), (0, 1, 1, 1, 0)]
    )
    assert broken(case) <= TOLERANCE
    key = prefix_cache_module.block_key
    monkeypatch.setattr(prefix_cache_module, "block_key", lambda before, tokens: key(b"", tokens))
    assert broken(case) > VISIBLE


@pytest.mark.parametrize("where", AT)
@pytest.mark.parametrize("forgotten", ["drafts", "committed"])
def test_mutation_the_penalty_forgets_tokens(forgotten: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with_tokens = SeenTokens.with_tokens
    if forgotten == "drafts":
        monkeypatch.setattr(SeenTokens, "with_tokens", lambda self, tokens=(): with_tokens(self))
    else:
        monkeypatch.setattr(SeenTokens, "add", lambda self, token: None)
    assert broken(Case(tokens=(4,)), where) > VISIBLE


def test_models_of_the_proof_run_in_float64() -> None:
    """Otherwise deviations would be those of float32."""
    assert next_logits(target(2), (0, 1)).dtype == torch.float64
