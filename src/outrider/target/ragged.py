"""One forward over spans of many requests, flattened, without padding.

    rows       a a a a a | b | c c c c         every span's new tokens, one after another
    attend     softmax(q_s K_s^T + causal) V_s   per span s, over [its cached tokens ; itself]

Embeddings, norms, projections and MLPs run on all rows at once; only attention goes span by span, in the shapes it
would have were the request alone. Where the slots of a span lie one after another its keys are a view of the pool, else
they are gathered. This loop runs (layers x requests) times a step, so what does not depend on the layer (slots, masks,
views of all layers) is made once. The query heads of one key head are folded into rows, as in lean.py.

Families without the lean forward come here through transformers' attention interface: their own modules call
`ragged_attention` for the duration of `ragged_attention_in`, with their scaling, window, soft cap and sinks.

Shapes: K kv heads, G queries per kv head, H = K * G, E head dim, T new tokens of all spans, Q folded rows of one span
(new tokens * G), N slots one span sees. The leading 1 is transformers' batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, PretrainedConfig

from outrider.target.branches import Branches, additive
from outrider.target.cache import KVCache, KVLayer
from outrider.target.paged import PagedKV, Span

_IMPLEMENTATION = "outrider_ragged"


@dataclass(frozen=True)
class _Context:
    """What one span attends to."""

    # Keys and values of every layer, [1, K, N, E], as views of the pool; or the slots to gather, [N].
    source: list[tuple[torch.Tensor, torch.Tensor]] | torch.Tensor
    mask_11QN: torch.Tensor | None  # additive; None: all is visible


class RaggedStep:
    """What the layers of one forward share.

    Attributes:
        tokens_1T, positions_1T: the input of the model.
        logit_rows_N: the rows of T that get logits.
    """

    def __init__(self, spans: Sequence[Span], kv: PagedKV) -> None:
        self._kv, self._spans = kv, spans
        tokens: list[int] = []
        positions: list[int] = []
        logit_rows: list[int] = []
        for span in spans:
            assert span.tokens, "a span without tokens"
            room = len(span.blocks) * kv.block_size
            assert span.end <= room, f"{span.end} tokens in {len(span.blocks)} blocks of {kv.block_size}"
            assert 0 <= span.logits <= len(span.tokens), f"{span.logits} rows of {len(span.tokens)} tokens"
            tokens += span.tokens
            positions += _positions(span)
            logit_rows += range(len(tokens) - span.logits, len(tokens))
        self.tokens_1T = torch.tensor([tokens], device=kv.device)
        self.positions_1T = torch.tensor([positions], device=kv.device)
        self.logit_rows_N = torch.tensor(logit_rows, dtype=torch.long, device=kv.device)
        self._slots_T = torch.cat([kv.slots(span.blocks, span.past, span.end) for span in spans]).to(kv.device)
        self._folded_rows = [len(span.tokens) * kv.groups for span in spans]
        self._contexts: dict[int | None, list[_Context]] = {}

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        sinks_H: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write k and v [1, K, T, E] into the pool and attend with q [1, H, T, E], span by span: [1, H, T, E].

        Args:
            scale: of the scores; None is 1 / sqrt(E).
            window: the last so many positions are visible, the token's own included; None is all.
            softcap: scores become softcap * tanh(score / softcap).
            sinks_H: one more score per head that takes probability and gives no value.
        """
        K = self._kv.kv_heads
        keys_KSE, values_KSE = self._kv.keys_LKSE[layer], self._kv.values_LKSE[layer]
        keys_KSE.index_copy_(1, self._slots_T, k[0])
        values_KSE.index_copy_(1, self._slots_T, v[0])
        folded = _fold(q, K)
        outputs = []
        for q_span, context in zip(folded.split(self._folded_rows, dim=2), self._seen(window), strict=True):
            source, mask = context.source, context.mask_11QN
            if isinstance(source, list):
                keys, values = source[layer]
            else:
                keys, values = keys_KSE.index_select(1, source)[None], values_KSE.index_select(1, source)[None]
            outputs.append(_attend(q_span, keys, values, mask, scale, softcap, sinks_H))
        return _unfold(torch.cat(outputs, dim=2), self._kv.groups)

    def _seen(self, window: int | None) -> list[_Context]:
        """The contexts under a window, made for its first layer."""
        if window not in self._contexts:
            self._contexts[window] = [_context(span, self._kv, window) for span in self._spans]
        return self._contexts[window]


