"""Who drafts in a round, and what gate and policy are shown: the same for a request alone and for a step of the engine.

    look up       what each request's text may be copied from, and how much of it is expected to be accepted
    gate          earlier rounds and committed text alone  ->  how deep each request drafts; 0: its copy, or nothing
    read          what the requests that draft have committed since they last did, in one pass of the drafter
    propose       their drafts
    view, record  what the policy sees; remembered when the round is over

The drafter reads committed tokens late, all at once when their request drafts next: a request that skips its drafts
pays nothing for them, and what it skips for long is read in one product.

A copy is a function of the committed text. What is expected of its token k is at first what drafters/ngram.py says;
`Beliefs` of group m_k, the number of tokens that agree before it, correct that.

Every copy is compared with the tokens that were committed in its place, drafted or not (in a round that rests: where
any draft was verified). A token drawn from p_t equals the copied x with probability p_t(x), which is how often x is
accepted. So beliefs about copies cost no drafts. The choice between copy and drafter is made before either has drafted
a token, and a copy is as certain as a chosen token (one-hot), so verification stays exact.

Shapes: R requests, K positions, N outcomes, T tokens, L aux layers, D target hidden.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from outrider.decoding.beliefs import Beliefs, Flags
from outrider.decoding.cost import Floats, Ints, LearnedCost
from outrider.decoding.gate import MANY, SOME, AlwaysDraft, DraftGate, History, Patience, known_verdicts
from outrider.decoding.policies import CostPolicy, Policy, StepView
from outrider.decoding.request import RequestState
from outrider.decoding.trace import PathRows, RoundTrace, Source, trace_round
from outrider.decoding.verification import RoundResult
from outrider.drafters.base import Drafter, FailedCall
from outrider.drafters.draft import Draft, allowed_part
from outrider.drafters.ngram import MOST_MATCHED, Library, NgramConfig, NgramSession, copy_confidences
from outrider.sampling import SamplingParams

_MOST_UNREAD = 256  # tokens of a request whose aux hidden states wait for the drafter; bounds memory
_MOST_STEPS = 32  # steps that wait to be noted for their requests


@dataclass(frozen=True)
class DraftTurn:
    """A request in a round. `limit`: most draft tokens that it may bring, branches included."""

    id: str
    state: RequestState
    limit: int


_LEAST_SURVIVAL = 0.1  # of a copied token: one that is less likely to be reached is not worth its row of the forward


@dataclass(frozen=True)
class Copy:
    """What a request may copy: the tokens behind an earlier occurrence of its last `matched` tokens.

    `start`: committed tokens when it was found. `confidences`: what is expected of each token. `borrowed`: they are
    from the library. `sampled`: they are compared with text drawn at a temperature above 0.
    """

    start: int
    matched: int
    tokens: list[int]
    confidences: list[float]
    borrowed: bool = False
    sampled: bool = False

    def draft(self, limit: int, min_confidence: float) -> Draft:
        """As a draft of at most `limit` tokens; it ends where they promise too little."""
        count, survival = 0, 1.0
        for confidence in self.confidences[:limit]:
            survival *= confidence
            if survival < _LEAST_SURVIVAL or confidence < min_confidence:
                break
            count += 1
        return Draft.chain(self.tokens[:count], confidences=self.confidences[:count])

    def outcomes(self, text: Sequence[int]) -> list[bool]:
        """Which of its tokens agree with what was committed, up to the first that does not."""
        found: list[bool] = []
        for mine, true in zip(self.tokens, text[self.start :], strict=False):
            found.append(mine == true)
            if mine != true:
                break
        return found


class Copies:
    """What requests may copy, and what is expected of it, learned from all of them.

    Args:
        config: how the texts are searched, and most tokens of a copy.
        library: other texts, which are copied where more tokens agree; responses are added to it. None: there are none.
    """

    def __init__(self, config: NgramConfig, library: Library | None = None) -> None:
        self.config, self.library = config, library
        self.beliefs = Beliefs(1, 4 * MOST_MATCHED)
        self._indexes: dict[str, NgramSession] = {}

    def look_up(
        self,
        texts: Mapping[str, Sequence[int]],
        open_to_responses: Collection[str] = (),
        sampled: Collection[str] = (),
        shortest: int = 1,
    ) -> dict[str, Copy]:
        """What each request may copy, by id, given its committed tokens; nothing where no suffix is known.

        Args:
            open_to_responses: requests that may copy the library's responses too, see `may_copy_responses`.
            sampled: requests whose tokens are drawn at a temperature above 0.
            shortest: tokens of a suffix of the own text that counts; fewer are cheap to pass over.
        """
        gamma, found = self.config.gamma, dict[str, tuple[int, list[int], bool]]()
        for id, text in texts.items():
            index = self._indexes.setdefault(id, NgramSession(self.config))
            for token in text[len(index.tokens) : -1]:
                index.append(token)
            place = index.place(text[-1], shortest)
            if place is not None:
                found[id] = index.matched(place, text[-1], MOST_MATCHED), index.copy(place, text[-1], gamma), False
            if self.library is not None:
                ending = tuple(text[-MOST_MATCHED:])
                matched, tokens = self.library.find(ending, gamma, responses=id in open_to_responses)
                if tokens and (id not in found or matched > found[id][0]):
                    found[id] = matched, tokens, True
        if not found:
            return {}
        matched_RK = np.array([matched for matched, _, _ in found.values()])[:, None] + np.arange(gamma)
        borrowed_N = np.repeat([borrowed for _, _, borrowed in found.values()], gamma)
        sampled_N = np.repeat([id in sampled for id in found], gamma)
        groups_N, prior_N1 = _kinds(matched_RK.ravel(), borrowed_N, sampled_N)
        ids = [id for id in found for _ in range(gamma)]
        expected_RK = self.beliefs.expected(ids, groups_N, prior_N1).reshape(matched_RK.shape)
        return {
            id: Copy(
                len(texts[id]),
                matched,
                tokens,
                confidences=own_K[: len(tokens)].tolist(),
                borrowed=borrowed,
                sampled=id in sampled,
            )
            for (id, (matched, tokens, borrowed)), own_K in zip(found.items(), expected_RK, strict=True)
        }

    def expected_RK(self, found: Mapping[str, Copy], ids: Sequence[str]) -> Floats | None:
        """What is expected of the copies that were found for these requests, 0 without one; None: nothing was found."""
        if not found:
            return None
        expected_RK = np.zeros((len(ids), self.config.gamma))
        for expected_K, id in zip(expected_RK, ids, strict=True):
            if id in found:
                expected_K[: len(found[id].tokens)] = found[id].confidences
        return expected_RK

    def record(self, found: Mapping[str, Copy], texts: Mapping[str, Sequence[int]]) -> None:
        """Learn from what was committed (`texts`, by id) in the place of copies, taken or not."""
        if not found:
            return
        ids: list[str] = []
        matched: list[int] = []
        borrowed: list[bool] = []
        sampled: list[bool] = []
        right: list[bool] = []
        for id, text in texts.items():
            if (copy := found.get(id)) is not None:
                outcomes = copy.outcomes(text)
                ids += [id] * len(outcomes)
                matched += range(copy.matched, copy.matched + len(outcomes))
                borrowed += [copy.borrowed] * len(outcomes)
                sampled += [copy.sampled] * len(outcomes)
                right += outcomes
        flags = (np.array(one, dtype=np.bool_) for one in (borrowed, sampled))
        groups_N, prior_N1 = _kinds(np.array(matched, dtype=np.int64), *flags)
        right_N = np.array(right, dtype=np.int64)
        self.beliefs.record(ids, np.ones_like(right_N), right_N, groups_R=groups_N, confidences_RK=prior_N1)

    def forget(self, id: str, response: Sequence[int] = ()) -> None:
        """Drop what is known of a request that has left alone; its response goes to the library."""
        self.beliefs.forget(id)
        self._indexes.pop(id, None)
        if self.library is not None:
            self.library.add(response)


def may_copy_responses(params: SamplingParams) -> bool:
    """Whether the random numbers that judge a request's drafts are independent of earlier responses.

    A client's seed may be that of an earlier request too, whose tokens were drawn with the numbers that would judge
    their copies: too many would be accepted. A seed of our own is fresh, and a fixed text follows from no copy.
    """
    return params.fixed_text or params.seed is None


def _kinds(matched_N: Ints, borrowed_N: Flags, sampled_N: Flags) -> tuple[Ints, Floats]:
    """Groups [N] and prior confidences [N, 1] of copied tokens by how many agree before them, whence they are, and
    whether they are compared with sampled text.
    """
    groups_N: Ints = np.minimum(matched_N, MOST_MATCHED) - 1 + MOST_MATCHED * (borrowed_N + 2 * sampled_N)
    return groups_N, copy_confidences(matched_N, sampled_N)[:, None]


@dataclass(frozen=True)
class _PlainSteps:
    """Steps in a row in which each of `states` committed one token, the first of them in the places `starts`.

    Their rows wait here in one piece: noting them request by request costs more than all else that drafting does in a
    round that rests.
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


