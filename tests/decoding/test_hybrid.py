"""Copies beside a drafter: who drafts, what is learned of copies, and that no choice changes the output."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from outrider.decoding.drafting import Copy, Drafting, Turn
from outrider.decoding.generate import generate
from outrider.decoding.request import RequestState, StopRules
from outrider.drafters.base import Drafter
from outrider.drafters.hybrid import HybridDrafter
from outrider.drafters.ngram import NgramConfig
from outrider.engine.batch import Request
from outrider.engine.engine import Engine
from outrider.sampling import SamplingParams
from outrider.scheduling.cost import Floats, Ints
from outrider.scheduling.gate import AlwaysDraft, GateView, History, SkipDrafting
from outrider.scheduling.policies import FixedPolicy, LookAhead, StepView
from outrider.target.model import Target
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

    def seconds(self, tokens_N: Ints, requests: int, drafting: int, context: float, depth: int | None = None) -> Floats:
        return 1 + self.per_token * tokens_N.astype(np.float64) + (drafting > 0) * self.draft


class Never(AlwaysDraft):
    """The drafter never drafts."""

    def depths(self, view: GateView) -> Ints:
        return np.zeros(len(view.idle_R), dtype=np.int64)


class Own(AlwaysDraft):
    """The drafter always drafts."""

    def depths(self, view: GateView) -> Ints:
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
        turns = [Turn("a", state, 12)]
        drafts, _ = drafting.draft(turns, 0.0, {})
        found.append(drafts[0].tokens)
        view = drafting.view(turns, drafts)
        state.commit(text)
        drafting.record(turns, view, [None])
    return found


def first_of_copy(drafting: Drafting, state: RequestState) -> float:
    """What is expected of the first token of a copy now."""
    assert drafting.copies is not None
    (copy,) = drafting.copies.look_up({"a": state.tokens}).values()
    return float(copy.confidences_K[0])


def test_a_copy_goes_on_where_the_text_did(target: Target) -> None:
    drafting = Drafting(hybrid(target), FixedPolicy(), Never())
    state = RequestState(target, LOOP, SamplingParams(), NO_STOPS)
    first, second = rounds_of(drafting, state, [LOOP[:3], [60, 61]])
    assert first == (LOOP * 2)[:12] and second == (LOOP * 2)[3:15]


@pytest.mark.parametrize("gate", [Never(), Own()])
def test_what_came_of_copies_is_learned_whether_they_were_taken_or_not(target: Target, gate: AlwaysDraft) -> None:
    """Beliefs rise where the text repeats itself and fall where it does not, with no copy drafted as well."""
    believed = {}
    for repeats in (True, False):
        drafting = Drafting(HybridDrafter(SelfDrafter(target, 1.0, 2)), FixedPolicy(), gate)
        state = RequestState(target, LOOP, SamplingParams(), NO_STOPS)
        state.session = drafting.drafter.new_session(100) if drafting.drafter else None
        believed["before"] = first_of_copy(drafting, state)
        for number in range(4):
            rounds_of(drafting, state, [LOOP[:5] if repeats else [60 + number, *LOOP[1:5]]])
        believed[str(repeats)] = first_of_copy(drafting, state)
    assert believed["True"] > believed["before"] > believed["False"]


def test_a_copy_ends_where_little_is_expected_of_it() -> None:
    copy = Copy(10, 3, [1, 2, 3, 4], np.array([0.9, 0.5, 0.1, 1.0]))
    assert copy.draft(9, 0.0).tokens == [1, 2] and copy.draft(1, 0.0).tokens == [1]
    assert copy.draft(9, 0.6).tokens == [1] and copy.draft(9, 0.95).tokens == []
    assert copy.draft(9, 0.0).confidences == [0.9, 0.5] and not copy.draft(9, 0.0).siblings


def test_outcomes_end_with_the_first_that_is_wrong() -> None:
    copy = Copy(2, 3, [1, 2, 3, 4], np.ones(4))
    assert copy.outcomes([8, 9, 1, 2, 7, 4]) == [True, True, False]
    assert copy.outcomes([8, 9, 1]) == [True] and copy.outcomes([8, 9]) == []


@pytest.mark.parametrize("gate", [None, Never(), SkipDrafting(Costs())])
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(1.0, seed=3, coupled=True)])
def test_alone_and_in_the_engine_the_text_is_plain_decoding_s(
    target: Target, params: SamplingParams, gate: AlwaysDraft | None
) -> None:
    texts = [[*LOOP], *prompts(3)]
    plain = [generate(target, text, params=params, rules=NO_STOPS).tokens for text in texts]
    alone = [generate(target, text, hybrid(target), params, NO_STOPS, gate=gate) for text in texts]
    assert [generation.tokens for generation in alone] == plain
    engine = Engine(target, hybrid(target), gate=gate)
    together = finish(engine, [Request(str(i), text, params, NO_STOPS) for i, text in enumerate(texts)])
    assert list(together.values()) == plain
    copies = engine.drafting.copies
    assert copies is not None and not copies.beliefs._slots._places and not copies._indexes


def test_a_copy_is_no_longer_than_the_response(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside trees too, which may have more nodes than there are tokens left."""
    drafted: list[tuple[int, int]] = []
    draft = Drafting.draft

    def watched(self: Drafting, turns: Sequence[Turn], *rest: object, **more: object) -> object:
        found = draft(self, turns, *rest, **more)  # type: ignore[arg-type]
        drafted.extend((found[0][i].depth, turn.state.remaining) for i, turn in enumerate(turns))
        return found

    monkeypatch.setattr(Drafting, "draft", watched)
    trained: Sequence[Drafter] = (toy_drafter(target), SelfTrees(target))
    for drafter in trained:
        beside = HybridDrafter(drafter, NgramConfig(12))
        rules = StopRules(9, stop_ids=())
        assert generate(target, LOOP, beside, rules=rules, gate=Never()).tokens == (
            generate(target, LOOP, rules=rules).tokens
        )
    assert drafted and max(depth for depth, _ in drafted) > 3
    assert all(depth < max(left, 1) for depth, left in drafted)


