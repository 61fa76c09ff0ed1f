"""Random models of mlx-lm, a few layers each, one for every way in which a cache is rolled back."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.generate import generate_step

from outrider.backends.mlx.target import MLXTarget

_COMMON: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 5000.0,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}
_DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
    "partial_rotary_factor": 0.5,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
MLX_TOYS: dict[str, Mapping[str, Any]] = {
    "llama": _COMMON,
    "qwen3": {**_COMMON, "tie_word_embeddings": False},
    "qwen3_moe": {**_COMMON, **_EXPERTS, "decoder_sparse_step": 1, "mlp_only_layers": []},
    "gemma3_text": {
        **_COMMON,
        "sliding_window": 8,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 8,
        "rope_global_base_freq": 5000.0,
        "rope_local_base_freq": 500.0,
    },
    "gpt_oss": {
        **_COMMON,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "rope_scaling": None,
        "layer_types": ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"],
    },
    "qwen3_next": {
        **_COMMON,
        **_DELTA,
        **_EXPERTS,
        "decoder_sparse_step": 2,
        "shared_expert_intermediate_size": 24,
        "mlp_only_layers": [],
    },
    "qwen3_5": {
        **_COMMON,
        **_DELTA,
        "rope_parameters": {"type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5},
    },
}


def mlx_model(family: str, seed: int = 0, **changes: Any) -> tuple[Any, dict[str, Any]]:
    """A random model, norms away from one, and its config."""
    module = importlib.import_module(f"mlx_lm.models.{family}")
    config = {"model_type": family, **MLX_TOYS[family], **changes}
    model = module.Model(module.ModelArgs.from_dict(dict(config)))
    mx.random.seed(seed)
    randomised = [
        (name, value + 0.2 * mx.random.normal(value.shape) if value.ndim == 1 else 0.3 * mx.random.normal(value.shape))
        for name, value in tree_flatten(model.parameters())
    ]
    model.update(tree_unflatten(randomised))
    if hasattr(model, "sanitize") and family == "gemma3_text":
        model.sanitize({})  # no lm_head among the weights: tied
    model.eval()
    return model, config


def mlx_toy(family: str, seed: int = 0, **changes: Any) -> MLXTarget:
    model, config = mlx_model(family, seed, **changes)
    return MLXTarget(model, config, None, f"toy-{family}")


def plain_mlx(target: MLXTarget, prompt: Sequence[int], count: int) -> list[int]:
    """mlx-lm's own greedy decoding, token by token."""
    return [int(token) for token, _ in generate_step(mx.array(list(prompt)), target.model, max_tokens=count)]
