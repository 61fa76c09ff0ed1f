"""The sampling chain on a GPU: nothing is read before its last position, and then all requests are read at once.

Every request draws at every position. Positions after its limit, or from its first low confidence on, are cut when the
draft is read: drawing them changed nothing before them. Each position up to the request's limit takes one uniform
number of its source, however long the drafts of other requests are: its text must not depend on them.
Shapes: R requests, A those that are warped together, K block positions, V target vocab, Vd draft vocab, H draft hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.drafters.base import DraftCall, FailedCall
from outrider.drafters.confidence import ChainHeads
from outrider.drafters.draft import Draft, DraftRow, Siblings
from outrider.drafters.graphs import BlockGraphs
from outrider.sampling import (
    IN_OUTPUT,
    PositionNoise,
    SamplingParams,
    SeenTokens,
    alike,
    choose_rows,
    not_finite,
    pick_together,
    warp,
)
from outrider.utils.measure import on_device


def sample_on_gpu(
    base_logits: Callable[[Tensor], Tensor],
    hidden_RKH: Tensor,
    calls: Sequence[DraftCall],
    heads: ChainHeads,
    min_confidence: float,
    graphs: BlockGraphs | None = None,
) -> list[Draft]:
    """As `sample_chain` of requests without constraints.

    Args:
        graphs: run a chain in a graph where all requests draw alike, without penalties and coupled noise.
    """
    (R, K, _), device = hidden_RKH.shape, hidden_RKH.device
    temperatures = [call.params.temperature for call in calls]
    draws = _Draws.of(calls, K, heads, device=device)
    anchors_R, uniforms_RK = torch.tensor([call.anchor for call in calls]), draws.uniforms_RK
    if graphs is not None and graphs.captures and draws.alike and not heads.estimates:
        params = draws.groups[0].params if draws.groups else None

        def captured(hidden_RKH: Tensor, anchors_R: Tensor, uniforms_RK: Tensor) -> Drawn:
            return draw_alike(base_logits, hidden_RKH, anchors_R, uniforms_RK=uniforms_RK, heads=heads, params=params)

        drawn = graphs.chain((K, params), [hidden_RKH, anchors_R, uniforms_RK], captured)
        certain_RK, embedding_RKr = (None if part is None else part[:R] for part in drawn[2:4])
        kept = [
            rows_KAVd[:, :R].clone() for rows_KAVd in drawn.probs if isinstance(rows_KAVd, Tensor)
        ]  # until verification
        drawn = Drawn(drawn.tokens_RK[:R], drawn.firsts_RK[:R], certain_RK, embedding_RKr=embedding_RKr, probs=kept)
    else:
        on_gpu = replace(draws, uniforms_RK=on_device(uniforms_RK, device))
        drawn = _walk(base_logits, hidden_RKH, on_device(anchors_R, device), draws=on_gpu, temperatures=temperatures)
    parts = [drawn.tokens_RK.double(), drawn.firsts_RK]
    if drawn.certain_RK is not None:
        parts.append(drawn.certain_RK.double())
    if heads.confidence is not None:  # a confidence depends on the tokens before it alone: one product for all of them
        logits_RK = heads.confidence(hidden_RKH, drawn.embedding_RKr)
        parts.append(heads.calibrated_block(logits_RK, temperatures).double())
    read = torch.stack(parts).tolist()  # [2 or 3, R, K]
    rows: list[list[Tensor]] = [[] for _ in calls]  # of sampled requests: p_k by position
    for group, probs in zip(draws.groups, drawn.probs, strict=True):
        for place, r in enumerate(group.members if group.params.temperature > 0.0 else ()):
            rows[r] = [probs_AVd[place] for probs_AVd in probs]
    return [
        draws.draft(
            r,
            [int(token) for token in read[0][r]],
            rows=rows[r],
            firsts=read[1][r],
            confidences=read[2][r] if len(read) == 3 else [],
            min_confidence=min_confidence,
        )
        for r in range(R)
    ]


def draw_alike(
    base_logits: Callable[[Tensor], Tensor],
    hidden_RKH: Tensor,
    anchors_R: Tensor,
    *,
    uniforms_RK: Tensor,
    heads: ChainHeads,
    params: SamplingParams | None,
) -> Drawn:
    """The chains of requests that nothing but uniform numbers tells from each other. The host reads no values, so that
    a graph may do it; `probs` has one tensor [K, R, Vd], or none where `params` is None, greedy drafts.
    """
    members, groups = list(range(len(hidden_RKH))), list[_Alike]()
    if params is not None:
        members_R = torch.arange(len(hidden_RKH), device=hidden_RKH.device)
        groups = [_Alike(params, members, members_R, noises=[], seen_AV=None)]
    draws = _Draws((), heads, groups, uniforms_RK=uniforms_RK, probs=[[] for _ in groups])
    drawn = _walk(base_logits, hidden_RKH, anchors_R, draws=draws, temperatures=())
    return drawn._replace(probs=[torch.stack(list(rows)) for rows in drawn.probs])


class Drawn(NamedTuple):
    """A chain: tokens, the probabilities that they were drawn with, confidences of estimators, and of each group of
    requests that are warped together p_k [A, Vd] by position.
    """

    tokens_RK: Tensor
    firsts_RK: Tensor
    certain_RK: Tensor | None
    embedding_RKr: Tensor | None
    probs: Sequence[Sequence[Tensor] | Tensor]


def _walk(
    base_logits: Callable[[Tensor], Tensor],
    hidden_RKH: Tensor,
    previous_R: Tensor,
    draws: _Draws,
    temperatures: Sequence[float],
) -> Drawn:
    """Draw all positions; `previous_R` are the anchors."""
    (R, K, _), heads, head = hidden_RKH.shape, draws.heads, draws.heads.sequential
    base_RKVd = base_logits(hidden_RKH.flatten(0, 1)).unflatten(0, (R, K))
    state = head.initial_state(R) if head is not None else None
    tokens, firsts, embeddings, certain = list[Tensor](), list[Tensor](), list[Tensor](), list[Tensor]()
    for k in range(K):
        logits_RVd = base_RKVd[:, k]
        if head is not None:
            latent_Rr, embedding_Rr, state = head.step(previous_R, hidden_RKH[:, k], state)
            if latent_Rr is not None:
                logits_RVd = logits_RVd + head.bias(latent_Rr)
            if embedding_Rr is not None:
                embeddings.append(embedding_Rr)
        if heads.estimates:
            certain.append(heads.estimated(logits_RVd, k, temperatures))
        previous_R, first_R = draws.draw(logits_RVd, k)
        tokens.append(previous_R)
        firsts.append(first_R)
    certain_RK, embedding_RKr = (torch.stack(part, dim=1) if part else None for part in (certain, embeddings))
    tokens_RK, firsts_RK = torch.stack(tokens, dim=1), torch.stack(firsts, dim=1)
    return Drawn(tokens_RK, firsts_RK, certain_RK, embedding_RKr=embedding_RKr, probs=draws.probs)


@dataclass(frozen=True)
class _Alike:
    """Requests that are warped together: their places, and the tokens that each has seen where they are penalised."""

    params: SamplingParams
    members: list[int]
    members_A: Tensor
    noises: list[PositionNoise]  # of coupled ones
    seen_AV: Tensor | None


@dataclass(frozen=True)
class _Draws:
    """Draws the tokens of several requests, position by position, without waiting for a GPU.

    `probs`: of each group, p_k [A, Vd] of the positions drawn so far.
    """

    calls: Sequence[DraftCall]
    heads: ChainHeads
    groups: list[_Alike]
    uniforms_RK: Tensor
    probs: list[list[Tensor]]

    @staticmethod
    def of(calls: Sequence[DraftCall], positions: int, heads: ChainHeads, device: torch.device) -> _Draws:
        """The uniform numbers are on the host still."""
        groups: list[_Alike] = []
        drawing = [r for r, call in enumerate(calls) if call.params.temperature > 0.0 or call.params.penalised]
        coupled = [call.noise is not None for call in calls]
        for noisy in (False, True):
            some = [r for r in drawing if coupled[r] == noisy]
            for params, places in alike([calls[r].params for r in some]).items():
                members = [some[place] for place in places]
                noises = [noise for r in members if (noise := calls[r].noise) is not None]
                seen_AV = SeenTokens.together([calls[r].seen for r in members], [()] * len(members))
                members_A = on_device(members, device)
                groups.append(_Alike(params, members, members_A, noises=noises, seen_AV=seen_AV))
        uniforms: list[list[float]] = []
        for call in calls:
            drawn = call.params.temperature > 0.0 and call.noise is None
            own = (positions if call.limit is None else min(call.limit, positions)) if drawn else 0
            uniforms.append([call.source.uniform() for _ in range(own)] + [0.0] * (positions - own))
        uniforms_RK = torch.tensor(uniforms, dtype=torch.float64)
        return _Draws(calls, heads, groups, uniforms_RK=uniforms_RK, probs=[[] for _ in groups])

    @property
    def alike(self) -> bool:
        """Whether nothing but uniform numbers tells the requests from each other."""
        if not self.groups:
            return True
        first = self.groups[0]
        return len(first.members) == len(self.calls) and not first.noises and first.seen_AV is None

    def draw(self, logits_RVd: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The tokens at position k, and the probabilities that they were drawn with, [R] each."""
        ids_Vd = self.heads.draft_ids_Vd
        index_R, first_R = logits_RVd.argmax(-1), self.uniforms_RK.new_ones(len(logits_RVd))
        for group, probs in zip(self.groups, self.probs, strict=True):
            params, members_A, seen_AV = group.params, group.members_A, group.seen_AV
            seen_AVd = seen_AV if seen_AV is None or ids_Vd is None else seen_AV[:, ids_Vd]
            probs_AVd = warp(logits_RVd[members_A], params, seen_AVd)
            if params.temperature == 0.0:
                index_A = probs_AVd.argmax(-1)
            elif group.noises:
                index_A = pick_together(probs_AVd, group.noises, self._positions(group, k), ids_V=ids_Vd)
            else:
                index_A, _ = choose_rows(probs_AVd, self.uniforms_RK[members_A, k])
            index_R = index_R.index_copy(0, members_A, index_A)
            first_R = first_R.index_copy(0, members_A, probs_AVd.gather(1, index_A[:, None])[:, 0].double())
            probs.append(probs_AVd)
            if seen_AV is not None:
                tokens_A1 = (index_A if ids_Vd is None else ids_Vd[index_A])[:, None]
                seen_AV.scatter_add_(1, tokens_A1, torch.full_like(tokens_A1, IN_OUTPUT, dtype=seen_AV.dtype))
        return index_R if ids_Vd is None else ids_Vd[index_R], first_R

    def _positions(self, group: _Alike, k: int) -> list[int]:
        return [self.calls[r].position + k for r in group.members]

    def draft(
        self,
        r: int,
        tokens: list[int],
        *,
        rows: list[Tensor],
        firsts: list[float],
        confidences: list[float],
        min_confidence: float,
    ) -> Draft:
        """The draft of request r from what was read of all K positions, and the rows that they were drawn from."""
        call = self.calls[r]
        count = len(tokens) if call.limit is None else min(call.limit, len(tokens))
        low = (k for k, confidence in enumerate(confidences) if confidence < min_confidence)
        count = min(count, next(low, count))
        siblings = {}
        for k in range(count if rows else 0):
            if not firsts[k] > 0.0:  # also where it is no number
                raise FailedCall(call.session, not_finite(firsts[k]))
            row = DraftRow(rows[k], self.heads.draft_ids_Vd, self.heads.vocab_size)
            siblings[k - 1] = Siblings(row, first=firsts[k])
        return Draft.chain(tokens[:count], siblings, confidences[:count])
