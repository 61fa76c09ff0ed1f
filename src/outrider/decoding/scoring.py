"""One target forward per step: the rows of all requests, and the target's distributions for their drafts.

    rows of the forward    | prefill chunk | prefill end, anchor | anchor, d_1 .. d_l | anchor, d_1 | ...
    logits                   none            1                     l + 1                2

Shapes: N rows with logits, K of them of one request, T rows, L aux layers, V vocab.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outrider.decoding.request import RequestState
from outrider.decoding.scheduler import Progress, Work
from outrider.decoding.trace import recorded
from outrider.decoding.verification import TargetRows
from outrider.drafters.draft import Draft
from outrider.sampling import at_least_float32, constrained, likeliest, warp
from outrider.target.model import DecodingTarget, KVPool
from outrider.target.paged import Span
from outrider.utils.measure import on_device


@dataclass(frozen=True)
class Scores:
    """What the target says in one step.

    Attributes:
        drafts: that are verified, of the requests that decode, in their order.
        rows: of these drafts.
        logits_NV: of these requests, one after another; None if none decodes.
        logit_rows: where each of them has its rows in `logits_NV`.
        first_row: where each request of the step has its rows in the forward.
        count: rows of the forward.
        aux_TLD: aux hidden states of all rows; None without aux layers.
        compared: the rows that verification reads, of requests that are watched.
    """

    drafts: Sequence[Draft]
    rows: list[TargetRows]
    logits_NV: Tensor | None
    logit_rows: dict[str, slice]
    first_row: dict[str, int]
    count: int
    aux_TLD: Tensor | None
    compared: dict[str, dict[int, Tensor]]

    def aux_of(self, kept: Mapping[str, Sequence[int]]) -> Tensor | None:
        """Aux hidden states [T, L, D] of the rows that stay of each request, counted from its first."""
        if self.aux_TLD is None or not kept:
            return None
        places = [self.first_row[id] + row for id, rows in kept.items() for row in rows]
        return self.aux_TLD[on_device(places, self.aux_TLD.device)]


def score(
    target: DecodingTarget,
    kv: KVPool,
    work: Sequence[Work],
    *,
    states: Mapping[str, RequestState],
    progress: Mapping[str, Progress],
    drafts: Mapping[str, Draft],
    aux_layers: tuple[int, ...],
    watched: Collection[str] = (),
) -> Scores:
    """Run the step's one target forward, prefill included.

    Args:
        work: of all requests of the step.
        drafts: of those that decode, in the order of `work`.
        watched: requests whose rows note what verification reads.
    """
    empty, spans, first_row, count = Draft.empty(), list[Span](), dict[str, int](), 0
    for part in work:
        at, state, draft = progress[part.id], states[part.id], drafts.get(part.id, empty)
        assert draft.row_parents is None or not part.prefill, "drafts together with a prefill"
        tokens = [*state.tokens[at.cached : at.cached + part.prefill + part.decodes], *draft.tokens]
        logits, parents = (len(draft.tokens) + 1 if part.decodes else 0), draft.row_parents
        spans.append(Span(tokens, at.cached, at.blocks, logits=logits, parents=parents, states=state.recurrent))
        first_row[part.id], count = count, count + len(tokens)
    output = target.forward_ragged(spans, kv, aux_layers)
    rows: list[TargetRows] = []
    logit_rows, compared = dict[str, slice](), dict[str, dict[int, Tensor]]()
    if output.logits_NV is not None:
        rows = target_rows([states[id] for id in drafts], output.logits_NV, list(drafts.values()))
        first = 0
        for number, (id, draft) in enumerate(drafts.items()):
            logit_rows[id] = slice(first, first := first + len(draft.tokens) + 1)
            if id in watched:
                rows[number], compared[id] = recorded(rows[number])
    return Scores(
        list(drafts.values()),
        rows,
        output.logits_NV,
        logit_rows=logit_rows,
        first_row=first_row,
        count=count,
        aux_TLD=output.aux_TLD,
        compared=compared,
    )


# ----------------------------------------------------------------------------
# The target's warped distributions, row by row.
#
# A row is warped when verification asks for it: those after a rejection never are. A GPU would wait for every answer,
# so there all rows of a request are warped together, and what verification will ask of them (`TargetRows.node_probs`,
# or the picks of coupled sampling) is read for all requests at once.
# ----------------------------------------------------------------------------


def target_rows(states: Sequence[RequestState], logits_NV: Tensor, drafts: Sequence[Draft]) -> list[TargetRows]:
    """The target's rows of several requests, from the logits after each anchor and its draft, request after request."""
    greedy = any(state.params.temperature == 0.0 for state in states)
    likeliest_N = likeliest(logits_NV) if greedy else []
    rows: list[TargetRows] = []
    asked: dict[int, Tensor] = {}  # what is still to be read from a GPU, by request
    first = 0
    for number, (state, draft) in enumerate(zip(states, drafts, strict=True)):
        own = slice(first, first := first + len(draft.tokens) + 1)
        request = _Rows(state, logits_NV[own], draft)
        if state.noise is None and state.params.temperature == 0.0 and request.plain:
            rows.append(TargetRows(request.row, likeliest_N[own].__getitem__))
        elif logits_NV.is_cuda and state.constraint is None:  # a constraint that fails ends its request alone
            warped = request.all()
            rows.append(TargetRows(warped.__getitem__))
            asked[number] = request.answers(warped)
        else:
            rows.append(TargetRows(request.row, None if state.noise is None else request.pick))
    read = torch.cat(list(asked.values())).tolist() if any(len(values) for values in asked.values()) else []
    for number, values in asked.items():
        answers, read = read[: len(values)], read[len(values) :]
        if states[number].noise is None:
            rows[number] = replace(rows[number], node_probs=answers)
        else:
            rows[number] = replace(rows[number], pick=[int(token) for token in answers].__getitem__)
    return rows


