"""Copies beside a drafter: who drafts, what is learned of copies, and that no choice changes the output."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from outrider.decoding.acceptance import Acceptance
from outrider.decoding.cost import Floats, Ints
from outrider.decoding.drafting import Drafted, Drafting, DraftTurn
from outrider.decoding.engine import Engine
from outrider.decoding.generate import generate
from outrider.decoding.policies import FixedPolicy, LookAhead, PlanView, SkipDrafting, StepView
from outrider.decoding.prompt_lookup import Lookup, PromptLookup
from outrider.decoding.request import Request, RequestState, StopRules
from outrider.decoding.scheduler import EngineConfig
from outrider.drafters.base import Drafter
from outrider.drafters.language_model import StandaloneDrafter
from outrider.drafters.ngram import HybridDrafter, Library, NgramConfig
from outrider.sampling import SamplingParams
from outrider.target.model import Target
from tests.proof.engine_cases import tiny_llama
from tests.toys.engine import finish, prompts, toy_drafter
from tests.toys.oracle import SelfDrafter
from tests.toys.targets import toy_target
from tests.toys.trees import SelfTrees

LOOP = [5, 9, 11, 40, 7] * 4
NO_STOPS = StopRules(40, stop_ids=())


@dataclass(frozen=True)
class Costs:
    """A forward costs 1 and `per_token` for each token, a draft `draft`."""

    draft: float = 0.3
    per_token: float = 0.02

    def seconds(self, tokens_N: Ints, requests: int, context: float) -> Floats:
        return 1 + self.per_token * tokens_N.astype(np.float64)

    def draft_seconds(self, drafting: int, depth: int | None = None) -> float:
        return (drafting > 0) * self.draft


class Never(FixedPolicy):
    """The drafter never drafts."""

    def depths(self, view: PlanView) -> Ints:
        return np.zeros(len(view.idle_R), dtype=np.int64)


class Own(FixedPolicy):
    """The drafter always drafts."""

    def depths(self, view: PlanView) -> Ints:
        return np.full(len(view.idle_R), view.expected_RK.shape[1])


@pytest.fixture(scope="module")
def target() -> Target:
    return toy_target()


def hybrid(target: Target, gamma: int = 12) -> HybridDrafter:
    return HybridDrafter(toy_drafter(target), NgramConfig(gamma))


def rounds_of(drafting: Drafting, state: RequestState, texts: Sequence[Sequence[int]]) -> list[list[int]]:
    """What is drafted in rounds that commit `texts` one after the other."""
    found = []
    for text in texts:
        turns = [DraftTurn("a", state, 12)]
        drafted = drafting.draft(turns, 0.0)
        found.append(drafted.drafts[0].tokens)
        view = drafting.view(turns, drafted)
        state.commit(text)
        drafting.observe(turns, drafted, view, results=[None])
    return found


def first_of_copy(drafting: Drafting, state: RequestState) -> float:
    """What is expected of the first token of a copy now."""
    assert drafting.lookup is not None
    (copy,) = drafting.lookup.find({"a": state.tokens}).values()
    return copy.confidences[0]


def test_a_copy_goes_on_where_the_text_did(target: Target) -> None:
    drafting = Drafting(hybrid(target), Never())
    state = RequestState(target, LOOP, SamplingParams(), NO_STOPS)
    first, second = rounds_of(drafting, state, [LOOP[:3], [60, 61]])
    assert first == (LOOP * 2)[:12] and second == (LOOP * 2)[3:15]


@pytest.mark.parametrize("gate", [Never(), Own()])
def test_what_came_of_copies_is_learned_whether_they_were_taken_or_not(target: Target, gate: FixedPolicy) -> None:
    """Beliefs rise where the text repeats itself and fall where it does not, with no copy drafted as well."""
    believed = {}
    for repeats in (True, False):
        drafting = Drafting(HybridDrafter(SelfDrafter(target, 1.0, 2)), gate)
        state = RequestState(target, LOOP, SamplingParams(), NO_STOPS)
        state.session = drafting.drafter.new_session(100) if drafting.drafter else None
        believed["before"] = first_of_copy(drafting, state)
        for number in range(4):
            rounds_of(drafting, state, [LOOP[:5] if repeats else [60 + number, *LOOP[1:5]]])
        believed[str(repeats)] = first_of_copy(drafting, state)
    assert believed["True"] > believed["before"] > believed["False"]


class Refusing(FixedPolicy):
    """No request drafts; unlike `Never`, this policy skips, so steps pause after those without a verified draft."""

    @property
    def skips(self) -> bool:
        return True

    def depths(self, view: PlanView) -> Ints:
        return np.zeros_like(view.idle_R)


@pytest.mark.parametrize(
    ("requests", "verified", "looks", "learned"),
    [(3, 0, (29, 0), 5), (4, 0, (4, 25), 4), (7, 0, (4, 25), 4), (8, 0, (4, 0), 4), (8, 1, (25, 0), 25)],
)
def test_many_requests_look_less_often_for_copies_that_are_not_used(
    target: Target, monkeypatch: pytest.MonkeyPatch, requests: int, verified: int, looks: tuple[int, int], learned: int
) -> None:
    """Where none is verified, behind 1, 3, 7 and 7 rounds, with four requests behind 1, 3, 7 and 15. The first round
    reads prompts. From four on they look for longer suffixes in between, and fewer than four for all. Of what is found
    in between and not verified nothing is learned."""
    looked, look_up = list[int](), PromptLookup.find
    recorded, record = list[int](), PromptLookup.observe

    def remembered(self: PromptLookup, found: Mapping[str, Lookup], texts: Mapping[str, Sequence[int]]) -> None:
        recorded.append(len(found))
        record(self, found, texts)

    def counted(
        self: PromptLookup, texts: Mapping[str, Sequence[int]], *, shortest: int, **more: Collection[str]
    ) -> dict[str, Lookup]:
        looked.append(shortest)
        return look_up(self, texts, shortest=shortest, **more)

    monkeypatch.setattr(PromptLookup, "find", counted)
    monkeypatch.setattr(PromptLookup, "observe", remembered)
    engine = Engine(target, hybrid(target), Refusing(verified), config=EngineConfig(8))
    for i in range(requests):
        engine.submit(Request(str(i), LOOP, rules=StopRules(80, stop_ids=())))
    for _ in range(30):
        engine.step()
    assert (looked.count(1), looked.count(3)) == looks and len(recorded) == 1 + learned


def test_short_suffixes_may_be_passed_over() -> None:
    copies = PromptLookup(NgramConfig(4))
    assert copies.find({"a": [1, 2, 3, 9, 2, 3]}).keys() == {"a"}
    assert not copies.find({"a": [1, 2, 3, 9, 2, 3]}, shortest=3)
    (copy,) = copies.find({"a": [1, 2, 3, 9, 2, 3, 9, 2]}, shortest=3).values()
    assert copy.tokens == [3, 9, 2, 3] and copy.matched == 4, "what was passed over is remembered all the same"


def test_copies_in_sampled_text_have_beliefs_of_their_own() -> None:
    """Less is expected of them, and what came of them says less about greedy text: only what all positions share."""
    copies = PromptLookup(NgramConfig(4))
    text = [7, 8, 9, 7, 8, 9, 7]

    def first(sampled: bool) -> float:
        (copy,) = copies.find({"new": text}, sampled=["new"] if sampled else []).values()
        return copy.confidences[0]

    greedy, sampled = first(False), first(True)
    assert sampled < greedy
    for number in range(30):
        found = copies.find({str(number): text}, sampled=[str(number)])
        copies.observe(found, {str(number): [*text, 5]})
    assert first(True) < sampled - 0.2 and greedy - first(False) < (sampled - first(True)) / 2


def test_a_copy_ends_where_little_is_expected_of_it() -> None:
    copy = Lookup(10, 3, [1, 2, 3, 4], np.array([0.9, 0.5, 0.1, 1.0]))
    assert copy.draft(9, 0.0).tokens == [1, 2] and copy.draft(1, 0.0).tokens == [1]
    assert copy.draft(9, 0.6).tokens == [1] and copy.draft(9, 0.95).tokens == []
    assert copy.draft(9, 0.0).confidences == [0.9, 0.5] and not copy.draft(9, 0.0).siblings


def test_outcomes_end_with_the_first_that_is_wrong() -> None:
    copy = Lookup(2, 3, [1, 2, 3, 4], np.ones(4))
    assert copy.outcomes([8, 9, 1, 2, 7, 4]) == [True, True, False]
    assert copy.outcomes([8, 9, 1]) == [True] and copy.outcomes([8, 9]) == []


@pytest.mark.parametrize("gate", [None, Never(), SkipDrafting(Costs())])
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(1.0, seed=3, coupled=True)])
def test_alone_and_in_the_engine_the_text_is_plain_decoding_s(
    target: Target, params: SamplingParams, gate: FixedPolicy | None
) -> None:
    texts = [[*LOOP], *prompts(3)]
    plain = [generate(target, text, params=params, rules=NO_STOPS).tokens for text in texts]
    alone = [generate(target, text, hybrid(target), params, NO_STOPS, policy=gate) for text in texts]
    assert [generation.tokens for generation in alone] == plain
    engine = Engine(target, hybrid(target), gate)
    together = finish(engine, [Request(str(i), text, params, NO_STOPS) for i, text in enumerate(texts)])
    assert list(together.values()) == plain
    copies = engine.drafting.lookup
    assert copies is not None and not copies.estimates._slots._places and not copies._indexes


def test_a_copy_is_no_longer_than_the_response(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside trees too, which may have more nodes than there are tokens left."""
    drafted: list[tuple[int, int]] = []
    draft = Drafting.draft

    def watched(self: Drafting, turns: Sequence[DraftTurn], *rest: object, **more: object) -> Drafted:
        found = draft(self, turns, *rest, **more)  # type: ignore[arg-type]
        drafted.extend((draft.depth, turn.state.remaining) for draft, turn in zip(found.drafts, turns, strict=True))
        return found

    monkeypatch.setattr(Drafting, "draft", watched)
    trained: Sequence[Drafter] = (toy_drafter(target), SelfTrees(target))
    for drafter in trained:
        beside = HybridDrafter(drafter, NgramConfig(12))
        rules = StopRules(9, stop_ids=())
        assert generate(target, LOOP, beside, rules=rules, policy=Never()).tokens == (
            generate(target, LOOP, rules=rules).tokens
        )
    assert drafted and max(depth for depth, _ in drafted) > 3
    assert all(depth < max(left, 1) for depth, left in drafted)


