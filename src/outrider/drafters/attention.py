"""The sparse block mask of training, two ways.

    queries   block n, row k, at position a_n + k
    keys      context slots j of the same sequence with j < a_n   (strictly before the anchor, by position)
              the K rows of block n itself, in both directions unless the layer is causal
              nothing of any other block

`split_attention` (CPU) never builds the [N K, S + N K] square: context scores and own-block scores are computed apart
and share one softmax. `flex_block_attention` (CUDA) states the same mask to FlexAttention; a test compares them.

Shapes: N blocks, K rows a block, S context slots, G kv heads, Q queries per kv head, E head dim.
Source: DFlash, arXiv 2602.06036, section on training; visibility by position, see docs/architecture.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class BlockLayout:
    """Where the blocks of a training step stand.

    `lengths` [sequences] are context slots per sequence (concatenated along S); `anchors_N` are positions inside the
    sequence; `sequence_N` says which one, ascending.
    """

    lengths: list[int]
    anchors_N: Tensor
    sequence_N: Tensor

    def positions_S(self) -> Tensor:
        """Absolute position of every context slot."""
        return torch.cat([torch.arange(length, device=self.anchors_N.device) for length in self.lengths])

    def block_positions_NK(self, rows: int) -> Tensor:
        """Absolute position of every block row: the anchor's own, then the following ones."""
        return self.anchors_N[:, None] + torch.arange(rows, device=self.anchors_N.device)

    def before_anchors(self, x_SH: Tensor) -> Tensor:
        """[N, H] rows of the slots right before the anchors; zeros where nothing precedes an anchor."""
        lengths = torch.tensor(self.lengths, device=x_SH.device)
        starts_N = (lengths.cumsum(0) - lengths)[self.sequence_N]
        slots_N = torch.where(self.anchors_N > 0, starts_N + self.anchors_N - 1, len(x_SH))
        return F.pad(x_SH, (0, 0, 0, 1))[slots_N]  # the row behind the last: nothing


class Sight(NamedTuple):
    """What the rows of a block see in one draft layer.

    Attributes:
        window: of the context, the last so many positions, the row's own included; None: all of it.
        causal: of their own block, the rows up to their own; otherwise all of them.
    """

    window: int | None = None
    causal: bool = False


EVERYTHING = Sight()


def serving_mask(sight: Sight, length: int, rows: int, device: torch.device | None = None) -> Tensor | None:
    """What the rows of one block see of `length` context slots and themselves, bool [K, S]; None: everything."""
    if sight == EVERYTHING:
        return None
    slots = torch.arange(length + rows, device=device)
    distance_KS = slots[length:, None] - slots
    visible_KS = distance_KS >= 0 if sight.causal else torch.ones_like(distance_KS, dtype=torch.bool)
    if sight.window is not None:
        visible_KS &= (distance_KS < sight.window) | (slots >= length)
    return visible_KS


def visible_context(anchors_N: Tensor, slots: int, rows: int, window: int | None) -> Tensor:
    """Bool [N, K, S]: which context slots of its own sequence a block row sees."""
    slots_S = torch.arange(slots, device=anchors_N.device)
    visible = (slots_S < anchors_N[:, None])[:, None].expand(-1, rows, -1)
    if window is not None:
        positions_NK = anchors_N[:, None] + torch.arange(rows, device=anchors_N.device)
        visible = visible & (positions_NK[..., None] - slots_S < window)
    return visible


