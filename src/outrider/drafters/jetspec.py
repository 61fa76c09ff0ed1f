"""JetSpec: DFlash whose rows see the rows before them alone, trained on the target's distributions, drafting trees.

    block    [anchor, mask, ..., mask] -> one pass; row k attends to the context and to rows 1 .. k of its block
    loss     sum_k KL(p_t,k || p_d,k) / K                      every position alike: no decay
    tree     the N paths with the largest product of p_d,k     drafters/dflash.py, for DFlash as well

Backbone, features and block layout are DFlash's. Row k of a causal block depends on nothing behind it, so a shorter
block gives the same first drafts. Which token was drafted before it does not enter either: the rows between are masks.

Source: JetSpec, arXiv 2606.18394, and the code of its authors (github.com/hao-ai-lab/JetSpec), whose checkpoints are
read and written. Departures: the temperature of the distillation is 1; a tree there gets all of a node's `width`
likeliest children at once, here the likeliest nodes one by one, by the drafter's own probabilities never a worse tree.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from pydantic import Field

from outrider.drafters.dflash import DFlash, DFlashConfig


@dataclass(frozen=True, kw_only=True)
class JetSpecConfig(DFlashConfig):
    """DFlash's fields; `is_causal` is true."""

    algorithm: ClassVar[str] = "jetspec"

    is_causal: Annotated[
        bool | None, Field(description="Whether rows of a block see earlier rows only: true here.")
    ] = field(default=True, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.is_causal is not True:
            raise ValueError("is_causal must be true: a JetSpec drafter without it is drafter.algorithm=dflash.")

    @classmethod
    def default_objective(cls, chosen: Mapping[str, Any]) -> dict[str, float]:
        return {"ce": 0.0, "l1": 0.0, "kl": 1.0, "confidence": 0.0, "decay": math.inf}


class JetSpec(DFlash):
    """The backbone as DFlash has it."""

    config: JetSpecConfig
