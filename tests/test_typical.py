"""Typical acceptance: the rule by hand, its greedy limit, which path wins, and that it is lossy."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from outrider.drafters.tree import Tree
from outrider.verification.tree import verify_tree_picks
from outrider.verification.typical import TypicalAcceptance, verify_typical


class Likeliest:
    """Every draw is the argmax; nothing may ask for chance."""

    def accept(self, probability: float) -> bool:
        raise AssertionError("typical acceptance has no chance in it")

    def choose(self, probs_V: Tensor) -> int:
        return int(probs_V.argmax())


def rows(*of: list[float]) -> dict[int, Tensor]:
    return dict(enumerate(torch.tensor(row) for row in of))


def test_thresholds_by_hand() -> None:
    rule = TypicalAcceptance()
    assert rule.threshold(torch.tensor([0.0, 1.0, 0.0])) == pytest.approx(0.09)
    assert rule.threshold(torch.full((4,), 0.25)) == pytest.approx(0.3 / 4)  # exp(-H) of a uniform row is 1 / V
    half = torch.tensor([0.5, 0.5, 0.0])
    assert rule.threshold(half) == pytest.approx(0.09)  # 0.3 / 2 is more than epsilon
    assert TypicalAcceptance(epsilon=0.2, delta=0.1).threshold(half) == pytest.approx(0.05)


def test_a_chain_is_kept_up_to_its_first_implausible_token() -> None:
    target = rows([0.5, 0.4, 0.1], [0.05, 0.9, 0.05], [1.0, 0.0, 0.0])
    verdict = verify_typical(Tree.chain([1, 0, 0]), target.__getitem__, Likeliest(), TypicalAcceptance())
    assert verdict.path == [0]
    assert verdict.next_token == 1  # from the target's row after the path, the token just turned down included


def test_the_longest_path_wins_and_of_these_the_likelier() -> None:
    #        anchor -> 0 (p 0.6), 1 (p 0.2), 2 (p 0.2);   1 -> 3 (p 0.3);   2 -> 4 (p 0.5);   0 -> 5 (p 0.01)
    tree = Tree([0, 1, 2, 0, 0, 1], [-1, -1, -1, 1, 2, 0])
    after = rows([0.6, 0.2, 0.2], [0.98, 0.01, 0.01], [0.3, 0.7, 0.0], [0.5, 0.5, 0.0], [1.0, 0, 0], [0.0, 1.0, 0.0])
    verdict = verify_typical(tree, after.__getitem__, Likeliest(), TypicalAcceptance())
    assert verdict.path == [2, 4]
    assert verdict.next_token == 1


def test_rows_are_asked_for_on_kept_nodes_only() -> None:
    after = rows([1.0, 0.0])
    verdict = verify_typical(Tree([1, 0], [-1, 0]), after.__getitem__, Likeliest(), TypicalAcceptance())
    assert verdict.path == [] and verdict.next_token == 0


@pytest.mark.parametrize("seed", range(20))
def test_at_temperature_zero_it_is_the_lossless_rule(seed: int) -> None:
    draw = random.Random(seed)
    paths: list[tuple[int, ...]] = [()]  # distinct siblings: of two equal ones the rules may follow different copies
    while len(paths) < 13:
        path = (*draw.choice(paths), draw.randrange(3))
        paths += [] if path in paths else [path]
    tree = Tree([path[-1] for path in paths[1:]], [paths.index(path[:-1]) - 1 for path in paths[1:]])
    after = [torch.eye(3)[draw.randrange(3)] for _ in paths]
    verdict = verify_typical(tree, after.__getitem__, Likeliest(), TypicalAcceptance())
    assert verdict == verify_tree_picks(tree, lambda row: int(after[row].argmax()))


def test_it_is_lossy() -> None:
    """A drafter that always says 1 makes the output always 1, where the target says it 3 times in 10."""
    verdict = verify_typical(Tree.chain([1]), lambda row: torch.tensor([0.7, 0.3]), Likeliest(), TypicalAcceptance())
    assert verdict.path == [0]


@pytest.mark.parametrize("wrong", [{"epsilon": 0.0}, {"delta": 1.5}, {"epsilon": math.nan}])
def test_constants_without_a_meaning_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="typical acceptance"):
        TypicalAcceptance(**wrong)
