"""A target on mlx-lm: its forward, cache and aux hidden states, with rows passed to torch as float32 by way of numpy.

On Apple silicon both sides share that memory, so a row costs a copy and no transfer; what crosses is small (a block's
logits, aux hidden states of committed tokens), and whoever converts waits until MLX has computed it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import torch
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache, make_prompt_cache
from mlx_lm.utils import load_config, load_model
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from outrider.target.hub import load_tokenizer, resolve_model
from outrider.target.loading import check_config
from outrider.target.model import check_aux_layers
from outrider.target.paged import Span
from outrider.utils.documents import read_mapping
from outrider.utils.files import check_finite


def to_torch(x: mx.array) -> Tensor:
    """A float32 copy on the CPU; evaluates `x`."""
    return torch.from_numpy(np.array(x.astype(mx.float32)))


def to_mlx(x: Tensor) -> mx.array:
    """A copy in MLX, float32, int64 or bool as on the other side."""
    return mx.array(x.detach().cpu().numpy())


# ----------------------------------------------------------------------------
# config.json as mlx-lm reads it.
#
#     transformers 5   rope_parameters: {rope_theta, rope_type, ..}, or one such mapping per kind of layer
#     mlx-lm           rope_theta, rope_scaling, partial_rotary_factor;
#                      Gemma: rope_global_base_freq, rope_local_base_freq
#
# Many models of mlx-lm know the older fields only, and take a default where one is absent: a model that transformers 5
# saved would then decode with another rotation and without a word. What is missing is filled in; what is there stays.
# ----------------------------------------------------------------------------


def older_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields that mlx-lm needs added to a config.json, also to the language model's part of a multimodal one."""
    added = _rope(config)
    text = config.get("text_config")
    if isinstance(text, Mapping) and (below := _rope(text)):
        added["text_config"] = {**text, **below}
    return added


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    rope = config.get("rope_parameters")
    if not isinstance(rope, Mapping):
        return {}
    found: dict[str, Any] = {}
    if isinstance(rope.get("full_attention"), Mapping):
        sliding = rope.get("sliding_attention") or {}
        found["rope_local_base_freq"] = sliding.get("rope_theta")
        rope = rope["full_attention"]
        found["rope_global_base_freq"] = rope.get("rope_theta")
    found["rope_theta"] = rope.get("rope_theta")
    found["partial_rotary_factor"] = rope.get("partial_rotary_factor")
    if rope.get("rope_type", "default") != "default":
        found["rope_scaling"] = dict(rope)
    return {name: value for name, value in found.items() if value is not None and config.get(name) is None}


# ----------------------------------------------------------------------------
# What goes into the layers of an mlx-lm model and what comes out: aux hidden states, and calls that can be made again.
#
#     layer(x, mask, cache) -> h      aux layer i = h of layer i, aux layer -1 = x of layer 0 (the scaled embedding)
#
# mlx-lm's modules have no hooks, so each layer's class is replaced by a subclass that notes the call and is otherwise
# the same: attributes, parameters and the model's own forward stay as they are.
# ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """Arguments of one call of one layer."""

    layer: Any
    x: mx.array
    rest: tuple[Any, ...]
    named: dict[str, Any]
    output: mx.array

    def again(self, rows: int) -> None:
        """The same call with the first `rows` tokens, for what it writes into its cache.

        MLX computes what is read: of the layer only the part that leads to the cache runs, no MLP and no output.
        """
        self.layer(self.x[:, :rows], *self.rest, **self.named)