@dataclass(frozen=True)
class SchedulerState:
    """What earlier rounds taught about a drafter and copies beside it: of an engine's requests, or of a model's.

    Requests that share one are told apart by their ids, and run in one thread.
    """

    history: History
    copies: Copies | None = None

    @staticmethod
    def of(drafter: Drafter | None) -> SchedulerState:
        """Before the first round."""
        if drafter is None:
            return SchedulerState(History(0))
        copies = None if drafter.copies is None else Copies(drafter.copies, drafter.library)
        return SchedulerState(History(drafter.own_slots, chains=not drafter.trees), copies)


def suffix_in_rests(requests: int) -> int:
    """Tokens of the shortest suffix that is looked for in a round that rests; 0: none is.

    Some requests pass over one and two tokens, which are found often and promise little. Fewer look for all: there a
    copy gains more than looking for it takes.
    """
    return 0 if requests >= MANY else 3 if requests >= SOME else 1


class Drafting:
    """Drafts of the requests of one target, round after round.

    Args:
        drafter: None for plain decoding.
        policy: decides on what is drafted here; it is only checked and asked for its reasons.
        gate: which requests draft at all; every one by default.
        experience: of earlier requests, which is added to; none by default.

    Raises:
        ValueError: the policy ends drafts by their confidence, which a gate would learn from.
    """

    def __init__(
        self,
        drafter: Drafter | None,
        policy: Policy,
        gate: DraftGate | None = None,
        experience: SchedulerState | None = None,
    ) -> None:
        self.drafter, self.policy, self.gate = drafter, policy, gate or AlwaysDraft()
        if policy.min_confidence > 0 and not isinstance(self.gate, AlwaysDraft):
            raise ValueError(
                f"{policy} ends drafts at its min_confidence, so a gate would learn from the better ones only: "
                "use a policy that decides by cost, or no gate."
            )
        experience = experience or SchedulerState.of(drafter)
        self.history, self.copies = experience.history, experience.copies
        self._found: dict[str, Copy] = {}  # copies of the round, taken or not
        self._taken: set[str] = set()
        self._cut: set[str] = set()  # requests whose drafts their constraint ended
        self._depths: dict[str, int] = {}  # of the round, by the gate
        self._patience = Patience(self.gate)
        cost = policy.cost if isinstance(policy, CostPolicy) else None
        self.learned_cost = cost if isinstance(cost, LearnedCost) else None  # told by the engine what steps take
        self._plain_steps = _PlainSteps([], [])
        self._resting = False
        self._comparing = False  # whether the round goes without drafts for its sake

    def open(self, state: RequestState) -> None:
        """Begin a request's session."""
        if self.drafter is not None:
            state.session = self.drafter.new_session(state.capacity)

    def draft(
        self, turns: Sequence[DraftTurn], min_confidence: float, failed: dict[str, Exception], other_tokens: int = 0
    ) -> tuple[list[Draft], int]:
        """A draft for every request of the round that may use one, and for how many the drafter was asked.

        Args:
            failed: requests to leave out, and why; those whose drafting fails join them.
            other_tokens: rows of the round's target forward that verify nothing.
        """
        drafts: list[Draft] = [Draft.empty() for _ in turns]
        able = [i for i, turn in enumerate(turns) if turn.limit > 0 and turn.id not in failed]
        self._taken.clear()
        self._cut.clear()
        self._depths.clear()
        self._found = {}
        self._comparing = False
        ids = [turns[i].id for i in able]
        if self.drafter is None or not able:
            return drafts, 0
        if self.learned_cost is not None and not other_tokens and self.learned_cost.lacks_plain(len(turns)):
            self._comparing = self._resting = True
            return drafts, 0
        self._resting = self._patience.rests(ids)
        shortest = suffix_in_rests(len(turns)) if self._resting else 1
        if self.copies is not None and shortest:
            states = {turns[i].id: turns[i].state for i in able}
            self._found = self.copies.look_up(
                {id: state.tokens for id, state in states.items()},
                open_to_responses={id for id, state in states.items() if may_copy_responses(state.params)},
                sampled={id for id, state in states.items() if state.params.temperature > 0},
                shortest=shortest,
            )
        depths = [0] * len(able)
        if not self._resting:
            view = self.history.gate_view(
                ids,
                [len(turns[i].state.tokens) for i in able],
                other_tokens,
                other_requests=len(turns) - len(able),
                copied_RK=None if self.copies is None else self.copies.expected_RK(self._found, ids),
                sampled=[turns[i].state.params.temperature > 0 for i in able],
            )
            depths = self.gate.depths(view).tolist()
        limits = {i: min(turns[i].limit, depth) for i, depth in zip(able, depths, strict=True)}
        self._depths = {turns[i].id: depth for i, depth in zip(able, depths, strict=True)}
        chosen = [i for i in able if limits[i]]
        for i in able:
            if not limits[i] and (copy := self._found.get(turns[i].id)) is not None:
                drafts[i] = copy.draft(min(turns[i].limit, turns[i].state.remaining - 1), min_confidence)
                self._taken.add(turns[i].id)
        while chosen:
            self.read([turns[i].state for i in chosen])
            calls = [turns[i].state.draft_call(limits[i]) for i in chosen]
            try:
                found = self.drafter.propose(calls, min_confidence)
            except FailedCall as error:
                # Ended, not drafted for again: whether drawing fails may depend on what is drawn. The others draw
                # anew, which their own tokens had no part in.
                lost = next(i for i, call in zip(chosen, calls, strict=True) if call.session is error.session)
                failed[turns[lost].id] = error
                chosen.remove(lost)
                continue
            for i, draft in zip(chosen, found, strict=True):
                drafts[i] = draft
            break
        for i in able:
            constraint = turns[i].state.constraint
            if constraint is not None and turns[i].id not in failed:
                try:
                    whole, drafts[i] = drafts[i], allowed_part(drafts[i], constraint)
                    if len(drafts[i].tokens) < len(whole.tokens):
                        self._cut.add(turns[i].id)
                except Exception as error:
                    failed[turns[i].id] = error
        return drafts, len(chosen)

    def view(self, turns: Sequence[DraftTurn], drafts: Sequence[Draft], other_tokens: int = 0) -> StepView:
        """What the policy is shown of this round."""
        return self.history.step_view(
            [turn.id for turn in turns],
            [draft.confidences for draft in drafts],
            [len(draft.tokens) for draft in drafts],
            contexts=[len(turn.state.tokens) for turn in turns],
            other_tokens=other_tokens,
            copied=None if self.copies is None else [turn.id in self._taken for turn in turns],
            sampled=[turn.state.params.temperature > 0 for turn in turns],
        )

    def record(self, turns: Sequence[DraftTurn], view: StepView | None, results: Sequence[RoundResult | None]) -> None:
        """Remember a round, once its tokens are committed.

        Args:
            view: as the policy was shown; None: nothing was drafted.
            results: None where the verification of the drafts failed.
        """
        if self.drafter is None:
            return
        verified = any(one is not None and one.verified.tokens for one in results)
        if verified or not self._resting:  # else nothing is learned of copies either: a rest takes no time for it
            able = [turn.id for turn in turns if turn.limit > 0]
            if able:
                self._patience.told(able, verified)
            if self.copies is not None:
                self.copies.record(self._found, {turn.id: turn.state.tokens for turn in turns})
        if view is None:
            self.history.skip(len(turns))
            return
        ids = [turn.id for turn in turns]
        counts = [(0, 0) if one is None else (len(one.verified.tokens), one.verdict.accepted) for one in results]
        verified_R, accepted_R = np.array(counts, dtype=np.int64).reshape(-1, 2).T
        committed_R = np.array([len(turn.state.tokens) for turn in turns]) - view.contexts_R
        verified_R, accepted_R = known_verdicts(verified_R, accepted_R, committed_R)
        self.history.record(ids, view, verified_R=verified_R, accepted_R=accepted_R)

    def copied(self, id: str) -> bool:
        """Whether the draft of this request was a copy in this round."""
        return id in self._taken

    def reason(
        self, turn: DraftTurn, result: RoundResult, *, left: int, view: StepView | None, lengths_R: Ints, request: int
    ) -> str:
        """Why no more drafts of a request were verified in this round, for people.

        Args:
            left: tokens that the request could still commit before the round.
            view: as the policy was shown; None: nothing was drafted.
            lengths_R: verified drafts of all requests of the round, of which this is number `request`.
        """
        drafted, depth, drafter = len(result.draft.tokens), self._depths.get(turn.id, 0), self.drafter
        if view is not None and len(result.verified.tokens) < drafted:
            return self.policy.reason(view, lengths_R, request)
        if drafter is None:
            return "there is no drafter"
        if left == 1:
            return "only one more token could come"
        if self._comparing:
            return "the round went without drafts, to learn what they cost"
        if self._resting and not drafted:
            return "no draft was worth verifying in the rounds before, so none was looked for"
        if turn.id in self._cut:
            return "the next token of the draft is not allowed by the request's constraint"
        if self.copied(turn.id):
            if drafted in (turn.limit, left - 1) or (self.copies is not None and drafted == self.copies.config.gamma):
                return "the copy has as many tokens as a round may draft"
            return "the rest of the copy promised too little" if drafted else "the copy promised too little"
        if not depth:
            return "the gate expected more tokens per second without a draft"
        if drafted and drafted in (turn.limit, left - 1):
            return "no more drafts fit the request or the step"
        if drafted and drafted == depth < drafter.own_gamma:
            return f"the gate asked for {depth} drafts"
        if self.policy.min_confidence > 0 and drafted < drafter.own_gamma:
            return f"draft {drafted + 1} had a confidence below {self.policy.min_confidence:g}, so it was not drawn"
        return "the whole draft was verified" if drafted else "the drafter had nothing to propose"

    def trace(
        self,
        turn: DraftTurn,
        result: RoundResult,
        tokens: Sequence[int],
        *,
        rows: PathRows,
        compared: Mapping[int, Tensor],
        number: int,
        reason: str,
        believed_K: Floats | None,
    ) -> RoundTrace:
        """The trace of a request's round; see `trace_round`. `believed_K`: None where nothing was drafted."""
        source: Source | None = None
        if result.draft.tokens:
            source = "copy" if self.copied(turn.id) else "drafter"
        heads = None if self.drafter is None or self.drafter.trees else self.drafter.heads
        return trace_round(
            result,
            tokens,
            rows,
            compared=compared,
            number=number,
            source=source,
            reason=reason,
            raw=None if heads is None else partial(heads.uncalibrated, temperature=turn.state.params.temperature),
            believed=[] if believed_K is None else believed_K.tolist(),
        )

    def committed(self, state: RequestState, tokens: Sequence[int], aux_TLD: Tensor | None) -> None:
        """Note tokens that the target has read and that stay, for the drafter. `aux_TLD`: as `Drafter.extend`."""
        if self.drafter is not None:
            self._note_plain_steps()
            state.leave_unread(list(tokens), aux_TLD)

    def committed_one_each(self, states: list[RequestState], starts: list[int], aux_RLD: Tensor | None) -> None:
        """As `committed` for a token of each of these requests, which is in place `starts` of its tokens."""
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
        """Drop what was remembered of a request that has left; `response`: its committed tokens, for the library."""
        self.history.forget(id)
        self._patience.forget(id)
        if self.copies is not None:
            self.copies.forget(id, response)

    def close(self, state: RequestState) -> None:
        """Free what the drafter holds for a request."""
        self._note_plain_steps()
        if self.drafter is not None and state.session is not None:
            self.drafter.end(state.session)
            state.session = None
