"""A block drafter with blocks of another size than it was trained with: the same weights, more or fewer mask rows.

What training at one size gives at another is a question of its own (DFlash, arXiv 2602.06036).
"""

from __future__ import annotations

from dataclasses import replace

from outrider.formats import Checkpoint


def with_block_size(checkpoint: Checkpoint, block_size: int) -> Checkpoint:
    """The drafter with that many rows a block. Its calibration is left out: it was for the positions of the other one.

    Raises:
        ValueError: not a block drafter, or a size that it cannot have.
    """
    drafter = checkpoint.drafter
    if not hasattr(drafter.config, "block_size"):
        raise ValueError(f"block_size {block_size}: a {drafter.algorithm} drafter has no blocks; leave it out.")
    other = type(drafter)(replace(drafter.config, block_size=block_size))
    other.load_state_dict(drafter.state_dict())
    metadata = {name: value for name, value in checkpoint.metadata.items() if name != "calibration"}
    return replace(checkpoint, drafter=other.eval().requires_grad_(False), metadata=metadata)
