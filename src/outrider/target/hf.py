"""Run a target through transformers' modules, with the cache, masks and ragged batches of this package.

In a ragged forward transformers' attention interface calls `ragged_attention`: the modules provide scaling, window,
soft cap and sinks, the step provides the keys that each row sees. Recurrent modules run once for all requests with
equally many rows, compressed attention request by request.

Shapes: K kv heads, H query heads, E head dim, T rows; the leading 1 is transformers' batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PretrainedConfig
from transformers.cache_utils import Cache

from outrider.target.attention import Branches, Latents, additive
from outrider.target.cache import KVCache, RecurrentLayer, recurrent_modules, remember_inputs
from outrider.target.compressed import compresses
from outrider.target.fused import AuxOutput
from outrider.target.paged import RaggedStep
from outrider.utils.measure import on_device

_IMPLEMENTATION = "outrider_ragged"


def ragged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    ragged_step: RaggedStep,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Implement transformers' attention interface: q [1, H, T, E], k, v [1, K, T, E] -> ([1, T, H, E], no weights)."""
    assert attention_mask is None, "transformers passed a mask"
    layer: Any = module.layer_idx
    latents = _latents(module) if ragged_step.latent else None
    out = ragged_step.attend(
        layer,
        q=query,
        k=key,
        v=value,
        scale=scaling,
        window=sliding_window,
        softcap=softcap,
        sinks_H=s_aux,
        latents=latents,
    )
    return out.transpose(1, 2), None


def _latents(attention: Any) -> Latents:
    """Return how the heads of a module of DeepSeek-V3 read latents, with views of its weights."""
    dims = attention.qk_nope_head_dim, attention.v_head_dim
    keys_HNC, values_HVC = attention.kv_b_proj.weight.detach().unflatten(0, (-1, sum(dims))).split(dims, dim=1)
    return Latents(keys_HNC, values_HVC, expand=attention.expand_kv)


AttentionInterface.register(_IMPLEMENTATION, ragged_attention)


@contextmanager
def ragged_attention_in(config: PretrainedConfig) -> Iterator[None]:
    """Make the modules of this config's model use `ragged_attention` inside the block."""
    before = config._attn_implementation
    config._attn_implementation = _IMPLEMENTATION
    try:
        yield
    finally:
        config._attn_implementation = before


def _recurrence(module: Any, hidden_states: Tensor, *, ragged_step: RaggedStep, **_: object) -> Tensor:
    """Run a recurrent module on the rows of many requests, [1, T, D], each with its states.

    Requests with equally many rows, as all of them in plain decoding, are a batch. Others would have to be padded, and
    padding rows would enter their states.
    """
    parts = hidden_states.split([len(span.tokens) for span in ragged_step.spans], dim=1)
    states: list[RecurrentLayer] = []
    batches: dict[tuple[int, int], list[int]] = {}
    for index, (span, rows_1TD) in enumerate(zip(ragged_step.spans, parts, strict=True)):
        assert span.states is not None, "a span of a recurrent target without states"
        states.append(span.states.layers[module.layer_idx])
        states[-1].remember(rows_1TD)
        batches.setdefault((rows_1TD.shape[1], states[-1].width), []).append(index)
    outputs: dict[int, Tensor] = {}
    for members in batches.values():
        joined = RecurrentLayer.join([states[index] for index in members])
        rows_BTD = torch.cat([parts[index] for index in members])
        cache = Cache(layers=[joined] * (module.layer_idx + 1))
        outputs.update(zip(members, type(module).forward(module, rows_BTD, cache_params=cache).split(1), strict=True))
        joined.split([states[index] for index in members])
    return torch.cat([outputs[index] for index in range(len(parts))], dim=1)


