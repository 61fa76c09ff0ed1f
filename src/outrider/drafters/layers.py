"""Layers of draft models: the KV cache and session of a request, attention in training and serving, MLP, RoPE.

Below: `DraftKV` and `DraftSession`; the block mask of training; `Attention` and the key sources that say what its rows
see; `SwiGLU`; RoPE; draft layers that begin as the target's.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple, Protocol, TypeAlias
from weakref import finalize

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.drafters.config import AuxLayers, DrafterConfig, DraftVocabulary, NotInRecipe
from outrider.target.attention import additive
from outrider.target.fused import rotate, signed_sin
from outrider.target.linear import Packable, padded_size
from outrider.target.model import Target, full_tensor
from outrider.utils.measure import on_device

Ints: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"


@dataclass(frozen=True, kw_only=True)
class LayerConfig(DrafterConfig):
    """Config of a drafter that has decoder layers in the target's shapes."""

    hidden_size: NotInRecipe[int]
    intermediate_size: NotInRecipe[int]
    num_attention_heads: NotInRecipe[int]
    num_key_value_heads: NotInRecipe[int]
    head_dim: NotInRecipe[int]
    vocab_size: NotInRecipe[int]
    draft_vocab_size: DraftVocabulary
    target_layer_ids: AuxLayers[tuple[int, ...]]
    num_target_layers: NotInRecipe[int]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_key_value_heads < 1 or self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of num_key_value_heads "
                f"{self.num_key_value_heads}."
            )


