"""A random target, its drafter and a recipe on disk, as a user's directories would be."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.checkpoints.checkpoint import Checkpoint, save_drafter
from outrider.drafters.base import DrafterWeights
from outrider.drafters.dspark import DSpark, DSparkConfig
from tests.toys.targets import TOY, randomise
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


def save_toy_drafter(directory: Path, vocab: int) -> None:
    """Write a random DSpark drafter for a toy target of five layers and this vocabulary."""
    shapes = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1, "head_dim": 8, "markov_rank": 4}
    shapes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_target_layers": 5, "mask_token_id": 3}
    drafter = DSpark(DSparkConfig(**shapes, vocab_size=vocab, draft_vocab_size=vocab, target_layer_ids=(1, 3)))
    randomise(drafter)
    save_drafter(Checkpoint(DrafterWeights(drafter)), directory)


def save_toy_recipe(directory: Path, more: str = "") -> Path:
    """Write a recipe, which ends in `more`, and its ten prompts; the target is directory/target."""
    prompts = [json.dumps({"id": f"p{i}", "turns": [f"prompt {i}"]}) for i in range(10)]
    (directory / "prompts.jsonl").write_text("\n".join(prompts) + "\n")
    recipe = directory / "recipe.yaml"
    recipe.write_text(
        f"target: {directory / 'target'}\nout: {directory / 'out'}\n"
        "data: {prompts: [{path: prompts.jsonl}], max_new_tokens: 12, max_prompt_tokens: 100, held_out: 3}\n"
        "drafter: {num_aux_layers: 2, num_hidden_layers: 1, markov_rank: 4, mask_token: <|end|>}\n" + more
    )
    return recipe