def test_copies_are_no_drafts_of_the_drafter(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its means stay as they are, and it counts as waiting."""
    views: list[tuple[StepView | None, PlanView]] = []
    record, skip, gate_view = Acceptance.observe, Acceptance.skip, Acceptance.plan_view
    asked: list[Sequence[Hashable]] = []

    def asking(self: Acceptance, ids: Sequence[Hashable], *args: Any, **options: Any) -> PlanView:
        asked.append(ids)
        return gate_view(self, ids, *args, **options)

    def watched(
        self: Acceptance, ids: Sequence[Hashable], view: StepView, *, verified_R: Ints, accepted_R: Ints
    ) -> None:
        record(self, ids, view, verified_R=verified_R, accepted_R=accepted_R)
        views.append((view, gate_view(self, ids, view.contexts_R.tolist())))

    def skipped(self: Acceptance, requests: int) -> None:
        skip(self, requests)
        views.append((None, gate_view(self, asked[0], [0])))

    monkeypatch.setattr(Acceptance, "observe", watched)
    monkeypatch.setattr(Acceptance, "skip", skipped)
    monkeypatch.setattr(Acceptance, "plan_view", asking)
    generate(target, LOOP, hybrid(target), rules=NO_STOPS, policy=Never())
    copied = [view for view, _ in views if view is not None]
    assert copied and all(view.looked_up_R is not None and view.looked_up_R.all() for view in copied)
    assert all(view.drafted_R.any() and not view.by_drafter_R.any() for view in copied)
    for number, (_, after) in enumerate(views, 1):
        assert np.isnan(after.expected_RK).all() and after.idle_R.tolist() == [number]


def test_a_library_is_searched_for_the_longest_match() -> None:
    library = Library([[1, 2, 3, 4, 5], [9, 2, 3, 4, 6, 7]], responses=12)
    assert library.find((1, 2, 3), 9) == (3, [4, 5]), "up to the end of the document"
    assert library.find((8, 2, 3, 4), 1) == (3, [6]), "the latest of two"
    assert library.find((1, 2, 3, 4), 9) == (4, [5])
    assert library.find((3, 4), 9) == library.find((5, 9, 2), 9) == (0, [])
    library.add([1, 2, 3, 8])
    assert library.find((1, 2, 3), 9) == (3, [8]), "responses come before documents"
    library.add([1, 2, 3, 0])
    library.add([5, 5, 5, 5])
    assert library.find((1, 2, 3), 9) == (3, [0])
    library.add([6, 6, 6, 6])
    library.add([7, 7, 7, 7])
    assert library.find((1, 2, 3), 9) == (3, [4, 5]), "old responses are dropped"
    assert library.find((6, 6, 6), 9) == (3, [6]) and library.find((6, 6, 6), 9, responses=False) == (0, [])
    forgetful = Library([[1, 2, 3, 4]])
    forgetful.add([1, 2, 3, 5])
    assert forgetful.find((1, 2, 3), 9) == (3, [4])


def test_no_fewer_tokens_of_responses_than_can_be_copied() -> None:
    least = Library(responses=8)
    least.add([1, 2, 3, 4])
    assert least.find((1, 2, 3), 9) == (3, [4])
    for few in (-1, 1, 7):
        with pytest.raises(ValueError, match=f"{few} tokens .* keep 0, or at least 8"):
            Library(responses=few)


def test_a_match_with_nothing_behind_it_hides_no_other() -> None:
    library = Library([[1, 2, 3, 4], [8, 1, 2, 3]])
    assert library.find((8, 1, 2, 3), 9) == (3, [4])


@pytest.mark.parametrize("responses", [8, 9, 20])
def test_a_library_keeps_no_more_than_it_may_and_long_responses_whole(responses: int) -> None:
    library, rng = Library(responses=responses), np.random.default_rng(0)
    for length in rng.integers(0, 30, size=40).tolist():
        response = rng.integers(0, 99, size=length).tolist()
        library.add(response)
        kept = [*library._before.tokens, *library._latest.tokens]
        assert len(kept) <= responses
        last = [*response, -1][-(responses // 2 * 2) :]
        assert not length or kept[-len(last) :] == last, "a response longer than a half too"


def test_responses_that_a_client_s_seed_may_have_drawn_are_not_copied() -> None:
    """Of three tokens that are equally likely: the numbers that drew a response accept the copies of its 0 alone.

    Two requests with the same prompt and seed; the fourth token of the second is a copy where that is allowed.
    """
    target = tiny_llama(2, 3)
    target.model.model.norm.weight.data.zero_()
    trained, own = StandaloneDrafter(tiny_llama(3, 3), target, 1), NgramConfig(1, longest=4, shortest=4)
    drawn, rules = np.zeros(3), StopRules(5, stop_ids=())
    for seed in range(150):
        drafter = HybridDrafter(trained, own, Library(responses=64))
        for _ in range(2):
            found = generate(target, [0], drafter, SamplingParams(1.0, seed=seed), rules, policy=Never())
        drawn[found.tokens[3]] += 1
    assert drawn.max() < 75, f"{drawn}: 50 each are expected, 90 of token 0 where responses are copied"


@pytest.mark.parametrize(
    ("params", "may"),
    [
        (SamplingParams(seed=1), True),
        (SamplingParams(1.0), True),
        (SamplingParams(1.0, seed=1, coupled=True), True),
        (SamplingParams(1.0, seed=1), False),
    ],
)
def test_who_copies_responses(target: Target, params: SamplingParams, may: bool) -> None:
    """Documents are copied by all."""
    library = Library([[50, 51, 52, 53]], responses=64)
    library.add([7, 8, 9, 60])
    drafting = Drafting(HybridDrafter(toy_drafter(target), NgramConfig(4), library), Never())
    for text, wanted in (([5, 7, 8, 9], [60] if may else []), ([5, 50, 51, 52], [53])):
        drafted = drafting.draft([DraftTurn("a", RequestState(target, text, params, NO_STOPS), 4)], 0.0)
        assert drafted.drafts[0].tokens == wanted
        drafting.forget("a", [])


def test_asking_twice_is_answered_from_the_first_answer(target: Target) -> None:
    """In the engine; the text is plain decoding's, and the second answer takes far fewer rounds."""
    text = prompts(3)[2]
    plain = generate(target, text, rules=NO_STOPS).tokens
    rounds: dict[int, list[int]] = {}
    for responses in (0, 400):
        drafter = HybridDrafter(toy_drafter(target), NgramConfig(12), Library(responses=responses))
        engine = Engine(target, drafter, Never())
        engine.warm_up()
        for asked in (text, text, [*text[:3], *text]):
            steps: list[None] = []
            found = finish(engine, [Request("a", asked, rules=NO_STOPS)], lambda steps=steps: steps.append(None))  # type: ignore[misc]
            assert asked != text or found["a"] == plain
            rounds.setdefault(responses, []).append(len(steps))
            if responses:
                assert drafter.library is not None
                assert drafter.library._latest.tokens[-41:] == [*found["a"], -1], "all of the response, no prompt"
                assert len(drafter.library._latest.tokens) % 41 == 0
    assert rounds[0][0] == rounds[0][1] == rounds[400][0] and rounds[400][1] <= rounds[0][1] // 2


def test_a_copy_is_taken_whence_more_tokens_agree() -> None:
    copies = PromptLookup(NgramConfig(4), Library([[7, 8, 9, 1]], responses=100))
    own, other = copies.find({"a": [6, 7, 8, 9, 2, 6, 7, 8, 9], "b": [5, 7, 8, 9]}).values()
    assert (own.from_library, own.matched, own.tokens) == (False, 4, [2, 6, 7, 8])
    assert (other.from_library, other.matched, other.tokens) == (True, 3, [1]) and len(other.confidences) == 1
    expected_RK = copies.expected_RK({"b": other}, ["b", "c"])
    assert expected_RK is not None and (expected_RK > 0).tolist() == [[True, False, False, False], [False] * 4]
    for _ in range(20):
        copies.observe({"b": other}, {"b": [5, 7, 8, 9, 0]})
    copies.forget("b")
    again = copies.find({"c": [5, 7, 8, 9], "d": [4, 7, 8, 9, 2, 7, 8, 9]})
    lowered, kept = again["c"].confidences[0], again["d"].confidences[0]
    assert lowered < 0.75 * other.confidences[0], "borrowed copies were wrong"
    assert kept > 0.85 * other.confidences[0] and not again["d"].from_library, "which says little about own ones"
    copies.forget("d", [3])
    assert copies.library is not None and copies.library.find((4, 7, 8, 9), 1) == (3, [1]), "prompts are not kept"


def gate_view(own: Sequence[float], copied: Sequence[float]) -> PlanView:
    return PlanView(np.array([own]), np.array([0]), np.array([50]), lookup_RK=np.array([copied]))


@pytest.mark.parametrize("gate", [FixedPolicy(), SkipDrafting(Costs())])
def test_gates_take_what_promises_more(gate: FixedPolicy) -> None:
    own = [0.7, 0.7, 0.7]
    assert gate.depths(gate_view(own, [0.95] * 8)).tolist() == [0], "a long copy"
    assert gate.depths(gate_view(own, [0.2] * 8)).tolist() == [3]
    assert gate.depths(gate_view(own, [0.65, 0.65, 0.65])).tolist() == [0], "nearly as good, and free"
    assert gate.depths(gate_view(own, [0.0] * 3)).tolist() == [3]


def test_the_gate_gives_drafts_to_those_that_gain_over_their_copies() -> None:
    own_RK, lookup_RK = np.array([[0.9, 0.9], [0.8, 0.8]]), np.array([[0.95, 0.95], [0.1, 0.1]])
    view = PlanView(own_RK, np.array([0, 0]), np.array([50, 50]), lookup_RK=lookup_RK)
    assert SkipDrafting(Costs(draft=0.1)).depths(view).tolist() == [0, 2]


def test_all_of_a_copy_may_be_read_when_planning() -> None:
    """A copy's confidences follow from the past: look-ahead crosses a token that does not pay for itself."""
    steps = np.array([1.0, 1.0, 2.0, 2.0, 2.0, 2.0])

    class Cliff(Costs):
        def seconds(self, tokens_N: Ints, requests: int, context: float) -> Floats:
            found: Floats = steps[np.minimum(tokens_N, 5)]
            return found

    confidences, policy = [[0.9, 0.9, 0.9, 0.9]], LookAhead(Cliff(draft=0.0))
    own = StepView.of(confidences, [4])
    history = Acceptance(4)
    copied = history.step_view(["a"], confidences, [4], [50], looked_up=[True])
    assert policy.lengths(own).tolist() == [0] and policy.lengths(copied).tolist() == [4]
