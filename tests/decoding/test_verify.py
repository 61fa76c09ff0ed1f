"""The acceptance rule by hand, on siblings."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from outrider.decoding.verification import TargetRows, verify
from outrider.drafters.draft import Draft, Siblings


class Refusing:
    """Accepts nothing, takes the argmax, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[float] = []

    def accept(self, probability: float) -> bool:
        self.asked.append(probability)
        return False

    def choose(self, probs_V: Tensor) -> int:
        return int(probs_V.argmax())


@pytest.mark.parametrize("first", [None, 0.5])
@pytest.mark.parametrize(("replaced", "second"), [(False, 2 / 3 / 0.6), (True, 2 / 3 / 0.3)])
def test_each_sibling_is_judged_by_what_it_was_drawn_from(first: float | None, replaced: bool, second: float) -> None:
    """p_t (0.2, 0.5, 0.3), p_d (0.5, 0.3, 0.2): without token 0 they are (0, 2/3, 1/3) and (0, 0.6, 0.4)."""
    source, draft_V, target_V = Refusing(), torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.5, 0.3])
    siblings = {-1: Siblings(lambda: draft_V, replaced, first)}
    verdict = verify(Draft([0, 1], [-1, -1], siblings), TargetRows(lambda k: target_V), source)
    assert source.asked == pytest.approx([0.4, second])
    assert verdict.path == [] and verdict.next_token == 1
