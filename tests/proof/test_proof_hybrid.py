"""Copies beside a drafter are lossless, in the engine and alone: every outcome over tiny Llama models.

Which of them drafts is decided from the past; broken versions that decide by drafted tokens show.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import outrider.decoding.backoff as backoff_module
import outrider.decoding.engine as engine_module
from outrider.decoding.backoff import Backoff, Pause
from outrider.decoding.cost import Ints
from outrider.decoding.drafting import Drafted, Drafting, DraftTurn, Proposal
from outrider.decoding.policies import (
    FixedPolicy,
    LookAhead,
    PlanView,
    Policy,
    PrefixScheduler,
    SkipDrafting,
    StepView,
    ThresholdPolicy,
)
from outrider.decoding.prompt_lookup import Lookup
from outrider.drafters.draft import Draft, Siblings
from tests.proof.cases import BY_NAME, TABLES, VISIBLE, DraftsCost
from tests.proof.engine_cases import TIGHT, Case, Tally

TOLERANCE = 1e-10
GATED = DraftsCost(TABLES["jagged"], per_draft=0.2)
POLICIES: dict[str, Policy] = {
    "fixed": FixedPolicy(),
    "threshold": ThresholdPolicy(0.5),
    "prefix": PrefixScheduler(TABLES["smooth"]),
    "goodput": BY_NAME["goodput"](TABLES["smooth"]),
    "async": BY_NAME["async"](TABLES["smooth"]),
    "look-ahead": LookAhead(GATED),
}
WHERE = ["engine", "stream"]


@pytest.fixture(scope="module")
def tally() -> Iterator[Tally]:
    counts = Tally()
    yield counts
    print(f"\nhybrid: {counts.cases} cases, {counts.traces} traces, total variation {counts.largest:.1e} at most")


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch) -> set[tuple[bool, bool]]:
    """Whether a request drafted, and whether that was a copy, of all rounds."""
    seen: set[tuple[bool, bool]] = set()
    draft = Drafting.draft

    def watched(self: Drafting, turns: Sequence[DraftTurn], *rest: object, **more: object) -> Drafted:
        drafted = draft(self, turns, *rest, **more)  # type: ignore[arg-type]
        seen.update((bool(found.draft.tokens), found.source == "copy") for found in drafted.proposals)
        return drafted

    monkeypatch.setattr(Drafting, "draft", watched)
    return seen


def both(sources: set[tuple[bool, bool]]) -> bool:
    return {(True, True), (True, False)} <= sources


@pytest.mark.parametrize("name", POLICIES)
def test_alone(name: str, tally: Tally, sources: set[tuple[bool, bool]]) -> None:
    gate = SkipDrafting(GATED, probe_share=0.3) if name == "look-ahead" else None
    case = Case(POLICIES[name], "hybrid chain", gate=gate, tokens=(5,))
    assert tally.deviation(case, case.in_stream) <= TOLERANCE
    assert both(sources)


@pytest.mark.parametrize("name", ["fixed", "prefix", "look-ahead"])
def test_in_the_engine(name: str, tally: Tally, sources: set[tuple[bool, bool]]) -> None:
    gate = SkipDrafting(GATED, probe_share=0.5) if name == "look-ahead" else None
    case = Case(POLICIES[name], "hybrid chain", gate=gate, tokens=(4, 3))
    assert tally.deviation(case, case.in_engine) <= TOLERANCE
    assert both(sources)


class ByLength(FixedPolicy):
    """The drafter drafts where the text is of odd length."""

    def depths(self, view: PlanView) -> Ints:
        return np.where(view.contexts_R % 2 == 1, view.expected_RK.shape[1], 0)


class Weighing(ByLength):
    """As `ByLength`, but steps may pause."""

    @property
    def skips(self) -> bool:
        return True


@pytest.mark.parametrize("many", [1, 8])
@pytest.mark.parametrize("where", WHERE)
def test_rounds_that_rest(
    where: str, many: int, tally: Tally, sources: set[tuple[bool, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a round in which nothing was verified one rests: from `many` requests on without copies, too."""
    rested: list[bool] = []
    pauses = Backoff.pause

    def watched(self: Backoff, *parts: Any, **more: Any) -> Pause | None:
        pause = pauses(self, *parts, **more)
        rested.append(pause is not None)
        return pause

    monkeypatch.setattr(Backoff, "pause", watched)
    monkeypatch.setattr(backoff_module, "_LONGEST", 1)
    monkeypatch.setattr(backoff_module, "MANY", many)
    case = Case(POLICIES["prefix"], "hybrid chain", gate=Weighing(), tokens=(5, 1) if where == "engine" else (5,))
    assert tally.deviation(case, case.in_engine if where == "engine" else case.in_stream) <= TOLERANCE
    assert {True, False} <= set(rested) and (True, True) in sources


