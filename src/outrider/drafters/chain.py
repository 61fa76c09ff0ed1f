"""The sampling chain draws draft tokens left to right, for any number of requests at once.

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
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from outrider.drafters.base import DraftCall, drawing_for
from outrider.drafters.chain_gpu import sample_on_gpu
from outrider.drafters.confidence import ChainHeads
from outrider.drafters.draft import Draft, DraftRow, Siblings
from outrider.drafters.graphs import BlockGraphs
from outrider.sampling import IN_OUTPUT, likeliest, warp
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
    graphs: BlockGraphs | None = None,
) -> list[Draft]:
    """Draw one block per request left to right, up to the first position whose confidence is below `min_confidence`.

    Stopping early is lossless for the reason truncating is: c_k is known before x_k is drawn. It is also cheaper.

    Args:
        base_logits: rows of hidden states [N, H] -> U [N, Vd]; called once at most for the requests that draw a token,
            on a GPU once for those with a constraint and once for the others.
        min_confidence: compared with the confidences that are handed over, after the temperatures.
        graphs: of a drafter on a GPU whose chains may be captured.
    """
    # The chain is written twice. This file's reads each position before the next: it stops early, which on a CPU saves
    # products with the vocabulary, and constraints need the tokens. On a GPU every read makes the host wait, and a step
    # may wait 5 times (tests/gpu/test_decoding.py): drafters/chain_gpu.py draws all positions and reads once.
    free = [r for r, call in enumerate(calls) if hidden_RKH.is_cuda and call.constraint is None]
    drafts: dict[int, Draft] = {}
    on_gpu = partial(sample_on_gpu, graphs=graphs)
    for members, sample in ((free, on_gpu), ([r for r in range(len(calls)) if r not in free], _sample_block)):
        if members:
            own_RKH = hidden_RKH
            if len(members) < len(calls):
                own_RKH = hidden_RKH[on_device(members, hidden_RKH.device)]
            own = [calls[r] for r in members]
            sampled = sample(base_logits, own_RKH, own, heads=heads, min_confidence=min_confidence)
            drafts.update(zip(members, sampled, strict=True))
    return [drafts[r] for r in range(len(calls))]


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
            row = DraftRow(probs_C, ids_C, vocab_size)
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
