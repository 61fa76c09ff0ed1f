"""Trees for the enumeration of evaluation/proof.py: every draw of every sibling, then every way to verify them.

    shape (-1, -1, 0)      x_0 ~ p_d   x_1 ~ p_d without x_0   x_2 ~ p_d(. | x_0)   -> TreeProposal -> verify_tree

The drafter's network is a table of random rows, as the target's, with another seed; its warp and its penalty follow the
path of a node. Shapes are given, or grown best first by what is known before each draw. Shapes: V vocab.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from outrider.drafters.tree import Drawn, Tree, TreeProposal, without
from outrider.evaluation.enumeration import DraftTree, Tokens
from outrider.evaluation.proof_toys import ToyTarget
from outrider.sampling import RandomSource

Kind = Literal["without", "replaced", "chosen"]


@dataclass
class Growth:
    """A tree while it is drawn.

    `kinds` take turns: how the children of node i come about is `kinds[(i + 1) % len(kinds)]`.
    """

    rows: Callable[[Tokens], Tensor]  # p_d after a path of draft tokens
    kinds: Sequence[Kind]
    source: RandomSource
    tree: Tree = field(default_factory=lambda: Tree([], []))
    left: dict[int, Tensor] = field(default_factory=dict)  # what the next child of a node is drawn from
    drawn: dict[int, Drawn] = field(default_factory=dict)

    def remaining(self, node: int) -> Tensor:
        if node not in self.left:
            row_V = self.rows(tuple(self.tree.tokens[i] for i in self.tree.path(node)))
            self.left[node] = row_V
            if self.kind(node) != "chosen":
                self.drawn[node] = Drawn(lambda: row_V, self.kind(node) == "replaced")
        return self.left[node]

    def kind(self, node: int) -> Kind:
        return self.kinds[(node + 1) % len(self.kinds)]

    def add(self, node: int) -> bool:
        """One more child of a node; False where nothing is left to draw."""
        left_V = self.remaining(node)
        if not left_V.any():
            return False
        if self.kind(node) == "chosen":  # the likeliest first; the third is a duplicate of the second
            count = len(self.tree.children(node))
            token = int(left_V.argsort(descending=True, stable=True)[min(count, 1)])
        else:
            token = self.source.choose(left_V)
            if self.kind(node) == "without":
                self.left[node] = without(left_V, token)
        self.tree = Tree([*self.tree.tokens, token], [*self.tree.parents, node])
        return True


class ToyTreeDrafter:
    """Draws trees of a given shape (`parents`), or of as many nodes as it has where `grown`."""

    def __init__(
        self,
        target: ToyTarget,
        parents: Sequence[int],
        kinds: Sequence[Kind] = ("without",),
        grown: bool = False,
        seed: int = 1,
    ) -> None:
        self.target, self.parents, self.kinds, self.grown = target, parents, kinds, grown
        self.table = ToyTarget(target.vocab_size, target.params, seed)
        self._trees: dict[Tokens, DraftTree[TreeProposal]] = {}

    def draft(self, context: Tokens, source: RandomSource) -> TreeProposal:
        if context not in self._trees:
            self._trees[context] = DraftTree(lambda recorder: self._draw(context, recorder))
        return self._trees[context].draw(source)

    def _draw(self, context: Tokens, source: RandomSource) -> TreeProposal:
        growth = Growth(lambda path: self.table.row(context + path), self.kinds, source)
        survivals = self._grow(growth) if self.grown else self._follow(growth)
        return TreeProposal(growth.tree, growth.drawn, survivals)

    def _follow(self, growth: Growth) -> list[float]:
        place = {-1: -1}  # a node whose parent, or whose own draw, could not be had is left out
        for node, parent in enumerate(self.parents):
            if parent in place and growth.add(place[parent]):
                place[node] = len(growth.tree.tokens) - 1
        return []

    def _grow(self, growth: Growth) -> list[float]:
        """The next node goes where p_d along the path times what siblings left is largest: known before its draw."""
        survivals: list[float] = []
        reached, open_mass = {-1: 0.8}, {-1: 1.0}
        for _ in self.parents:
            parent = max(open_mass, key=lambda node: (reached[node] * open_mass[node], -node))
            survival = min([reached[parent] * open_mass[parent], *survivals[-1:]])
            before_V = growth.remaining(parent)
            if survival <= 0 or not growth.add(parent):
                break
            node, token = len(survivals), growth.tree.tokens[-1]
            survivals.append(survival)
            share = before_V[token].item()
            reached[node], open_mass[node] = survival * share, 1.0
            open_mass[parent] *= 1 - share
        return survivals


@dataclass
class ToyTreeLane:
    """One toy request whose drafts are trees; its context ends with the anchor."""

    target: ToyTarget
    drafter: ToyTreeDrafter
    context: Tokens
    source: RandomSource

    def draft(self, floor: float) -> TreeProposal:
        return self.drafter.draft(self.context, self.source)

    def score(self, tokens: list[int]) -> Callable[[int], Tensor]:
        return lambda k: self.target.row(self.context + tuple(tokens[:k]))
