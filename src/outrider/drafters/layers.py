"""Parts of draft layers: attention under the block mask, and the MLP.

Training and serving differ in the key source alone. `BlockLayout`, `AttentionPattern` and `block_attention` are the
mask of training; the key sources of serving are in drafters/cache.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.drafters.flex import Compilation, flex_block_attention, flex_mask_of
from outrider.drafters.rope import Rope
from outrider.target.fused import rotate
from outrider.target.linear import Packable, padded_size
from outrider.utils.measure import on_device

# ----------------------------------------------------------------------------
# The sparse block mask of training, two ways.
#
#     queries   block n, row k, at position a_n + k
#     keys      context slots j of the same sequence with j < a_n   (strictly before the anchor, by position)
#               the K rows of block n itself, in both directions unless the layer is causal
#               nothing of any other block
#
# `split_attention` (CPU) never builds the [N K, S + N K] square: context scores and own-block scores are computed apart
# and share one softmax. `flex_block_attention` (CUDA) states the same mask to FlexAttention; a test compares them.
#
# Shapes: N blocks, K rows a block, S context slots, G kv heads, Q queries per kv head, E head dim.
# Source: DFlash, arXiv 2602.06036, section on training; visibility by position, see docs/architecture.md.
# ----------------------------------------------------------------------------


@dataclass(frozen=True)
class BlockLayout:
    """Where the blocks of a training step stand.

    `lengths` [sequences] are context slots per sequence (concatenated along S); `anchors_N` are positions inside the
    sequence; `sequence_N` says which one, ascending.
    """

    lengths: list[int]
    anchors_N: Tensor
    sequence_N: Tensor
    # FlexAttention's masks of this batch, by rows and own keys of a block and pattern: for all layers, recomputed ones
    # too.
    masks: dict[tuple[int, int, AttentionPattern], Any] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def prepare(self, rows: int, patterns: Iterable[AttentionPattern]) -> None:
        """Make the masks of blocks of so many rows, which compiled layers only look up."""
        if kernel_of(self.anchors_N.device) is not split_attention:
            for pattern in patterns:
                flex_mask_of(self, rows, rows, pattern=pattern)

    def positions_S(self) -> Tensor:
        """Absolute position of every context slot."""
        return torch.cat([torch.arange(length, device=self.anchors_N.device) for length in self.lengths])

    def block_positions_NK(self, rows: int) -> Tensor:
        """Absolute position of every block row: the anchor's own, then the following ones."""
        return self.anchors_N[:, None] + torch.arange(rows, device=self.anchors_N.device)

    def before_anchors(self, x_SH: Tensor) -> Tensor:
        """[N, H] rows of the slots right before the anchors; zeros where nothing precedes an anchor."""
        lengths = on_device(self.lengths, x_SH.device)
        starts_N = (lengths.cumsum(0) - lengths)[self.sequence_N]
        slots_N = torch.where(self.anchors_N > 0, starts_N + self.anchors_N - 1, len(x_SH))
        return F.pad(x_SH, (0, 0, 0, 1))[slots_N]  # the row behind the last: nothing


class AttentionPattern(NamedTuple):
    """What the rows of a block see in one draft layer.

    Attributes:
        window: of the context, the last so many positions, the row's own included; None: all of it.
        causal: of their own block, the rows up to their own; otherwise all of them.
    """

    window: int | None = None
    causal: bool = False


