"""What goes into an engine and what comes out, and the batch of one engine step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outrider.decoding.request import FinishReason, RequestState, StopRules
from outrider.drafters.base import Drafter, FailedCall
from outrider.drafters.draft import Draft
from outrider.engine.scheduler import Progress, StepPlan
from outrider.sampling import RandomSource, SamplingParams
from outrider.scheduling.gate import DraftGate, History
from outrider.scheduling.policies import StepView
from outrider.target.model import Target
from outrider.target.paged import PagedKV, Span
from outrider.utils.measure import Clock
from outrider.verification import TargetRows


@dataclass(frozen=True)
class Request:
    """A prompt to decode, with its sampling parameters and stops.

    At temperature 0, and with `params.coupled` at any, its tokens are the same in any company. Otherwise they depend on
    its seed and on how many drafts were verified in each step, which company may change.
    """

    id: str
    prompt: Sequence[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    rules: StopRules = field(default_factory=StopRules)


@dataclass(frozen=True)
class Output:
    """Tokens and text that a step gave a request; `finish` is set on its last output.

    `seed`: what it is sampled with; None where another engine does not say. `error`: what ended it, where `finish` is
    "error".
    """

    id: str
    tokens: list[int]
    text: str
    finish: FinishReason | None
    seed: int | None = None
    error: Exception | None = None


@dataclass(frozen=True)
class StepRecord:
    """Counts and times of one engine step; seconds add up to its length.

    `requests` decoded, `drafting` of them with a draft. `tokens` are the rows of the target forward, `prefill_tokens`
    among them; `accepted` drafts behind a stop are not counted. `running`, `waiting` and
    `used_blocks` are counted after the step. A simulated step leaves the same record, to be compared field by field.
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
    running: int
    waiting: int
    used_blocks: int


# ----------------------------------------------------------------------------
# The requests of one step as a `Batch` (decoding/round.py).
#
#     rows of the forward    | prefill chunk | prefill end, anchor | anchor, d_1 .. d_l | anchor, d_1 | ...
#     logits                   none            1                     l + 1                2
#
# The drafter reads committed tokens late, all at once when their request drafts next: a request that skips its drafts
# pays nothing for them, and what it skips for long is read in one product.
#
# Shapes: N rows with logits, T rows, L aux layers, V vocab.
# ----------------------------------------------------------------------------


_MOST_UNREAD = 256  # tokens of a request whose aux hidden states wait for the drafter; bounds memory


