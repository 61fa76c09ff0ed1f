"""Training state on disk: raw weights, optimizer moments and the step, as safetensors; no pickle.

Data order and anchors are functions of (seed, step) (training/batches.py) and nothing else is drawn during training, so
these tensors and one integer are all that an exact resume needs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from outrider.formats.files import atomic_directory, read_tensors

_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


def save_state(
    directory: Path, module: nn.Module, optimizer: torch.optim.Optimizer, step: int, settings: dict[str, Any]
) -> None:
    """Write atomically. `settings` must match on resume."""
    tensors = {f"weight.{name}": p.detach() for name, p in module.named_parameters()}
    tensors |= {f"buffer.{name}": b for name, b in module.named_buffers()}
    for name, parameter in module.named_parameters():
        for moment in _MOMENTS:
            if parameter in optimizer.state:
                tensors[f"{moment}.{name}"] = optimizer.state[parameter][moment]
    with atomic_directory(directory) as staging:
        save_file({k: v.contiguous() for k, v in tensors.items()}, staging / "state.safetensors")
        (staging / "state.json").write_text(json.dumps({"step": step, "settings": settings}, indent=1))


def load_state(directory: Path, module: nn.Module, optimizer: torch.optim.Optimizer, settings: dict[str, Any]) -> int:
    """Restore in place and return the step to go on from; 0 where there is nothing to resume.

    Raises:
        ValueError: the state belongs to another recipe, or is damaged.
    """
    if not (directory / "state.json").is_file():
        return 0
    stored = json.loads((directory / "state.json").read_text())
    different = sorted(k for k in settings if stored["settings"].get(k) != settings[k])
    if different:
        raise ValueError(
            f"{directory} was written by another recipe ({', '.join(different)} differ). "
            "Choose another out=..., or delete that directory to start again."
        )
    tensors = read_tensors(directory / "state.safetensors")
    missing = [n for n, _ in module.named_parameters() if f"weight.{n}" not in tensors]
    if missing:
        raise ValueError(
            f"{directory / 'state.safetensors'} lacks {', '.join(missing)}; delete {directory} to start again."
        )
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(tensors[f"weight.{name}"])
            if f"exp_avg.{name}" in tensors:
                optimizer.state[parameter] = {m: tensors[f"{m}.{name}"].to(parameter.device) for m in _MOMENTS}
        for name, buffer in module.named_buffers():
            buffer.copy_(tensors[f"buffer.{name}"])
    return int(stored["step"])