class BranchedStep:
    """One forward of rows that branch, after a `KVCache` of one sequence: what `ragged_attention` asks for them."""

    def __init__(self, cache: KVCache, branches: Branches, groups: int) -> None:
        assert cache.pad_B is None, "branches after left padding"
        self._cache, self._branches, self._groups, self._past = cache, branches, groups, cache.length
        self._masks: dict[int | None, torch.Tensor] = {}

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        sinks_H: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As `RaggedStep.attend`, with k and v appended to the cache."""
        store = self._cache.layers[layer]
        assert isinstance(store, KVLayer)
        keys, values = store.update(k, v)
        low = _low(self._past, window)
        if window not in self._masks:
            mask = additive(self._branches.visible(self._past, low, window), q.dtype)
            self._masks[window] = mask.repeat_interleave(self._groups, dim=0)[None, None].to(q.device)
        folded, seen = _fold(q, k.shape[1]), (keys[:, :, low:], values[:, :, low:])
        return _unfold(_attend(folded, *seen, self._masks[window], scale, softcap, sinks_H), self._groups)


def _fold(q: torch.Tensor, K: int) -> torch.Tensor:
    """[1, H, T, E] -> [1, K, T * G, E]: the query heads of a key head become rows, token by token."""
    _, H, T, E = q.shape
    return q.reshape(1, K, H // K, T, E).transpose(2, 3).reshape(1, K, T * (H // K), E)


def _unfold(folded: torch.Tensor, groups: int) -> torch.Tensor:
    """The way back, [1, H, T, E]."""
    _, K, Q, E = folded.shape
    out = folded.view(1, K, Q // groups, groups, E)
    return out.transpose(1, 2).reshape(1, Q // groups, K * groups, E).transpose(1, 2)


def _positions(span: Span) -> Sequence[int]:
    if span.parents is None:
        return range(span.past, span.end)
    positions: list[int] = (span.past + Branches.of(span.parents).depths_T).tolist()
    return positions


def _low(past: int, window: int | None) -> int:
    """The first position that any new token sees."""
    return 0 if window is None else max(0, past + 1 - window)


def _context(span: Span, kv: PagedKV, window: int | None) -> _Context:
    low = _low(span.past, window)
    mask = None if len(span.tokens) == 1 else _mask(span, kv, low, window)
    start = kv.first_slot(span.blocks, low, span.end)
    if start is None:
        return _Context(kv.slots(span.blocks, low, span.end).to(kv.device), mask)
    keys, values = (
        pool[:, None, :, start : start + span.end - low].unbind() for pool in (kv.keys_LKSE, kv.values_LKSE)
    )
    return _Context(list(zip(keys, values, strict=True)), mask)


def _mask(span: Span, kv: PagedKV, low: int, window: int | None) -> torch.Tensor:
    """[1, 1, Q, N]; additive, because attention would convert a bool mask in every layer."""
    if span.parents is not None:
        visible = Branches.of(span.parents).visible(span.past, low, window)
    else:
        past = span.past - low
        visible = torch.ones(len(span.tokens), span.end - low, dtype=torch.bool).tril_(past)
        if window is not None:
            visible.triu_(past + 1 - window)
    return additive(visible, kv.dtype).repeat_interleave(kv.groups, dim=0)[None, None].to(kv.device)


def _attend(
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


def ragged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    *,
    ragged_step: RaggedStep | BranchedStep,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: q [1, H, T, E], k and v [1, K, T, E] -> ([1, T, H, E], no weights)."""
    assert attention_mask is None, "transformers made a mask of its own"
    layer: Any = module.layer_idx
    out = ragged_step.attend(layer, query, key, value, scaling, sliding_window, softcap, s_aux)
    return out.transpose(1, 2), None


AttentionInterface.register(_IMPLEMENTATION, ragged_attention)


@contextmanager
def ragged_attention_in(config: PretrainedConfig) -> Iterator[None]:
    """The modules of this config's model call `ragged_attention` inside, and what they called before afterwards."""
    before = config._attn_implementation
    config._attn_implementation = _IMPLEMENTATION
    try:
        yield
    finally:
        config._attn_implementation = before