def test_copies_are_no_drafts_of_the_drafter(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its means stay as they are, and it counts as waiting."""
    views: list[tuple[StepView, GateView]] = []
    record = History.record

    def watched(self: History, ids: Sequence[Hashable], view: StepView, *, verified_R: Ints, accepted_R: Ints) -> None:
        record(self, ids, view, verified_R=verified_R, accepted_R=accepted_R)
        views.append((view, self.gate_view(ids, view.contexts_R.tolist())))

    monkeypatch.setattr(History, "record", watched)
    generate(target, LOOP, hybrid(target), rules=NO_STOPS, gate=Never())
    copied = [(view, after) for view, after in views if view.drafted_R.any()]
    assert copied and all(view.copied_R is not None and view.copied_R.all() for view, _ in copied)
    assert all(not view.made_R.any() for view, _ in copied)
    for number, (_, after) in enumerate(views, 1):
        assert np.isnan(after.expected_RK).all() and after.idle_R.tolist() == [number]


def gate_view(own: Sequence[float], copied: Sequence[float]) -> GateView:
    return GateView(np.array([own]), np.array([0]), np.array([50]), copied_RK=np.array([copied]))


@pytest.mark.parametrize("gate", [AlwaysDraft(), SkipDrafting(Costs())])
def test_gates_take_what_promises_more(gate: AlwaysDraft) -> None:
    own = [0.7, 0.7, 0.7]
    assert gate.depths(gate_view(own, [0.95] * 8)).tolist() == [0], "a long copy"
    assert gate.depths(gate_view(own, [0.2] * 8)).tolist() == [3]
    assert gate.depths(gate_view(own, [0.65, 0.65, 0.65])).tolist() == [0], "nearly as good, and free"
    assert gate.depths(gate_view(own, [0.0] * 3)).tolist() == [3]


def test_the_gate_gives_drafts_to_those_that_gain_over_their_copies() -> None:
    own_RK, copied_RK = np.array([[0.9, 0.9], [0.8, 0.8]]), np.array([[0.95, 0.95], [0.1, 0.1]])
    view = GateView(own_RK, np.array([0, 0]), np.array([50, 50]), copied_RK=copied_RK)
    assert SkipDrafting(Costs(draft=0.1)).depths(view).tolist() == [0, 2]


def test_all_of_a_copy_may_be_read_when_planning() -> None:
    """A copy's confidences follow from the past: look-ahead crosses a token that does not pay for itself."""
    steps = np.array([1.0, 1.0, 2.0, 2.0, 2.0, 2.0])

    class Cliff(Costs):
        def seconds(self, tokens_N: Ints, *rest: object, **more: object) -> Floats:  # type: ignore[override]
            found: Floats = steps[np.minimum(tokens_N, 5)]
            return found

    confidences, policy = [[0.9, 0.9, 0.9, 0.9]], LookAhead(Cliff())
    own = StepView.of(confidences, [4])
    history = History(4)
    copied = history.step_view(["a"], confidences, [4], [50], copied=[True])
    assert policy.lengths(own).tolist() == [0] and policy.lengths(copied).tolist() == [4]