class StepBatch:
    """The requests of a step plan that decode, in the plan's order.

    Args:
        states, progress: of every request in the plan.
        failed: requests that end with this step, and why; those whose drafting fails join them.
    """

    def __init__(
        self,
        target: Target,
        kv: PagedKV,
        drafter: Drafter | None,
        *,
        gate: DraftGate,
        history: History,
        plan: StepPlan,
        states: Mapping[str, RequestState],
        progress: Mapping[str, Progress],
        failed: dict[str, Exception],
    ) -> None:
        self.target, self.kv, self.drafter, self.gate, self.history = target, kv, drafter, gate, history
        self.work, self.states, self.progress, self.failed = plan.work, states, progress, failed
        self.deciding = [work for work in plan.work if work.decodes]
        self.ids = [work.id for work in self.deciding]
        self.prefill_tokens = sum(work.prefill for work in plan.work)
        self.draft_clock, self.verify_clock = Clock(target.device), Clock(target.device)
        self.drafting = self.rows = 0
        self._aux_TLD: Tensor | None = None
        self._view: StepView | None = None
        self._first_row: dict[str, int] = {}

    @property
    def sources(self) -> Sequence[RandomSource]:
        return [self.states[id].source for id in self.ids]

    def draft(self, min_confidence: float) -> Sequence[Draft]:
        """A block or tree for every request that may use one and that the gate lets draft."""
        drafts: list[Draft] = [Draft.empty() for _ in self.deciding]
        able = [i for i, work in enumerate(self.deciding) if work.limit > 0 and work.id not in self.failed]
        if self.drafter is None or not able:
            return drafts
        ids = [self.ids[i] for i in able]
        contexts = [len(self.states[id].tokens) for id in ids]
        view = self.history.gate_view(ids, contexts, self.prefill_tokens, other_requests=len(self.deciding) - len(able))
        depths = self.gate.depths(view).tolist()
        limits = {i: min(self.deciding[i].limit, depth) for i, depth in zip(able, depths, strict=True)}
        chosen = [i for i in able if limits[i]]
        while chosen:
            with self.draft_clock:
                self._read([self.states[self.ids[i]] for i in chosen])
                calls = [self.states[self.ids[i]].draft_call(limits[i]) for i in chosen]
                try:
                    found = self.drafter.propose(calls, min_confidence)
                except FailedCall as error:
                    # Ended, not drafted for again: whether drawing fails may depend on what is drawn. The others draw
                    # anew, which their own tokens had no part in.
                    lost = next(i for i, call in zip(chosen, calls, strict=True) if call.session is error.session)
                    self.failed[self.ids[lost]] = error
                    chosen.remove(lost)
                    continue
            for i, draft in zip(chosen, found, strict=True):
                drafts[i] = draft
            break
        self.drafting = len(chosen)
        return drafts

    def view(self, drafts: Sequence[Draft]) -> StepView:
        confidences = [draft.confidences for draft in drafts]
        drafted = [len(draft.tokens) for draft in drafts]
        contexts = [len(self.states[id].tokens) for id in self.ids]
        self._view = self.history.step_view(
            self.ids, confidences, drafted, contexts=contexts, other_tokens=self.prefill_tokens
        )
        return self._view

    def score(self, drafts: Sequence[Draft]) -> list[TargetRows]:
        """The step's one target forward, prefill included."""
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
        aux_layers = () if self.drafter is None else self.drafter.aux_layers
        with self.verify_clock:
            output = self.target.forward_ragged(spans, self.kv, aux_layers)
        self._aux_TLD = output.aux_TLD
        return [] if output.logits_NV is None else self._target_rows(output.logits_NV, draft_of)

    def _target_rows(self, logits_NV: Tensor, draft_of: Mapping[str, Draft]) -> list[TargetRows]:
        greedy = any(self.states[id].params.temperature == 0.0 for id in draft_of)
        likeliest_N = logits_NV.argmax(-1).tolist() if greedy else None
        rows, first = [], 0
        for id, draft in draft_of.items():
            own = slice(first, first + len(draft.tokens) + 1)
            likeliest = None if likeliest_N is None else likeliest_N[own]
            rows.append(self.states[id].target_rows(logits_NV[own], draft, likeliest))
            first = own.stop
        return rows

    def close(self, kept: Mapping[str, list[int]]) -> None:
        """Move the keys that stay together, and note their rows for the drafter.

        Args:
            kept: rows of its span that stay, per request; finished requests left out.
        """
        at = self.progress
        with self.verify_clock:
            self.kv.keep_paths([(at[id].blocks, at[id].cached - len(rows), rows) for id, rows in kept.items()])
        if self._view is not None:
            self.history.record(self.ids, self._view)
        if self.drafter is None:
            return
        for id, rows in kept.items():
            state, cached, first = self.states[id], self.progress[id].cached, self._first_row[id]
            aux_TLD = None
            if self._aux_TLD is not None:  # a copy: a view would keep the aux hidden states of the whole step
                places = torch.tensor([first + row for row in rows], device=self._aux_TLD.device)
                aux_TLD = self._aux_TLD[places]
            state.unread.append((state.tokens[cached - len(rows) : cached], aux_TLD))
        with self.draft_clock:
            self._read([self.states[id] for id in kept if self.states[id].unread_tokens > _MOST_UNREAD])

    def _read(self, requests: Sequence[RequestState]) -> None:
        """Give the drafter what it has not read of these requests."""
        behind = [state for state in requests if state.unread]
        if self.drafter is None or not behind:
            return
        tokens = [[token for part, _ in state.unread for token in part] for state in behind]
        aux = [aux_TLD for state in behind for _, aux_TLD in state.unread if aux_TLD is not None]
        self.drafter.extend([state.session for state in behind], tokens, torch.cat(aux) if aux else None)
        for state in behind:
            state.unread.clear()