class DraftKV:
    """Keys and values of one draft layer for one request in float32, written in place and read up to an end.

        slots   0 .. committed-1 | rows of the draft in hand | free

    Position p is in slot p mod S. Where rows have a window, S slots for the window and a draft's rows are enough: a
    position takes the slot of one that no row sees any more. A draft's own rows are written behind what is committed
    and overwritten by the next draft: forgetting costs nothing. The query heads of one key head are folded into rows,
    so keys are never repeated.
    Shapes: T rows, S slots read, Q heads, G kv heads, E head dim.
    """

    def __init__(self, config: LayerConfig, slots: int, device: torch.device) -> None:
        self.groups = config.num_attention_heads // config.num_key_value_heads
        shape = (config.num_key_value_heads, slots, config.head_dim)
        self.keys_GSE, self.values_GSE = torch.empty(shape, device=device), torch.empty(shape, device=device)

    @property
    def slots(self) -> int:
        return self.keys_GSE.shape[1]

    def write(self, start: int, k_TGE: Tensor, v_TGE: Tensor) -> None:
        """Put the rows at position `start` and on; of more rows than there are slots the last."""
        end, S = start + len(k_TGE), self.slots
        if end <= S:
            self.keys_GSE[:, start:end] = k_TGE.transpose(0, 1)
            self.values_GSE[:, start:end] = v_TGE.transpose(0, 1)
            return
        places_T = torch.arange(max(start, end - S), end, device=k_TGE.device) % S
        self.keys_GSE[:, places_T] = k_TGE[-S:].transpose(0, 1)
        self.values_GSE[:, places_T] = v_TGE[-S:].transpose(0, 1)

    def attend(self, q_TQE: Tensor, end: int, visible_TS: Tensor | None) -> Tensor:
        """Over the positions before `end` that slots hold, or those of them that are visible: [T, Q, E]."""
        T, heads, E = q_TQE.shape
        mask = None if visible_TS is None else visible_TS.repeat(self.groups, 1)
        q_GRE = q_TQE.transpose(0, 1).reshape(1, heads // self.groups, -1, E)  # rows: query group x T
        keys, values = self.keys_GSE[None, :, :end], self.values_GSE[None, :, :end]
        out = F.scaled_dot_product_attention(q_GRE, keys, values, attn_mask=mask)
        return out.view(heads, T, E).transpose(0, 1)


@dataclass
class DraftSession:
    """What a drafter remembers of one request.

    Attributes:
        caches: keys and values, layer by layer; none where they are in a `DraftPool`.
        waiting: states [m, H] of the newest committed tokens that are used together with a later token, layer by layer.
        length: number of committed tokens.
        pages: of the pool, in order.
        slots: of these pages, that each layer has.
    """

    caches: list[DraftKV]
    waiting: list[Tensor] = field(default_factory=list)
    length: int = 0
    pages: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    slots: Sequence[int] = ()

    def rows(self, layer: int, positions_T: Ints) -> Ints:
        """Rows of the pool where a layer's keys of these positions are."""
        slots_T = positions_T % self.slots[layer]
        found: Ints = self.pages[slots_T // _PAGE] * _PAGE + slots_T % _PAGE
        return found


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
                _flex_mask_of(self, rows, rows, pattern=pattern)

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


def serving_mask(
    pattern: AttentionPattern, length: int, rows: int, slots: int | None = None, device: torch.device | None = None
) -> Tensor | None:
    """What the rows of one block see of `length` context positions and themselves, bool [K, S]; None: everything.

    `slots`: of a cache that may have fewer (`DraftKV`); None: position p is in slot p.
    """
    if pattern == EVERYTHING or (pattern.window is None and rows == 1):
        return None
    end = length + rows
    positions_S = torch.arange(end, device=device)
    if slots is not None and end > slots:
        positions_S = positions_S[-slots:].roll(end % slots)
    distance_KS = torch.arange(length, end, device=device)[:, None] - positions_S
    return _sees(pattern, distance_KS, positions_S >= length)


def _sees(pattern: AttentionPattern, distance: Tensor, own: Tensor) -> Tensor:
    """Whether rows see keys so many positions before them; `own`: keys of their block."""
    visible = distance >= 0 if pattern.causal else torch.ones_like(distance, dtype=torch.bool)
    return visible if pattern.window is None else visible & ((distance < pattern.window) | own)


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


_fused = Compilation("draft attention in training goes sequence by sequence, slower than FlexAttention")


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
    pattern: AttentionPattern = EVERYTHING,
) -> Tensor:
    """The same attention through FlexAttention: one kernel for all sequences.

    On CUDA it is compiled, with the layer around it where that is; eager elsewhere.
    """
    N, K, H, E = q_NKHE.shape
    J, G = block_k_NKGE.shape[1:3]
    keys = torch.cat((context_k_SGE, block_k_NKGE.flatten(0, 1))).transpose(0, 1)[None]
    values = torch.cat((context_v_SGE, block_v_NKGE.flatten(0, 1))).transpose(0, 1)[None]
    queries = q_NKHE.reshape(N * K, H, E).transpose(0, 1)[None]
    mask = _flex_mask_of(layout, K, J, pattern=pattern)
    if torch.compiler.is_compiling():  # the layer around it
        from torch.nn.attention.flex_attention import flex_attention as kernel
    else:
        kernel = _flex_kernel(q_NKHE.device.type == "cuda")
    out = kernel(queries, keys, values, block_mask=mask, enable_gqa=H != G)
    return out[0].transpose(0, 1).reshape(N, K, H, E)


_TILE = 128  # rows and keys of a tile of FlexAttention's kernels


def _flex_mask_of(layout: BlockLayout, K: int, J: int, pattern: AttentionPattern) -> Any:
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


Rope = tuple[Tensor, Tensor]  # cos and signed sin, broadcast over heads


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


class CachedKeys:
    """The key source of serving: new rows of several requests over their request's cache and one another.

    Their keys are written behind the cached rows, request by request, and forgotten when others are written there.

    Args:
        starts: rows of each request's caches that come before its new ones.
        counts: new rows of each request; rows stand request after request.
        visible: of each request, which of the cached and new rows each new one sees, [count, start + count], or None
            for all; without it the layer's pattern decides.
    """

    def __init__(
        self,
        sessions: Sequence[DraftSession],
        starts: Sequence[int],
        counts: Sequence[int],
        visible: Sequence[Tensor | None] | None = None,
    ) -> None:
        self.requests, self.counts, self.visible = list(zip(sessions, starts, strict=True)), list(counts), visible
        self._masks: dict[AttentionPattern, Sequence[Tensor | None]] = {}

    def attend(self, attention: Attention, q_XQE: Tensor, k_XGE: Tensor, v_XGE: Tensor) -> Tensor:
        parts = zip(*(x.flatten(0, -3).split(self.counts) for x in (q_XQE, k_XGE, v_XGE)), strict=True)
        masks, attended = self._visible(attention, q_XQE.device), []
        for (session, start), mask, (q, k, v) in zip(self.requests, masks, parts, strict=True):
            kv = session.caches[attention.layer]
            kv.write(start, k, v)
            attended.append(kv.attend(q, start + len(q), mask))
        return torch.cat(attended).view(q_XQE.shape)

    def _visible(self, attention: Attention, device: torch.device) -> Sequence[Tensor | None]:
        if self.visible is not None:
            return self.visible
        pattern = attention.pattern  # layers alike in it have as many slots
        if pattern not in self._masks:
            self._masks[pattern] = [
                serving_mask(pattern, start, count, slots=session.caches[attention.layer].slots, device=device)
                for (session, start), count in zip(self.requests, self.counts, strict=True)
            ]
        return self._masks[pattern]


# ----------------------------------------------------------------------------
# On a GPU the keys of all requests of a block drafter are in one tensor a layer, in pages: the new rows of all requests
# are written by one copy and attend by one call, as in target/graphs.py.
#
#     position p  ->  slot s = p mod S of its request  ->  page table[s // 16]  ->  row 16 page + s mod 16 of the pool
#
# Shapes: R requests, K rows of each, N slots that are gathered, P pages, T new tokens, G kv heads, E head dim.
# ----------------------------------------------------------------------------


_PAGE = 16


class DraftPool:
    """Keys and values of the requests of a block drafter, [2, G, pages * 16, E] a layer in float32. It grows as asked.

    `patterns`: what rows see, layer by layer; layers alike in it have as many slots of a session.
    """

    def __init__(self, config: LayerConfig, patterns: Sequence[AttentionPattern], device: torch.device) -> None:
        self.patterns, self.device = list(patterns), device
        # Zeros: what is masked has weight 0, and that times what was never written may be no number.
        shape = (2, config.num_key_value_heads, 0, config.head_dim)
        with torch.inference_mode(False):  # calls in and out of that mode write into them
            self.layers = [torch.zeros(shape, device=device) for _ in patterns]
        self._free: list[int] = []

    def session(self, slots: Sequence[int]) -> DraftSession:
        """An empty session of so many slots in each layer; its pages are free again when it is forgotten."""
        count = -(-max(slots) // _PAGE)
        if len(self._free) < count:
            self._grow(count - len(self._free))
        pages = [self._free.pop() for _ in range(count)]
        session = DraftSession([], pages=np.array(pages, dtype=np.int64), slots=slots)
        finalize(session, self._free.extend, pages)
        return session

    def _grow(self, more: int) -> None:
        """By that many pages at least, by half in any case."""
        there = self.layers[0].shape[2] // _PAGE
        more = max(more, there // 2)
        with torch.inference_mode(False):
            self.layers = [F.pad(pool, (0, 0, 0, more * _PAGE)) for pool in self.layers]
        self._free += reversed(range(there, there + more))

    def write(self, layer: int, rows_T: Tensor, *, keys_values: tuple[Tensor, Tensor]) -> None:
        """Put keys and values of tokens, [T, G, E] each, into these rows."""
        self.layers[layer].index_copy_(2, rows_T, torch.stack(keys_values).transpose(1, 2))

    def rows_of(self, sessions: Sequence[DraftSession], counts: Sequence[int]) -> list[tuple[Tensor, Tensor | None]]:
        """Layer by layer, where new tokens behind the committed ones belong, and which of the new ones these are.

        Of more than a layer has slots, only the last: the others would be overwritten. None: all of them.
        """
        found: dict[AttentionPattern, tuple[Tensor, Tensor | None]] = {}
        for layer, pattern in enumerate(self.patterns):
            if pattern in found:
                continue
            rows, kept, first = [], [], 0
            for session, count in zip(sessions, counts, strict=True):
                few = min(count, session.slots[layer])
                end, first = session.length + count, first + count
                rows.append(session.rows(layer, np.arange(end - few, end)))
                kept.append(np.arange(first - few, first))
            rows_T = np.concatenate(rows)
            kept_T = None if len(rows_T) == first else on_device(torch.from_numpy(np.concatenate(kept)), self.device)
            found[pattern] = on_device(torch.from_numpy(rows_T), self.device), kept_T
        return [found[pattern] for pattern in self.patterns]


class PooledKeys:
    """The key source of drafts whose keys are in a pool: K new rows of each request, behind its committed tokens."""

    def __init__(self, pool: DraftPool, sessions: Sequence[DraftSession], rows: int) -> None:
        self.pool, self.rows, self.sessions = pool, rows, sessions
        self.ends = np.array([session.length + rows for session in sessions])
        pages = [session.pages[: -(-end // _PAGE)] for session, end in zip(sessions, self.ends, strict=True)]
        numbers = np.zeros((len(sessions), 1 + max(map(len, pages))), dtype=np.int64)
        numbers[:, 0] = self.ends
        for r, own in enumerate(pages):
            numbers[r, 1 : 1 + len(own)] = own * _PAGE
        numbers_RP = on_device(torch.from_numpy(numbers), pool.device)
        self.ends_R1, self.firsts_RP = numbers_RP[:, :1], numbers_RP[:, 1:]
        self._shared: dict[AttentionPattern, tuple[Tensor, Tensor, Tensor]] = {}

    def attend(self, attention: Attention, q_RKQE: Tensor, k_RKGE: Tensor, v_RKGE: Tensor) -> Tensor:
        pattern, layer, (R, K, Q, E) = attention.pattern, attention.layer, q_RKQE.shape
        if pattern not in self._shared:
            self._shared[pattern] = self._of(pattern, layer, queries=Q // k_RKGE.shape[2])
        new_X, gathered_X, mask = self._shared[pattern]
        self.pool.write(layer, new_X, keys_values=(k_RKGE.flatten(0, 1), v_RKGE.flatten(0, 1)))
        gathered = self.pool.layers[layer].index_select(2, gathered_X).unflatten(2, (R, -1)).transpose(1, 2)
        folded = q_RKQE.transpose(1, 2).reshape(R, k_RKGE.shape[2], -1, E)  # rows: query group x K
        out = F.scaled_dot_product_attention(folded, gathered[0], gathered[1], attn_mask=mask)
        return out.view(R, Q, K, E).transpose(1, 2)

    def _of(self, pattern: AttentionPattern, layer: int, queries: int) -> tuple[Tensor, Tensor, Tensor]:
        """Rows of the pool for the new keys [R K] and to gather [R N], and the additive mask over [R, 1, queries K, N].

        The mask has one row for all where they see the same.
        """
        device, slots = self.pool.device, np.array([session.slots[layer] for session in self.sessions])
        new = [s.rows(layer, np.arange(end - self.rows, end)) for s, end in zip(self.sessions, self.ends, strict=True)]
        new_X = on_device(torch.from_numpy(np.concatenate(new)), device)
        pages = int(-(-np.minimum(self.ends, slots).max() // _PAGE))
        gathered_RN = (self.firsts_RP[:, :pages, None] + torch.arange(_PAGE, device=device)).flatten(1)
        position_N = slot_N = torch.arange(pages * _PAGE, device=device)
        held_RN = slot_N < self.ends_R1
        if (self.ends > slots).any():  # the last position before the end that a slot is for; below 0: there is none
            slots_R1 = on_device(torch.from_numpy(slots[:, None]), device)
            position_N = slot_N + (self.ends_R1 - 1 - slot_N).div(slots_R1, rounding_mode="floor") * slots_R1
            held_RN = (slot_N < slots_R1) & (position_N >= 0)
        if pattern == EVERYTHING:
            return new_X, gathered_RN.flatten(), additive(held_RN, torch.float32)[:, None, None]
        start_R1 = self.ends_R1 - self.rows
        row_RK1 = (start_R1 + torch.arange(self.rows, device=device))[..., None]
        own_R1N = (position_N >= start_R1)[:, None]
        visible_RKN = _sees(pattern, row_RK1 - position_N.unsqueeze(-2), own_R1N) & held_RN[:, None]
        mask = additive(visible_RKN, torch.float32).repeat(1, queries, 1)[:, None]
        return new_X, gathered_RN.flatten(), mask


class ChainKeys:
    """The key source of training chains, one row of every anchor at a time: the context and the chain so far.

    The slot right before an anchor is the pair that its chain begins with: it is computed there and not seen here.

    Args:
        context: keys and values of the context slots, [S, G, E] each.
    """

    def __init__(self, context: tuple[Tensor, Tensor], layout: BlockLayout) -> None:
        self.context, self.layout = context, replace(layout, anchors_N=layout.anchors_N - 1)
        self.chain: list[tuple[Tensor, Tensor]] = []

    def attend(self, attention: Attention, q_NQE: Tensor, k_NGE: Tensor, v_NGE: Tensor) -> Tensor:
        self.chain.append((k_NGE, v_NGE))
        own_k, own_v = (torch.stack(rows, dim=1) for rows in zip(*self.chain, strict=True))
        return block_attention(q_NQE[:, None], *self.context, own_k, own_v, self.layout)[:, 0]


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


def rope_table(positions: Tensor, head_dim: int, theta: float) -> Rope:
    """cos and signed sin for absolute positions: [..., 1, head_dim], the 1 standing for heads."""
    inverse = theta ** (-torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim)
    angles = positions[..., None].float() * inverse
    angles = torch.cat((angles, angles), dim=-1)[..., None, :]
    return angles.cos(), signed_sin(angles.sin())


class RopeTables:
    """`rope_table` of consecutive positions, kept from call to call and extended when a later position is asked for."""

    def __init__(self, head_dim: int, theta: float, device: torch.device) -> None:
        self.head_dim, self.theta, self.device = head_dim, theta, device
        self.kept: Rope = rope_table(torch.arange(0, device=device), head_dim, theta)

    def __call__(self, positions: Sequence[int]) -> Rope:
        """cos and signed sin, [X, 1, head_dim]."""
        end = max(positions, default=0) + 1
        if end > len(self.kept[0]):
            self.kept = rope_table(torch.arange(2 * end, device=self.device), self.head_dim, self.theta)
        index_X = on_device(positions, self.device, torch.long)
        return self.kept[0][index_X], self.kept[1][index_X]


# ----------------------------------------------------------------------------
# Draft layers in the target's shapes and, where the target is Llama-shaped, with its weights to begin with.
#
# draft layer i   <-  target layer (num_layers - n + i): projections, MLP, norms
# q_norm, k_norm  <-  copied where the target has them, else the mean RMS of the target's own queries and keys, so
#                     that attention logits start at the target's size
# ----------------------------------------------------------------------------


def layer_shapes(target: Target) -> dict[str, Any]:
    """The fields of a drafter's config that follow from the target alone, in config.json's words.

    Where layers differ, the first one with attention counts (Gemma 4: a sliding one, with the smaller heads).
    """
    theirs = target.config
    rope = getattr(theirs, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)  # Gemma 3 has one set per kind of layer
    attention = next(layer.self_attn for layer in target.decoder.layers if hasattr(layer, "self_attn"))
    active = getattr(theirs, "intermediate_size", None) or theirs.moe_intermediate_size * theirs.num_experts_per_tok
    return {
        "hidden_size": target.hidden_size,
        "intermediate_size": active,
        "num_attention_heads": theirs.num_attention_heads,
        "num_key_value_heads": theirs.num_attention_heads // attention.num_key_value_groups,
        "head_dim": getattr(attention, "head_dim", None) or target.hidden_size // theirs.num_attention_heads,
        "vocab_size": target.vocab_size,
        "num_target_layers": target.num_layers,
        "rope_theta": float(rope.get("rope_theta", 10000.0)),
        "rms_norm_eps": theirs.rms_norm_eps,
        "max_position_embeddings": target.max_context,
    }


@torch.no_grad()
def copy_target_layers(layers: Iterable[nn.Module], target: Target, documents: Sequence[Sequence[int]]) -> list[Any]:
    """Copy the weights of the target's last layers into draft layers of the same shapes and names, in place.

    A draft layer may lack q_norm and k_norm. Returns the target's layers, in order.

    Args:
        documents: token sequences on which the size of queries and keys is measured.
    """
    drafted: list[Any] = list(layers)
    source = list(target.decoder.layers)[-len(drafted) :]
    rms = _query_key_rms(target, source, documents)
    for layer, theirs, (q_rms, k_rms) in zip(drafted, source, rms, strict=True):
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            getattr(layer.self_attn, name).weight.copy_(full_tensor(getattr(theirs.self_attn, name).weight))
        for name in ("gate_proj", "up_proj", "down_proj"):
            getattr(layer.mlp, name).weight.copy_(full_tensor(getattr(theirs.mlp, name).weight))
        layer.input_layernorm.weight.copy_(full_tensor(theirs.input_layernorm.weight))
        layer.post_attention_layernorm.weight.copy_(full_tensor(theirs.post_attention_layernorm.weight))
        if hasattr(layer.self_attn, "q_norm") and hasattr(theirs.self_attn, "q_norm"):
            layer.self_attn.q_norm.weight.copy_(full_tensor(theirs.self_attn.q_norm.weight))
            layer.self_attn.k_norm.weight.copy_(full_tensor(theirs.self_attn.k_norm.weight))
        elif hasattr(layer.self_attn, "q_norm"):
            layer.self_attn.q_norm.weight.fill_(q_rms)
            layer.self_attn.k_norm.weight.fill_(k_rms)
    return source


def _query_key_rms(
    target: Target, layers: Sequence[Any], documents: Sequence[Sequence[int]]
) -> list[tuple[float, float]]:
    seen: dict[nn.Module, list[float]] = {}

    def record(module: nn.Module, _args: Any, output: Tensor) -> None:
        heads = output.unflatten(-1, (-1, target.decoder.layers[0].self_attn.head_dim))
        seen.setdefault(module, []).append(heads.square().mean(-1).sqrt().mean().item())

    hooks = [proj.register_forward_hook(record) for layer in layers for proj in _query_key(layer)]
    try:
        with torch.inference_mode():  # like Target.forward: weights that a sharded target gathers remember the mode
            for document in documents:
                target.model(on_device([list(document)], target.device), logits_to_keep=1)
    finally:
        for hook in hooks:
            hook.remove()
    means = [[sum(seen[proj]) / len(seen[proj]) for proj in _query_key(layer)] for layer in layers]
    return [(q, k) for q, k in means]


def _query_key(layer: Any) -> tuple[nn.Module, nn.Module]:
    return layer.self_attn.q_proj, layer.self_attn.k_proj
