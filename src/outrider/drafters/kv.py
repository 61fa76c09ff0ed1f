"""Keys and values of one draft layer for one request, written in place and read up to an end.

    slots   0 .. committed-1 | rows of the draft in hand | free

A draft's own rows are written behind what is committed and overwritten by the next draft: forgetting costs nothing.
The query heads of one key head are folded into rows, so keys are never repeated.

Shapes: T rows, S slots read, Q heads, G kv heads, E head dim.
"""

from __future__ import annotations

from typing import Protocol

import torch.nn.functional as F
from torch import Tensor


class HeadShapes(Protocol):
    """What a config says of attention."""

    @property
    def num_attention_heads(self) -> int: ...

    @property
    def num_key_value_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...


def check_heads(config: HeadShapes) -> None:
    """Query heads divide evenly among key heads.

    Raises:
        ValueError: they do not.
    """
    if config.num_key_value_heads < 1 or config.num_attention_heads % config.num_key_value_heads:
        raise ValueError(
            f"num_attention_heads {config.num_attention_heads} is not a multiple of num_key_value_heads "
            f"{config.num_key_value_heads}."
        )


class DraftKV:
    """Room for `slots` rows, in the type and on the device of `like`."""

    def __init__(self, config: HeadShapes, slots: int, like: Tensor) -> None:
        self.groups = config.num_attention_heads // config.num_key_value_heads
        shape = (config.num_key_value_heads, slots, config.head_dim)
        self.keys_GSE, self.values_GSE = like.new_empty(shape), like.new_empty(shape)

    def write(self, start: int, k_TGE: Tensor, v_TGE: Tensor) -> None:
        """Put the rows at `start`."""
        self.keys_GSE[:, start : start + len(k_TGE)] = k_TGE.transpose(0, 1)
        self.values_GSE[:, start : start + len(v_TGE)] = v_TGE.transpose(0, 1)

    def attend(self, q_TQE: Tensor, end: int, visible_TS: Tensor | None) -> Tensor:
        """Over the slots before `end`, or those of them that are visible: [T, Q * E]."""
        T, heads, E = q_TQE.shape
        mask = None if visible_TS is None else visible_TS.repeat(self.groups, 1)
        q_GRE = q_TQE.transpose(0, 1).reshape(1, heads // self.groups, -1, E)  # rows: query group x T
        keys, values = self.keys_GSE[None, :, :end], self.values_GSE[None, :, :end]
        out = F.scaled_dot_product_attention(q_GRE, keys, values, attn_mask=mask)
        return out.view(heads, T, E).transpose(0, 1).reshape(T, heads * E)