@dataclass(frozen=True)
class _Rows:
    """The rows [K, V] of one request: row 0 follows the anchor, row i + 1 follows node i of the draft."""

    state: RequestState
    logits_KV: Tensor
    draft: Draft

    @property
    def plain(self) -> bool:
        """Whether the distributions depend on the logits alone."""
        return not self.state.params.penalised and self.state.constraint is None

    def row(self, k: int) -> Tensor:
        """Warped distribution k [V]."""
        state, before = self.state, self.draft.tokens_before(k)
        allowed_V = None if state.constraint is None else state.constraint.allowed(before)
        logits_V = constrained(at_least_float32(self.logits_KV[k]), allowed_V)
        return warp(logits_V, state.params, state.seen.with_tokens(before))

    def all(self) -> Sequence[Tensor]:
        """All of them."""
        if self.plain:
            return warp(at_least_float32(self.logits_KV), self.state.params).unbind()
        return [self.row(k) for k in range(len(self.logits_KV))]

    def pick(self, k: int) -> int:
        """The token that coupled sampling takes from row k."""
        assert self.state.noise is not None
        return self.state.noise.pick(self.row(k), self._position(k))

    def answers(self, warped: Sequence[Tensor]) -> Tensor:
        """What verification asks of the rows, float64: probabilities of the nodes [K - 1], or the picks [K]."""
        noise = self.state.noise
        if noise is not None:
            picks = [noise.pick_tensor(probs_V, self._position(k)) for k, probs_V in enumerate(warped)]
            return torch.stack(picks).double()
        nodes = zip(self.draft.tokens, self.draft.parents, strict=True)
        probs = [warped[parent + 1][token] for token, parent in nodes]
        return torch.stack(probs).double() if probs else warped[0].new_empty(0, dtype=torch.float64)

    def _position(self, k: int) -> int:
        return len(self.state.tokens) + len(self.draft.tokens_before(k))
