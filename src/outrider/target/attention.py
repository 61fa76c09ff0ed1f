"""Compute tree attention: row t of a draft tree attends to the cache, its ancestors and itself, at its depth.

    parents   -1  0  0  1  1       slots     past  past+1  past+2  past+3  past+4
    depths     0  1  1  2  2       position  past + depth, for rotary embeddings and sliding windows

              0 1 2 3 4            Siblings share a position and do not see each other. Verification decides which rows
        row 0 x                    stay; their keys then move into the slots that follow the cache
        row 1 x x                  (`KVCache.keep_path`, `PagedKV.keep_paths`), without recomputation.
        row 2 x . x
        row 3 x x . x              Tree attention: SpecInfer, arXiv 2305.09781.
        row 4 x x . . x

Shapes: T new rows, N keys one forward sees, K kv heads, G queries per kv head, E head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Branches:
    """The tree attention mask: the depth of every row, and the rows that it sees, including itself."""

    depths_T: Tensor
    sees_TT: Tensor

    @staticmethod
    def of(parents: Sequence[int]) -> Branches:
        """Compute depths and mask from the parent of each row, -1 for the first row only."""
        assert all((parent == -1) == (t == 0) and parent < t for t, parent in enumerate(parents)), f"{list(parents)}"
        sees_TT = np.eye(len(parents), dtype=bool)
        for row, parent in enumerate(parents[1:], start=1):
            sees_TT[row] |= sees_TT[parent]
        return Branches(torch.from_numpy(sees_TT.sum(axis=1) - 1), torch.from_numpy(sees_TT))

    def visible(self, past: int, low: int = 0, window: int | None = None) -> Tensor:
        """Return the mask [T, past - low + T] bool over cached positions low .. past - 1 and the rows.

        Args:
            window: number of visible positions, including the row's; None: all.
        """
        rows = len(self.depths_T)
        visible_TN = torch.cat([torch.ones(rows, past - low, dtype=torch.bool), self.sees_TT], dim=1)
        if window is not None:
            position_T = past + self.depths_T
            position_N = torch.cat([torch.arange(low, past), position_T])
            visible_TN &= position_T[:, None] - position_N < window
        return visible_TN


def additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a bool mask to 0 or -inf once, because attention would convert it in every layer.

    Args:
        dtype: type of the queries. PyTorch's fused CPU kernel accepts a float32 mask for float64 queries and then masks
            wrongly, without an error.
    """
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, -torch.inf)


def lowest_visible(past: int, window: int | None) -> int:
    """Return the first position that any new row after `past` cached ones sees."""
    return 0 if window is None else max(0, past + 1 - window)


# ----------------------------------------------------------------------------
# Attention over folded rows: the G query heads of one key head become rows, so keys are never repeated.
#
#     q [1, H, T, E]  -- fold -->  [1, K, T * G, E]  -- attend over k, v [1, K, N, E] -- unfold -->  [1, H, T, E]
#
# Shapes: K kv heads, G queries per kv head, H = K * G, E head dim, T tokens, Q = T * G folded rows, N keys.
# ----------------------------------------------------------------------------


def fold(q: Tensor, K: int) -> Tensor:
    """Fold the query heads of a key head into rows, token by token: [1, H, T, E] -> [1, K, T * G, E]."""
    _, H, T, E = q.shape
    return q.reshape(1, K, H // K, T, E).transpose(2, 3).reshape(1, K, T * (H // K), E)


def unfold(folded: Tensor, groups: int) -> Tensor:
    """Invert `fold`: [1, K, T * G, E] -> [1, H, T, E]."""
    _, K, Q, E = folded.shape
    out = folded.view(1, K, Q // groups, groups, E)
    return out.transpose(1, 2).reshape(1, Q // groups, K * groups, E).transpose(1, 2)


def attend_folded(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    mask_11QN: Tensor | None,
    scale: float | None,
    softcap: float | None,
    sinks_H: Tensor | None,
) -> Tensor:
    """Compute attention of folded rows, [1, K, Q, E], with PyTorch's fused kernel, or explicitly with float32
    probabilities if there is a soft cap or sinks.
    """
    if softcap is None and sinks_H is None:
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask_11QN, scale=scale)
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


# ----------------------------------------------------------------------------
# Multi-head latent attention: a token keeps one latent c and a rotated part r, which all heads share.
#
#     key of head h      [W_h c ; r]        value of head h    U_h c
#     scores             [q ; q_r] [W_h c ; r]  =  [W_h^T q ; q_r] [c ; r]
#     output             sum_n p_n U_h c_n      =  U_h (sum_n p_n c_n)
#
# So heads can read the latents themselves, as keys and values of one kv head, without expanding them for each head:
# for few rows that is the far smaller work. Expanded, rows cost less each, which pays for a prompt's.
# Source: DeepSeek-V2, arXiv 2405.04434, section 2.1.
# Shapes: H heads, T rows, N key dim without and P with rotary positions, C latent dim, V value dim of a head.
# ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Latents:
    """How the heads of a layer read latents.

    Attributes:
        keys_HNC, values_HVC: W and U of every head.
        expand: converts latents [1, 1, S, C] and their rotated parts [1, 1, S, P] to keys and values of all heads.
    """

    keys_HNC: Tensor
    values_HVC: Tensor
    expand: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

    def queries(self, q: Tensor) -> Tensor:
        """Turn queries of keys [1, H, T, N + P] into those of latents, [1, H, T, C + P]."""
        N = self.keys_HNC.shape[1]
        return torch.cat([q[0, ..., :N] @ self.keys_HNC, q[0, ..., N:]], dim=2)[None]

    def outputs(self, out_THC: Tensor) -> Tensor:
        """Turn sums of latents into sums of values, [T, H, V]."""
        return (out_THC.transpose(0, 1) @ self.values_HVC.transpose(1, 2)).transpose(0, 1)
