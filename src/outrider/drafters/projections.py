"""The projections of grouped-query attention, for layers whose rows see what their caller decides.

    q = R norm(W_q u)    k = R norm(W_k u)    v = W_v u    out = W_o attended       R: rotation by position

EAGLE-3's layer reads pairs, 2 H wide, all others read H. `norm` is there, head by head, where `qk_norm` says so.
Parameter names are those of checkpoints.

Shapes: X rows, U inputs, H hidden, Q heads, G kv heads, E head dim.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from outrider.target.lean import rotate

Rope = tuple[Tensor, Tensor]  # cos and signed sin, broadcast over heads


class Projections(nn.Module):
    """In the shapes of `config`: hidden_size, head counts, head_dim and rms_norm_eps."""

    def __init__(self, config: Any, inputs: int, qk_norm: bool, bias: bool = False) -> None:
        super().__init__()
        E = config.head_dim
        self.head_dim = E
        self.q_proj = nn.Linear(inputs, config.num_attention_heads * E, bias=bias)
        self.k_proj = nn.Linear(inputs, config.num_key_value_heads * E, bias=bias)
        self.v_proj = nn.Linear(inputs, config.num_key_value_heads * E, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * E, config.hidden_size, bias=bias)
        if qk_norm:
            self.q_norm = nn.RMSNorm(E, eps=config.rms_norm_eps)
            self.k_norm = nn.RMSNorm(E, eps=config.rms_norm_eps)
        self.qk_norm = qk_norm

    def queries(self, u_XU: Tensor, rope: Rope) -> Tensor:
        """[X, Q, E]"""
        return self._rotated(self.q_norm if self.qk_norm else None, self.q_proj(u_XU), rope)

    def keys_values(self, u_XU: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """[X, G, E] each."""
        keys = self._rotated(self.k_norm if self.qk_norm else None, self.k_proj(u_XU), rope)
        return keys, self.v_proj(u_XU).unflatten(-1, (-1, self.head_dim))

    def _rotated(self, norm: nn.RMSNorm | None, x: Tensor, rope: Rope) -> Tensor:
        """Result in x's type: under autocast queries, keys and values must agree.

        The norm is in its own type, which is float32 but in layers sharded in bfloat16; the rotation is in float32.
        """
        heads = x.unflatten(-1, (-1, self.head_dim))
        heads = heads.float() if norm is None else norm(heads.to(norm.weight.dtype))
        return rotate(heads, *rope).to(x.dtype)