class LayerLog:
    """Records the calls of a model's layers."""

    def __init__(self, layers: Sequence[Any]) -> None:
        self._wanted: frozenset[int] = frozenset()
        self._calls: dict[int, Call] = {}
        for index, layer in enumerate(layers):
            self._listen(index, layer)

    def _listen(self, index: int, layer: Any) -> None:
        log, own = self, type(layer)

        def call(module: Any, x: mx.array, *rest: Any, **named: Any) -> Any:
            output = own.__call__(module, x, *rest, **named)
            if index in log._wanted:
                hidden = output[0] if isinstance(output, tuple) else output
                log._calls[index] = Call(module, x, rest, named=named, output=hidden)
            return output

        layer.__class__ = type(own.__name__, (own,), {"__call__": call})

    @contextmanager
    def noting(self, wanted: Sequence[int]) -> Iterator[dict[int, Call]]:
        """Record the calls of these layers inside the block, by index."""
        self._wanted, self._calls = frozenset(wanted), {}
        try:
            yield self._calls
        finally:
            self._wanted, self._calls = frozenset(), {}


# ----------------------------------------------------------------------------
# One request's cache in an mlx-lm model, with rollback to any row of the last forward.
#
#     KVCache          rows 0 .. n        forget the last: move the end
#     RotatingKVCache  the last w rows    after several rows at once they lie in order, w - 1 and the new: cut the end
#     ArraysCache      a recurrent state  back to the state before, then the kept rows again, through that layer alone
#
# A gated delta net (Qwen3-Next, Qwen3.5) or any other recurrence has no rows to forget. States are immutable arrays, so
# remembering one is a reference; making up for the kept rows reads one layer's input projections and nothing else
# (`Call.again`).
# ----------------------------------------------------------------------------


class MLXCache:
    """The caches of all layers; `length` counts tokens.

    Raises:
        ValueError: a layer keeps its memory in a way that cannot be rolled back.
    """

    def __init__(self, model: Any) -> None:
        self.layers: list[Any] = make_prompt_cache(model)
        self.length = 0
        kinds = {type(layer) for layer in self.layers}
        if unknown := sorted(
            kind.__name__ for kind in kinds if not issubclass(kind, KVCache | RotatingKVCache | ArraysCache)
        ):
            raise ValueError(
                f"this MLX model keeps its memory as {', '.join(unknown)}, which cannot be rolled back after a "
                "rejected draft; use another target, or mlx-lm's own decoding."
            )
        self.recurrent = tuple(i for i, layer in enumerate(self.layers) if isinstance(layer, ArraysCache))
        self._before: dict[int, list[mx.array | None]] = {}
        self._calls: dict[int, Call] = {}

    def remember(self) -> None:
        """Keep the recurrent states as they are before a forward."""
        self._before = {i: list(self.layers[i].cache) for i in self.recurrent}

    def grown(self, count: int, calls: Mapping[int, Call]) -> None:
        """Take note of a forward of `count` tokens, with the calls of the recurrent layers."""
        self.length += count
        self._calls = {i: calls[i] for i in self.recurrent}

    def evaluate(self) -> None:
        """Compute what is pending, so that a long prompt does not pile up a graph."""
        mx.eval([layer.state for layer in self.layers])
        self._before, self._calls = {}, {}

    def keep_path(self, start: int, rows: Sequence[int]) -> None:
        """Of the last forward, which began at `start`, keep the first rows (a chain: no other path is possible)."""
        kept = len(rows)
        assert kept and list(rows) == list(range(kept)), f"rows {list(rows)} are no beginning of a chain"
        forgotten = self.length - start - kept
        assert forgotten >= 0, f"cannot keep {kept} rows after {start}: there are {self.length - start}"
        if forgotten:
            for index, layer in enumerate(self.layers):
                if isinstance(layer, RotatingKVCache):
                    _cut(layer, forgotten)
                elif isinstance(layer, ArraysCache):
                    layer.cache = self._before[index]
                    self._calls[index].again(kept)
                else:
                    layer.trim(forgotten)
        self.length = start + kept
        self._before, self._calls = {}, {}


