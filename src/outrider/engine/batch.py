"""What goes into an engine, what comes out, and what it keeps of a request in between."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from outrider.decoding.request import FinishReason, StopRules, TextStream, check_prompt, target_rows
from outrider.decoding.round import TargetRows
from outrider.drafters.base import DraftCall, Drafter
from outrider.drafters.draft import Draft
from outrider.engine.scheduler import Progress, StepPlan
from outrider.sampling import PositionNoise, RandomSource, SamplingParams, SeededSource, SeenTokens
from outrider.scheduling.gate import DraftGate
from outrider.scheduling.view import History, StepView
from outrider.target.model import Target
from outrider.target.paged import PagedKV, Span
from outrider.utils.measure import Clock


@dataclass(frozen=True)
class Request:
    """One prompt.

    At temperature 0, and with `params.coupled` at any, its tokens are the same in any company. Otherwise they depend on
    its seed and on how many drafts were verified in each step, which company may change.
    """

    id: str
    prompt: Sequence[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    rules: StopRules = field(default_factory=StopRules)


@dataclass(frozen=True)
class Output:
    """What a step gave a request; `finish` is set on its last."""

    id: str
    tokens: list[int]
    text: str
    finish: FinishReason | None


@dataclass(frozen=True)
class StepRecord:
    """One engine step; seconds add up to its length.

    `requests` decoded, `drafting` of them with a block. `tokens` are the rows of the target forward, `prefill_tokens`
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


