"""logits = W[ids] h: rows of a target's output matrix, quantised or not, without dequantising it.

A quantised matrix has its scales and biases per row and group of inputs, so any choice of rows is again a quantised
matrix. Tied targets give their embedding: its rows mean the same. Shapes: N rows, H hidden, V vocab, Vd chosen ids.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import torch
from mlx.utils import tree_map
from mlx_lm.models.cache import KVCache
from torch import Tensor

from outrider.backends.mlx.target import MLXTarget, load_mlx_target, to_mlx, to_torch
from outrider.checkpoints.checkpoint import Checkpoint, load_checkpoint
from outrider.decoding.generate import stream
from outrider.decoding.request import Request
from outrider.drafters.base import DraftCall, Drafter, capped, check_embedding_scale, check_fits, longest_draft
from outrider.drafters.cache import serving_mask
from outrider.drafters.chain import sample_chain
from outrider.drafters.confidence import ChainHeads
from outrider.drafters.dflash import DFlash, DFlashConfig
from outrider.drafters.draft import Draft
from outrider.drafters.dspark import DSparkConfig
from outrider.drafters.heads import VanillaMarkov
from outrider.drafters.rope import frequencies


def parameters_of(module: Any, ids_Vd: mx.array | None = None) -> dict[str, Any]:
    """A layer's parameters, of these rows; None: of all."""
    parameters: dict[str, Any] = module.parameters()
    return parameters if ids_Vd is None else tree_map(lambda rows: rows[ids_Vd], parameters)


def quantisation_of(module: Any) -> dict[str, Any]:
    """How its matrix is quantised, as the arguments of mx.quantize; empty where it is not."""
    return {name: getattr(module, name) for name in ("group_size", "bits", "mode") if hasattr(module, name)}


class OutputRows:
    """A linear layer or an embedding as hidden states -> logits, called from torch.

    Args:
        module: nn.Linear, nn.Embedding or their quantised kin, [V, H].
        dtype: of the hidden states that it takes: the model's own.
        ids_Vd: rows to keep, in this order; None: all of them.
    """

    def __init__(self, module: Any, dtype: mx.Dtype, ids_Vd: mx.array | None = None) -> None:
        self.parameters, self.quantised = parameters_of(module, ids_Vd), quantisation_of(module)
        self.dtype = dtype
        mx.eval(self.parameters)

    def __call__(self, hidden_NH: Tensor) -> Tensor:
        """[N, H] -> [N, Vd] in float32."""
        x, own = to_mlx(hidden_NH).astype(self.dtype), self.parameters
        if self.quantised:
            logits = mx.quantized_matmul(x, own["weight"], own["scales"], own.get("biases"), True, **self.quantised)
        else:
            logits = x @ own["weight"].T
        return to_torch(logits if "bias" not in own else logits + own["bias"])


# ----------------------------------------------------------------------------
# A drafter's own embedding or LM head beside a target of MLX: the target's module where it is a copy of that.
#
#     DeepSpec and speculators store copies of the target's embed_tokens and lm_head     ->  the target's, shared
#     anything else, as EAGLE-like heads or one trained over a reduced vocabulary         ->  a matrix of its own
#
# Of a quantised matrix a copy is what the same quantisation turns into the very same bits.
# Shapes: V vocab, Vd rows the drafter has, H hidden.
# ----------------------------------------------------------------------------


def shared_or_own(
    own: Tensor | None, module: Any, dtype: mx.Dtype, ids_Vd: mx.array | None = None
) -> tuple[Any, mx.array | None]:
    """The module that serves the drafter, and which of its rows; None: all of them.

    Args:
        own: the drafter's matrix, [Vd, H] with a row for each of `ids_Vd`, or [V, H]; None: it has none.
        module: the target's embedding or linear layer, quantised or not.
        dtype: of an own matrix: the model's, which the target's was quantised from.
    """
    if own is None:
        return module, ids_Vd
    matrix = to_mlx(own)
    if _is_copy(matrix, module, dtype, ids_Vd=ids_Vd):
        return module, ids_Vd
    apart = nn.Embedding(1, 1)
    apart.weight = matrix.astype(dtype)
    return apart, None


def _is_copy(matrix: mx.array, module: Any, dtype: mx.Dtype, ids_Vd: mx.array | None) -> bool:
    theirs, quantisation = parameters_of(module, ids_Vd), quantisation_of(module)
    if not quantisation:
        return bool(mx.array_equal(matrix.astype(dtype), theirs["weight"]))
    quantised = mx.quantize(matrix.astype(dtype), **quantisation)
    names = ("weight", "scales", "biases")[: len(quantised)]
    return all(bool(mx.array_equal(mine, theirs[name])) for name, mine in zip(names, quantised, strict=True))


