"""Toy targets and drafters in shapes that vLLM's CPU attention takes (head size 32), trained until drafts are accepted.

Untrained drafters would have nothing accepted, and rounds that accept nothing hide errors: so each learns the target's
own greedy responses by heart. Norms start away from one, and rope_theta is nobody's default.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import outrider.checkpoints.registry as catalogue
from outrider.checkpoints.checkpoint import Checkpoint
from outrider.data.responses import Sample
from outrider.decoding.generate import generate
from outrider.decoding.request import StopRules
from outrider.drafters.base import DrafterWeights
from outrider.drafters.dflash import DFlashConfig
from outrider.drafters.dspark import DSparkConfig
from outrider.drafters.eagle3 import Eagle3Config
from outrider.drafters.loss import ObjectiveConfig
from outrider.drafters.medusa import MedusaConfig
from outrider.target.model import Target
from outrider.training.dataset import choose_draft_ids
from outrider.training.features import measure_aux_scale
from outrider.training.objective import BlockObjective
from outrider.training.recipe import Recipe
from outrider.training.setup import Run
from tests.toys.targets import TOY, randomise
from tests.toys.training import train_until

VOCAB, HIDDEN, LAYERS = 160, 64, 5
SHAPES = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "head_dim": 32,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def save_target(directory: Path, seed: int = 0) -> Target:
    """A random Llama on disk, and loaded."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**{**TOY, **SHAPES}), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(1 + 0.2 * torch.randn_like(parameter)) if "norm" in name else parameter.normal_(std=0.15)
    model.save_pretrained(directory)
    return Target(model, None, str(directory))


def configs(draft_vocab: int) -> dict[str, Any]:
    """A drafter of each method that vLLM serves on a CPU."""
    common = {**SHAPES, **HEADS, "draft_vocab_size": draft_vocab, "num_target_layers": LAYERS, "rope_theta": 777.0}
    heads = {"hidden_size": HIDDEN, "vocab_size": VOCAB, "draft_vocab_size": draft_vocab, "num_target_layers": LAYERS}
    blocks = {**common, "target_layer_ids": (0, 2, 3), "num_hidden_layers": 2, "mask_token_id": 3, "block_size": 5}
    return {
        "dflash": DFlashConfig(**blocks),
        "dspark": DSparkConfig(**blocks, markov_rank=16),
        "eagle3": Eagle3Config(**common, target_layer_ids=(0, 1, 2, 3), gamma=4),
        "medusa": MedusaConfig(**heads, num_heads=4, num_layers=2),
    }


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Random prompts of 2 to 30 tokens."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 30, (count,), generator=g).tolist()
    return [torch.randint(4, VOCAB, (length,), generator=g).tolist() for length in lengths]


def train(config: Any, target: Target, texts: list[list[int]], new: int, out: Path) -> Checkpoint:
    """A drafter that knows how `target` goes on after these prompts."""
    samples = []
    for i, prompt in enumerate(texts):
        response = generate(target, prompt, rules=StopRules(new, stop_ids=())).tokens
        samples.append(Sample(f"s{i}", prompt + response, ((len(prompt), len(prompt) + len(response)),)))
    method = next(m for m in catalogue.methods() if m.config is type(config))
    drafter = method.module(config)
    randomise(drafter)
    drafter.aux_scale_L.copy_(measure_aux_scale(target, samples[:3], config.target_layer_ids))
    ids = choose_draft_ids(samples, VOCAB, config.draft_vocab_size, frozenset({1}))
    objective = BlockObjective(target, ids, ObjectiveConfig(ce=1.0), "float32")
    optimizer = {"steps": 400, "sequences_per_step": 4, "anchors_per_sequence": 24, "learning_rate": 1e-2}
    recipe = Recipe.model_validate(
        {
            "target": target.name,
            "out": str(out),
            "data": {"prompts": [{"path": "unused"}]},
            "optimizer": optimizer,
            "eval_every": 40,
            "save_every": 40,
        }
    )
    run = Run(target, drafter, objective, ids, config.draft_vocab_size < VOCAB, samples, samples[:2])
    train_until(lambda held_out: held_out["expected_length_greedy"] > 2, recipe, run, part=40)
    return Checkpoint(
        DrafterWeights(drafter.eval().requires_grad_(False), ids if config.draft_vocab_size < VOCAB else None)
    )
