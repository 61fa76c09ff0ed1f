"""The sampling chain on a GPU: nothing is read before its last position, and then all requests are read at once.

Every request draws at every position. Positions after its limit, or from its first low confidence on, are cut when the
draft is read: drawing them changed nothing before them. Each position up to the request's limit takes one uniform
number of its source, however long the drafts of other requests are: its text must not depend on them.
Shapes: R requests, A those that are warped together, K block positions, V target vocab, Vd draft vocab, H draft hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.drafters.base import DraftCall, FailedCall
from outrider.drafters.confidence import ChainHeads
from outrider.drafters.draft import Draft, DraftRow, Siblings
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
) -> list[Draft]:
    """As `sample_chain` of requests without constraints."""
    (R, K, _), device, head = hidden_RKH.shape, hidden_RKH.device, heads.sequential
    base_RKVd = base_logits(hidden_RKH.flatten(0, 1)).unflatten(0, (R, K))
    state = head.initial_state(R) if head is not None else None
    previous_R = on_device([call.anchor for call in calls], device)
    draws = _Draws(calls, K, heads, device=device)
    temperatures = [call.params.temperature for call in calls]
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
    parts = [torch.stack(part, dim=1).double() for part in (tokens, firsts, certain) if part]
    if heads.confidence is not None:  # a confidence depends on the tokens before it alone: one product for all of them
        embedding_RKr = torch.stack(embeddings, dim=1) if embeddings else None
        parts.append(heads.calibrated_block(heads.confidence(hidden_RKH, embedding_RKr), temperatures).double())
    read = torch.stack(parts).tolist()  # [2 or 3, R, K]
    return [
        draws.draft(
            r,
            [int(token) for token in read[0][r]],
            firsts=read[1][r],
            confidences=read[2][r] if len(read) == 3 else [],
            min_confidence=min_confidence,
        )
        for r in range(R)
    ]


@dataclass(frozen=True)
class _Alike:
    """Requests that are warped together: their places, and the tokens that each has seen where they are penalised."""

    params: SamplingParams
    members: list[int]
    members_A: Tensor
    noises: list[PositionNoise]  # of coupled ones
    seen_AV: Tensor | None


class _Draws:
    """Draws the tokens of several requests, position by position, without waiting for a GPU."""

    def __init__(self, calls: Sequence[DraftCall], positions: int, heads: ChainHeads, device: torch.device) -> None:
        self.calls, self.heads = calls, heads
        self.groups: list[_Alike] = []
        drawing = [r for r, call in enumerate(calls) if call.params.temperature > 0.0 or call.params.penalised]
        coupled = [call.noise is not None for call in calls]
        for noisy in (False, True):
            some = [r for r in drawing if coupled[r] == noisy]
            for params, places in alike([calls[r].params for r in some]).items():
                members = [some[place] for place in places]
                noises = [noise for r in members if (noise := calls[r].noise) is not None]
                seen_AV = SeenTokens.together([calls[r].seen for r in members], [()] * len(members))
                members_A = on_device(members, device)
                self.groups.append(_Alike(params, members, members_A, noises=noises, seen_AV=seen_AV))
        uniforms: list[list[float]] = []
        for call in calls:
            drawn = call.params.temperature > 0.0 and call.noise is None
            own = (positions if call.limit is None else min(call.limit, positions)) if drawn else 0
            uniforms.append([call.source.uniform() for _ in range(own)] + [0.0] * (positions - own))
        self.uniforms_RK = on_device(uniforms, device, torch.float64)
        self.ones_R = torch.ones(len(calls), dtype=torch.float64, device=device)
        self.rows: list[dict[int, Tensor]] = [{} for _ in calls]  # of sampled requests: p_k by position

    def draw(self, logits_RVd: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The tokens at position k, and the probabilities that they were drawn with, [R] each."""
        ids_Vd = self.heads.draft_ids_Vd
        index_R, first_R = logits_RVd.argmax(-1), self.ones_R
        for group in self.groups:
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
            if params.temperature > 0.0:
                for r, probs_Vd in zip(group.members, probs_AVd, strict=True):
                    self.rows[r][k] = probs_Vd
            if seen_AV is not None:
                tokens_A1 = (index_A if ids_Vd is None else ids_Vd[index_A])[:, None]
                seen_AV.scatter_add_(1, tokens_A1, torch.full_like(tokens_A1, IN_OUTPUT, dtype=seen_AV.dtype))
        return index_R if ids_Vd is None else ids_Vd[index_R], first_R

    def _positions(self, group: _Alike, k: int) -> list[int]:
        return [self.calls[r].position + k for r in group.members]

    def draft(
        self, r: int, tokens: list[int], firsts: list[float], confidences: list[float], min_confidence: float
    ) -> Draft:
        """The draft of request r from what was read of all K positions."""
        call, rows = self.calls[r], self.rows[r]
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