# ----------------------------------------------------------------------------
# DFlash's backbone in MLX: the same parameters under the same names as drafters/dflash.py, for serving.
#
#     context   H_ctx = RMSNorm(W_c aux hidden states) -> K, V of every layer -> appended to its cache
#     block     [anchor, mask, ..] attends over [context KV ; block KV]; the block's own rows are forgotten afterwards
#
# Source: DFlash, arXiv 2602.06036. Shapes: a leading 1 for the batch, T new tokens, K block rows, S slots, H draft
# hidden, F = aux hidden states x H, G kv heads, E head dim.
# ----------------------------------------------------------------------------


class _Context(KVCache):
    """Keys and values of all context tokens; `offset` counts them."""

    def beside(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Those of the context, then the given ones, which are written behind it and forgotten at once."""
        found = self.update_and_fetch(keys, values)
        self.trim(keys.shape[2])
        return found


class _LastContext:
    """A rotating cache: keys and values of the last `size` context tokens, oldest first; `offset` counts all.

    Every call copies them; mlx-lm's `RotatingKVCache` does so too for more than one row, and blocks have several.
    """

    def __init__(self, size: int) -> None:
        self.size, self.offset = size, 0
        self.state: tuple[mx.array, ...] = ()

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append tokens; those before the last `size` are dropped."""
        first = max(0, min(self.offset, self.size) + keys.shape[2] - self.size)
        self.offset += keys.shape[2]
        keys, values = (x[:, :, first:] for x in self.beside(keys, values))
        self.state = keys, values
        return keys, values

    def beside(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Those of the context, then the given ones, which are not kept."""
        if not self.state:
            return keys, values
        return mx.concatenate([self.state[0], keys], axis=2), mx.concatenate([self.state[1], values], axis=2)


_Cache = _Context | _LastContext


class _Attention(nn.Module):
    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        H, E = config.hidden_size, config.head_dim
        self.head_dim = E
        inverse_F, self.rope_factor = frequencies(config)
        self._periods_F = to_mlx(1 / inverse_F)  # the underscore: no parameter
        self.q_proj = nn.Linear(H, config.num_attention_heads * E, bias=False)
        self.k_proj = nn.Linear(H, config.num_key_value_heads * E, bias=False)
        self.v_proj = nn.Linear(H, config.num_key_value_heads * E, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * E, H, bias=False)
        self.q_norm = nn.RMSNorm(E, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(E, eps=config.rms_norm_eps)

    def _heads(self, x: mx.array) -> mx.array:
        """[1, T, heads * E] -> [1, heads, T, E]"""
        return x.reshape(1, x.shape[1], -1, self.head_dim).transpose(0, 2, 1, 3)

    def _rotated(self, x: mx.array, start: int) -> mx.array:
        turned = mx.fast.rope(
            x, self.head_dim, traditional=False, base=None, scale=1.0, offset=start, freqs=self._periods_F
        )
        return turned if self.rope_factor == 1 else turned * self.rope_factor

    def keys_values(self, x_1TH: mx.array, start: int) -> tuple[mx.array, mx.array]:
        """Those of rows from position `start` on, [1, G, T, E] each."""
        k = self._rotated(self.k_norm(self._heads(self.k_proj(x_1TH))), start)
        return k, self._heads(self.v_proj(x_1TH))

    def __call__(self, x_1KH: mx.array, cache: _Cache, visible_KS: mx.array | None) -> mx.array:
        q = self._rotated(self.q_norm(self._heads(self.q_proj(x_1KH))), cache.offset)
        keys, values = cache.beside(*self.keys_values(x_1KH, cache.offset))
        out = mx.fast.scaled_dot_product_attention(q, keys, values, scale=self.head_dim**-0.5, mask=visible_KS)
        return self.o_proj(out.transpose(0, 2, 1, 3).reshape(1, x_1KH.shape[1], -1))


class _SwiGLU(nn.Module):
    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(nn.silu(self.gate_proj(x)) * self.up_proj(x))


class _Layer(nn.Module):
    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = _Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = _SwiGLU(config)

    def __call__(self, x_1KH: mx.array, cache: _Cache, visible_KS: mx.array | None) -> mx.array:
        x_1KH = x_1KH + self.self_attn(self.input_layernorm(x_1KH), cache, visible_KS)
        return x_1KH + self.mlp(self.post_attention_layernorm(x_1KH))


class Backbone(nn.Module):
    """The parallel part of DFlash and DSpark. A session is one cache per layer, rotating where it has a window.

    Args:
        window: of all layers, where theirs is not smaller; None: as trained.
    """

    def __init__(self, config: DFlashConfig, window: int | None = None) -> None:
        super().__init__()
        self.attention_patterns = tuple(
            pattern if window is None else pattern._replace(window=min(pattern.window or window, window))
            for pattern in config.attention_patterns
        )
        self.gamma = config.gamma
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = [_Layer(config) for _ in range(config.num_hidden_layers)]
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def new_caches(self) -> list[_Cache]:
        """Empty ones. The first row of a block is in its window and sees one token of the context less."""
        windows = [pattern.window for pattern in self.attention_patterns]
        return [_Context() if window is None else _LastContext(window - 1) for window in windows]

    def extend(self, caches: Sequence[_Cache], aux_1TF: mx.array) -> None:
        """Append the features of committed tokens, raw aux hidden states side by side."""
        context_1TH = self.hidden_norm(self.fc(aux_1TF))
        for layer, cache in zip(self.layers, caches, strict=True):
            cache.update_and_fetch(*layer.self_attn.keys_values(context_1TH, cache.offset))

    def __call__(self, caches: Sequence[_Cache], embedded_1KH: mx.array) -> mx.array:
        """One block after the context: normed hidden states of the prediction rows, [1, gamma, H]. No cache grows."""
        start, rows = caches[0].offset, embedded_1KH.shape[1]
        kept = {p: start if p.window is None else min(start, p.window - 1) for p in self.attention_patterns}
        masks = {pattern: serving_mask(pattern, length, rows) for pattern, length in kept.items()}
        visible = {pattern: None if mask_KS is None else to_mlx(mask_KS) for pattern, mask_KS in masks.items()}
        x_1KH = embedded_1KH
        for layer, cache, pattern in zip(self.layers, caches, self.attention_patterns, strict=True):
            x_1KH = layer(x_1KH, cache, visible[pattern])
        return self.norm(x_1KH[:, -self.gamma :])


# ----------------------------------------------------------------------------
# DFlash and DSpark over an MLX target: the backbone and the matrices over the vocabulary in MLX, the sampling in torch.
#
#     aux hidden states -> extend -> draft cache          anchor -> block in MLX -> h_1..h_K -> sample_chain -> Draft
#                                                       U_k = head h_k and W2 l_k in MLX, where sample_chain asks
#
# The sampling chain (drafters/chain.py) draws, warps and stops at low confidence; it is the code that every other
# drafter uses, so what is proved of it holds here. Its heads' small parts stay in torch. Embedding and LM head are the
# target's, or the drafter's own where it brings others (`shared_or_own`). Shapes: as for the backbone above.
# ----------------------------------------------------------------------------


_DRAFTED_HERE = (DFlashConfig.algorithm, DSparkConfig.algorithm)


class MLXDrafter(Drafter):
    """A `Drafter` (drafters/base.py) for a target of mlx-lm, in the target's own type.

    Args:
        sliding_window_size: tokens that every draft layer sees at most, the row's own included, so that long texts
            cost no more memory and time; None: as the drafter was trained. It changes drafts, not what is accepted.

    Raises:
        ValueError: another kind of drafter, one made for another target, or a window of no token.
    """

    def __init__(self, checkpoint: Checkpoint, target: MLXTarget, sliding_window_size: int | None = None) -> None:
        if sliding_window_size is not None and sliding_window_size < 2:
            raise ValueError(f"sliding_window_size={sliding_window_size} must be at least 2.")
        module = checkpoint.weights.module
        if module.algorithm not in _DRAFTED_HERE:
            raise ValueError(
                f"the MLX backend drafts with {' and '.join(_DRAFTED_HERE)} checkpoints and n-grams; this drafter is "
                f"{module.algorithm}: serve it with the local backend."
            )
        config = module.config
        check_fits(config, target)
        weights, calibration = checkpoint.weights, checkpoint.calibration
        calibration.check(config.gamma)
        weights.check()
        check_embedding_scale(weights.embedding_scale, target.embed_scale, target.name)
        self.config, self.aux_layers, self.gamma = config, tuple(config.target_layer_ids), config.gamma
        self.embed_scale, self.dtype = target.embed_scale, target.dtype
        self.embed, _ = shared_or_own(weights.embedding_VH, target.embed, target.dtype)
        ids_Vd = None if weights.draft_ids_Vd is None else to_mlx(weights.draft_ids_Vd)
        head, rows_Vd = shared_or_own(weights.head_VdH, target.head, target.dtype, ids_Vd=ids_Vd)
        rows = OutputRows(head, target.dtype, rows_Vd)
        self.head = capped(rows, config.output_multiplier, config.final_logit_softcapping)
        backbone = module.block_backbone()
        assert backbone is not None, f"{config.algorithm} has DFlash's backbone"
        self.backbone = _backbone(backbone, target.dtype, window=sliding_window_size)
        sequential, confidence = module.chain_heads()
        if sequential is not None:
            sequential = _with_output_in_mlx(sequential, target.dtype)
        self.heads: ChainHeads = weights.chain_heads(target, calibration, sequential, confidence=confidence)

    def new_session(self, capacity: int) -> list[_Cache]:
        """An empty draft cache; it grows by itself."""
        return self.backbone.new_caches()

    def extend(self, sessions: Sequence[list[_Cache]], tokens: Sequence[Sequence[int]], aux_TLD: Tensor | None) -> None:
        """Append the features of newly committed tokens (raw aux hidden states, session after session)."""
        assert aux_TLD is not None
        for session, part in zip(sessions, aux_TLD.split([len(part) for part in tokens]), strict=True):
            self.backbone.extend(session, to_mlx(part.flatten(1))[None].astype(self.dtype))
            mx.async_eval([cache.state for cache in session])  # begun, not waited for

    def block_hidden(self, session: list[_Cache], anchor: int) -> Tensor:
        """One block pass: normed hidden states of the prediction rows, [gamma, H]. No cache grows."""
        block = mx.array([[anchor] + [self.config.mask_token_id] * (self.config.block_size - 1)])
        return to_torch(self.backbone(session, self.embed(block) * self.embed_scale)[0])

    def propose(self, calls: Sequence[DraftCall], min_confidence: float = 0.0) -> list[Draft]:
        """Draft for every call, gamma tokens each at most, while c_k is at least `min_confidence`."""
        hidden_RKH = torch.stack([self.block_hidden(call.session, call.anchor) for call in calls])
        return sample_chain(
            self.head,
            hidden_RKH[:, : longest_draft(calls, self.gamma)],
            calls,
            heads=self.heads,
            min_confidence=min_confidence,
        )


def _backbone(module: DFlash, dtype: mx.Dtype, window: int | None) -> Backbone:
    backbone = Backbone(module.config, window)
    heads = ("markov_head.", "confidence_head.")
    state = {name: tensor for name, tensor in module.folded_state_dict().items() if not name.startswith(heads)}
    backbone.load_weights([(name, to_mlx(tensor).astype(dtype)) for name, tensor in state.items()])
    mx.eval(backbone.parameters())
    return backbone


def _with_output_in_mlx(head: VanillaMarkov, dtype: mx.Dtype) -> VanillaMarkov:
    """The same head, whose W2 [Vd, r] is MLX's: it is as tall as the vocabulary, and read at every position."""
    head = copy.deepcopy(head)
    output = _MLXLinear(head.markov_w2.weight, dtype)
    head.markov_w2 = output  # type: ignore[assignment]
    return head


class _MLXLinear(torch.nn.Module):
    def __init__(self, weight: Tensor, dtype: mx.Dtype) -> None:
        super().__init__()
        self.dtype, self.weight_MN = dtype, to_mlx(weight).astype(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return to_torch(to_mlx(x).astype(self.dtype) @ self.weight_MN.T)


# ----------------------------------------------------------------------------
# A function that decodes one prompt with MLX, for whoever puts load on it (`outrider bench --backend mlx`).
# ----------------------------------------------------------------------------


_load = lru_cache(maxsize=1)(load_mlx_target)  # plain and speculative decoding share one target


def decoder(target: str, drafter: Path | None) -> Callable[[Request], Iterator[list[int]]]:
    """A function of a request that yields the tokens of each round, stop token included.

    Args:
        target: as for `load_mlx_target`.
        drafter: directory of a DFlash or DSpark checkpoint; None: plain decoding.

    Raises:
        ValueError: no such model or drafter, or they do not fit.
    """
    loaded: MLXTarget = _load(target)
    served = (
        None if drafter is None else MLXDrafter(load_checkpoint(drafter, num_target_layers=loaded.num_layers), loaded)
    )

    def decode(request: Request) -> Iterator[list[int]]:
        for chunk in stream(loaded, request.prompt, served, params=request.params, rules=request.rules):
            yield chunk.tokens

    return decode
