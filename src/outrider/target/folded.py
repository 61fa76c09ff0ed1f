"""Attention over folded rows: the G query heads of one key head become rows, so keys are never repeated.

    q [1, H, T, E]  -- fold -->  [1, K, T * G, E]  -- attend over k, v [1, K, N, E] -- unfold -->  [1, H, T, E]

Shapes: K kv heads, G queries per kv head, H = K * G, E head dim, T tokens, Q = T * G folded rows, N keys.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def fold(q: torch.Tensor, K: int) -> torch.Tensor:
    """[1, H, T, E] -> [1, K, T * G, E]: the query heads of a key head become rows, token by token."""
    _, H, T, E = q.shape
    return q.reshape(1, K, H // K, T, E).transpose(2, 3).reshape(1, K, T * (H // K), E)


def unfold(folded: torch.Tensor, groups: int) -> torch.Tensor:
    """The way back, [1, H, T, E]."""
    _, K, Q, E = folded.shape
    out = folded.view(1, K, Q // groups, groups, E)
    return out.transpose(1, 2).reshape(1, Q // groups, K * groups, E).transpose(1, 2)


def attend_folded(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask_11QN: torch.Tensor | None,
    scale: float | None,
    softcap: float | None,
    sinks_H: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of folded rows, [1, K, Q, E]; fused where there is neither soft cap nor sinks."""
    if softcap is None and sinks_H is None:
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask_11QN, scale=scale)
    return _attend_in_full(q, keys, values, mask_11QN, scale, softcap, sinks_H)


def _attend_in_full(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask_11QN: torch.Tensor | None,
    scale: float | None,
    softcap: float | None,
    sinks_H: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of one span with what fused kernels do not offer; probabilities in float32. [1, K, Q, E]."""
    _, K, Q, E = q.shape
    scores = (q @ keys.transpose(-1, -2)) * (E**-0.5 if scale is None else scale)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask_11QN is not None:
        scores = scores + mask_11QN
    if sinks_H is not None:
        sinks = sinks_H.view(1, K, -1).repeat(1, 1, Q * K // len(sinks_H))[..., None]  # rows are (token, query of K)
        scores = torch.cat([scores, sinks.to(scores.dtype)], dim=-1)
    probabilities = scores.softmax(-1, dtype=torch.float32)[..., : keys.shape[2]]
    return probabilities.to(values.dtype) @ values
