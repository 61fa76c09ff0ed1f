"""The sampling chain on a GPU: nothing is read before its last position, and then all requests are read at once.

Every request draws at every position. Positions after its limit, or from its first low confidence on, are cut when the
draft is read: drawing them changed nothing before them. Each position up to the request's limit takes one uniform
number of its source, however long the drafts of other requests are: its text must not depend on them.
Shapes: R requests, A those that are warped together, K block positions, V target vocab, Vd draft vocab, H draft hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from outrider.drafters.base import DraftCall, FailedCall
from outrider.drafters.confidence import ChainHeads
from outrider.drafters.draft import Draft, Siblings, over_vocabulary
from outrider.sampling import IN_OUTPUT, SamplingParams, choose_rows, not_finite, warp
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


class _Draws:
    """Draws the tokens of several requests, position by position, without waiting for a GPU."""

    def __init__(self, calls: Sequence[DraftCall], positions: int, heads: ChainHeads, device: torch.device) -> None:
        self.calls, self.heads = calls, heads
        self.seen = [call.seen.with_tokens() for call in calls]
        alike: dict[tuple[SamplingParams, bool], list[int]] = {}  # requests that are warped together
        uniforms: list[list[float]] = []
        for r, call in enumerate(calls):
            if call.params.temperature > 0.0 or self.seen[r] is not None:
                alike.setdefault((replace(call.params, seed=None), call.noise is None), []).append(r)
            drawn = call.params.temperature > 0.0 and call.noise is None
            own = (positions if call.limit is None else min(call.limit, positions)) if drawn else 0
            uniforms.append([call.source.uniform() for _ in range(own)] + [0.0] * (positions - own))
        self.groups = [(params, on_device(members, device), members) for (params, _), members in alike.items()]
        self.uniforms_RK = on_device(uniforms, device, torch.float64)
        self.ones_R = torch.ones(len(calls), dtype=torch.float64, device=device)
        self.rows: list[dict[int, Tensor]] = [{} for _ in calls]  # of sampled requests: p_k by position

    def draw(self, logits_RVd: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The tokens at position k, and the probabilities that they were drawn with, [R] each."""
        ids_Vd = self.heads.draft_ids_Vd
        index_R, first_R = logits_RVd.argmax(-1), self.ones_R
        for params, members_A, members in self.groups:
            seen_AV = torch.stack([x for r in members if (x := self.seen[r]) is not None]) if params.penalised else None
            if seen_AV is not None and ids_Vd is not None:
                seen_AV = seen_AV[:, ids_Vd]
            probs_AVd = warp(logits_RVd[members_A], params, seen_AV)
            if params.temperature == 0.0:
                index_A = probs_AVd.argmax(-1)
            elif self.calls[members[0]].noise is None:
                index_A, _ = choose_rows(probs_AVd, self.uniforms_RK[members_A, k])
            else:
                index_A = torch.stack(
                    [self._coupled(r, probs_Vd, k) for r, probs_Vd in zip(members, probs_AVd, strict=True)]
                )
            index_R = index_R.index_copy(0, members_A, index_A)
            first_R = first_R.index_copy(0, members_A, probs_AVd.gather(1, index_A[:, None])[:, 0].double())
            if params.temperature > 0.0:
                for r, probs_Vd in zip(members, probs_AVd, strict=True):
                    self.rows[r][k] = probs_Vd
        tokens_R = index_R if ids_Vd is None else ids_Vd[index_R]
        for r, seen_V in enumerate(self.seen):
            if seen_V is not None:
                seen_V.index_add_(0, tokens_R[r : r + 1], torch.full_like(seen_V[:1], IN_OUTPUT))
        return tokens_R, first_R

    def _coupled(self, r: int, probs_Vd: Tensor, k: int) -> Tensor:
        call = self.calls[r]
        assert call.noise is not None, "coupled sampling without noise"
        return call.noise.pick_tensor(probs_Vd, call.position + k, self.heads.draft_ids_Vd)

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
            row = partial(over_vocabulary, rows[k], self.heads.draft_ids_Vd, self.heads.vocab_size)
            siblings[k - 1] = Siblings(row, first=firsts[k])
        return Draft.chain(tokens[:count], siblings, confidences[:count])
