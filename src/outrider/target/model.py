"""Define the target: the interface for decoding and drafters, the model families, and `Target`, which runs PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import (
    PretrainedConfig,
    PreTrainedTokenizerBase,
)

from outrider.target.attention import Branches
from outrider.target.cache import KVCache, RecurrentLayer, StateLayer, recurrent_modules
from outrider.target.compressed import compressed_layers, compresses
from outrider.target.fused import FusedDecoder
from outrider.target.graphs import StepGraphs
from outrider.target.hf import FamilyDecoder, most_keys, text_decoder
from outrider.target.hub import load_tokenizer, model_config, resolve_model
from outrider.target.linear import Float32Rows, PackedLinear
from outrider.target.loading import generation_config, load_model, outline_model
from outrider.target.paged import PagedKV, RaggedOutput, RaggedStep, Span, batches, check_batches, logit_rows
from outrider.target.paged_attention import available
from outrider.utils.measure import on_device, usable_device


class KVPool(Protocol):
    """The keys and values of all requests of an engine, in blocks, or the state that a target keeps instead."""

    @property
    def block_bytes(self) -> int:
        """Memory of one block."""
        ...

    def claim(self) -> None:
        """Commit the memory to this process, before anything is stored in it."""
        ...

    def keep_paths(self, kept: Sequence[tuple[list[int], int, Sequence[int]]]) -> None:
        """Keep only the accepted paths of the last forward; see `PagedKV.keep_paths`."""
        ...

    def keep_aux(self, kept: Sequence[tuple[list[int], int, int]], aux_TLD: Tensor) -> None:
        """Store aux hidden states beside the keys, if prefixes are shared; see `PagedKV.keep_aux`."""
        ...

    def aux(self, blocks: list[int], start: int, end: int) -> Tensor:
        """The stored aux hidden states of a request's tokens; see `PagedKV.aux`."""
        ...


class DecodingOutput(Protocol):
    """Rows of a ragged forward in the order of its spans; see `RaggedOutput`."""

    @property
    def logits_NV(self) -> Tensor | None: ...

    @property
    def aux_TLD(self) -> Tensor | None: ...