EVERYTHING = AttentionPattern()


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
    pattern: AttentionPattern = EVERYTHING,
) -> Tensor:
    """Attention under the block mask, [N, K, H, E]; one pass per sequence, no masked-out block pairs computed.

    A block may have another number of own keys than of queries, all visible: a chain's next row has those before it.
    """
    K, H, E = q_NKHE.shape[1:]
    J, G = block_k_NKGE.shape[1:3]
    per_sequence = torch.bincount(layout.sequence_N, minlength=len(layout.lengths)).tolist()
    out, n0, s0 = [], 0, 0
    for own_count, length in zip(per_sequence, layout.lengths, strict=True):
        # Slots behind the sequence's are never visible, blocks behind its own are dropped: they are there so that
        # matrix products have few shapes, for each of which a kernel is built.
        count, S = min(padded_size(own_count, 8), len(q_NKHE) - n0), min(padded_size(length), len(context_k_SGE) - s0)
        blocks, slots = slice(n0, n0 + count), slice(s0, s0 + S)
        n0, s0 = n0 + own_count, s0 + length
        if not own_count:
            continue
        q = q_NKHE[blocks].view(count, K, G, H // G, E) * E**-0.5
        q_ctx = q.permute(2, 3, 0, 1, 4).reshape(G, H // G * count * K, E)
        ctx = (q_ctx @ context_k_SGE[slots].permute(1, 2, 0)).view(G, H // G, count, K, S)
        visible = visible_context(layout.anchors_N[blocks], S, K, window=pattern.window)
        ctx = ctx.masked_fill(~visible, -torch.inf)
        q_own = q.permute(2, 0, 3, 1, 4).reshape(G, count, -1, E)  # [G, N, Q K, E]
        own = q_own @ block_k_NKGE[blocks].permute(2, 0, 3, 1)  # [G, N, Q K, J]
        own = own.view(G, count, H // G, K, J).transpose(1, 2)
        if pattern.causal:
            own = own.masked_fill(own.new_ones(K, J, dtype=torch.bool).triu(1), -torch.inf)
        weights = torch.cat((ctx, own), dim=-1).softmax(-1)
        w_ctx, w_own = weights.split((S, J), dim=-1)
        y = (w_ctx.reshape(G, H // G * count * K, S) @ context_v_SGE[slots].transpose(0, 1)).view(
            G, H // G, count, K, E
        )
        y_own = w_own.transpose(1, 2).reshape(G, count, -1, J) @ block_v_NKGE[blocks].permute(2, 0, 1, 3)
        y = y + y_own.view(G, count, H // G, K, E).transpose(1, 2)
        out.append(y.permute(2, 3, 0, 1, 4).reshape(count, K, H, E)[:own_count])
    return torch.cat(out)


_fused = Compilation("draft attention in training goes sequence by sequence, slower than FlexAttention")


def kernel_of(device: torch.device) -> Callable[..., Tensor]:
    """What computes `block_attention` there."""
    return flex_block_attention if device.type == "cuda" and _fused.works else split_attention


def block_attention(
    q_NKHE: Tensor,
    context_k_SGE: Tensor,
    context_v_SGE: Tensor,
    block_k_NKGE: Tensor,
    block_v_NKGE: Tensor,
    layout: BlockLayout,
    pattern: AttentionPattern = EVERYTHING,
) -> Tensor:
    """`split_attention`, on CUDA by one kernel."""
    tensors = q_NKHE, context_k_SGE, context_v_SGE, block_k_NKGE, block_v_NKGE
    kernel = kernel_of(q_NKHE.device)
    if kernel is split_attention or torch.compiler.is_compiling():
        return kernel(*tensors, layout, pattern)
    return _fused.call(kernel, split_attention, *tensors, layout, pattern)


# ----------------------------------------------------------------------------
# Grouped-query attention of draft layers, whose rows see what a key source says.
#
#     q = R norm(W_q u)    k = R norm(W_k u)    v = W_v u    out = W_o source(q, k, v)      R: rotation by position
#
# EAGLE-3's layer reads pairs, 2 H wide, all others read H. `norm` is there, head by head, where `qk_norm` says so.
# Training and serving differ in the source alone: the context of a training batch under its mask, or the KV caches of
# requests. Parameter names are those of checkpoints.
#
# Shapes: X rows, U inputs, H hidden, Q heads, G kv heads, E head dim.
# ----------------------------------------------------------------------------


class KeySource(Protocol):
    """Where the keys and values that rows attend to come from."""

    def attend(self, attention: Attention, q_XQE: Tensor, k_XGE: Tensor, v_XGE: Tensor) -> Tensor:
        """Attention of rows over the source's keys and their own, [X, Q, E]."""
        ...


class Attention(Packable):
    """Grouped-query attention in the shapes of `config`: hidden_size, head counts, head_dim and rms_norm_eps.

    Args:
        layer: index of the layer, which key sources know its keys by.
        pattern: what rows see of the context and of their block.
    """

    groups: tuple[tuple[str, ...], ...] = (("q_proj", "k_proj", "v_proj"), ("o_proj",))

    def __init__(
        self,
        config: Any,
        inputs: int,
        *,
        qk_norm: bool,
        bias: bool = False,
        layer: int = 0,
        pattern: AttentionPattern = EVERYTHING,
    ) -> None:
        super().__init__()
        E = config.head_dim
        self.head_dim, self.layer, self.pattern = E, layer, pattern
        self.q_proj = nn.Linear(inputs, config.num_attention_heads * E, bias=bias)
        self.k_proj = nn.Linear(inputs, config.num_key_value_heads * E, bias=bias)
        self.v_proj = nn.Linear(inputs, config.num_key_value_heads * E, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * E, config.hidden_size, bias=bias)
        if qk_norm:
            self.q_norm = nn.RMSNorm(E, eps=config.rms_norm_eps)
            self.k_norm = nn.RMSNorm(E, eps=config.rms_norm_eps)
        self.qk_norm = qk_norm

    def forward(self, u_XU: Tensor, rope: Rope, source: KeySource) -> Tensor:
        """[X, U] -> [X, H]"""
        q, k, v = self.outputs(u_XU, "q_proj", "k_proj", "v_proj")
        q_XQE = self._rotated(self.q_norm if self.qk_norm else None, q, rope)
        return self.o_proj(source.attend(self, q_XQE, *self.keys_values(k, v, rope)).flatten(-2))

    def keys_values(self, k: Tensor, v: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """Outputs of k_proj and v_proj -> keys and values as rows see them, [X, G, E] each."""
        keys = self._rotated(self.k_norm if self.qk_norm else None, k, rope)
        return keys, v.unflatten(-1, (-1, self.head_dim))

    def _rotated(self, norm: nn.RMSNorm | None, x: Tensor, rope: Rope) -> Tensor:
        """Result in x's type: under autocast queries, keys and values must agree.

        The norm is in its own type, which is float32 but in layers sharded in bfloat16; the rotation is in float32.
        """
        heads = x.unflatten(-1, (-1, self.head_dim))
        heads = heads.float() if norm is None else norm(heads.to(norm.weight.dtype))
        return rotate(heads, *rope).to(x.dtype)


class SwiGLU(Packable):
    """The MLP of every draft layer; `config` has hidden_size and intermediate_size."""

    groups = (("gate_proj", "up_proj"), ("down_proj",))

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.outputs(x, "gate_proj", "up_proj")
        return self.down_proj(F.silu(gate) * up)
