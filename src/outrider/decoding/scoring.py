"""One target forward per step: the rows of all requests, and the target's distributions for their drafts.

    rows of the forward    | prefill chunk | prefill end, anchor | anchor, d_1 .. d_l | anchor, d_1 | ...
    logits                   none            1                     l + 1                2

Shapes: N rows with logits, K of them of one request, T rows, L aux layers, V vocab.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.decoding.request import RequestState
from outrider.decoding.scheduler import Progress, Work
from outrider.decoding.trace import recorded
from outrider.decoding.verification import TargetRows
from outrider.drafters.draft import Draft
from outrider.sampling import SeenTokens, alike, at_least_float32, constrained, likeliest, pick_together, warp
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
# so there all rows of requests of the same parameters are warped together, and what verification will ask of them
# (`TargetRows.node_probs`, or the picks of coupled sampling) is read for all requests at once.
# ----------------------------------------------------------------------------


def target_rows(states: Sequence[RequestState], logits_NV: Tensor, drafts: Sequence[Draft]) -> list[TargetRows]:
    """The target's rows of several requests, from the logits after each anchor and its draft, request after request."""
    greedy = any(state.params.temperature == 0.0 for state in states)
    likeliest_N = likeliest(logits_NV) if greedy else []
    rows: list[TargetRows] = []
    together: dict[int, _Rows] = {}
    first = 0
    for number, (state, draft) in enumerate(zip(states, drafts, strict=True)):
        own = slice(first, first := first + len(draft.tokens) + 1)
        request = _Rows(state, logits_NV[own], draft)
        if state.noise is None and state.params.temperature == 0.0 and request.plain:
            rows.append(TargetRows(request.row, likeliest_N[own].__getitem__))
        elif logits_NV.is_cuda and state.constraint is None:  # a constraint that fails ends its request alone
            together[number] = request
            rows.append(TargetRows(request.row))
        else:
            rows.append(TargetRows(request.row, None if state.noise is None else request.pick))
    for number, found in zip(together, _rows_together(list(together.values())), strict=True):
        rows[number] = found
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

    def pick(self, k: int) -> int:
        """The token that coupled sampling takes from row k."""
        assert self.state.noise is not None
        return self.state.noise.pick(self.row(k), self.position(k))

    def position(self, k: int) -> int:
        """Absolute position of the token that follows row k."""
        return len(self.state.tokens) + len(self.draft.tokens_before(k))


def _rows_together(requests: Sequence[_Rows]) -> list[TargetRows]:
    """The rows of requests without constraints on a GPU: one warp for all of the same parameters, one read for all."""
    warped: dict[int, Tensor] = {}  # [K, V] of each request
    asked: dict[int, int] = {}  # how many numbers of each request are read, in this order
    answers: list[Tensor] = []
    for params, members in alike([request.state.params for request in requests]).items():
        own = [requests[member] for member in members]
        places = [(request, k) for request in own for k in range(len(request.logits_KV))]
        seen_MV = None
        if params.penalised:
            before = [request.draft.tokens_before(k) for request, k in places]
            seen_MV = SeenTokens.together([request.state.seen for request, _ in places], before)
        warped_MV = warp(at_least_float32(torch.cat([request.logits_KV for request in own])), params, seen_MV)
        counts = [len(request.logits_KV) for request in own]
        warped |= zip(members, warped_MV.split(counts), strict=True)
        noises = [request.state.noise for request, _ in places if request.state.noise is not None]
        if noises:
            asked |= zip(members, counts, strict=True)
            answers.append(pick_together(warped_MV, noises, [request.position(k) for request, k in places]).double())
            continue
        asked |= ((member, len(request.draft.tokens)) for member, request in zip(members, own, strict=True))
        nodes, first = list[tuple[int, int]](), 0
        for request in own:
            pairs = zip(request.draft.parents, request.draft.tokens, strict=True)
            nodes += ((first + parent + 1, token) for parent, token in pairs)
            first += len(request.logits_KV)
        if nodes:
            rows_P, tokens_P = on_device(nodes, warped_MV.device).T
            answers.append(warped_MV[rows_P, tokens_P].double())
    read, found = torch.cat(answers).tolist() if answers else [], dict[int, TargetRows]()
    for member, count in asked.items():
        values, read = read[:count], read[count:]
        row = warped[member].__getitem__
        if requests[member].state.noise is None:
            found[member] = TargetRows(row, node_probs=values)
        else:
            found[member] = TargetRows(row, [int(token) for token in values].__getitem__)
    return [found[member] for member in range(len(requests))]
