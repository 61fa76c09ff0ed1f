"""The sampling chain: draw draft tokens left to right, for any number of requests at once.

    anchor -> x_1 -> x_2 -> ... -> x_K,   x_k ~ p_k = warp(U_k + W2 l_k),   c_k = sigmoid(s_k / T_k + b_k)

`sample_chain`: h_1..h_K come from one parallel pass, only the sampling is serial (DSpark, arXiv 2607.05147).
`sample_steps`: h_k itself depends on x_{k-1}, and is computed position by position (EAGLE, arXiv 2401.15077).
s_k = w^T [h_k; W1[x_{k-1}]], or what an estimator computes from p_k. Each p_k is the exact distribution that x_k was
drawn from; that keeps verification lossless.
Shapes: R requests, A those still drawing, K block positions, V target vocab, Vd draft vocab, C tokens that logits are
about, H draft hidden, r rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from outrider.drafters.base import DraftCall, FailedCall, drawing_for
from outrider.drafters.draft import Draft, Siblings, over_vocabulary
from outrider.drafters.heads import ChainHeads
from outrider.sampling import IN_OUTPUT, SamplingParams, choose_rows, likeliest, not_finite, warp
from outrider.utils.measure import on_device

Step = Callable[[int, list[int]], Tensor]  # (k from 0, x_{k-1} of every request) -> h_k [R, H] of every request


@dataclass
class _Chain:
    """The chain of one request while it is drawn."""

    call: DraftCall
    previous: int
    seen_V: Tensor | None
    tokens: list[int] = field(default_factory=list)
    siblings: dict[int, Siblings] = field(default_factory=dict)  # of drawn tokens, by the position before
    confidences: list[float] = field(default_factory=list)


def _rows_of(x_R: Tensor, active: Sequence[int]) -> Tensor:
    """The rows `active`, which ascend; all of them are not copied."""
    return x_R if len(active) == len(x_R) else x_R[active]


class Rows(Protocol):
    """Hidden states and logits of each position k, counted from 0; asked for in order."""

    def hidden(self, k: int, previous: list[int]) -> Tensor:
        """h_k [R, H] of all requests, whose last tokens are `previous`."""
        ...

    def logits(self, k: int, active: list[int]) -> Tensor:
        """U_k [A, C] of the requests that are `active`; never one that was not at k - 1."""
        ...

    def ids(self, k: int, active: list[int]) -> Tensor | None:
        """The target ids [A, C] that the logits are about; None: the draft vocabulary, C = Vd."""
        return None


class BlockRows(Rows):
    """Rows of a block whose hidden states are known at once: their logits are one product, when first asked for."""

    def __init__(self, base_logits: Callable[[Tensor], Tensor], hidden_RKH: Tensor) -> None:
        self.base_logits, self.hidden_RKH = base_logits, hidden_RKH
        self.rows_of: dict[int, int] = {}  # request -> its rows of the base logits
        self.base_NKVd: Tensor | None = None

    def hidden(self, k: int, previous: list[int]) -> Tensor:
        return self.hidden_RKH[:, k]

    def logits(self, k: int, active: list[int]) -> Tensor:
        if self.base_NKVd is None:
            self.rows_of = {r: n for n, r in enumerate(active)}
            base = self.base_logits(_rows_of(self.hidden_RKH, active).flatten(0, 1))
            self.base_NKVd = base.view(len(active), self.hidden_RKH.shape[1], -1)
        return _rows_of(self.base_NKVd[:, k], [self.rows_of[r] for r in active])


class _Steps(Rows):
    """Rows whose hidden states are computed one position after the other."""

    def __init__(self, base_logits: Callable[[Tensor], Tensor], step: Step) -> None:
        self.base_logits, self.step = base_logits, step

    def hidden(self, k: int, previous: list[int]) -> Tensor:
        self.hidden_RH = self.step(k, previous)
        return self.hidden_RH

    def logits(self, k: int, active: list[int]) -> Tensor:
        return self.base_logits(_rows_of(self.hidden_RH, active))


def sample_chain(
    base_logits: Callable[[Tensor], Tensor],
    hidden_RKH: Tensor,
    calls: Sequence[DraftCall],
    heads: ChainHeads,
    min_confidence: float = 0.0,
) -> list[Draft]:
    """Draw one block per request left to right, up to the first position whose confidence is below `min_confidence`.

    Stopping early is lossless for the reason truncating is: c_k is known before x_k is drawn. It is also cheaper.

    Args:
        base_logits: rows of hidden states [N, H] -> U [N, Vd]; called once at most for the requests that draw a token,
            on a GPU once for those with a constraint and once for the others.
        min_confidence: compared with the confidences that are handed over, after the temperatures.
    """
    free = [r for r, call in enumerate(calls) if hidden_RKH.is_cuda and call.constraint is None]
    found: dict[int, Draft] = {}
    for members, sample in ((free, _sample_on_gpu), ([r for r in range(len(calls)) if r not in free], _sample_block)):
        if members:
            own_RKH = hidden_RKH
            if len(members) < len(calls):
                own_RKH = hidden_RKH[on_device(members, hidden_RKH.device)]
            own = [calls[r] for r in members]
            drafts = sample(base_logits, own_RKH, own, heads=heads, min_confidence=min_confidence)
            found.update(zip(members, drafts, strict=True))
    return [found[r] for r in range(len(calls))]


def _sample_block(
    base_logits: Callable[[Tensor], Tensor],
    hidden_RKH: Tensor,
    calls: Sequence[DraftCall],
    heads: ChainHeads,
    min_confidence: float,
) -> list[Draft]:
    """As `sample_chain`, position by position."""
    rows = BlockRows(base_logits, hidden_RKH)
    return sample_rows(rows, hidden_RKH.shape[1], calls, heads=heads, min_confidence=min_confidence)


def sample_steps(
    base_logits: Callable[[Tensor], Tensor],
    step: Step,
    steps: int,
    calls: Sequence[DraftCall],
    heads: ChainHeads,
    min_confidence: float = 0.0,
) -> list[Draft]:
    """As `sample_chain`, with hidden states that depend on the tokens drawn so far.

    Args:
        base_logits: rows of hidden states [A, H] -> U [A, Vd]; called at every position.
        step: called with k = 0, 1, .. while a request draws; requests that have stopped are computed too.
        steps: most positions of any request.
    """
    return sample_rows(_Steps(base_logits, step), steps, calls, heads=heads, min_confidence=min_confidence)


def sample_rows(
    rows: Rows, steps: int, calls: Sequence[DraftCall], heads: ChainHeads, min_confidence: float = 0.0
) -> list[Draft]:
    """As `sample_chain` and `sample_steps`, with hidden states and logits from `rows`."""
    head = heads.sequential
    chains = [_Chain(call, call.anchor, call.seen.with_tokens()) for call in calls]
    state = head.initial_state(len(calls)) if head is not None else None
    temperatures = [call.params.temperature for call in calls]
    active = list(range(len(calls)))
    for k in range(steps):
        active = [r for r in active if chains[r].call.limit is None or k < (chains[r].call.limit or 0)]
        if not active:
            break
        previous = [chain.previous for chain in chains]
        hidden_RH = rows.hidden(k, previous)
        latent_Rr = embedding_Rr = None
        if head is not None:  # requests that have stopped are computed too: fewer rows cost the same
            previous_R = torch.tensor(previous, device=hidden_RH.device)
            latent_Rr, embedding_Rr, state = head.step(previous_R, hidden_RH, state)
        if heads.confidence is not None:  # before x_k is drawn: c_k must not know it
            certain_R = heads.calibrated(heads.confidence(hidden_RH, embedding_Rr), k, temperatures).tolist()
            active = [r for r in active if certain_R[r] >= min_confidence]
            for r in active:
                chains[r].confidences.append(certain_R[r])
        if not active:
            break
        logits_AC = rows.logits(k, active)
        if head is not None and latent_Rr is not None:
            logits_AC = logits_AC + head.bias(_rows_of(latent_Rr, active))
        if heads.estimates:  # knows p_k, not yet x_k
            certain_A = heads.estimated(logits_AC, k, [temperatures[r] for r in active]).tolist()
            kept = [a for a, certain in enumerate(certain_A) if certain >= min_confidence]
            for a in kept:
                chains[active[a]].confidences.append(certain_A[a])
            active, logits_AC = [active[a] for a in kept], logits_AC[kept]
            if not active:
                break
        ids_AC = rows.ids(k, active)
        ids = [heads.draft_ids_Vd] * len(active) if ids_AC is None else ids_AC
        _draw([chains[r] for r in active], logits_AC, ids, vocab_size=heads.vocab_size)
    return [Draft.chain(chain.tokens, chain.siblings, chain.confidences) for chain in chains]


# ----------------------------------------------------------------------------
# The same chain on a GPU: nothing is read before its last position, and then all requests are read at once.
#
# Every request draws at every position. What lies behind its limit, or from its first low confidence on, is cut when it
# is read: drawing it changed nothing before it. Each position up to the request's limit takes one uniform number of its
# source, however long the drafts of other requests are: its text must not depend on them.
# ----------------------------------------------------------------------------


def _sample_on_gpu(
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


def _draw(chains: Sequence[_Chain], logits_AC: Tensor, ids: Sequence[Tensor | None] | Tensor, vocab_size: int) -> None:
    """Draw the next token of each chain, among its `ids` [C]; None: among all tokens."""
    greedy = [chain.call.params.temperature == 0.0 and chain.seen_V is None for chain in chains]
    tops = likeliest(logits_AC) if any(greedy) else [0] * len(chains)
    for chain, logits_C, ids_C, top, is_greedy in zip(chains, logits_AC, ids, tops, greedy, strict=True):
        if chain.call.constraint is not None:
            with drawing_for(chain.call):
                logits_C = chain.call.constrained(logits_C, ids_C, chain.tokens)
            top = int(logits_C.argmax())
        if is_greedy:  # one-hot: nothing is drawn
            index = top
        else:
            seen_C = chain.seen_V if chain.seen_V is None or ids_C is None else chain.seen_V[ids_C]
            with drawing_for(chain.call):
                probs_C = warp(logits_C, chain.call.params, seen_C)
                index = _choose(chain, probs_C, ids_C)
            row = partial(over_vocabulary, probs_C, ids_C, vocab_size)
            chain.siblings[len(chain.tokens) - 1] = Siblings(row, first=probs_C[index].item())
        chain.previous = index if ids_C is None else int(ids_C[index])
        if chain.seen_V is not None:
            chain.seen_V[chain.previous] += IN_OUTPUT
        chain.tokens.append(chain.previous)


def _choose(chain: _Chain, probs_C: Tensor, ids_C: Tensor | None) -> int:
    call = chain.call
    if call.noise is None:
        return call.source.choose(probs_C)
    return call.noise.pick(probs_C, call.position + len(chain.tokens), ids_C)