def _attention_by_span(
    module: Any,
    hidden_states: Tensor,
    *,
    position_embeddings: dict[str, tuple[Tensor, Tensor]],
    position_ids: Tensor,
    ragged_step: RaggedStep,
    **_: object,
) -> tuple[Tensor, None]:
    """Run compressed attention on the rows of many requests, [1, T, D], each with its states."""
    outputs: list[Tensor] = []
    start = 0
    for index, span in enumerate(ragged_step.spans):
        assert span.states is not None, "a span of compressed attention without states"
        rows = slice(start, start := start + len(span.tokens))
        rope = {kind: (cos[:, rows], sin[:, rows]) for kind, (cos, sin) in position_embeddings.items()}
        output, *_rest = type(module).forward(
            module,
            hidden_states[:, rows],
            position_embeddings=rope,
            position_ids=position_ids[:, rows],
            attention_mask=ragged_step.mask(index, module.sliding_window),
            past_key_values=span.states,
        )
        outputs.append(output)
    return torch.cat(outputs, dim=1), None


def _every_key(module: Any, *, prev_topk_indices: Tensor | None = None, **inputs: Any) -> tuple[Any, Any, None]:
    """Run sparse attention whose indexer would select every key: it is DeepSeek-V3's, with the same parameters."""
    # Here: transformers loads a family's modules when they are asked for, which takes a while.
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

    output, weights, *_ = DeepseekV3Attention.forward(module, **inputs)
    return output, weights, None


@contextmanager
def forwards_replaced(modules: Sequence[Any], forward: Callable[..., Any]) -> Iterator[None]:
    """Make these modules run `forward(module, ...)` inside the block."""
    for module in modules:
        module.forward = partial(forward, module)
    try:
        yield
    finally:
        for module in modules:
            del module.forward  # restores the method of the class


# ----------------------------------------------------------------------------
# transformers' decoder of a family, with hooks that capture the aux hidden states, for families without the fused
# forward (target/fused.py).
#
#     ForCausalLM.model                                the decoder
#     ForConditionalGeneration.model.language_model    the same inside a multimodal model; images are never given
#     hooks                                            embedding -> aux layer -1, layer i -> aux layer i
#
# Trees (target/attention.py) pass a mask for every layer type; ragged forwards replace the attention.
# Shapes: B sequences, T new tokens, S slots, D hidden.
# ----------------------------------------------------------------------------


def text_decoder(model: Any) -> Any:
    """Return the module with `embed_tokens`, `layers` and `norm` of a causal LM or multimodal model."""
    return getattr(model.model, "language_model", model.model)


def most_keys(config: PretrainedConfig) -> int | None:
    """How many keys the indexer of a model selects for each row (`index_topk` of GLM-5), if it does not run here."""
    found: int | None = getattr(config, "index_topk", None)
    return None if compresses(config) else found


