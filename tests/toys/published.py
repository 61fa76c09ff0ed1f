"""The targets of published drafters at toy size: every trait that decoding could trip over, five or six layers each."""

from __future__ import annotations

from transformers import (
    DeepseekV3Config,
    Gemma3Config,
    Gemma4Config,
    Gemma4TextConfig,
    Gemma4UnifiedConfig,
    GlmMoeDsaConfig,
    GptOssConfig,
    Kimi_K25Config,
    LlamaConfig,
    PretrainedConfig,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from outrider.target.model import Target
from tests.toys.deepseek_v4 import target_config
from tests.toys.targets import GEMMA3_ROPE, TOY, random_target

MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
WINDOW = 16
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": 32}
GEMMA4_ROPE = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 5000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
}
LINEAR = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention", "full_attention"],
}
PARTIAL = {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5}
MROPE = {**PARTIAL, "mrope_section": [1, 1, 0], "mrope_interleaved": True}
GEMMA3 = {**TOY, "rope_parameters": GEMMA3_ROPE, "sliding_window": WINDOW, "query_pre_attn_scalar": 8}
GEMMA4 = {
    **TOY,
    "rope_parameters": GEMMA4_ROPE,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "global_head_dim": 12,
    "final_logit_softcapping": 3.0,
    "hidden_size_per_layer_input": 0,
}
SIGLIP = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
QWEN_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
}
KIMI_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "pos_emb_height": 4,
    "pos_emb_width": 4,
}
DEEPSEEK = {
    **{key: value for key, value in TOY.items() if key not in ("head_dim", "num_key_value_heads")},
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 24,
    "kv_lora_rank": 12,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
}


def _configs() -> dict[str, PretrainedConfig]:
    hybrid = {**TOY, **LINEAR}
    without_mlp = {key: value for key, value in hybrid.items() if key != "intermediate_size"}
    per_layer = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 97, "num_kv_shared_layers": 2}
    sharing = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    gemma4_moe = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24}
    return {
        "qwen3": Qwen3Config(**TOY),
        "llama3.1": LlamaConfig(**{**TOY, "rope_parameters": LLAMA3_ROPE}),
        "qwen3_moe": Qwen3MoeConfig(**TOY, **MOE),
        "gpt_oss": GptOssConfig(
            **{**TOY, "rope_parameters": {**YARN, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}},
            sliding_window=WINDOW,
            num_local_experts=4,
            num_experts_per_tok=2,
        ),
        "gemma3 (nested)": Gemma3Config(text_config=GEMMA3, vision_config=SIGLIP, mm_tokens_per_image=1),
        "gemma4": Gemma4TextConfig(**GEMMA4, attention_k_eq_v=True, num_global_key_value_heads=1, **gemma4_moe),
        "gemma4 (nested)": Gemma4Config(text_config={**GEMMA4, **per_layer, "layer_types": sharing}),
        "gemma4 12b (nested)": Gemma4UnifiedConfig(text_config=GEMMA4),
        "qwen3_next": Qwen3NextConfig(
            **{**hybrid, "rope_parameters": PARTIAL}, **MOE, shared_expert_intermediate_size=24
        ),
        "qwen3.5 (nested)": Qwen3_5Config(text_config={**hybrid, "rope_parameters": MROPE}, vision_config=QWEN_VISION),
        "qwen3.5_moe (nested)": Qwen3_5MoeConfig(
            text_config={**without_mlp, **MOE, "rope_parameters": MROPE, "shared_expert_intermediate_size": 24},
            vision_config=QWEN_VISION,
        ),
        "deepseek_v3": DeepseekV3Config(**DEEPSEEK),
        # Above the texts of tests: the indexer selects every key.
        "glm_moe_dsa": GlmMoeDsaConfig(
            **{**DEEPSEEK, "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}},
            index_topk=200,
            index_head_dim=8,
            index_n_heads=2,
            indexer_types=["full", "full", "shared", "full", "shared"],
        ),
        "deepseek_v4": target_config(),
        # Kimi-K2 is DeepSeek-V3 with one group of experts; its checkpoints call it so inside kimi_k25.
        "kimi_k2.5 (nested)": Kimi_K25Config(
            text_config={**DEEPSEEK, "model_type": "kimi_k2", "n_group": 1, "topk_group": 1},
            vision_config=KIMI_VISION,
            projection_hidden_size=16,
            tie_word_embeddings=False,
        ),
    }


PUBLISHED = _configs()


def published_target(name: str, seed: int = 0) -> Target:
    """A random toy of that family."""
    return random_target(PUBLISHED[name], f"toy-{name}", seed)
