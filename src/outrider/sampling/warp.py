"""logits --penalty--> --/T--> --top-k--> --softmax--> --top-p--> --min-p--> --normalise--> probs

Semantics are those of Hugging Face's logits processors, in their order. What is kept never depends on how ties are
broken: top-k and top-p keep every token as likely as the last one kept. At temperature 0 the answer is one-hot at
`torch.argmax`, the lowest index on ties. Shapes: K rows (any leading dimensions), V vocab.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import BoolTensor, Tensor

from outrider.sampling.params import SamplingParams

# A nucleus rarely holds more tokens than this; looking for it here first avoids sorting the vocabulary.
_NUCLEUS_GUESS = 512


def warp(logits_KV: Tensor, params: SamplingParams, seen_KV: BoolTensor | Tensor | None = None) -> Tensor:
    """The distribution(s) that tokens are drawn from; float32 or float64, as the logits."""
    assert logits_KV.dtype in (torch.float32, torch.float64), f"warp needs float32 or float64, not {logits_KV.dtype}"
    if params.repetition_penalty != 1.0:
        assert seen_KV is not None, "a repetition penalty needs the mask of the tokens so far"
        penalty = params.repetition_penalty
        penalised_KV = torch.where(logits_KV < 0, logits_KV * penalty, logits_KV / penalty)
        logits_KV = torch.where(seen_KV, penalised_KV, logits_KV)
    if params.temperature == 0.0:
        return torch.zeros_like(logits_KV).scatter_(-1, logits_KV.argmax(-1, keepdim=True), 1.0)
    # The maximum goes first: at a tiny temperature logits / T overflows, (logits - max) / T does not.
    logits_KV = (logits_KV - logits_KV.amax(-1, keepdim=True)) / params.temperature
    if 0 < params.top_k < logits_KV.shape[-1]:
        last_kept_K1 = logits_KV.topk(params.top_k, dim=-1).values[..., -1:]
        logits_KV = logits_KV.masked_fill(logits_KV < last_kept_K1, -torch.inf)
    probs_KV = logits_KV.softmax(-1)
    if params.top_p == 1.0 and params.min_p == 0.0:
        return probs_KV
    if params.top_p < 1.0:
        probs_KV = probs_KV.masked_fill(probs_KV < _nucleus_floor(probs_KV, params.top_p), 0.0)
    if params.min_p > 0.0:
        probs_KV = probs_KV.masked_fill(probs_KV < params.min_p * probs_KV.amax(-1, keepdim=True), 0.0)
    return probs_KV / probs_KV.sum(-1, keepdim=True)


def _nucleus_floor(probs_KV: Tensor, top_p: float) -> Tensor:
    """The smallest probability kept: a token stays while the mass of the likelier ones is < top_p."""
    vocab = probs_KV.shape[-1]
    for size in (min(_NUCLEUS_GUESS, vocab), vocab):
        sorted_KS = probs_KV.topk(size, dim=-1).values
        before_KS = sorted_KS.cumsum(-1) - sorted_KS
        if size == vocab or bool((before_KS[..., -1] >= top_p).all()):
            break
    kept_K1 = (before_KS < top_p).sum(-1, keepdim=True)
    return sorted_KS.gather(-1, kept_K1 - 1)


class SeenTokens:
    """The mask of the tokens so far that a repetition penalty reads; costs nothing while the penalty is 1."""

    def __init__(
        self,
        vocab_size: int,
        repetition_penalty: float = 1.0,
        tokens: Iterable[int] = (),
        device: torch.device | str | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self._mask_V: Tensor | None = None
        if repetition_penalty != 1.0:
            self._mask_V = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            self._mask_V[torch.tensor(list(tokens), dtype=torch.long, device=device)] = True

    def add(self, token: int) -> None:
        if self._mask_V is not None:
            self._mask_V[token] = True

    def with_tokens(self, tokens: Sequence[int] = ()) -> Tensor | None:
        """A fresh mask of everything seen and `tokens`, or None when no penalty reads it."""
        if self._mask_V is None:
            return None
        mask_V = self._mask_V.clone()
        if tokens:
            mask_V[torch.tensor(tokens, dtype=torch.long, device=mask_V.device)] = True
        return mask_V
