"""Attention over pages, written down densely, request by request: the reference of target/paged_attention.py."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from outrider.target.paged_attention import Reader


def visible_of(reader: Reader, window: int | None, drafts: bool) -> tuple[Tensor, Tensor]:
    """The positions that are read, and which of them each row sees, [rows, positions]."""
    low = max(0, reader.end - reader.slots) if reader.slots else 0
    place_N = np.arange(low, reader.end)
    own_N, row_T1 = place_N - reader.past, np.arange(len(reader.positions))[:, None]
    chain_TN = own_N <= row_T1
    sees_T1 = np.full(row_T1.shape, -1) if reader.sees_T is None else reader.sees_T[:, None]
    bits_TN = (sees_T1 >> own_N.clip(0, 63)) & 1 == 1
    visible = (own_N < 0) | (bits_TN if drafts else bits_TN & chain_TN)
    position_N = np.where(own_N < 0, place_N, np.array(reader.positions)[own_N.clip(0)])
    if window is not None:
        near = np.array(reader.positions)[:, None] - position_N < window
        visible &= near | (own_N >= 0) if drafts else near
    return torch.from_numpy(place_N), torch.from_numpy(visible)


def dense(
    q_THE: Tensor,
    keys_KSE: Tensor,
    values_KSE: Tensor,
    *,
    readers: Sequence[Reader],
    page_size: int,
    window: int | None = None,
    drafts: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Attention of all rows in the type of the arguments, [T, H, E]."""
    groups, out, first = q_THE.shape[1] // keys_KSE.shape[0], [], 0
    for reader in readers:
        q_HTE = q_THE[first : first + len(reader.positions)].transpose(0, 1)
        first += len(reader.positions)
        place_N, visible_TN = visible_of(reader, window, drafts)
        slot_N = place_N % reader.slots if reader.slots else place_N
        at_N = torch.tensor(reader.pages)[slot_N // page_size] * page_size + slot_N % page_size
        keys, values = (pool[:, at_N].repeat_interleave(groups, dim=0) for pool in (keys_KSE, values_KSE))
        scores = q_HTE @ keys.transpose(1, 2) * (q_THE.shape[2] ** -0.5 if scale is None else scale)
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        scores = scores.masked_fill(~visible_TN, -torch.inf)
        if sinks_H is not None:
            sinks = sinks_H.to(scores.dtype)[:, None, None].expand(-1, scores.shape[1], 1)
            scores = torch.cat([scores, sinks], dim=2)
        weights = scores.softmax(-1)[..., : len(place_N)]
        out.append((weights @ values).transpose(0, 1))
    return torch.cat(out)
