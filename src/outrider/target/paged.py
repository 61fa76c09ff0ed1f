"""Store keys and values of many requests in blocks of one pool (paged KV cache).

    pool       | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 | 8 | 9 |     blocks of block_size slots, the same in every layer
    requests     .   .   c   c   a   a   .   c   .   b       a: 4 5      b: 9      c: 7 2 3

Block i of a request holds its positions from i * block_size. The engine assigns blocks; a `Span` lists the blocks that
a forward reads. A smaller `past` rolls back: later slots keep stale values that are overwritten before they are read.
Source: Kwon et al., arXiv 2309.06180.

If layers differ in their heads (Gemma 4), every run of equal layers has its own pool with the same slots. With latent
attention (DeepSeek-V3) a slot holds latents as one head: the compressed vector that keys and values are expanded from,
and the rotated part that all heads share. A recurrent layer has no heads, nor has one that attends to compressed keys
(DeepSeek-V4): the states of a request are in its `Span`, and a block is only counted.

Shapes: L layers, K kv heads, S slots of the pool, E head dim, T new tokens of all spans, N rows with logits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from outrider.target.attention import Branches, Latents, additive, attend_folded, fold, lowest_visible, unfold
from outrider.target.cache import KVCache
from outrider.target.compressed import compresses, numbers_per_token
from outrider.target.kernels import Cache, FewRows, WholeStep, attends, few
from outrider.target.paged_attention import MOST_SEEN, Plan, Reader, available, bits_of, plan
from outrider.target.paged_attention import attend as attend_pages
from outrider.utils.measure import on_device

if TYPE_CHECKING:
    from outrider.target.model import Target

_PAGEABLE = {"indexed_attention", "full_attention", "sliding_attention", "linear_attention"}
_LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}


@dataclass(frozen=True)
class Span:
    """The new tokens of one request in a ragged forward.

    Attributes:
        tokens: at positions `past`, `past + 1`, ...; at least one.
        past: number of the request's tokens with keys in the pool; a smaller value than before rolls back.
        blocks: blocks of the request in order of positions; it may list more than needed.
        logits: how many of the last tokens get logits.
        parents: the parent of each token of a tree, -1 for the first (target/attention.py). Each token takes one slot,
            so `past + t` is the slot of token t and not its position.
        states: the request's `Target.new_states`, which roll back to `past` within the last forward.
    """

    tokens: list[int]
    past: int
    blocks: list[int]
    logits: int
    parents: list[int] | None = None
    states: KVCache | None = None

    @property
    def end(self) -> int:
        """Number of slots that the request uses after this forward."""
        return self.past + len(self.tokens)


@dataclass(frozen=True)
class RaggedOutput:
    """The output rows in the order of the spans. `logits_NV` holds the requested rows, None if there are none."""

    logits_NV: Tensor | None
    aux_TLD: Tensor | None
    hidden_TD: Tensor


class PagedKV:
    """Keys and values of all layers, allocated once.

    Attributes:
        pools: (keys [L, K, S, E], values [L, K, S, E]) of every run of layers of equal shape, in order; mostly one.
        layers: (keys [K, S, E], values [K, S, E]) of every layer, views of `pools`.
        latent: whether keys and values are latents, [1, S, kv_lora_rank] and [1, S, qk_rope_head_dim].
        latents: then both of every layer, side by side, [1, S, kv_lora_rank + qk_rope_head_dim].
        spare_slot: slot after those of all blocks, into which padding rows write (target/graphs.py); on a GPU only.
        aux_SLD: aux hidden states of the token in each slot, where a drafter may read those of a cached prefix
            (decoding/prefix_cache.py); else L is 0.

    Raises:
        ValueError: a layer type is not supported.
    """

    def __init__(self, target: Target, num_blocks: int, block_size: int, aux_layers: int = 0) -> None:
        config = target.config
        _check_layers(config)
        self.num_blocks, self.block_size = num_blocks, block_size
        self.latent = getattr(config, "kv_lora_rank", None) is not None
        kept = [_kept_per_slot(getattr(layer, "self_attn", None), config) for layer in target.decoder.layers]
        # Not zeroed: a slot is written before it is read, and on a CPU the system allocates memory at the first write
        # of a block (`claim`).
        self.spare_slot = num_blocks * block_size
        slots = self.spare_slot + (block_size if target.device.type == "cuda" else 0)
        self.pools: list[tuple[Tensor, Tensor]] = []
        self.latents: list[Tensor] = []
        for (K, *dims), run in groupby(kept):
            L = len(list(run))
            if self.latent:
                both = target.embed_VD.new_empty(L, K, slots, sum(dims))
                self.latents += both.unbind()
                keys, values = both.split(dims, dim=3)
            else:
                keys, values = (target.embed_VD.new_empty(L, K, slots, E) for E in dims)
            self.pools.append((keys, values))
        self.layers = [layer for keys, values in self.pools for layer in zip(keys, values, strict=True)]
        self.aux_SLD = target.embed_VD.new_empty(slots, aux_layers, target.hidden_size)
        self._bytes_beside = int(numbers_per_token(config) * block_size) * self.dtype.itemsize

    @property
    def device(self) -> torch.device:
        return self.pools[0][0].device

    @property
    def dtype(self) -> torch.dtype:
        return self.pools[0][0].dtype

    @property
    def block_bytes(self) -> int:
        """Memory of one block, with that of states that grow with a text."""
        kept = sum(pool.nbytes // pool.shape[2] * self.block_size for pool in chain.from_iterable(self.pools))
        return kept + self._bytes_beside + self.aux_SLD.nbytes // len(self.aux_SLD) * self.block_size

    def claim(self) -> None:
        """Write every slot once to commit the memory to this process, before anything is stored in it."""
        for pool in (*chain.from_iterable(self.pools), self.aux_SLD):
            pool.zero_()

    def slots(self, blocks: list[int], start: int, end: int) -> Tensor:
        """Return the slots of positions start .. end - 1 in a request's blocks, [end - start] int64 on the CPU."""
        size, first = self.block_size, start // self.block_size
        used = torch.tensor(blocks[first : -(-end // size)])
        slots = (used[:, None] * size + torch.arange(size)).view(-1)
        return slots[start - first * size : end - first * size]

    def keep_paths(self, kept: Sequence[tuple[list[int], int, Sequence[int]]]) -> None:
        """Keep only the accepted paths of the last forward and move their slots together.

        Args:
            kept: (blocks of a request, its `past`, rows of its span that stay, ascending) each.
        """
        sources, places = [], []
        for blocks, past, rows in kept:
            moved = [(row, place) for place, row in enumerate(rows) if row != place]
            if moved:
                slots = self.slots(blocks, past, past + rows[-1] + 1)
                sources.append(slots[[row for row, _ in moved]])
                places.append(slots[[place for _, place in moved]])
        if sources:
            from_S, to_S = (on_device(torch.cat(slots), self.device) for slots in (sources, places))
            for pool in chain.from_iterable(self.pools):
                pool.index_copy_(2, to_S, pool.index_select(2, from_S))

    def keep_aux(self, kept: Sequence[tuple[list[int], int, int]], aux_TLD: Tensor) -> None:
        """Store the aux hidden states [T, L, D] of tokens that stay.

        Args:
            kept: (blocks of a request, its cached tokens, how many of the last of them are in `aux_TLD`) each.
        """
        slots_T = torch.cat([self.slots(blocks, end - count, end) for blocks, end, count in kept])
        self.aux_SLD.index_copy_(0, on_device(slots_T, self.device), aux_TLD)

    def aux(self, blocks: list[int], start: int, end: int) -> Tensor:
        """Return the aux hidden states of positions start .. end - 1 of a request, [end - start, L, D]."""
        return self.aux_SLD[on_device(self.slots(blocks, start, end), self.device)]

    def views(self, start: int, end: int) -> list[tuple[Tensor, Tensor]]:
        """Return views of keys and values [1, K, end - start, E] of consecutive slots, layer by layer."""
        runs = [[pool[:, None, :, start:end].unbind() for pool in pair] for pair in self.pools]
        return [layer for keys, values in runs for layer in zip(keys, values, strict=True)]

    def first_slot(self, blocks: list[int], start: int, end: int) -> int | None:
        """Return the slot of position `start` if positions start .. end - 1 have consecutive slots, else None."""
        first = start // self.block_size
        used = blocks[first : -(-end // self.block_size)]
        if used != list(range(used[0], used[0] + len(used))):
            return None
        return (used[0] - first) * self.block_size + start


def _kept_per_slot(attention: Any, config: PretrainedConfig) -> tuple[int, int, int]:
    """Return heads, key dim and value dim that a layer stores per token; no heads without attention in pages."""
    if attention is None or compresses(config):
        return 0, 0, 0
    if getattr(config, "kv_lora_rank", None) is not None:
        return 1, config.kv_lora_rank, config.qk_rope_head_dim
    heads = config.num_attention_heads // attention.num_key_value_groups
    return heads, attention.head_dim, attention.head_dim


def logit_rows(spans: Sequence[Span]) -> list[int]:
    """List the rows of the concatenated spans that get logits."""
    rows: list[int] = []
    end = 0
    for span in spans:
        assert 0 <= span.logits <= len(span.tokens), f"{span.logits} rows of {len(span.tokens)} tokens"
        end += len(span.tokens)
        rows += range(end - span.logits, end)
    return rows


def in_pieces(spans: Sequence[Span], rows: int) -> list[Span]:
    """Cut spans of more than so many rows into spans that follow one another, as one forward may have them.

    Each layer writes the keys of all rows before any row attends, so a piece sees those before it. Trees stay whole.
    """
    pieces: list[Span] = []
    for span in spans:
        count = len(span.tokens)
        if count <= rows or span.parents is not None:
            pieces.append(span)
            continue
        assert span.states is None, "a recurrent state reads its rows in one piece"
        for start in range(0, count, rows):
            tokens = span.tokens[start : start + rows]
            left = count - start - len(tokens)
            logits = min(max(0, span.logits - left), len(tokens))
            pieces.append(replace(span, tokens=tokens, past=span.past + start, logits=logits))
    return pieces


def check_batches(config: PretrainedConfig) -> None:
    """Raise ValueError if the target cannot decode several requests together."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = {part.get("rope_type") for part in (rope, *rope.values()) if isinstance(part, dict)}
    if dependent := kinds & _LENGTH_DEPENDENT_ROPE:
        raise ValueError(
            f"model_type {config.model_type!r} cannot be batched: rope_type {dependent.pop()!r} depends on the "
            "longest request of a batch. Use `outrider generate`."
        )


def batches(config: PretrainedConfig) -> bool:
    """Return whether the target can decode several requests together."""
    try:
        check_batches(config)
    except ValueError:
        return False
    return True


def _check_layers(config: PretrainedConfig) -> None:
    others = set(getattr(config, "layer_types", None) or ()) - _PAGEABLE
    if others and not compresses(config):
        raise ValueError(
            f"model_type {config.model_type!r} cannot be decoded: layers of type {', '.join(sorted(others))} are not "
            "supported. Use another target."
        )


# ----------------------------------------------------------------------------
# A forward over the flattened spans of many requests, without padding.
#
#     rows       a a a a a | b | c c c c         every span's new tokens, one after another
#     attend     softmax(q_s K_s^T + causal) V_s   per span s, over [its cached tokens ; itself]
#
# Embeddings, norms, projections and MLPs run on all rows at once; attention treats every request as if it were alone.
# One call per layer attends for all spans, on a GPU (target/paged_attention.py) as on a CPU (target/kernels.py). Span
# by span run: prompts on a CPU, whose many rows PyTorch's blocked products take faster; latents on a GPU; all in
# float64 and without compiled kernels. Then the keys of a span are a view of the pool if its slots are consecutive,
# otherwise they are gathered. This loop runs (layers x requests) times a step, so slots, masks and views, which do not
# depend on the layer, are made once.
# Where spans attend in one call their heads read latents as they are. Span by span these are expanded to keys and
# values in every step, as in `transformers`: the pool stays small, and only one request's keys exist at a time.
#
# Shapes: K kv heads, G queries per kv head, H = K * G, E head dim, T new tokens of all spans, Q folded rows of one span
# (new tokens * G), N slots one span sees. The leading 1 is transformers' batch.
# ----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Context:
    """Keys, values and mask that one span attends to."""

    # Keys and values of every layer, [1, K, N, E], as views of the pool; or the slots to gather, [N].
    source: list[tuple[Tensor, Tensor]] | Tensor
    mask_11QN: Tensor | None  # additive; None: all is visible


class RaggedStep:
    """The state that all layers of a ragged forward share.

    Attributes:
        spans: spans in the order of their rows.
        tokens_1T, positions_1T: input of the model.
    """

    def __init__(self, spans: Sequence[Span], kv: PagedKV) -> None:
        self._kv, self.spans = kv, spans
        tokens: list[int] = []
        positions: list[int] = []
        for span in spans:
            assert span.tokens, "a span without tokens"
            room = len(span.blocks) * kv.block_size
            assert span.end <= room, f"{span.end} tokens in {len(span.blocks)} blocks of {kv.block_size}"
            if span.states is not None:
                span.states.rollback(span.past)
            tokens += span.tokens
            positions += _positions(span)
        self.tokens_1T = on_device([tokens], kv.device)
        self.positions_1T = on_device([positions], kv.device)
        slots_T = torch.cat([kv.slots(span.blocks, span.past, span.end) for span in spans])
        self._slots_T = on_device(slots_T, kv.device)
        compiled = attends(kv.dtype, kv.device)
        # Spans that attend in one compiled call.
        self._few = [i for i, s in enumerate(spans) if compiled and few(len(s.tokens), tree=s.parents is not None)]
        self._contexts: dict[tuple[int, int | None, int], _Context] = {}
        self._masks: dict[tuple[int, int], Tensor] = {}
        small = all(span.parents is None or len(span.tokens) <= MOST_SEEN for span in spans)
        self._pages = small and available(kv.device, kv.dtype)
        self._plans: dict[tuple[int | None, int], Plan] = {}

    @property
    def latent(self) -> bool:
        """Whether layers give latents to `update` instead of keys and values to `attend`."""
        return self._kv.latent

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Write keys and values of the new tokens, [1, K, T, E] each, into the pool (a `transformers.Cache` method)."""
        for pool, states in zip(self._kv.layers[layer_idx], (key_states, value_states), strict=True):
            pool.index_copy_(1, self._slots_T, states[0])
        return key_states, value_states

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        sinks_H: Tensor | None = None,
        latents: Latents | None = None,
    ) -> Tensor:
        """Write k and v [1, K, T, E] into the pool and attend with q [1, H, T, E]: [1, H, T, E].

        Args:
            scale: factor of the scores; None: 1 / sqrt(E).
            window: number of visible positions, including the token's; None: all.
            softcap: scores become softcap * tanh(score / softcap).
            sinks_H: an additional score per head that takes probability without a value.
            latents: how heads read latents, which `update` has then written.
        """
        K, G = k.shape[1], q.shape[1] // k.shape[1]
        scale = q.shape[3] ** -0.5 if scale is None else scale
        if latents is None:
            self.update(k, v, layer)
        keys_KSE, values_KSE = self._kv.layers[layer]
        if self._pages and latents is None:
            q_THE, made = q[0].transpose(0, 1), self._plan(window, groups=G)
            out_THE = attend_pages(
                q_THE, keys_KSE, values_KSE, plan=made, scale=scale, softcap=softcap, sinks_H=sinks_H
            )
            return out_THE.transpose(0, 1)[None]

        def attend_few(q_few: Tensor) -> Tensor:
            options: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap, "sinks_H": sinks_H}
            if latents is None:
                out_THE = self._few_rows.attend(q_few, keys_KSE, values_KSE, **options)
            else:
                joined_1SE = self._kv.latents[layer]
                out_THC = self._few_rows.attend(latents.queries(q_few), joined_1SE, keys_KSE, **options)
                out_THE = latents.outputs(out_THC)
            return out_THE.transpose(0, 1)[None]

        def attend_span(index: int, q_span: Tensor) -> Tensor:
            context = self._context(index, window, groups=G)
            source, mask = context.source, context.mask_11QN
            if isinstance(source, list):
                keys, values = source[layer]
            else:
                keys, values = keys_KSE.index_select(1, source)[None], values_KSE.index_select(1, source)[None]
            if latents is not None:
                keys, values = latents.expand(keys, values)
            folded = fold(q_span, K)
            out = attend_folded(folded, keys, values, mask_11QN=mask, scale=scale, softcap=softcap, sinks_H=sinks_H)
            return unfold(out, G)

        if len(self._few) == len(self.spans):
            return attend_few(q)
        parts = q.split([len(span.tokens) for span in self.spans], dim=2)
        together: Iterator[Tensor] = iter(())
        if self._few:
            attended = attend_few(torch.cat([parts[index] for index in self._few], dim=2))
            together = iter(attended.split([len(self.spans[index].tokens) for index in self._few], dim=2))
        found = [next(together) if i in self._few else attend_span(i, part) for i, part in enumerate(parts)]
        return found[0] if len(found) == 1 else torch.cat(found, dim=2)

    def mask(self, index: int, window: int) -> Tensor:
        """Return the additive mask [1, 1, T, N] of a span's rows over what a sliding window leaves, cached."""
        key = index, window
        if key not in self._masks:
            span = self.spans[index]
            low = lowest_visible(span.past, window)
            self._masks[key] = _mask(span, self._kv, low, window=window, groups=1)
        return self._masks[key]

    def whole(self) -> WholeStep | None:
        """Prepare the step for layers computed as a whole; None if a span has too many rows for that."""
        if len(self._few) < len(self.spans):
            return None
        return WholeStep(self._few_rows, lambda layer: Cache(*self._kv.layers[layer], self._slots_T))

    def _plan(self, window: int | None, groups: int) -> Plan:
        """Return the work of `attend_pages` under a sliding window, cached."""
        key = window, groups
        if key not in self._plans:
            page_size = self._kv.block_size
            host = plan([reader_of(span, page_size) for span in self.spans], groups, page_size, window=window)
            numbers = on_device(torch.from_numpy(host.numbers), self._kv.device)
            self._plans[key] = Plan.of(numbers, host.sizes, page_size, window=window, split=host.split)
        return self._plans[key]

    @cached_property
    def _few_rows(self) -> FewRows:
        """The spans that attend in one compiled call."""
        size = self._kv.block_size
        return FewRows([reader_of(self.spans[index], size) for index in self._few], size)

    def _context(self, index: int, window: int | None, groups: int) -> _Context:
        """Return the context of a span under a sliding window, cached."""
        key = index, window, groups
        if key not in self._contexts:
            self._contexts[key] = _context(self.spans[index], self._kv, window, groups=groups)
        return self._contexts[key]


def reader_of(span: Span, block_size: int) -> Reader:
    """Return what the rows of a span read."""
    sees_T = None if span.parents is None else bits_of(Branches.of(span.parents))
    return Reader(span.past, _positions(span), span.blocks[: -(-span.end // block_size)], sees_T=sees_T)


def _positions(span: Span) -> Sequence[int]:
    if span.parents is None:
        return range(span.past, span.end)
    positions: list[int] = (span.past + Branches.of(span.parents).depths_T).tolist()
    return positions


def _context(span: Span, kv: PagedKV, window: int | None, groups: int) -> _Context:
    low = lowest_visible(span.past, window)
    mask = None if len(span.tokens) == 1 else _mask(span, kv, low, window=window, groups=groups)
    start = kv.first_slot(span.blocks, low, span.end)
    if start is None:
        return _Context(on_device(kv.slots(span.blocks, low, span.end), kv.device), mask)
    return _Context(kv.views(start, start + span.end - low), mask)


def _mask(span: Span, kv: PagedKV, low: int, window: int | None, groups: int) -> Tensor:
    """Make an additive mask [1, 1, Q, N], because attention would convert a bool mask in every layer."""
    if span.parents is not None:
        visible = Branches.of(span.parents).visible(span.past, low, window)
    else:
        past = span.past - low
        visible = torch.ones(len(span.tokens), span.end - low, dtype=torch.bool).tril_(past)
        if window is not None:
            visible.triu_(past + 1 - window)
    return additive(on_device(visible, kv.device), kv.dtype).repeat_interleave(groups, dim=0)[None, None]