class MLXKV:
    """The pool of an engine with one request: its `MLXCache`, made anew for a request that begins."""

    block_bytes = 0

    def __init__(self, model: Any) -> None:
        self.model = model
        self.cache = MLXCache(model)

    def claim(self) -> None:
        """mlx-lm's caches take memory as they grow."""

    def of(self, span: Span) -> MLXCache:
        """The cache that `span` continues."""
        if span.past == 0:
            self.cache = MLXCache(self.model)
        assert span.past == self.cache.length, f"{span.past} tokens kept, {self.cache.length} in the cache"
        return self.cache

    def keep_paths(self, kept: Sequence[tuple[list[int], int, Sequence[int]]]) -> None:
        """Keep only the accepted path of the last forward; see `PagedKV.keep_paths`."""
        for _, past, rows in kept:
            self.cache.keep_path(past, rows)


def _cut(layer: Any, count: int) -> None:
    """Forget the last `count` of the rows that one forward added; its own `trim` refuses once the window is full.

    A forward of several rows lays the window out in order, so they are the last ones, and it kept one row of context
    less than the window for the first of them: as long as one stays, nothing that was thrown away is needed again.
    """
    layer.keys, layer.values = layer.keys[..., :-count, :], layer.values[..., :-count, :]
    layer.offset -= count
    layer._idx = layer.keys.shape[2]


# ----------------------------------------------------------------------------
# An mlx-lm model as a target: tokens in, logits and aux hidden states out, a cache that rolls back.
#
#     tokens, cache -> mlx-lm's own forward -> logits at the last tokens [N, V], aux hidden states [T, L, D]
#
# There is one request. The model is used as it is, quantised or not; `LayerLog` only records the calls of its layers.
# How a family scales its embeddings is read off the input of layer 0, not kept in a table: mlx-lm does it inside each
# model's own forward.
# ----------------------------------------------------------------------------


_NO_LIMIT = 2**31  # a config that names no longest context
_PROBES = 8  # tokens whose embeddings are compared with what layer 0 is given


@dataclass(frozen=True)
class MLXOutput:
    """Logits and aux hidden states of one forward, in float32 on the CPU."""

    logits_NV: Tensor | None
    aux_TLD: Tensor | None


