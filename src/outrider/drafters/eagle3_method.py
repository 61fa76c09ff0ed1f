"""EAGLE-3 as a method: what a recipe says of it, and the config that follows.

Weights begin as noise, as in the paper: the layer reads pairs [embedding; feature], which no layer of the target does.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from outrider.drafters.eagle3 import Eagle3, Eagle3Config
from outrider.drafters.eagle3_serve import Eagle3Drafter
from outrider.drafters.eagle_tree import dynamic_tree
from outrider.drafters.method import Method, MethodSection
from outrider.drafters.target_layers import layer_shapes
from outrider.target import Target


class Eagle3Section(MethodSection):
    """A recipe's choices; the defaults are the paper's."""

    algorithm: Literal["eagle3"] = "eagle3"
    gamma: int = Field(7, ge=1)  # draft tokens, and steps of the training-time test
    target_layer_ids: list[int] | None = None  # null: an early, a middle and a late layer


def eagle_taps(num_target_layers: int) -> list[int]:
    """The official choice: what layers 2, L / 2 and L - 3 read, i.e. the outputs of those before them."""
    return sorted({1, num_target_layers // 2 - 1, num_target_layers - 4})


def configure(section: Eagle3Section, target: Target) -> Eagle3Config:
    """The target's layer shapes, the recipe's choices."""
    return Eagle3Config(
        **layer_shapes(target),
        draft_vocab_size=section.draft_vocab(target),
        target_layer_ids=target.check_taps(section.target_layer_ids or eagle_taps(target.num_layers)),
        gamma=section.gamma,
    )


EAGLE3 = Method("eagle3", Eagle3Section, configure, Eagle3Config, Eagle3, Eagle3Drafter, branch=dynamic_tree)