class FamilyDecoder:
    """Runs a decoder of transformers with the cache, trees and ragged batches of this package.

    Args:
        streams: whether layers give several residual streams, [B, T, n, D]; aux hidden states are then their means.
    """

    def __init__(self, model: Any, config: PretrainedConfig, streams: bool = False) -> None:
        self.module, self.config = text_decoder(model), config
        self._last = config.num_hidden_layers - 1
        self._captured: dict[int, Tensor] = {}
        self._wanted: tuple[int, ...] = ()
        self._streams = streams
        self.module.embed_tokens.register_forward_hook(self._hook(-1))
        # The last aux layer is the model's output, after the final norm; with streams their mean, before that norm.
        for index, layer in enumerate(self.module.layers if streams else self.module.layers[:-1]):
            layer.register_forward_hook(self._hook(index))
        self._recurrent = list(recurrent_modules(self.module).values())
        self._compressed = [layer.self_attn for layer in self.module.layers] if compresses(config) else []
        self._selecting = most_keys(config)
        self._sparse = [] if self._selecting is None else [layer.self_attn for layer in self.module.layers]
        if self._sparse:
            config.rope_interleave = True  # pairs side by side, which this family's modules do without asking
        for recurrent in self._recurrent:
            recurrent.register_forward_pre_hook(remember_inputs, with_kwargs=True)

    def _hook(self, index: int) -> Any:
        def capture(_module: Any, _args: Any, output: Any) -> None:
            if index in self._wanted:
                hidden = output[0] if isinstance(output, tuple) else output
                self._captured[index] = hidden.mean(2) if self._streams and index >= 0 else hidden

        return capture

    def forward(
        self,
        tokens_BT: Tensor,
        cache: KVCache,
        positions_BT: Tensor,
        aux_layers: tuple[int, ...],
        branches: Branches | None = None,
    ) -> AuxOutput:
        """Run T new tokens after those in `cache`, as `FusedDecoder.forward`."""
        B, T = tokens_BT.shape
        self._check_keys(cache.length + T)
        mask: Any = None
        if branches is not None:
            mask = self._branch_masks(cache, branches)
        positions_BT = positions_BT.expand(B, T)
        return self._forward_aux(
            aux_layers, input_ids=tokens_BT, past_key_values=cache, attention_mask=mask, position_ids=positions_BT
        )

    def _branch_masks(self, cache: KVCache, branches: Branches) -> Any:
        """Return the additive mask [1, 1, T, S], or one per layer type for families with sliding layers."""
        weight = self.module.norm.weight

        def mask(window: int | None) -> Tensor:
            visible_TN = on_device(branches.visible(cache.length, 0, window), weight.device)
            return additive(visible_TN, weight.dtype)[None, None]

        kinds, window = getattr(self.config, "layer_types", None) or (), getattr(self.config, "sliding_window", None)
        if "sliding_attention" in kinds:
            return {"full_attention": mask(None), "sliding_attention": mask(window)}
        return mask(None if "full_attention" in kinds else window)

    def forward_ragged(self, step: RaggedStep, aux_layers: tuple[int, ...]) -> AuxOutput:
        """Run the rows of many requests, B = 1, with the attention of `step`."""
        self._check_keys(max(span.end for span in step.spans))
        inputs = {"input_ids": step.tokens_1T, "position_ids": step.positions_1T, "ragged_step": step}
        if self._compressed:
            with forwards_replaced(self._compressed, _attention_by_span):
                return self._forward_aux(aux_layers, **inputs, attention_mask={"unused": None})  # no mask of all rows
        if step.latent:
            inputs["past_key_values"] = step  # its modules cache latents before expanding them
        with ragged_attention_in(self.config), forwards_replaced(self._recurrent, _recurrence):
            return self._forward_aux(aux_layers, **inputs)

    def forward_padded(self, documents: Sequence[Sequence[int]], aux_layers: tuple[int, ...]) -> AuxOutput:
        """Run one document per row, padded on the right, which causal attention never sees."""
        self._check_keys(max(map(len, documents)))
        rows = [torch.tensor(document) for document in documents]
        tokens_BT = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        return self._forward_aux(aux_layers, input_ids=on_device(tokens_BT, self.module.norm.weight.device))

    def _check_keys(self, count: int) -> None:
        """Refuse texts in which an indexer would leave keys out.

        Raises:
            ValueError: more keys than it selects.
        """
        if self._selecting is not None and count > self._selecting:
            raise ValueError(
                f"model_type {self.config.model_type!r} attends to {self._selecting} keys of each text at most "
                f"(index_topk), and {count} tokens need its indexer, which is not run here: use shorter texts."
            )

    def _forward_aux(self, aux_layers: tuple[int, ...], **inputs: Any) -> AuxOutput:
        self._wanted, self._captured = aux_layers, {}
        with forwards_replaced(self._sparse, _every_key):
            output = self.module(use_cache="past_key_values" in inputs, **inputs)
        captured, self._wanted, self._captured = self._captured, (), {}
        if self._last in aux_layers and not self._streams:
            captured[self._last] = output.last_hidden_state
        return output.last_hidden_state, captured
