"""What goes into an engine and what comes out, and the batch of one engine step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from outrider.decoding.drafting import Drafting, DraftTurn
from outrider.decoding.policies import StepView
from outrider.decoding.request import FinishReason, RequestState, StopRules, target_rows
from outrider.decoding.round import RoundResult
from outrider.decoding.scheduler import Progress, StepPlan
from outrider.decoding.structured import Grammar
from outrider.decoding.trace import PathRows, RoundTrace, path_rows, recorded
from outrider.decoding.verification import TargetRows, Verdict
from outrider.drafters.draft import Draft
from outrider.sampling import RandomSource, SamplingParams, at_least_float32
from outrider.target.model import Target
from outrider.target.paged import PagedKV, Span
from outrider.utils.measure import Clock, on_device


@dataclass(frozen=True)
class Request:
    """A prompt to decode, with its sampling parameters and stops.

    At temperature 0, and with `params.coupled` at any, its tokens are the same in any company. Otherwise they depend on
    its seed and on how many drafts were verified in each step, which company may change; where drawing the drafts of a
    request beside it fails, its own are drawn anew.

    `most_drafts`: draft tokens of a step, 0 for plain decoding; None: as many as the drafter has. `logprobs`: its
    outputs tell the log-probability of each token and of so many of the likeliest; None: nothing. `trace`: its outputs
    tell what each round did, draft by draft. `grammar`: what its response must follow, compiled for the engine's
    target; None: nothing.
    """

    id: str
    prompt: Sequence[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    rules: StopRules = field(default_factory=StopRules)
    most_drafts: int | None = None
    logprobs: int | None = None
    trace: bool = False
    grammar: Grammar | None = None


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of a token and of the likeliest tokens (id, log-probability), likeliest first.

    They are the target's own: of log softmax of its logits, before the grammar, penalties, temperature, top-k, top-p
    and min-p.
    """

    logprob: float
    top: list[tuple[int, float]]


@dataclass(frozen=True)
class Output:
    """Tokens and text that a step gave a request; `finish` is set on its last output.

    `seed`: what it is sampled with; None where another engine does not say. `error`: what ended it, where `finish` is
    "error". `verified` drafts were judged by the target in this step, for `reach` positions, and `accepted` of them,
    those behind a stop left out; 0 where another engine does not say. `logprobs`, `trace`: of its tokens, where the
    request asked for them.
    """

    id: str
    tokens: list[int]
    text: str
    finish: FinishReason | None
    seed: int | None = None
    error: Exception | None = None
    verified: int = 0
    accepted: int = 0
    reach: int = 0
    logprobs: list[TokenLogprob] | None = None
    trace: RoundTrace | None = None


@dataclass(frozen=True)
class StepRecord:
    """Counts and times of one engine step; seconds add up to its length.

    `requests` decoded, `drafting` of them with a draft. `tokens` are the rows of the target forward, `prefill_tokens`
    among them; `accepted` drafts behind a stop are not counted. `preempted` requests gave up their KV blocks before it.
    `running`, `waiting` and `used_blocks` are counted after the step. A simulated step leaves the same record, to be
    compared field by field.
    """

    seconds: float
    draft_seconds: float
    verify_seconds: float
    other_seconds: float
    requests: int
    drafting: int
    tokens: int
    prefill_tokens: int
    proposed: int
    admitted: int
    accepted: int
    committed: int
    preempted: int
    running: int
    waiting: int
    used_blocks: int


# ----------------------------------------------------------------------------
# The requests of one step as a `Batch` (decoding/round.py).
#
#     rows of the forward    | prefill chunk | prefill end, anchor | anchor, d_1 .. d_l | anchor, d_1 | ...
#     logits                   none            1                     l + 1                2
#
# Shapes: N rows with logits, T rows, L aux layers, V vocab.
# ----------------------------------------------------------------------------


