"""torch <-> MLX: float32 rows by way of numpy, which both read from memory.

On Apple silicon both sides share that memory, so a row costs a copy and no transfer; what crosses is small (a block's
logits, taps of committed tokens), and whoever converts waits until MLX has computed it.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import torch
from torch import Tensor


def to_torch(x: mx.array) -> Tensor:
    """A float32 copy on the CPU; evaluates `x`."""
    return torch.from_numpy(np.array(x.astype(mx.float32)))


def to_mlx(x: Tensor) -> mx.array:
    """A copy in MLX, float32, int64 or bool as on the other side."""
    return mx.array(x.detach().cpu().numpy())
