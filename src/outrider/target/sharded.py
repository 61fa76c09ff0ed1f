"""Weights of a target whose layers may be spread over ranks (training/sharding.py spreads them)."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor that may be sharded over ranks (then a collective)."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
