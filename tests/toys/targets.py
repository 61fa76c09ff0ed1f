"""Toy targets of every family, configs of drafters for them, and random samples."""

from __future__ import annotations

from copy import copy
from typing import cast

import torch
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedTokenizerBase,
    Qwen3Config,
    Qwen3MoeConfig,
)

from outrider.data.responses import Sample
from outrider.drafters.dflash import DFlashConfig
from outrider.drafters.dspark import DSparkConfig
from outrider.target.loading import auto_class
from outrider.target.model import Target

TOY = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    "eos_token_id": 1,
    "bos_token_id": 2,
    "pad_token_id": 0,
}
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "default", "rope_theta": 5000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
}
TOY_CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**TOY),
    "qwen3": Qwen3Config(**TOY),
    "qwen3_moe": Qwen3MoeConfig(**TOY, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24),
    "gemma": GemmaConfig(**TOY),
    "gemma2": Gemma2Config(**TOY, sliding_window=16, query_pre_attn_scalar=8),
    "gemma3_text": Gemma3TextConfig(
        **{**TOY, "rope_parameters": GEMMA3_ROPE}, sliding_window=16, query_pre_attn_scalar=8
    ),
}
# Every family in float32, and in float64 where it runs: experts are products that PyTorch has not in float64.
TOY_DTYPES: list[tuple[str, torch.dtype]] = [
    *((family, torch.float32) for family in TOY_CONFIGS),
    *((family, torch.float64) for family in TOY_CONFIGS if family != "qwen3_moe"),
]


def toy_target(family: str = "llama", seed: int = 0, dtype: torch.dtype = torch.float32) -> Target:
    """A random five-layer model of a family, with norms away from one."""
    return random_target(TOY_CONFIGS[family], f"toy-{family}", seed, dtype)


def random_target(config: PretrainedConfig, name: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> Target:
    """A random model of that config, with norms away from one; the same weights in any `dtype` but for rounding."""
    torch.manual_seed(seed)
    model = auto_class(config).from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for place, parameter in model.named_parameters():
            if "norm" in place:
                parameter.add_(0.2 * torch.randn_like(parameter))
            else:
                parameter.normal_(std=0.15)
        for place, buffer in model.named_buffers():
            if place.endswith("tid2eid"):  # the experts of each token, where a token decides them
                buffer.copy_(torch.rand(len(buffer), config.n_routed_experts).argsort(-1)[:, : buffer.shape[1]])
    return Target(model.to(dtype), None, name)


class MaskTokenizer:
    """A tokenizer that knows its mask token and nothing else."""

    mask_token_id = 3
    unk_token = unk_token_id = None

    def convert_tokens_to_ids(self, token: str) -> int:
        return self.mask_token_id


def with_mask_token(target: Target) -> Target:
    """The same target with a tokenizer that names a mask token, for configs that ask for one."""
    named = copy(target)
    named.tokenizer = cast(PreTrainedTokenizerBase, MaskTokenizer())
    return named


def toy_config(dspark: bool = True, **changes: object) -> DFlashConfig:
    """A two-layer drafter for the toy targets."""
    fields: dict[str, object] = {
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 97,
        "draft_vocab_size": 97,
        "target_layer_ids": (0, 2, 3),
        "num_target_layers": 5,
        "mask_token_id": 3,
        "block_size": 4,
        "rope_theta": 777.0,
        "max_position_embeddings": 256,
    }
    if dspark:
        fields["markov_rank"] = 6
    return (DSparkConfig if dspark else DFlashConfig)(**{**fields, **changes})


def randomise(module: torch.nn.Module, seed: int = 0) -> None:
    """Every parameter away from its initial value, norms too."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * noise if "norm" in name else 0.2 * noise)


def toy_samples(count: int, seed: int = 0, vocab: int = 97) -> list[Sample]:
    """Random prompts with random responses of mixed lengths."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    samples = []
    for i in range(count):
        prompt, response = draw(3, 9), draw(8, 24)
        tokens = torch.randint(4, vocab, (prompt + response,), generator=generator).tolist()
        samples.append(Sample(f"s{i}", tokens, ((prompt, prompt + response),)))
    return samples
