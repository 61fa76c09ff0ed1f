"""anchor -> x_1 -> x_2 -> ... -> x_K,   x_k ~ p_k = warp(U_k + W2 l_k),   c_k = sigmoid(s_k / T_k + b_k)

The sequential half of a semi-autoregressive drafter (DSpark, arXiv 2607.05147), for any number of requests at once: U_k
and h_k come from one parallel pass, and only this walk is serial. Each p_k is a plain, exact distribution; that keeps
verification lossless. s_k = w^T [h_k; W1[x_{k-1}]], or what an estimator reads off p_k.
Shapes: R requests, K block positions, V target vocab, Vd draft vocab, H draft hidden, r rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outrider.drafters.base import DraftCall, Proposal
from outrider.drafters.estimator import Estimator
from outrider.drafters.sequential import ConfidenceHead, VanillaMarkov
from outrider.sampling import warp


@dataclass(frozen=True)
class ChainHeads:
    """What a walk reads besides hidden states.

    `draft_ids_Vd` maps a reduced draft vocabulary into the target's (None: the same). Confidences come from the
    `confidence` head or, where there is none, from an `estimator`; `temperatures` T_k and `offsets` b_k per position
    calibrate them (None: all 1, all 0).
    """

    vocab_size: int
    sequential: VanillaMarkov | None = None
    confidence: ConfidenceHead | None = None
    draft_ids_Vd: Tensor | None = None
    temperatures: Sequence[float] | None = None
    offsets: Sequence[float] | None = None
    estimator: Estimator | None = None

    @property
    def confident(self) -> bool:
        """Whether proposals come with confidences."""
        return self.confidence is not None or self.estimator is not None

    def calibrated(self, logit_N: Tensor, k: int) -> Tensor:
        """c_k [N] at position k, counted from 0."""
        temperature = 1.0 if self.temperatures is None else self.temperatures[k]
        offset = 0.0 if self.offsets is None else self.offsets[k]
        return (logit_N / temperature + offset).sigmoid()


@dataclass
class _Walk:
    """One request on its way through the block."""

    call: DraftCall
    previous: int
    seen_V: Tensor | None
    device: torch.device
    tokens: list[int] = field(default_factory=list)
    drafted_with: list[float] = field(default_factory=list)
    rows: list[Tensor | None] = field(default_factory=list)  # p_k [Vd]; None where it is one-hot at the token
    confidences: list[float] = field(default_factory=list)


def sample_chain(
    base_logits: Callable[[Tensor], Tensor],
    hidden_RKH: Tensor,
    calls: Sequence[DraftCall],
    heads: ChainHeads,
    floor: float = 0.0,
) -> list[Proposal]:
    """Draw one block per request left to right, up to the first position whose confidence is below `floor`.

    Stopping early is lossless for the reason truncating is: c_k is known before x_k is drawn. It is also cheaper.

    Args:
        base_logits: rows of hidden states [N, H] -> U [N, Vd]; called once at most, for the requests that draw a token.
        floor: compared with the confidences that are handed over, after the temperatures.
    """
    R, K, _ = hidden_RKH.shape
    head = heads.sequential
    walks = [_Walk(call, call.anchor, call.seen.with_tokens(), hidden_RKH.device) for call in calls]
    state = head.initial_state(R) if head is not None else None
    active = list(range(R))
    rows_of: dict[int, int] = {}  # request -> its rows of the base logits
    base_NKVd: Tensor | None = None
    for k in range(K):
        active = [r for r in active if walks[r].call.limit is None or k < (walks[r].call.limit or 0)]
        latent_Rr = embedding_Rr = None
        if head is not None:  # requests that have stopped walk along: fewer rows cost the same
            previous_R = torch.tensor([walk.previous for walk in walks], device=hidden_RKH.device)
            latent_Rr, embedding_Rr, state = head.step(previous_R, hidden_RKH[:, k], state)
        if heads.confidence is not None:  # before x_k is drawn: c_k must not know it
            certain_R = heads.calibrated(heads.confidence(hidden_RKH[:, k], embedding_Rr), k).tolist()
            active = [r for r in active if certain_R[r] >= floor]
            for r in active:
                walks[r].confidences.append(certain_R[r])
        if not active:
            break
        if base_NKVd is None:
            rows_of = {r: n for n, r in enumerate(active)}
            base_NKVd = base_logits(hidden_RKH[active].flatten(0, 1)).view(len(active), K, -1)
        logits_AVd = base_NKVd[[rows_of[r] for r in active], k]
        if head is not None and latent_Rr is not None:
            logits_AVd = logits_AVd + head.bias(latent_Rr[active])
        if heads.confidence is None and heads.estimator is not None:  # knows p_k, not yet x_k
            certain_A = heads.calibrated(heads.estimator(logits_AVd, k), k).tolist()
            kept = [a for a, certain in enumerate(certain_A) if certain >= floor]
            for a in kept:
                walks[active[a]].confidences.append(certain_A[a])
            active, logits_AVd = [active[a] for a in kept], logits_AVd[kept]
            if not active:
                break
        _draw([walks[r] for r in active], logits_AVd, heads.draft_ids_Vd)
    return [_proposal(walk, heads) for walk in walks]


def _draw(walks: Sequence[_Walk], logits_AVd: Tensor, draft_ids_Vd: Tensor | None) -> None:
    """The next token of each walk."""
    greedy = [walk.call.params.temperature == 0.0 and walk.seen_V is None for walk in walks]
    likeliest = logits_AVd.argmax(-1).tolist() if any(greedy) else [0] * len(walks)
    for walk, logits_Vd, top, is_greedy in zip(walks, logits_AVd, likeliest, greedy, strict=True):
        if is_greedy:  # one-hot: nothing is drawn
            index, probability, row = top, 1.0, None
        else:
            seen_Vd = walk.seen_V if walk.seen_V is None or draft_ids_Vd is None else walk.seen_V[draft_ids_Vd]
            row = warp(logits_Vd, walk.call.params, seen_Vd)
            index = _choose(walk, row, draft_ids_Vd)
            probability = row[index].item()
        walk.previous = index if draft_ids_Vd is None else int(draft_ids_Vd[index])
        if walk.seen_V is not None:
            walk.seen_V[walk.previous] = True
        walk.tokens.append(walk.previous)
        walk.drafted_with.append(probability)
        walk.rows.append(row)


def _choose(walk: _Walk, probs_Vd: Tensor, draft_ids_Vd: Tensor | None) -> int:
    call = walk.call
    if call.noise is None:
        return call.source.choose(probs_Vd)
    return call.noise.pick(probs_Vd, call.position + len(walk.tokens), draft_ids_Vd)


def _proposal(walk: _Walk, heads: ChainHeads) -> Proposal:
    def row(k: int) -> Tensor:
        probs_Vd, ids_Vd = walk.rows[k], heads.draft_ids_Vd
        if probs_Vd is not None and ids_Vd is None:
            return probs_Vd
        if probs_Vd is None:
            one_hot_V = torch.zeros(heads.vocab_size, device=walk.device)
            one_hot_V[walk.tokens[k]] = 1.0
            return one_hot_V
        assert ids_Vd is not None
        return probs_Vd.new_zeros(heads.vocab_size).scatter_(0, ids_Vd, probs_Vd)

    return Proposal(walk.tokens, walk.drafted_with, row, walk.confidences)
