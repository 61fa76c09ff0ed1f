"""Which causal-LM families a target may come from, and which of them have the lean CPU forward.

A family is listed once its cached, tapped forward has been compared with `transformers` (tests/test_target.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PretrainedConfig


@dataclass(frozen=True)
class Family:
    """What Outrider must know about a `model_type`."""

    model_type: str
    lean: bool = False  # RMSNorm -> (QK-norm) -> RoPE -> GQA -> SwiGLU: target/lean.py can run it
    scaled_embeddings: bool = False  # embeddings are multiplied by sqrt(hidden_size) before layer 0


FAMILIES: tuple[Family, ...] = (
    Family("llama", lean=True),
    Family("qwen3", lean=True),
    Family("qwen3_moe"),
    Family("gemma", scaled_embeddings=True),
    Family("gemma2", scaled_embeddings=True),
    Family("gemma3_text", scaled_embeddings=True),
)


def family_of(config: PretrainedConfig) -> Family:
    """The family of a model config.

    Raises:
        ValueError: the `model_type` is not supported; the message lists those that are.
    """
    for family in FAMILIES:
        if family.model_type == config.model_type:
            return family
    supported = ", ".join(f.model_type for f in FAMILIES)
    raise ValueError(f"model_type {config.model_type!r} is not a supported target family. Supported: {supported}.")
