"""anchor -> x_1 -> x_2 -> ... -> x_K,   x_k ~ p_k = warp(U_k + W2 l_k),   c_k = sigmoid(w^T [h_k; W1[x_{k-1}]])

The sequential half of a semi-autoregressive drafter (DSpark, arXiv 2607.05147): U_k and h_k come from one parallel
pass, and only this walk is serial. Each p_k is a plain, exact distribution; that keeps verification lossless.
Shapes: K block positions, V target vocab, Vd draft vocab, H draft hidden, r rank.
"""

import torch
from torch import Tensor

from outrider.drafters.base import Proposal
from outrider.drafters.sequential import ConfidenceHead, VanillaMarkov
from outrider.sampling import RandomSource, SamplingParams, SeenTokens, warp


def sample_chain(
    base_logits_KVd: Tensor,
    hidden_KH: Tensor,
    anchor: int,
    head: VanillaMarkov | None,
    confidence: ConfidenceHead | None,
    params: SamplingParams,
    seen: SeenTokens,
    source: RandomSource,
    draft_ids_Vd: Tensor | None = None,
) -> Proposal:
    """Draw one block left to right. `draft_ids_Vd` maps a reduced draft vocabulary into the target's."""
    block, draft_vocab = base_logits_KVd.shape
    assert draft_ids_Vd is not None or draft_vocab == seen.vocab_size, (
        f"{draft_vocab} draft logits for a vocabulary of {seen.vocab_size} need draft_ids_Vd"
    )
    state = head.initial_state(1) if head is not None else None
    seen_V = seen.with_tokens()
    tokens: list[int] = []
    probs: list[Tensor] = []
    confidence_logits: list[Tensor] = []
    previous = anchor
    for k in range(block):
        hidden_1H = hidden_KH[k : k + 1]
        logits_Vd, embedding_1r = base_logits_KVd[k], None
        if head is not None:
            prev_token_1 = torch.tensor([previous], device=hidden_KH.device)
            latent_1r, embedding_1r, state = head.step(prev_token_1, hidden_1H, state)
            logits_Vd = logits_Vd + head.bias(latent_1r)[0]
        if confidence is not None:  # before x_k is drawn: c_k must not know it
            confidence_logits.append(confidence(hidden_1H, embedding_1r))
        seen_Vd = seen_V if seen_V is None or draft_ids_Vd is None else seen_V[draft_ids_Vd]
        probs_Vd = warp(logits_Vd, params, seen_Vd)
        index = source.choose(probs_Vd)
        previous = index if draft_ids_Vd is None else int(draft_ids_Vd[index])
        if seen_V is not None:
            seen_V[previous] = True
        tokens.append(previous)
        probs.append(probs_Vd)
    probs_KV = torch.stack(probs)
    if draft_ids_Vd is not None:
        ids_KVd = draft_ids_Vd.expand(block, -1)  # scatter_ is twice as quick here as index_copy_
        probs_KV = probs_KV.new_zeros(block, seen.vocab_size).scatter_(1, ids_KVd, probs_KV)
    confidences = torch.cat(confidence_logits).sigmoid().tolist() if confidence_logits else []
    return Proposal(tokens, probs_KV, confidences)