@pytest.mark.parametrize("where", WHERE)
def test_copies_of_other_texts(where: str, tally: Tally, monkeypatch: pytest.MonkeyPatch) -> None:
    borrowed: set[bool] = set()
    draft = Lookup.draft

    def watched(self: Lookup, limit: int, min_confidence: float) -> Draft:
        borrowed.add(self.from_library)
        return draft(self, limit, min_confidence)

    monkeypatch.setattr(Lookup, "draft", watched)
    case = Case(POLICIES["prefix"], "borrowed chain", gate=ByLength(), tokens=(5,))
    assert tally.deviation(case, case.in_engine if where == "engine" else case.in_stream) <= TOLERANCE
    assert True in borrowed


@pytest.mark.parametrize("kind", ["drawn", "chosen"])
def test_beside_trees(kind: str, tally: Tally, sources: set[tuple[bool, bool]]) -> None:
    case = Case(POLICIES["prefix"], f"hybrid {kind}", gate=ByLength(), tokens=(4,))
    assert tally.deviation(case, case.in_stream) <= TOLERANCE
    assert tally.deviation(case, case.in_engine) <= TOLERANCE
    assert both(sources)


def test_requests_that_are_preempted(tally: Tally) -> None:
    case = Case(POLICIES["threshold"], "hybrid chain", config=TIGHT)
    assert tally.deviation(case, case.in_engine) <= TOLERANCE


def test_coupled_sampling(tally: Tally) -> None:
    case = Case(POLICIES["prefix"], "hybrid chain", coupled=True, tokens=(3, 3))
    assert tally.deviation(case, case.in_engine) <= TOLERANCE
    alone = replace(case, tokens=(4,))
    assert tally.deviation(alone, alone.in_stream) <= TOLERANCE


def broken(where: str, policy: str = "fixed", gate: FixedPolicy | None = None) -> float:
    case = Case(POLICIES[policy], "hybrid chain", gate=gate, tokens=(4,))
    return Tally().deviation(case, case.in_engine if where == "engine" else case.in_stream)


@pytest.mark.parametrize("where", WHERE)
def test_mutation_the_source_is_chosen_by_the_drafted_token(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Choosing(Drafting):
        """Where the drafter's first token is not the copy's, the copy takes its place."""

        def draft(self, turns: Sequence[DraftTurn], *rest: object, **more: object) -> Drafted:
            drafted = super().draft(turns, *rest, **more)  # type: ignore[arg-type]
            for i, turn in enumerate(turns):
                copy, own = drafted.lookups.get(turn.id), drafted.proposals[i]
                if copy is not None and own.draft.tokens[:1] != copy.tokens[:1] and own.source != "copy":
                    drafted.proposals[i] = Proposal(copy.draft(turn.limit, 0.0), "copy", "")
            return drafted

    monkeypatch.setattr(engine_module, "Drafting", Choosing)
    assert broken(where) > VISIBLE


@pytest.mark.parametrize("where", WHERE)
def test_mutation_a_copy_says_that_it_was_drawn(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    draft = Lookup.draft

    def drawn(self: Lookup, limit: int, min_confidence: float) -> Draft:
        found = draft(self, limit, min_confidence)
        row = partial(torch.full, (2,), 0.5, dtype=torch.float64)
        siblings = {k - 1: Siblings(row, first=0.5) for k in range(len(found.tokens))}
        return Draft.chain(found.tokens, siblings, found.confidences)

    monkeypatch.setattr(Lookup, "draft", drawn)
    assert broken(where, gate=ByLength()) > VISIBLE


@pytest.mark.parametrize("where", WHERE)
def test_mutation_copies_end_where_the_drafter_disagrees(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the drafter's own draft only what the copy confirms is verified."""

    class Confirmed(Drafting):
        def draft(self, turns: Sequence[DraftTurn], *rest: object, **more: object) -> Drafted:
            drafted = super().draft(turns, *rest, **more)  # type: ignore[arg-type]
            for i, turn in enumerate(turns):
                if (copy := drafted.lookups.get(turn.id)) is not None:
                    own = drafted.proposals[i]
                    pairs = list(zip(own.draft.tokens, copy.tokens, strict=False))
                    agreed = next((k for k, (a, b) in enumerate(pairs) if a != b), len(pairs))
                    drafted.proposals[i] = replace(own, draft=own.draft.truncated(agreed))
            return drafted

    monkeypatch.setattr(engine_module, "Drafting", Confirmed)
    assert broken(where) > VISIBLE


def test_mutation_a_copy_s_confidence_is_read_off_its_rivals_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy sees a drafted token in the confidences of the draft itself: 1 where the copy says the same."""

    class Told(Drafting):
        def view(self, turns: Sequence[DraftTurn], drafted: Drafted, other_tokens: int = 0) -> StepView:
            shown = []
            for turn, proposal in zip(turns, drafted.proposals, strict=True):
                copy, found = drafted.lookups.get(turn.id), proposal.draft
                same = [] if copy is None else [a == b for a, b in zip(found.tokens, copy.tokens, strict=False)]
                given = [1.0 if k < len(same) and same[k] else 0.0 for k in range(len(found.tokens))]
                draft = Draft(found.tokens, found.parents, found.siblings, confidences=given)
                shown.append(replace(proposal, draft=draft))
            return super().view(turns, replace(drafted, proposals=shown), other_tokens)

    monkeypatch.setattr(engine_module, "Drafting", Told)
    assert broken("engine", "threshold") > VISIBLE