class DecodingTarget(Protocol):
    """The interface of a target for decoding and drafters. `device` holds its logits and aux hidden states."""

    @property
    def name(self) -> str: ...

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def num_layers(self) -> int: ...

    @property
    def max_context(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def eos_ids(self) -> frozenset[int]:
        """Ids of the tokens that end a response."""
        ...

    def check_aux_layers(self, aux_layers: Sequence[int], final: bool = False) -> tuple[int, ...]:
        """See `check_aux_layers` below."""
        ...

    def check_trees(self) -> None:
        """Raise ValueError if the target cannot verify trees."""
        ...

    def check_batches(self) -> None:
        """Raise ValueError if the target cannot decode several requests together."""
        ...

    def check_prefixes(self) -> None:
        """Raise ValueError if KV blocks do not hold all that later tokens read of a prefix."""
        ...

    def new_kv(self, num_blocks: int, block_size: int, aux_layers: int = 0) -> Any:
        """Make a `KVPool` of `num_blocks` blocks of `block_size` tokens, with so many aux hidden states of each."""
        ...

    def new_states(self) -> Any:
        """Make the states of a request that are not in the pool; None if no layer keeps one."""
        ...

    def forward_ragged(self, spans: Sequence[Span], kv: Any, aux_layers: tuple[int, ...] = ()) -> DecodingOutput:
        """Run the new tokens of some requests and write their keys into the pool; see `Target.forward_ragged`."""
        ...


def check_aux_layers(num_layers: int, aux_layers: Sequence[int], final: bool = False) -> tuple[int, ...]:
    """Check aux layers and return them in ascending order.

    Args:
        final: whether the final layer is allowed.

    Raises:
        ValueError: an aux layer is out of range, repeated, or the final layer without `final`.
    """
    last = num_layers - 1
    highest = last if final else last - 1
    bad = [aux_layer for aux_layer in aux_layers if not -1 <= aux_layer <= highest]
    if bad or len(set(aux_layers)) != len(aux_layers) or not aux_layers:
        raise ValueError(
            f"target_layer_ids {list(aux_layers)} do not fit a target of {num_layers} layers: use distinct ids from "
            f"-1 (embedding output) to {highest}"
            + ("." if final else f"; this drafter cannot read the final layer, {last}.")
        )
    return tuple(sorted(aux_layers))


# ----------------------------------------------------------------------------
# Supported causal-LM families, and which of them have the fused forward.
#
# For every listed family tests compare cached forward, aux hidden states and decoding with `transformers`
# (tests/target/test_target.py, tests/target/test_target_families.py; docs/targets.md has the table). A multimodal model
# counts by its `text_config`.
# ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Family:
    """A model family (`model_type`): whether it has the fused forward, scales embeddings and has several streams."""

    model_type: str
    fused: bool = False  # RMSNorm -> (QK-norm) -> RoPE -> GQA -> SwiGLU: target/fused.py can run it
    scaled_embeddings: bool = False  # embeddings are multiplied by sqrt(hidden_size) before layer 0
    streams: bool = False  # residual streams (hyper-connections), whose means are the aux hidden states

    def embedding_scale(self, hidden_size: int, dtype: torch.dtype) -> float:
        """Return the factor of input embeddings, rounded to the model's type."""
        return torch.tensor(hidden_size**0.5, dtype=dtype).item() if self.scaled_embeddings else 1.0


FAMILIES: tuple[Family, ...] = (
    Family("llama", fused=True),
    Family("qwen3", fused=True),
    Family("qwen3_moe"),
    Family("gemma", scaled_embeddings=True),
    Family("gemma2", scaled_embeddings=True),
    Family("gemma3_text", scaled_embeddings=True),
    Family("gemma4_text", scaled_embeddings=True),
    Family("gemma4_unified_text", scaled_embeddings=True),
    Family("gpt_oss"),
    Family("qwen3_next"),
    Family("qwen3_5_text"),
    Family("qwen3_5_moe_text"),
    Family("deepseek_v3"),
    Family("glm_moe_dsa"),  # as far as its indexer selects every key
    Family("deepseek_v4", streams=True),
)


def family_of(config: PretrainedConfig) -> Family:
    """Look up the family of a language model's config (`get_text_config()` of a multimodal one).

    Raises:
        ValueError: the `model_type` is not supported; the message lists the supported ones.
    """
    for family in FAMILIES:
        if family.model_type == config.model_type:
            return family
    supported = ", ".join(f.model_type for f in FAMILIES)
    raise ValueError(f"model_type {config.model_type!r} is not a supported target family. Supported: {supported}.")


# ----------------------------------------------------------------------------
# The frozen target: one forward gives logits and aux hidden states.
#
#     tokens_BT, cache  ->  logits at the last `logits` tokens [B, n, V], aux hidden states [B, T, L, D], last hidden
#     [B, T, D]
#
# Aux layer i is HF's `hidden_states[i + 1]`: the output of decoder layer i, after the final norm for the last layer; -1
# is the embedding output. Only some drafters read the final layer (docs/architecture.md, Checkpoints). Of a family with
# residual streams an aux layer is the mean of the streams after it, also for the last layer: before the final norm.
# ----------------------------------------------------------------------------


@dataclass(frozen=True)
class TargetOutput:
    """The result of a forward. `logits_BTV` covers the requested tokens; `aux_BTLD` is ascending in layer."""

    logits_BTV: Tensor | None
    aux_BTLD: Tensor | None
    hidden_BTD: Tensor


class Target:
    """A frozen causal LM with aux hidden states.

    Llama-shaped models run from fused weights (target/fused.py), unless their layers are sharded.
    """

    def __init__(self, model: Any, tokenizer: PreTrainedTokenizerBase | None, name: str) -> None:
        config = model.config.get_text_config()
        self.family = family_of(config)
        self.model = model.eval().requires_grad_(False)
        self.decoder = text_decoder(model)
        self.tokenizer = tokenizer
        self.name = name
        self.config = config
        self.hidden_size: int = config.hidden_size
        self.vocab_size: int = config.vocab_size
        self.num_layers: int = config.num_hidden_layers
        self.max_context: int = min(config.max_position_embeddings, most_keys(config) or config.max_position_embeddings)
        self.softcap: float | None = getattr(config, "final_logit_softcapping", None)
        self.embed_VD: Tensor = model.get_input_embeddings().weight.detach()
        self.head_VD: Tensor = model.get_output_embeddings().weight.detach()
        self.device, self.dtype = self.embed_VD.device, self.embed_VD.dtype
        self.embed_scale = self.family.embedding_scale(self.hidden_size, self.dtype)
        self.head = PackedLinear(self.head_VD)
        self._head32: Float32Rows | None = None
        self.sharded = isinstance(self.decoder.layers[0], FSDPModule)  # every rank must then run each forward
        self._recurrent = recurrent_modules(self.decoder)
        self._stateful = bool(self._recurrent) or compresses(config)  # layers keep a state outside the pages
        fused = self.device.type in ("cpu", "cuda") and self._fusable() and not self.sharded
        self._fused = FusedDecoder(model) if fused else None
        self._decoder = self._fused or FamilyDecoder(model, config, self.family.streams)
        graphed = self._fused is not None and available(self.device, self.dtype)
        self.graphs = StepGraphs(self._fused) if self._fused is not None and graphed else None

    def _fusable(self) -> bool:
        windows = "sliding_attention" in (getattr(self.config, "layer_types", None) or ())
        return self.family.fused and not windows and self.config.hidden_act == "silu"

    @property
    def eos_ids(self) -> frozenset[int]:
        """Ids of the tokens that end a response, from the generation config."""
        eos = self.model.generation_config.eos_token_id
        if eos is None:
            eos = self.config.eos_token_id
        return frozenset([] if eos is None else [eos] if isinstance(eos, int) else eos)

    def check_aux_layers(self, aux_layers: Sequence[int], final: bool = False) -> tuple[int, ...]:
        """See the function `check_aux_layers`."""
        return check_aux_layers(self.num_layers, aux_layers, final)

    def check_trees(self) -> None:
        """Refuse trees for targets whose layers carry a state.

        Raises:
            ValueError: layers carry a state from token to token.
        """
        if self._stateful:
            raise ValueError(
                f"model_type {self.config.model_type!r} cannot verify trees: its layers carry a state from token to "
                "token, which siblings cannot share. Draft chains: leave out --tree."
            )

    def new_cache(self, capacity: int) -> KVCache:
        """Make an empty KV cache of `capacity` slots."""
        states: dict[int, StateLayer] = {i: RecurrentLayer(module) for i, module in self._recurrent.items()}
        if compresses(self.config):
            states |= compressed_layers(self.config)
        return KVCache(self.num_layers, capacity, states)

    def check_batches(self) -> None:
        """Refuse batches if requests would affect each other.

        Raises:
            ValueError: rotary embeddings depend on the longest request.
        """
        check_batches(self.config)

    def check_prefixes(self) -> None:
        """Refuse to share the KV blocks of a prefix that are not all of its state.

        Raises:
            ValueError: layers carry a state, or keys depend on the length of the text.
        """
        if self._stateful or not batches(self.config):
            why = "layers carry a state from token to token" if self._stateful else "keys depend on a text's length"
            raise ValueError(f"model_type {self.config.model_type!r} cannot share cached prefixes: {why}.")

    def new_kv(self, num_blocks: int, block_size: int, aux_layers: int = 0) -> PagedKV:
        """Make a pool of keys and values for the requests of ragged forwards, with so many aux hidden states a slot."""
        return PagedKV(self, num_blocks, block_size, aux_layers=aux_layers)

    def new_states(self) -> KVCache | None:
        """Make the states of a request of ragged forwards; None if no layer keeps a state outside the pages."""
        return self.new_cache(0) if self._stateful else None

    @torch.inference_mode()
    def forward(
        self,
        tokens_BT: Tensor,
        cache: KVCache,
        aux_layers: tuple[int, ...] = (),
        logits: int | None = 1,
        parents: Sequence[int] | None = None,
    ) -> TargetOutput:
        """Run T new tokens of a text after the cached ones and append them to the cache.

        It serves whole texts that are not decoded: features and their scales in training depend on its exact bits,
        which `forward_ragged` does not reproduce.

        Args:
            tokens_BT: [B, T] int64.
            cache: extended by T slots; roll it back to drop tokens.
            aux_layers: ascending layer ids to capture (see `check_aux_layers`).
            logits: how many of the last tokens get logits; None for all T, 0 for none.
            parents: the parent of each token of a tree, -1 for the first (target/attention.py); None: a chain.
        """
        T = tokens_BT.shape[1]
        if parents is not None:
            self.check_trees()
        wanted = T if logits is None else logits
        branches = None if parents is None else Branches.of(parents)
        slots_T = torch.arange(cache.length, cache.length + T, device=self.device)
        if branches is not None:
            slots_T = cache.length + on_device(branches.depths_T, self.device)
        hidden_BTD, captured = self._decoder.forward(
            tokens_BT, cache, slots_T[None], aux_layers=aux_layers, branches=branches
        )
        logits_BTV = self.logits(hidden_BTD[:, T - wanted :]) if wanted else None
        aux_BTLD = torch.stack([captured[aux_layer] for aux_layer in aux_layers], dim=2) if aux_layers else None
        return TargetOutput(logits_BTV, aux_BTLD, hidden_BTD)

    @torch.inference_mode()
    def forward_ragged(self, spans: Sequence[Span], kv: PagedKV, aux_layers: tuple[int, ...] = ()) -> RaggedOutput:
        """Run the new tokens of many requests in one flattened pass and write their keys into the pool.

        Args:
            spans: one per request, at least one; no two write the same slot.
            aux_layers: ascending layer ids to capture (see `check_aux_layers`).
        """
        if any(span.parents is not None for span in spans):
            self.check_trees()
        spans = spans if self.graphs is None else self.graphs.pieces(spans)
        rows = logit_rows(spans)
        if self.graphs is not None and self.graphs.takes(spans):
            hidden_TD, aux_TLD = self.graphs.forward(spans, kv, aux_layers)
        else:
            hidden_1TD, captured = self._decoder.forward_ragged(RaggedStep(spans, kv), aux_layers)
            hidden_TD = hidden_1TD[0]
            aux_TLD = torch.stack([captured[aux_layer][0] for aux_layer in aux_layers], dim=1) if aux_layers else None
        logits_NV = self.logits(hidden_TD[on_device(rows, self.device, torch.long)]) if rows else None
        return RaggedOutput(logits_NV, aux_TLD, hidden_TD)

    @property
    def packs_exactly(self) -> bool:
        """Whether packed prefill gives a document the same bits whatever it is packed with."""
        return self._fused is not None and self.head.packed

    @torch.inference_mode()
    def prefill_packed(
        self, documents: Sequence[Sequence[int]], aux_layers: tuple[int, ...]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Run several documents in one forward; return aux hidden states [T, L, D] and normed last hidden states [T, D]
        of each.

        No document sees another, and positions start at 0 in each. The fused forward concatenates the tokens; other
        families get one row per document, padded on the right: under a causal mask no real token sees the padding,
        whatever the window, so no mask is needed. (transformers can also pack by position ids, but with a cache it
        silently attends across documents.)
        """
        lengths = [len(document) for document in documents]
        if self._fused is not None:
            tokens_T = on_device([token for document in documents for token in document], self.device)
            hidden_BTD, captured = self._fused.forward_packed(tokens_T, lengths, aux_layers)

            def split(x_BTD: Tensor) -> Sequence[Tensor]:
                return x_BTD[0].split(lengths)
        else:
            assert isinstance(self._decoder, FamilyDecoder)
            hidden_BTD, captured = self._decoder.forward_padded(documents, aux_layers)

            def split(x_BTD: Tensor) -> Sequence[Tensor]:
                return [x_TD[:length] for x_TD, length in zip(x_BTD, lengths, strict=True)]

        aux_layers_of = zip(*(split(captured[aux_layer]) for aux_layer in aux_layers), strict=True)
        return [torch.stack(layers, dim=1) for layers in aux_layers_of], list(split(hidden_BTD))

    def logits(self, hidden_XD: Tensor) -> Tensor:
        """Apply the LM head and its soft cap, if any, to normed last hidden states, [..., D] -> [..., V].

        float32 rows of a bfloat16 target give float32 logits, because a log-sum-exp rounded to bfloat16 is wrong by
        several per cent of probability. A GPU computes them from the bfloat16 head, a CPU from a float32 copy made at
        first use.
        """
        head: PackedLinear | Float32Rows = self.head
        if hidden_XD.dtype != self.dtype and self.device.type != "cuda":
            assert hidden_XD.dtype == torch.float32
            self._head32 = self._head32 or Float32Rows(self.head_VD)
            head = self._head32
        logits = head(hidden_XD.reshape(-1, self.hidden_size)).view(*hidden_XD.shape[:-1], self.vocab_size)
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits


# ----------------------------------------------------------------------------
# From an id or a directory to a `Target`.
# ----------------------------------------------------------------------------


def count_layers(id_or_dir: str) -> int:
    """Read the number of decoder layers from a model's config.

    Raises:
        ValueError: the model cannot be found.
    """
    return int(model_config(resolve_model(id_or_dir, weights=False)).get_text_config().num_hidden_layers)


def read_architectures(id_or_dir: str) -> tuple[str, ...]:
    """Read the class names in a model's config, which tell its family; () if it has none.

    Raises:
        ValueError: the model cannot be found.
    """
    return tuple(model_config(resolve_model(id_or_dir, weights=False)).architectures or ())


def outline_target(id_or_dir: str | Path) -> Target:
    """Make a target with weights on the meta device: shapes, config and tokenizer only.

    Raises:
        ValueError: the model cannot be found, or its family is not supported.
    """
    path = resolve_model(str(id_or_dir), weights=False)
    config = model_config(path)
    family_of(config.get_text_config())
    model = outline_model(config, path)
    model.generation_config = generation_config(path)
    return Target(model, load_tokenizer(path), name=str(id_or_dir))


def load_target(
    id_or_dir: str | Path,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    place: Callable[[Any], None] = lambda model: None,
) -> Target:
    """Load a Hugging Face causal LM as a frozen target; MXFP4 weights are dequantised.

    Args:
        id_or_dir: a local directory, a hub id, or "SmolLM2-135M-Instruct" (see target/hub.py).
        dtype: float32 on a CPU (most emulate bf16, see linear.py); bfloat16 is usual on a GPU.
        place: called with the model before it moves to `device`, to shard its layers.

    Raises:
        ValueError: the model or device cannot be found, the family is not supported, or config.json or the weights are
            damaged (see target/loading.py).
    """
    device = usable_device(device)
    if device.type == "meta":
        raise ValueError("device 'meta' has no values; use auto, cpu or cuda.")
    path = resolve_model(str(id_or_dir))
    config = model_config(path)
    family_of(config.get_text_config())  # refuse before reading gigabytes
    generation_config(path)
    model = load_model(config, path, dtype)
    place(model)
    model.to(device)
    return Target(model, load_tokenizer(path), name=str(id_or_dir))


def full_tensor(tensor: Tensor) -> Tensor:
    """Gather a tensor that may be sharded over ranks (then a collective)."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