class StepBatch:
    """The requests of a step plan that decode, in the plan's order.

    Args:
        states, progress: of every request in the plan.
        failed: requests that end with this step, and why; those whose drafting fails join them.
        traced: requests of which `trace` will be asked, and the number of this round of theirs.
    """

    def __init__(
        self,
        target: Target,
        kv: PagedKV,
        drafting: Drafting,
        *,
        plan: StepPlan,
        states: Mapping[str, RequestState],
        progress: Mapping[str, Progress],
        failed: dict[str, Exception],
        traced: Mapping[str, int],
    ) -> None:
        self.target, self.kv, self.drafting, self.traced = target, kv, drafting, traced
        self.work, self.states, self.progress, self.failed = plan.work, states, progress, failed
        self.deciding = [work for work in plan.work if work.decodes]
        self.ids = [work.id for work in self.deciding]
        self.turns = [DraftTurn(work.id, states[work.id], work.limit) for work in self.deciding]
        self.prefill_tokens = sum(work.prefill for work in plan.work)
        self.context = sum(len(turn.state.tokens) for turn in self.turns) / max(1, len(self.turns))  # before the step
        self.draft_clock, self.verify_clock = Clock(target.device), Clock(target.device)
        self.drafted = self.rows = 0  # requests with a draft, rows of the target forward
        self._aux_TLD: Tensor | None = None
        self._view: StepView | None = None
        self._first_row: dict[str, int] = {}
        self._logits_NV: Tensor | None = None
        self._logit_rows: dict[str, slice] = {}
        self._verified: Sequence[Draft] = ()
        self._compared: dict[str, dict[int, Tensor]] = {}  # rows that verification read, of traced requests
        self._paths: dict[str, PathRows] = {}  # of traced requests

    @property
    def sources(self) -> Sequence[RandomSource]:
        return [self.states[id].source for id in self.ids]

    def draft(self, min_confidence: float) -> Sequence[Draft]:
        """See `Drafting.draft`."""
        with self.draft_clock:
            drafts, self.drafted = self.drafting.draft(
                self.turns, min_confidence, self.failed, other_tokens=self.prefill_tokens
            )
        return drafts

    def view(self, drafts: Sequence[Draft]) -> StepView:
        self._view = self.drafting.view(self.turns, drafts, other_tokens=self.prefill_tokens)
        return self._view

    def score(self, drafts: Sequence[Draft]) -> list[TargetRows]:
        """The step's one target forward, prefill included."""
        self._verified = drafts
        draft_of = dict(zip(self.ids, drafts, strict=True))
        empty = Draft.empty()
        spans = []
        for work in self.work:
            progress = self.progress[work.id]
            known = self.states[work.id].tokens[progress.cached : progress.cached + work.prefill + work.decodes]
            draft = draft_of.get(work.id, empty)
            assert draft.row_parents is None or not work.prefill, "drafts together with a prefill"
            tokens, logits = [*known, *draft.tokens], len(draft.tokens) + 1 if work.decodes else 0
            states = self.states[work.id].recurrent
            parents = draft.row_parents
            spans.append(Span(tokens, progress.cached, progress.blocks, logits=logits, parents=parents, states=states))
            self._first_row[work.id] = self.rows
            self.rows += len(tokens)
        aux_layers = () if self.drafting.drafter is None else self.drafting.drafter.aux_layers
        with self.verify_clock:
            output = self.target.forward_ragged(spans, self.kv, aux_layers)
        self._aux_TLD = output.aux_TLD
        return [] if output.logits_NV is None else self._target_rows(output.logits_NV, draft_of)

    def _target_rows(self, logits_NV: Tensor, draft_of: Mapping[str, Draft]) -> list[TargetRows]:
        rows, first = target_rows([self.states[id] for id in draft_of], logits_NV, list(draft_of.values())), 0
        self._logits_NV = logits_NV
        for number, (id, draft) in enumerate(draft_of.items()):
            own = self._logit_rows[id] = slice(first, first + len(draft.tokens) + 1)
            if id in self.traced:
                rows[number], self._compared[id] = recorded(rows[number])
            first = own.stop
        return rows

    def logprobs(self, id: str, verdict: Verdict, tokens: Sequence[int], count: int) -> list[TokenLogprob]:
        """Of the committed tokens of a request's round and of the `count` likeliest in place of each."""
        rows = [0, *(node + 1 for node in verdict.path)][: len(tokens)]  # the row that each token was drawn from
        assert self._logits_NV is not None, "tokens were committed"
        logprobs_TV = at_least_float32(self._logits_NV[self._logit_rows[id]][rows]).log_softmax(-1)
        own = logprobs_TV.gather(1, torch.tensor(tokens, device=logprobs_TV.device)[:, None])[:, 0].tolist()
        values, ids = (found.tolist() for found in logprobs_TV.topk(min(count, logprobs_TV.shape[1])))
        return [
            TokenLogprob(one, list(zip(top_ids, top, strict=True)))
            for one, top_ids, top in zip(own, ids, values, strict=True)
        ]

    def look_at_paths(self, results: Mapping[str, RoundResult]) -> None:
        """Prepare `trace` of the requests that are traced, all of them together."""
        paths = {id: (self._logit_rows[id].start, results[id].verdict.path) for id in results if id in self.traced}
        if paths:
            assert self._logits_NV is not None, "the rounds were verified"
            rows = path_rows(self._logits_NV, list(paths.values()))
            self._paths = dict(zip(paths, rows, strict=True))

    def trace(self, id: str, result: RoundResult, tokens: Sequence[int]) -> RoundTrace:
        """Of the round of a request that committed `tokens`, after `look_at_paths`."""
        place, view = self.ids.index(id), self._view
        return self.drafting.trace(
            self.turns[place],
            result,
            tokens,
            rows=self._paths[id],
            compared=self._compared[id],
            number=self.traced[id],
            reason=self._reason(place, result, view, committed=len(tokens)),
            believed_K=None if view is None else view.confidences_RK[place],
        )

    def _reason(self, place: int, result: RoundResult, view: StepView | None, committed: int) -> str:
        """Why no more drafts of the request were verified."""
        turn, work = self.turns[place], self.deciding[place]
        left = turn.state.remaining + committed
        if turn.limit > 0 or self.drafting.drafter is None:
            lengths_R = np.array([len(draft.tokens) for draft in self._verified])
            return self.drafting.reason(turn, result, left=left, view=view, lengths_R=lengths_R, request=place)
        if self.progress[turn.id].most_drafts == 0:
            return "the request asked for no drafts"
        if work.prefill or self.traced[turn.id] == 1:
            return "the prompt was read in this step, and drafts begin behind its first token"
        return "only one more token could come" if left == 1 else "the step had no rows or KV blocks left for drafts"

    def close(self, kept: Mapping[str, list[int]], results: Mapping[str, RoundResult]) -> None:
        """Move the keys that stay together, note their rows for the drafter, and remember what became of the drafts.

        Args:
            kept: rows of its span that stay, per request; finished requests left out.
            results: of the requests whose drafts were verified without an error.
        """
        at = self.progress
        with self.verify_clock:
            self.kv.keep_paths([(at[id].blocks, at[id].cached - len(rows), rows) for id, rows in kept.items()])
        if self.turns:
            self.drafting.record(self.turns, self._view, [results.get(id) for id in self.ids])
        if self.drafting.drafter is None:
            return
        if len(kept) == self.rows:  # plain decoding of all, in this order
            states = [self.states[id] for id in kept]
            self.drafting.committed_one_each(states, [at[id].cached - 1 for id in kept], self._aux_TLD)
        else:
            aux: Sequence[Tensor | None] = [None] * len(kept)
            if self._aux_TLD is not None and kept:
                places = [self._first_row[id] + row for id, rows in kept.items() for row in rows]
                kept_TLD = self._aux_TLD[on_device(places, self._aux_TLD.device)]
                # A tensor of its own each: with views, a request that does not draft would keep the rows of all.
                aux = [part.clone() for part in kept_TLD.split([len(rows) for rows in kept.values()])]
            for (id, rows), aux_TLD in zip(kept.items(), aux, strict=True):
                state, cached = self.states[id], at[id].cached
                self.drafting.committed(state, state.tokens[cached - len(rows) : cached], aux_TLD)
        with self.draft_clock:
            self.drafting.read_overdue([self.states[id] for id in kept])
