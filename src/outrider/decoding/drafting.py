"""Drafts of the requests of a step: the same for a request alone and for a step of the engine.

    pause      is drafting considered at all in this step?                              (decoding/backoff.py)
    look up    what prompt lookup offers each request                                   (decoding/prompt_lookup.py)
    plan       how deep each request drafts; 0: its lookup, or nothing                  (Policy.depths)
    read       the tokens that the requests that draft have committed since they last did, in one pass of the drafter
    propose    their drafts
    constrain  drafts end before a token that the request's constraint forbids

`Drafting.draft` returns all of this as a `Drafted`; `view` shows it to the policy, and `observe` updates the acceptance
estimates from the outcomes.

`Drafter.extend` takes a request's committed tokens in one call when the request drafts next; at most 256 wait. So a
request that skips drafting does not run the drafter for every token.

Shapes: R requests, K positions, T tokens, L aux layers, D target hidden.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from outrider.decoding.acceptance import Acceptance, known_verdicts
from outrider.decoding.backoff import Backoff, Pause
from outrider.decoding.cost import Ints
from outrider.decoding.learned_cost import learned
from outrider.decoding.policies import Policy, StepView
from outrider.decoding.prompt_lookup import Lookup, PromptLookup, may_read_responses
from outrider.decoding.request import RequestState
from outrider.decoding.trace import Source
from outrider.decoding.verification import RoundResult
from outrider.drafters.base import Drafter, FailedCall
from outrider.drafters.draft import Draft, allowed_part

_MOST_UNREAD = 256  # tokens of a request whose aux hidden states wait for the drafter; bounds memory
_MOST_STEPS = 32  # steps that wait to be noted for their requests


@dataclass(frozen=True)
class DraftTurn:
    """A request in a step. `limit`: most draft tokens that it may bring, branches included; 0: it may not draft."""

    id: str
    state: RequestState
    limit: int

    @property
    def deepest(self) -> int:
        """Most draft tokens of a chain that it can use."""
        return min(self.limit, self.state.remaining - 1)


@dataclass(frozen=True)
class Proposal:
    """A request's draft.

    `source`: who drafted it; None: nobody. `reason` tells a person why the draft has no more tokens.
    """

    draft: Draft
    source: Source | None
    reason: str

    @staticmethod
    def none(reason: str) -> Proposal:
        """No draft."""
        return Proposal(Draft.empty(), None, reason)


@dataclass(frozen=True)
class Drafted:
    """The drafts of a step.

    Attributes:
        proposals: one for every request.
        considered: requests that may use drafts.
        drafting: for how many of them the drafter was asked.
        lookups: what prompt lookup offered, by id, drafted or not.
        pause: why drafts were not considered; None: they were.
        failed: requests whose drafting failed, and why.
    """

    proposals: list[Proposal]
    considered: list[str] = field(default_factory=list)
    drafting: int = 0
    lookups: Mapping[str, Lookup] = field(default_factory=dict)
    pause: Pause | None = None
    failed: Mapping[str, Exception] = field(default_factory=dict)

    @property
    def drafts(self) -> list[Draft]:
        """One for every request."""
        return [proposal.draft for proposal in self.proposals]


@dataclass(frozen=True)
class SchedulerState:
    """The acceptance estimates of a drafter and of prompt lookup beside it: of an engine's requests, or of a model's.

    Requests that share one are told apart by their ids, and run in one thread.
    """

    acceptance: Acceptance
    lookup: PromptLookup | None = None

    @staticmethod
    def of(drafter: Drafter | None) -> SchedulerState:
        """Before the first step."""
        if drafter is None:
            return SchedulerState(Acceptance(0))
        sources = drafter.sources
        lookup = None if sources.lookup is None else PromptLookup(sources.lookup, sources.library)
        return SchedulerState(Acceptance(sources.drafter.slots, chains=not drafter.trees), lookup)


@dataclass(frozen=True)
class _PlainSteps:
    """Steps in a row in which each of `states` committed one token, the first of them in the places `starts`.

    Their rows wait here in one piece: noting them request by request costs more than all else that drafting does in a
    step that pauses.
    """

    states: list[RequestState]
    starts: list[int]
    aux: list[Tensor | None] = field(default_factory=list)  # [R, L, D] of each step

    def note(self) -> None:
        """Leave the tokens to their requests as unread."""
        for request, (state, start) in enumerate(zip(self.states, self.starts, strict=True)):
            # A tensor of its own each: with views, a request that does not draft would keep the rows of all.
            rows = [aux_RLD[request] for aux_RLD in self.aux if aux_RLD is not None]
            state.leave_unread(state.tokens[start : start + len(self.aux)], torch.stack(rows) if rows else None)


class Drafting:
    """Drafts of the requests of one target, step after step.

    Args:
        drafter: None for plain decoding.
        policy: decides how deep each request drafts (`depths`); the engine calls its `lengths`.
        state: acceptance estimates of earlier requests, which are updated; none by default.
    """

    def __init__(self, drafter: Drafter | None, policy: Policy, state: SchedulerState | None = None) -> None:
        self.drafter, self.policy = drafter, policy
        self.gamma = 0 if drafter is None else drafter.sources.drafter.gamma
        state = state or SchedulerState.of(drafter)
        self.acceptance, self.lookup = state.acceptance, state.lookup
        self.backoff = Backoff(policy)
        self._plain_steps = _PlainSteps([], [])

    def open(self, state: RequestState) -> None:
        """Begin a request's session."""
        if self.drafter is not None:
            state.session = self.drafter.new_session(state.capacity)

    def draft(self, turns: Sequence[DraftTurn], min_confidence: float, other_tokens: int = 0) -> Drafted:
        """The drafts of a step, one for every request.

        Args:
            other_tokens: rows of the step's target forward that verify nothing.
        """
        able = [turn for turn in turns if turn.limit > 0]
        if self.drafter is None or not able:
            none = Proposal.none("there is no drafter" if self.drafter is None else "only one more token could come")
            return Drafted([none] * len(turns))
        ids = [turn.id for turn in able]
        pause = self.backoff.pause(ids, len(turns), other_tokens)
        lookups = self._look_up(able, 1 if pause is None else pause.shortest_suffix)
        depths = (
            [0] * len(able)
            if pause
            else self._depths(able, lookups, other_requests=len(turns) - len(able), other_tokens=other_tokens)
        )
        drafting = [(turn, min(turn.limit, depth)) for turn, depth in zip(able, depths, strict=True) if depth]
        drafts, failed = self._propose(drafting, min_confidence)

        skipped = Proposal.none(
            "more tokens per second were expected without a draft" if pause is None else pause.reason
        )
        proposals = dict.fromkeys((turn.id for turn in turns), Proposal.none("only one more token could come"))
        for turn, depth in zip(able, depths, strict=True):
            if turn.id in drafts:
                proposals[turn.id] = self._by_drafter(turn, drafts[turn.id], depth, min_confidence=min_confidence)
            elif not depth and turn.id in lookups:
                proposals[turn.id] = self._by_lookup(turn, lookups[turn.id], pause, min_confidence=min_confidence)
            else:
                proposals[turn.id] = skipped
            if turn.state.constraint is not None and turn.id not in failed:
                try:
                    proposals[turn.id] = _constrained(proposals[turn.id], turn.state)
                except Exception as error:
                    failed[turn.id] = error
        return Drafted(
            [proposals[turn.id] for turn in turns], ids, len(drafts), lookups=lookups, pause=pause, failed=failed
        )

    def ahead(self, turns: Sequence[DraftTurn]) -> tuple[list[str], Pause | None, list[int]]:
        """Plan the drafts of a step that is launched ahead (decoding/ahead.py), without prompt lookup.

        Return the requests that are considered, why they are not, and how many tokens each turn would draft.
        """
        able = [turn for turn in turns if turn.limit > 0]
        if self.drafter is None or not able:
            return [], None, [0] * len(turns)
        ids = [turn.id for turn in able]
        pause = self.backoff.pause(ids, len(turns), 0)
        if pause is not None:
            return ids, pause, [0] * len(turns)
        depths = self._depths(able, {}, other_requests=len(turns) - len(able), other_tokens=0)
        of_id = dict(zip(ids, depths, strict=True))
        return ids, None, [of_id.get(turn.id, 0) for turn in turns]

    def budget(self, turns: Sequence[DraftTurn], drafted: Sequence[int]) -> int:
        """How many drafts of such a step are verified in all, where each request drafts so many."""
        ids, contexts = [turn.id for turn in turns], [len(turn.state.tokens) for turn in turns]
        view = self.acceptance.step_view(
            ids,
            [[]] * len(turns),
            drafted,
            contexts=contexts,
            sampled=[turn.state.params.temperature > 0 for turn in turns],
        )
        return self.policy.budget(replace(view, past=view.past[-1:]))

    def _look_up(self, turns: Sequence[DraftTurn], shortest_suffix: int) -> Mapping[str, Lookup]:
        """What prompt lookup offers these requests, by id; `shortest_suffix` 0: nothing is searched."""
        if self.lookup is None or not shortest_suffix:
            return {}
        params = {turn.id: turn.state.params for turn in turns}
        return self.lookup.find(
            {turn.id: turn.state.tokens for turn in turns},
            open_to_responses={id for id, own in params.items() if may_read_responses(own)},
            sampled={id for id, own in params.items() if own.temperature > 0},
            shortest=shortest_suffix,
        )

    def _depths(
        self, turns: Sequence[DraftTurn], lookups: Mapping[str, Lookup], *, other_requests: int, other_tokens: int
    ) -> list[int]:
        """How many tokens each of these requests drafts at most."""
        ids = [turn.id for turn in turns]
        view = self.acceptance.plan_view(
            ids,
            [len(turn.state.tokens) for turn in turns],
            other_tokens,
            other_requests=other_requests,
            lookup_RK=None if self.lookup is None else self.lookup.expected_RK(lookups, ids),
            sampled=[turn.state.params.temperature > 0 for turn in turns],
        )
        depths: list[int] = self.policy.depths(view).tolist()
        return depths

    def _propose(
        self, drafting: Sequence[tuple[DraftTurn, int]], min_confidence: float
    ) -> tuple[dict[str, Draft], dict[str, Exception]]:
        """Ask the drafter for drafts of at most so many tokens each; return drafts and errors by id.

        A request whose draft cannot be drawn ends: drawing again would bias it, because the failure may depend on the
        drawn tokens. The others draw again; their tokens did not cause the failure.
        """
        assert self.drafter is not None
        failed: dict[str, Exception] = {}
        while drafting:
            self.read([turn.state for turn, _ in drafting])
            calls = [turn.state.draft_call(limit) for turn, limit in drafting]
            try:
                drafts = self.drafter.propose(calls, min_confidence)
            except FailedCall as error:
                session = error.session
                failed |= {turn.id: error for turn, _ in drafting if turn.state.session is session}
                drafting = [(turn, limit) for turn, limit in drafting if turn.state.session is not session]
            else:
                return {turn.id: draft for (turn, _), draft in zip(drafting, drafts, strict=True)}, failed
        return {}, failed

    def _by_drafter(self, turn: DraftTurn, draft: Draft, depth: int, *, min_confidence: float) -> Proposal:
        count = len(draft.tokens)
        if count == self.gamma:
            reason = "the whole draft was verified"
        elif count and count in (turn.limit, turn.state.remaining - 1):
            reason = "no more drafts fit the request or the step"
        elif count and count == depth:
            reason = f"the policy planned {depth} drafts"
        elif min_confidence > 0:
            reason = f"draft {count + 1} had a confidence below {min_confidence:g}, so it was not drawn"
        else:
            reason = "the whole draft was verified" if count else "the drafter had nothing to propose"
        return Proposal(draft, "drafter" if count else None, reason)

    def _by_lookup(self, turn: DraftTurn, lookup: Lookup, pause: Pause | None, *, min_confidence: float) -> Proposal:
        assert self.lookup is not None
        draft = lookup.draft(turn.deepest, min_confidence)
        count = len(draft.tokens)
        if not count:
            return Proposal(draft, "copy", "the copy promised too little" if pause is None else pause.reason)
        whole = count == min(turn.deepest, self.lookup.config.gamma)
        return Proposal(
            draft,
            "copy",
            "the copy has as many tokens as a round may draft" if whole else "the rest of the copy promised too little",
        )

    def view(self, turns: Sequence[DraftTurn], drafted: Drafted, other_tokens: int = 0) -> StepView:
        """The drafts as the policy reads them."""
        return self.acceptance.step_view(
            [turn.id for turn in turns],
            [draft.confidences for draft in drafted.drafts],
            [len(draft.tokens) for draft in drafted.drafts],
            contexts=[len(turn.state.tokens) for turn in turns],
            other_tokens=other_tokens,
            looked_up=None if self.lookup is None else [proposal.source == "copy" for proposal in drafted.proposals],
            sampled=[turn.state.params.temperature > 0 for turn in turns],
        )

    def observe(
        self,
        turns: Sequence[DraftTurn],
        drafted: Drafted,
        view: StepView | None,
        *,
        results: Sequence[RoundResult | None],
    ) -> None:
        """Update the estimates after a step whose tokens are committed.

        Args:
            view: as the policy read it; None: nothing was drafted.
            results: None for requests whose verification failed.
        """
        if self.drafter is None:
            return
        verified = any(result is not None and result.verified.tokens for result in results)
        if verified or drafted.pause is None:  # a paused step without verified drafts skips the updates: they cost time
            self.backoff.observe(drafted.considered, verified)
            if self.lookup is not None:
                self.lookup.observe(drafted.lookups, {turn.id: turn.state.tokens for turn in turns})
        if view is None:
            self.acceptance.skip(len(turns))
            return
        ids = [turn.id for turn in turns]
        counts = [
            (0, 0) if result is None else (len(result.verified.tokens), result.verdict.accepted) for result in results
        ]
        verified_R, accepted_R = np.array(counts, dtype=np.int64).reshape(-1, 2).T
        committed_R = np.array([len(turn.state.tokens) for turn in turns]) - view.contexts_R
        verified_R, accepted_R = known_verdicts(verified_R, accepted_R, committed_R)
        self.acceptance.observe(ids, view, verified_R=verified_R, accepted_R=accepted_R)

    def observe_cost(
        self, drafted: Drafted, seconds: float, context: float, *, verified: int, draft_seconds: float
    ) -> None:
        """Update the cost of a step that read no prompt: its seconds, those of the drafts among them, and how many
        drafts were verified in all.
        """
        cost = learned(self.policy.step_cost)
        if cost is not None:
            depths = [len(proposal.draft.tokens) for proposal in drafted.proposals if proposal.source == "drafter"]
            cost.observe(
                seconds,
                len(drafted.proposals),
                context,
                verified=verified,
                drafting=drafted.drafting,
                depth=max([1, *depths]),
                draft_seconds=draft_seconds,
            )

    def reason(self, drafted: Drafted, view: StepView | None, lengths_R: Ints, request: int) -> str:
        """Why no more drafts of request number `request` were verified in this step, for people.

        Args:
            view: as the policy read it; None: nothing was drafted.
            lengths_R: verified drafts of all requests of the step.
        """
        proposal = drafted.proposals[request]
        if view is not None and lengths_R[request] < len(proposal.draft.tokens):
            return self.policy.reason(view, lengths_R, request)
        return proposal.reason

    def committed(self, state: RequestState, tokens: Sequence[int], aux_TLD: Tensor | None) -> None:
        """Note tokens that the target has read and that stay, for the drafter. `aux_TLD`: as `Drafter.extend`."""
        if self.drafter is not None:
            self._note_plain_steps()
            state.leave_unread(list(tokens), aux_TLD)

    def committed_one_each(self, states: list[RequestState], starts: list[int], aux_RLD: Tensor | None) -> None:
        """As `committed` for one token of each of these requests, in the places `starts` of their tokens."""
        if self.drafter is None:
            return
        if states != self._plain_steps.states or len(self._plain_steps.aux) == _MOST_STEPS:
            self._note_plain_steps()
            self._plain_steps = _PlainSteps(states, starts)
        self._plain_steps.aux.append(aux_RLD)

    def _note_plain_steps(self) -> None:
        if self._plain_steps.aux:
            self._plain_steps.note()
            self._plain_steps = _PlainSteps([], [])

    def read_overdue(self, states: Sequence[RequestState]) -> None:
        """Read for those of these requests whose unread tokens take too much memory."""
        self.read([state for state in states if state.unread_tokens > _MOST_UNREAD])

    def read(self, states: Sequence[RequestState]) -> None:
        """Give the drafter what it has not read of these requests."""
        if not states:
            return
        self._note_plain_steps()
        behind = [state for state in states if state.unread]
        if self.drafter is None or not behind:
            return
        tokens = [[token for part, _ in state.unread for token in part] for state in behind]
        aux = [aux_TLD for state in behind for _, aux_TLD in state.unread if aux_TLD is not None]
        self.drafter.extend([state.session for state in behind], tokens, torch.cat(aux) if aux else None)
        for state in behind:
            state.all_read()

    def forget(self, id: str, response: Sequence[int]) -> None:
        """Drop the estimates of a request that has left; `response`: its committed tokens, for the library."""
        self.acceptance.forget(id)
        self.backoff.forget(id)
        if self.lookup is not None:
            self.lookup.forget(id, response)

    def close(self, state: RequestState) -> None:
        """Free what the drafter holds for a request."""
        self._note_plain_steps()
        if self.drafter is not None and state.session is not None:
            self.drafter.end(state.session)
            state.session = None


def _constrained(proposal: Proposal, state: RequestState) -> Proposal:
    """The part of a draft that the request's constraint allows."""
    assert state.constraint is not None
    draft = allowed_part(proposal.draft, state.constraint)
    if len(draft.tokens) == len(proposal.draft.tokens):
        return Proposal(draft, proposal.source, proposal.reason)
    return Proposal(draft, proposal.source, "the next token of the draft is not allowed by the request's constraint")
