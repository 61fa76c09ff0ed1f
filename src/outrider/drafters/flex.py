"""Block attention of training through FlexAttention (CUDA): one kernel for all sequences of a batch.

The mask is that of `split_attention` (drafters/layers.py), stated as tiles; a test compares the two.
Shapes: N blocks, K rows a block, J own keys of a block, S context slots, G kv heads, H query heads, E head dim.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from outrider.utils.measure import on_device

if TYPE_CHECKING:
    from outrider.drafters.layers import AttentionPattern, BlockLayout


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` compiled as one graph, for any sizes of its tensors; what cannot be is an error where it is called."""
    # Otherwise it goes on uncompiled, attention with all scores in memory, once there are eight kinds of shapes.
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    torch._dynamo.config.optimize_ddp = False  # it would cut graphs at the buckets of DDP, and has no FlexAttention
    torch._functorch.config.force_non_lazy_backward_lowering = True  # or the backward would fail on its own, later
    return torch.compile(function, fullgraph=True, dynamic=True)


class Compilation:
    """Calls compiled functions; from the first one that fails on, those that take their place, with one warning.

    `instead`: what then happens, for the warning.
    """

    def __init__(self, instead: str) -> None:
        self.instead, self.works = instead, True

    def call(self, compiled: Callable[..., Tensor], plain: Callable[..., Tensor], *inputs: Any) -> Tensor:
        if self.works:
            try:
                return compiled(*inputs)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # of the compiler, of Triton, or of CUDA at a kernel's first launch
                self.works = False
                reason = f"{type(error).__name__}: {error}".splitlines()[0]
                warnings.warn(f"{self.instead}, for torch.compile failed ({reason})", stacklevel=2)
        return plain(*inputs)


@cache
def _flex_kernel(compile: bool) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return compiled(flex_attention) if compile else flex_attention


def flex_block_attention(
    q_NKHE: Tensor,
    context_k_SGE: Tensor,
    context_v_SGE: Tensor,
    block_k_NKGE: Tensor,
    block_v_NKGE: Tensor,
    layout: BlockLayout,
    pattern: AttentionPattern,
) -> Tensor:
    """The same attention through FlexAttention: one kernel for all sequences.

    On CUDA it is compiled, with the layer around it where that is; eager elsewhere.
    """
    N, K, H, E = q_NKHE.shape
    J, G = block_k_NKGE.shape[1:3]
    keys = torch.cat((context_k_SGE, block_k_NKGE.flatten(0, 1))).transpose(0, 1)[None]
    values = torch.cat((context_v_SGE, block_v_NKGE.flatten(0, 1))).transpose(0, 1)[None]
    queries = q_NKHE.reshape(N * K, H, E).transpose(0, 1)[None]
    mask = flex_mask_of(layout, K, J, pattern=pattern)
    if torch.compiler.is_compiling():  # the layer around it
        from torch.nn.attention.flex_attention import flex_attention as kernel
    else:
        kernel = _flex_kernel(q_NKHE.device.type == "cuda")
    out = kernel(queries, keys, values, block_mask=mask, enable_gqa=H != G)
    return out[0].transpose(0, 1).reshape(N, K, H, E)


_TILE = 128  # rows and keys of a tile of FlexAttention's kernels


def flex_mask_of(layout: BlockLayout, K: int, J: int, pattern: AttentionPattern) -> Any:
    """`_flex_mask`, once a batch."""
    if (K, J, pattern) not in layout.masks:
        layout.masks[K, J, pattern] = _flex_mask(layout, K, J, pattern=pattern)
    return layout.masks[K, J, pattern]


def _flex_mask(layout: BlockLayout, K: int, J: int, pattern: AttentionPattern) -> Any:
    """The block mask of FlexAttention, [N * K] rows over [S + N * J] keys.

    Its tiles follow from the range of keys that each row sees, [low, high) of the context and its block's J own ones.
    FlexAttention's own `create_block_mask` would ask for every pair of a row and a key: gigabytes for a large batch.
    """
    from torch.nn.attention.flex_attention import BlockMask

    anchors, sequence, device = layout.anchors_N, layout.sequence_N, layout.anchors_N.device
    N, S = len(anchors), sum(layout.lengths)
    lengths = on_device(layout.lengths, device)
    slot_sequence = torch.repeat_interleave(torch.arange(len(lengths), device=device), lengths, output_size=S)
    slot_position = layout.positions_S()
    window, causal = pattern

    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        block, slot = q // K, kv.clamp(max=S - 1)
        context = (kv < S) & (slot_sequence[slot] == sequence[block]) & (slot_position[slot] < anchors[block])
        if window is not None:
            context = context & (anchors[block] + q % K - slot_position[slot] < window)
        own = (kv >= S) & ((kv - S) // J == block)
        if causal:
            own = own & ((kv - S) % J <= q % K)
        return context | own

    start_N = (lengths.cumsum(0) - lengths)[sequence]
    hidden_NK = torch.zeros(N, K, dtype=torch.long, device=device)
    if window is not None:
        hidden_NK = (layout.block_positions_NK(K) - window + 1).clamp(min=0)
    low, high = (start_N[:, None] + hidden_NK).flatten(), (start_N + anchors)[:, None].expand(N, K).flatten()
    own = S + J * torch.arange(N, device=device)[:, None].expand(N, K).flatten()

    def by_tile(values: Tensor, largest: bool) -> Tensor:
        """[tiles of rows, 1] the smallest or largest value of a tile's rows, of which the last is repeated."""
        padded = torch.cat((values, values[-1:].expand(-len(values) % _TILE))).view(-1, _TILE)
        return padded.amax(-1, keepdim=True) if largest else padded.amin(-1, keepdim=True)

    begins = torch.arange(-(-(S + N * J) // _TILE), device=device) * _TILE
    ends = begins + _TILE
    whole = (begins >= by_tile(low, True)) & (ends <= by_tile(high, False))
    seen = (ends > by_tile(low, False)) & (begins < by_tile(high, True))
    seen = (seen | ((ends > by_tile(own, False)) & (begins < by_tile(own, True) + J))) & ~whole
    listed = [
        (tiles.sum(-1).int()[None, None], tiles.int().argsort(dim=-1, descending=True, stable=True).int()[None, None])
        for tiles in (seen, whole)
    ]
    lengths_QK = (N * K, S + N * J)
    return BlockMask.from_kv_blocks(*listed[0], *listed[1], BLOCK_SIZE=_TILE, mask_mod=mask, seq_lengths=lengths_QK)