class LiveRequest:
    """A request's tokens and everything that belongs to them.

    `session` is its drafter's while it runs; `unread` are tokens in the target's cache that the drafter has yet to
    read, with their aux hidden states [T, L, D].
    """

    def __init__(self, request: Request, target: Target) -> None:
        check_prompt(target, request.prompt)
        self.request, self.params = request, request.params
        self.tokens = list(request.prompt)
        self.last = min(len(self.tokens) + request.rules.max_new_tokens, target.max_context)
        self.source = SeededSource(request.params.seed)
        self.noise = PositionNoise(request.params.seed, target.vocab_size) if request.params.coupled else None
        self.seen = SeenTokens(target.vocab_size, request.params.repetition_penalty, self.tokens, target.device)
        self.text = TextStream(target.tokenizer, request.rules.stop_strings)
        self.stop_ids = request.rules.ids(target)
        self.session: Any = None
        self.unread: list[tuple[list[int], Tensor | None]] = []

    @property
    def unread_tokens(self) -> int:
        return sum(len(tokens) for tokens, _ in self.unread)

    def leave(self) -> None:
        """Forget what its KV blocks and its session held: it will be prefilled anew."""
        self.session = None
        self.unread.clear()

    def commit(self, tokens: Sequence[int]) -> Output:
        """Take the tokens of a round, up to the first that ends the response."""
        kept, stopped = self.text.cut(tokens, self.stop_ids)
        self.tokens += kept
        for token in kept:
            self.seen.add(token)
        finish: FinishReason | None = "stop" if stopped else "length" if len(self.tokens) == self.last else None
        return Output(self.request.id, kept, self.text.release(final=finish is not None), finish)


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
    """One step. Its requests are those of the plan that decode, in the plan's order.

    Args:
        live, progress: of every request in the plan.
    """

    def __init__(
        self,
        target: Target,
        kv: PagedKV,
        drafter: Drafter | None,
        gate: DraftGate,
        history: History,
        plan: StepPlan,
        live: Mapping[str, LiveRequest],
        progress: Mapping[str, Progress],
    ) -> None:
        self.target, self.kv, self.drafter, self.gate, self.history = target, kv, drafter, gate, history
        self.work, self.live, self.progress = plan.work, live, progress
        self.deciding = [work for work in plan.work if work.decodes]
        self.ids = [work.id for work in self.deciding]
        self.prefill_tokens = sum(work.prefill for work in plan.work)
        self.draft_clock, self.verify_clock = Clock(target.device), Clock(target.device)
        self.drafting = self.rows = 0
        self._aux_TLD: Tensor | None = None
        self._shown: StepView | None = None
        self._first_row: dict[str, int] = {}

    @property
    def sources(self) -> Sequence[RandomSource]:
        return [self.live[id].source for id in self.ids]

    def draft(self, min_confidence: float) -> Sequence[Draft]:
        """A block or tree for every request that may use one and that the gate lets draft."""
        proposals: list[Draft] = [Draft.empty() for _ in self.deciding]
        able = [i for i, work in enumerate(self.deciding) if work.limit > 0]
        if self.drafter is None or not able:
            return proposals
        ids = [self.ids[i] for i in able]
        contexts = [len(self.live[id].tokens) for id in ids]
        view = self.history.gate_view(ids, contexts, self.prefill_tokens, len(self.deciding) - len(able))
        depths = self.gate.depths(view).tolist()
        limits = {i: min(self.deciding[i].limit, depth) for i, depth in zip(able, depths, strict=True)}
        chosen = [i for i in able if limits[i]]
        self.drafting = len(chosen)
        if chosen:
            with self.draft_clock:
                self._read([self.live[self.ids[i]] for i in chosen])
                found = self.drafter.propose([self._call(i, limits[i]) for i in chosen], min_confidence)
            for i, proposal in zip(chosen, found, strict=True):
                proposals[i] = proposal
        return proposals

    def _call(self, index: int, slots: int) -> DraftCall:
        """`slots` are the step's; a tree may have more nodes than the request has tokens left."""
        live = self.live[self.ids[index]]
        position = len(live.tokens)
        limit = min(slots, live.last - position - 1)
        return DraftCall(
            live.session, live.tokens[-1], live.params, live.seen, live.source, limit, live.noise, position, slots
        )

    def view(self, proposals: Sequence[Draft]) -> StepView:
        confidences = [proposal.confidences for proposal in proposals]
        drafted = [len(proposal.tokens) for proposal in proposals]
        contexts = [len(self.live[id].tokens) for id in self.ids]
        self._shown = self.history.step_view(self.ids, confidences, drafted, contexts, self.prefill_tokens)
        return self._shown

    def score(self, parts: Sequence[Draft]) -> list[TargetRows]:
        """The step's one forward, prefill included."""
        drafts = dict(zip(self.ids, parts, strict=True))
        empty = Draft.empty()
        spans = []
        for work in self.work:
            live, progress = self.live[work.id], self.progress[work.id]
            known = live.tokens[progress.cached : progress.cached + work.prefill + work.decodes]
            part = drafts.get(work.id, empty)
            assert part.row_parents is None or not work.prefill, "drafts together with a prefill"
            tokens, logits = [*known, *part.tokens], len(part.tokens) + 1 if work.decodes else 0
            spans.append(Span(tokens, progress.cached, progress.blocks, logits, part.row_parents))
            self._first_row[work.id] = self.rows
            self.rows += len(tokens)
        aux_layers = () if self.drafter is None else self.drafter.aux_layers
        with self.verify_clock:
            output = self.target.forward_ragged(spans, self.kv, aux_layers)
        self._aux_TLD = output.aux_TLD
        return [] if output.logits_NV is None else self._target_rows(output.logits_NV, drafts)

    def _target_rows(self, logits_NV: Tensor, drafts: Mapping[str, Draft]) -> list[TargetRows]:
        greedy = any(self.live[id].params.temperature == 0.0 for id in drafts)
        likeliest_N = logits_NV.argmax(-1).tolist() if greedy else None
        rows, first = [], 0
        for id, part in drafts.items():
            live, mine = self.live[id], slice(first, first + len(part.tokens) + 1)
            likeliest = None if likeliest_N is None else likeliest_N[mine]
            position = len(live.tokens)
            rows.append(target_rows(logits_NV[mine], part, live.params, live.seen, live.noise, position, likeliest))
            first = mine.stop
        return rows

    def close(self, kept: Mapping[str, list[int]]) -> None:
        """Move the keys that stay together, and note their rows for the drafter.

        Args:
            kept: rows of its span that stay, per request; finished requests left out.
        """
        at = self.progress
        with self.verify_clock:
            self.kv.keep_paths([(at[id].blocks, at[id].cached - len(rows), rows) for id, rows in kept.items()])
        if self._shown is not None:
            self.history.record(self.ids, self._shown)
        if self.drafter is None:
            return
        for id, rows in kept.items():
            live, cached, first = self.live[id], self.progress[id].cached, self._first_row[id]
            aux_TLD = None
            if self._aux_TLD is not None:  # a copy: a view would keep the aux hidden states of the whole step
                places = torch.tensor([first + row for row in rows], device=self._aux_TLD.device)
                aux_TLD = self._aux_TLD[places]
            live.unread.append((live.tokens[cached - len(rows) : cached], aux_TLD))
        with self.draft_clock:
            self._read([self.live[id] for id in kept if self.live[id].unread_tokens > _MOST_UNREAD])

    def _read(self, requests: Sequence[LiveRequest]) -> None:
        """Give the drafter what it has not seen of these requests."""
        behind = [live for live in requests if live.unread]
        if self.drafter is None or not behind:
            return
        tokens = [[token for part, _ in live.unread for token in part] for live in behind]
        aux_layers = [aux_TLD for live in behind for _, aux_TLD in live.unread if aux_TLD is not None]
        self.drafter.extend([live.session for live in behind], tokens, torch.cat(aux_layers) if aux_layers else None)
        for live in behind:
            live.unread.clear()
