"""The requests of one step as a `Batch` (decoding/round.py).

    rows of the forward    | prefill chunk | prefill end, anchor | anchor, d_1 .. d_l | anchor, d_1 | ...
    logits                   none            1                     l + 1                2

Shapes: N rows with logits, T rows, L taps, V vocab.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from outrider.decoding.lane import Clock, target_rows
from outrider.decoding.round import TargetRows
from outrider.drafters.base import Draft, DraftCall, Drafter, Proposal
from outrider.engine.request import LiveRequest
from outrider.engine.scheduler import Progress, StepPlan
from outrider.sampling import RandomSource
from outrider.scheduling import DraftGate, History, StepView
from outrider.target import Target
from outrider.target.paged import PagedKV, Span


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
        self._taps_TLD: Tensor | None = None
        self._shown: StepView | None = None
        self._first_row: dict[str, int] = {}

    @property
    def sources(self) -> Sequence[RandomSource]:
        return [self.live[id].source for id in self.ids]

    def draft(self, floor: float) -> Sequence[Draft]:
        """A block or tree for every request that may use one and that the gate lets draft."""
        proposals: list[Draft] = [Proposal.empty() for _ in self.deciding]
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
                found = self.drafter.propose([self._call(i, limits[i]) for i in chosen], floor)
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
        empty = Proposal.empty()
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
        taps = () if self.drafter is None else self.drafter.taps
        with self.verify_clock:
            output = self.target.forward_ragged(spans, self.kv, taps)
        self._taps_TLD = output.taps_TLD
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
        """Move the keys that stay together and give the drafter their rows.

        Args:
            kept: rows of its span that stay, per request; finished requests left out.
        """
        at = self.progress
        with self.verify_clock:
            self.kv.keep_paths([(at[id].blocks, at[id].cached - len(rows), rows) for id, rows in kept.items()])
        if self._shown is not None:
            self.history.record(self.ids, self._shown)
        if self.drafter is None or not kept:
            return
        ids = list(kept)
        tokens = []
        for id in ids:
            cached = self.progress[id].cached
            tokens.append(self.live[id].tokens[cached - len(kept[id]) : cached])
        taps_TLD = None
        if self._taps_TLD is not None:
            rows = [self._first_row[id] + row for id in ids for row in kept[id]]
            taps_TLD = self._taps_TLD[torch.tensor(rows, device=self._taps_TLD.device)]
        with self.draft_clock:
            self.drafter.extend([self.live[id].session for id in ids], tokens, taps_TLD)
