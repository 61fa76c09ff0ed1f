"""Rotary embeddings of draft layers: tables of cos and sin by absolute position."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.target.fused import signed_sin
from outrider.utils.measure import on_device

Rope = tuple[Tensor, Tensor]  # cos and signed sin, broadcast over heads


def rope_table(positions: Tensor, head_dim: int, theta: float) -> Rope:
    """cos and signed sin for absolute positions: [..., 1, head_dim], the 1 standing for heads."""
    inverse = theta ** (-torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim)
    angles = positions[..., None].float() * inverse
    angles = torch.cat((angles, angles), dim=-1)[..., None, :]
    return angles.cos(), signed_sin(angles.sin())


class RopeTables:
    """`rope_table` of consecutive positions, kept from call to call and extended when a later position is asked for."""

    def __init__(self, head_dim: int, theta: float, device: torch.device) -> None:
        self.head_dim, self.theta, self.device = head_dim, theta, device
        self.kept: Rope = rope_table(torch.arange(0, device=device), head_dim, theta)

    def __call__(self, positions: Sequence[int]) -> Rope:
        """cos and signed sin, [X, 1, head_dim]."""
        end = max(positions, default=0) + 1
        if end > len(self.kept[0]):
            self.kept = rope_table(torch.arange(2 * end, device=self.device), self.head_dim, self.theta)
        index_X = on_device(positions, self.device, torch.long)
        return self.kept[0][index_X], self.kept[1][index_X]