def split_attention(
    q_NKHE: Tensor,
    context_k_SGE: Tensor,
    context_v_SGE: Tensor,
    block_k_NKGE: Tensor,
    block_v_NKGE: Tensor,
    layout: BlockLayout,
    sight: Sight = EVERYTHING,
) -> Tensor:
    """Attention under the block mask, [N, K, H, E]; one pass per sequence, no masked-out block pairs computed.

    A block may have another number of own keys than of queries, all visible: a chain's next row has those before it.
    """
    K, H, E = q_NKHE.shape[1:]
    J, G = block_k_NKGE.shape[1:3]
    per_sequence = torch.bincount(layout.sequence_N, minlength=len(layout.lengths)).tolist()
    out, n0, s0 = [], 0, 0
    for count, length in zip(per_sequence, layout.lengths, strict=True):
        blocks, slots = slice(n0, n0 + count), slice(s0, s0 + length)
        n0, s0 = n0 + count, s0 + length
        if not count:
            continue
        q = q_NKHE[blocks].view(count, K, G, H // G, E) * E**-0.5
        q_ctx = q.permute(2, 3, 0, 1, 4).reshape(G, H // G * count * K, E)
        ctx = (q_ctx @ context_k_SGE[slots].permute(1, 2, 0)).view(G, H // G, count, K, length)
        visible = visible_context(layout.anchors_N[blocks], length, K, sight.window)
        ctx = ctx.masked_fill(~visible, -torch.inf)
        q_own = q.permute(2, 0, 3, 1, 4).reshape(G, count, -1, E)  # [G, N, Q K, E]
        own = q_own @ block_k_NKGE[blocks].permute(2, 0, 3, 1)  # [G, N, Q K, J]
        own = own.view(G, count, H // G, K, J).transpose(1, 2)
        if sight.causal:
            own = own.masked_fill(own.new_ones(K, J, dtype=torch.bool).triu(1), -torch.inf)
        weights = torch.cat((ctx, own), dim=-1).softmax(-1)
        w_ctx, w_own = weights.split((length, J), dim=-1)
        y = (w_ctx.reshape(G, H // G * count * K, length) @ context_v_SGE[slots].transpose(0, 1)).view(
            G, H // G, count, K, E
        )
        y_own = w_own.transpose(1, 2).reshape(G, count, -1, J) @ block_v_NKGE[blocks].permute(2, 0, 1, 3)
        y = y + y_own.view(G, count, H // G, K, E).transpose(1, 2)
        out.append(y.permute(2, 3, 0, 1, 4).reshape(count, K, H, E))
    return torch.cat(out)


@cache
def _compiled_flex() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True)


def flex_block_attention(
    q_NKHE: Tensor,
    context_k_SGE: Tensor,
    context_v_SGE: Tensor,
    block_k_NKGE: Tensor,
    block_v_NKGE: Tensor,
    layout: BlockLayout,
    sight: Sight = EVERYTHING,
) -> Tensor:
    """The same attention through FlexAttention: one kernel for all sequences (compiled on CUDA, eager elsewhere)."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    N, K, H, E = q_NKHE.shape
    S, G = context_k_SGE.shape[:2]
    device = q_NKHE.device
    slot_sequence = torch.repeat_interleave(
        torch.arange(len(layout.lengths), device=device), torch.tensor(layout.lengths, device=device)
    )
    slot_position, anchors, sequence = layout.positions_S(), layout.anchors_N, layout.sequence_N
    window, causal = sight

    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        block, slot = q // K, kv.clamp(max=S - 1)
        context = (kv < S) & (slot_sequence[slot] == sequence[block]) & (slot_position[slot] < anchors[block])
        if window is not None:
            context = context & (anchors[block] + q % K - slot_position[slot] < window)
        own = (kv >= S) & ((kv - S) // K == block)
        if causal:
            own = own & ((kv - S) % K <= q % K)
        return context | own

    keys = torch.cat((context_k_SGE, block_k_NKGE.reshape(N * K, G, E))).transpose(0, 1)[None]
    values = torch.cat((context_v_SGE, block_v_NKGE.reshape(N * K, G, E))).transpose(0, 1)[None]
    queries = q_NKHE.reshape(N * K, H, E).transpose(0, 1)[None]
    block_mask = create_block_mask(mask, None, None, N * K, S + N * K, device=device)
    kernel: Any = _compiled_flex() if device.type == "cuda" else flex_attention
    out = kernel(queries, keys, values, block_mask=block_mask, enable_gqa=H != G)
    return out[0].transpose(0, 1).reshape(N, K, H, E)
