"""AdamW; linear warm-up, then a cosine to zero.

lr(s) = lr (s + 1) / w   for s < w = warmup_fraction * steps;      lr/2 (1 + cos(pi (s - w) / (steps - w)))   after
"""

from __future__ import annotations

import math

import torch
from torch import nn

from outrider.training.recipe import OptimizerSection


def learning_rate(step: int, config: OptimizerSection) -> float:
    """The rate of a step, zero at `steps`."""
    warmup = max(1, round(config.warmup_fraction * config.steps))
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, config.steps - warmup)
    return config.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))


def build_optimizer(module: nn.Module, config: OptimizerSection) -> torch.optim.Optimizer:
    """AdamW over all parameters; matrices decay, norms and biases do not."""
    decayed = [p for p in module.parameters() if p.dim() > 1]
    plain = [p for p in module.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95), fused=True)
