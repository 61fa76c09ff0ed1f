"""A random target on disk, as a user's model directory would be."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.toys.targets import TOY
from tests.toys.tokenizer import byte_tokenizer


def save_toy_target(directory: Path, layers: int) -> int:
    """Write a random Llama with a byte tokenizer; returns the size of its vocabulary."""
    torch.manual_seed(0)
    tokenizer = byte_tokenizer()
    model = LlamaForCausalLM(LlamaConfig(**{**TOY, "vocab_size": len(tokenizer), "num_hidden_layers": layers}))
    for parameter in model.parameters():
        parameter.data.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return len(tokenizer)
