"""anchor -> x_1 -> x_2 -> ... -> x_K,   x_k ~ p_k = warp(U_k + W2 l_k),   c_k = sigmoid(w^T [h_k; W1[x_{k-1}]] / T_k)

The sequential half of a semi-autoregressive drafter (DSpark, arXiv 2607.05147): U_k and h_k come from one parallel
pass, and only this walk is serial. Each p_k is a plain, exact distribution; that keeps verification lossless.
Shapes: K block positions, V target vocab, Vd draft vocab, H draft hidden, r rank.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from outrider.drafters.base import Proposal
from outrider.drafters.sequential import ConfidenceHead, VanillaMarkov
from outrider.sampling import RandomSource, SamplingParams, SeenTokens, warp


def sample_chain(
    base_logits: Callable[[], Tensor],
    hidden_KH: Tensor,
    anchor: int,
    head: VanillaMarkov | None,
    confidence: ConfidenceHead | None,
    params: SamplingParams,
    seen: SeenTokens,
    source: RandomSource,
    draft_ids_Vd: Tensor | None = None,
    floor: float = 0.0,
    temperatures: Sequence[float] | None = None,
) -> Proposal:
    """Draw one block left to right, up to the first position whose confidence is below `floor`.

    Stopping early is lossless for the reason truncating is: c_k is known before x_k is drawn. It is also cheaper.

    Args:
        base_logits: gives U [K, Vd]; called only if a token is drawn at all.
        draft_ids_Vd: maps a reduced draft vocabulary into the target's.
        floor: compared with the confidences that are handed over, after the temperatures.
        temperatures: T_k per position, for calibrated confidences; all 1 by default.
    """
    state = head.initial_state(1) if head is not None else None
    seen_V = seen.with_tokens()
    base_logits_KVd: Tensor | None = None
    tokens: list[int] = []
    probs: list[Tensor] = []
    confidences: list[float] = []
    previous = anchor
    for hidden_1H in hidden_KH.split(1):
        latent_1r = embedding_1r = None
        if head is not None:
            prev_token_1 = torch.tensor([previous], device=hidden_KH.device)
            latent_1r, embedding_1r, state = head.step(prev_token_1, hidden_1H, state)
        if confidence is not None:  # before x_k is drawn: c_k must not know it
            certainty_logit = confidence(hidden_1H, embedding_1r)
            if temperatures is not None:
                certainty_logit = certainty_logit / temperatures[len(tokens)]
            certainty = certainty_logit.sigmoid().item()
            if certainty < floor:
                break
            confidences.append(certainty)
        if base_logits_KVd is None:
            base_logits_KVd = base_logits()
            assert base_logits_KVd.shape[1] == (seen.vocab_size if draft_ids_Vd is None else len(draft_ids_Vd))
        logits_Vd = base_logits_KVd[len(tokens)]
        if head is not None and latent_1r is not None:
            logits_Vd = logits_Vd + head.bias(latent_1r)[0]
        seen_Vd = seen_V if seen_V is None or draft_ids_Vd is None else seen_V[draft_ids_Vd]
        probs_Vd = warp(logits_Vd, params, seen_Vd)
        index = source.choose(probs_Vd)
        previous = index if draft_ids_Vd is None else int(draft_ids_Vd[index])
        if seen_V is not None:
            seen_V[previous] = True
        tokens.append(previous)
        probs.append(probs_Vd)
    if not tokens:
        return Proposal([], hidden_KH.new_empty(0, seen.vocab_size), [])
    probs_KV = torch.stack(probs)
    if draft_ids_Vd is not None:
        ids_KVd = draft_ids_Vd.expand(len(tokens), -1)  # scatter_ is twice as quick here as index_copy_
        probs_KV = probs_KV.new_zeros(len(tokens), seen.vocab_size).scatter_(1, ids_KVd, probs_KV)
    return Proposal(tokens, probs_KV, confidences)