class MLXTarget:
    """A `DecodingTarget` over a model of mlx-lm.

    Args:
        model: as `mlx_lm.utils.load_model` makes it.
        config: its config.json with the stop tokens of its generation config.
    """

    def __init__(
        self, model: Any, config: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase | None, name: str
    ) -> None:
        text: Mapping[str, Any] = config.get("text_config") or config  # multimodal configs keep the LLM's apart
        causal = getattr(model, "language_model", model)
        self.model, self.name, self.tokenizer = model, name, tokenizer
        self.embed = causal.model.embed_tokens
        self.head = getattr(causal, "lm_head", self.embed)
        self.layers = causal.model.layers
        self.vocab_size = int(self.head.weight.shape[0])
        self.num_layers = len(self.layers)
        limit = text.get("max_position_embeddings") or getattr(causal.args, "max_position_embeddings", None)
        self.max_context = int(limit or _NO_LIMIT)
        eos = config.get("eos_token_id", text.get("eos_token_id"))
        self.eos_ids = frozenset([] if eos is None else [eos] if isinstance(eos, int) else eos)
        self.device = torch.device("cpu")  # of what it returns
        self.log = LayerLog(self.layers)
        probes = mx.arange(min(_PROBES, self.vocab_size))[None]
        embedded = self.embed(probes)
        self.hidden_size, self.dtype = int(embedded.shape[-1]), embedded.dtype
        self.embed_scale = self._embed_scale(probes)

    def _embed_scale(self, probes: mx.array) -> float:
        """What the model multiplies embeddings by. Nothing behind layer 0's input is read, so nothing is computed."""
        with self.log.noting([0]) as calls:
            self.model(probes, cache=MLXCache(self.model).layers)
        given, plain = calls[0].x.astype(mx.float32), self.embed(probes).astype(mx.float32)
        return ((given * plain).sum() / (plain * plain).sum()).item()

    def check_aux_layers(self, aux_layers: Sequence[int], final: bool = False) -> tuple[int, ...]:
        """The aux hidden states, ascending; ValueError where they do not fit (target/model.py)."""
        return check_aux_layers(self.num_layers, aux_layers, final)

    def check_trees(self) -> None:
        """Refuse draft trees: mlx-lm's attention knows no branches.

        Raises:
            ValueError: always.
        """
        raise ValueError("the MLX backend verifies chains, not trees: leave --tree out.")

    def check_batches(self) -> None:
        """Refuse several requests at a time.

        Raises:
            ValueError: always.
        """
        raise ValueError("the MLX backend decodes one request at a time: set max_requests to 1.")

    def check_prefixes(self) -> None:
        """Refuse to share prefixes between requests.

        Raises:
            ValueError: always.
        """
        raise ValueError("the MLX backend has no blocks that requests could share: leave out prefix_cache.")

    def new_kv(self, num_blocks: int, block_size: int, aux_layers: int = 0) -> MLXKV:
        """The keys of one request; mlx-lm's caches grow by themselves, so they know no blocks."""
        return MLXKV(self.model)

    def new_states(self) -> None:
        """Recurrent states are in the request's caches."""

    def forward_ragged(self, spans: Sequence[Span], kv: MLXKV, aux_layers: tuple[int, ...] = ()) -> MLXOutput:
        """Run the new tokens of the one request after those that are kept; see `Target.forward_ragged`.

        Raises:
            ValueError: tokens branch (`check_trees`).
        """
        (span,) = spans
        if span.parents is not None:
            self.check_trees()
        cache = kv.of(span)
        cache.remember()
        inputs = [0 if aux_layer == -1 else aux_layer for aux_layer in aux_layers]  # aux layer -1 goes into layer 0
        with self.log.noting([*inputs, *cache.recurrent]) as calls:
            logits_1TV = self.model(mx.array([span.tokens]), cache=cache.layers)
        cache.grown(len(span.tokens), calls)
        captured = [calls[0].x if aux_layer == -1 else calls[aux_layer].output for aux_layer in aux_layers]
        aux_TLD = to_torch(mx.stack(captured, axis=2))[0] if aux_layers else None
        if not span.logits:
            cache.evaluate()  # never read, so the head was not computed
            return MLXOutput(None, aux_TLD)
        return MLXOutput(to_torch(logits_1TV[:, len(span.tokens) - span.logits :])[0], aux_TLD)


def load_mlx_target(id_or_dir: str) -> MLXTarget:
    """Load a model with mlx-lm.

    Args:
        id_or_dir: a directory, a hub id (of mlx-community or of any safetensors release that mlx-lm knows), or the
            embedded model (target/hub.py). Runs on MLX's default device.

    Raises:
        ValueError: the model cannot be found, mlx-lm has no such architecture, or config.json or the weights are
            damaged: missing, unknown, of another shape, or not finite.
    """
    path = Path(resolve_model(id_or_dir))
    if mx.default_device() == mx.Device(mx.cpu):
        mx.disable_compile()  # without a GPU it would call a C++ compiler, seconds for every kernel
    try:
        check_config(read_mapping(path / "config.json"), path / "config.json")
        fields = load_config(path)
        if "model_file" in fields:  # mlx-lm would run it
            raise ValueError(
                f"{path / 'config.json'} names code of its own (model_file), and Outrider never runs code that comes "
                "with a model."
            )
        model, config = load_model(path, model_config=older_fields(fields))
    except FileNotFoundError as error:
        raise ValueError(f"{id_or_dir}: {error}; mlx-lm reads directories with model*.safetensors.") from error
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path / 'config.json'}: mlx-lm needs a field that is not there ({error}).") from error
    # The sum of each tensor tells: weights are far too small for it to overflow, and no second copy of them is kept.
    check_finite(
        path, {name: to_torch(array.astype(mx.float32).sum()) for name, array in tree_flatten(model.parameters())}
    )
    return MLXTarget(model, config, load_tokenizer(path), name=id_or_dir)
