"""Targets of mlx-lm and block drafters in MLX, behind the interfaces that decoding knows.

    decoding.stream / generate  (rounds, policies, warps, acceptance: torch, the code that is proved)
          |  tokens, logits, aux hidden states         |  aux hidden states, proposals
      MLXTarget (mlx-lm model)        MLXDrafter (DFlash, DSpark)          float32 rows cross here (target.py)

Acceptance is decoding/verification.py's and drawing is sampling.py's. MLX is an optional dependency; this
module imports without it.
"""

from __future__ import annotations

import importlib.util


def require_mlx() -> None:
    """Refuse to go on where MLX is not installed.

    Raises:
        ValueError: mlx or mlx-lm is not installed.
    """
    missing = [name for name in ("mlx", "mlx_lm") if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(
            f"the MLX backend needs {' and '.join(missing).replace('_', '-')}: pip install 'outrider[mlx]' "
            "(Apple silicon, or Linux on the CPU)."
        )
