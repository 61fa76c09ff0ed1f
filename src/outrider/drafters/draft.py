"""A draft that branches: several candidates for a position, each with candidates of its own.

    anchor -+- 0 "the" -+- 2 "cat"          tokens   the  a  cat  dog  red
            |           +- 3 "dog"          parents   -1 -1    0    0    1
            +- 1 "a" ----- 4 "red"          row 0 of the target follows the anchor, row i + 1 follows node i

Candidates of one node (siblings) are tried one after another (verification.py), and how they came about decides
how. *Drawn* ones come from a known p_d, with or without replacement. *Chosen* ones (EAGLE-2, Medusa: the top-k) are a
function of the tokens before them: p_d is then one-hot at each, and p_t(x) is the acceptance.

Only chosen nodes may be reranked by how probable they turned out (EAGLE-2, arXiv 2406.16858): nothing was drawn, so
keeping the likely ones favours no outcome of a draw. Of drawn nodes it would keep lucky draws and throw unlucky ones
away, and the rule below would still count both. What admits a drawn node may therefore depend on the nodes before it,
never on itself, on later siblings or on what follows them; nodes stand in the order in which they were drawn, and any
beginning of a tree is a tree. Sources: SpecInfer, arXiv 2305.09781; EAGLE, 2401.15077; Medusa, 2401.10774.
Shapes: V target vocab.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from outrider.sampling import PositionNoise, RandomSource


@dataclass(frozen=True)
class Tree:
    """Node i is `tokens[i]` after node `parents[i] < i`, or after the anchor (-1).

    Children of one node are tried in the order of their indices. The same token twice among them does no harm.
    """

    tokens: list[int]
    parents: list[int]

    def __post_init__(self) -> None:
        assert len(self.tokens) == len(self.parents), f"{len(self.tokens)} tokens, {len(self.parents)} parents"
        assert all(-1 <= parent < i for i, parent in enumerate(self.parents)), f"parents {self.parents}"

    @staticmethod
    def chain(tokens: list[int]) -> Tree:
        return Tree(tokens, list(range(-1, len(tokens) - 1)))

    @cached_property
    def _children(self) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in range(len(self.tokens) + 1)]
        for node, parent in enumerate(self.parents):
            found[parent + 1].append(node)
        return found

    def children(self, node: int) -> list[int]:
        """Of a node or, at -1, of the anchor; in the order they are tried."""
        return self._children[node + 1]

    @cached_property
    def depths(self) -> list[int]:
        """Of every node; 1 right after the anchor."""
        found: list[int] = []
        for parent in self.parents:
            found.append(1 if parent < 0 else found[parent] + 1)
        return found

    def path(self, node: int) -> list[int]:
        """The nodes from the anchor (excluded) to this one (included); [] at -1."""
        found: list[int] = []
        while node >= 0:
            found.append(node)
            node = self.parents[node]
        return found[::-1]

    def truncated(self, nodes: int | None) -> Tree:
        return Tree(self.tokens[:nodes], self.parents[:nodes])


@dataclass(frozen=True)
class Drawn:
    """Siblings were drawn one after another, the first from `row()` [V], a distribution over the target's vocabulary.

    `replaced`: each from the same distribution (duplicates happen); otherwise each from what is left of it without the
    tokens before, renormalised.
    """

    row: Callable[[], Tensor]
    replaced: bool = False


@dataclass(frozen=True)
class TreeProposal:
    """A tree and how it came about; stands where a `Proposal` may stand.

    `drawn` has an entry for each node (-1: the anchor) whose children were drawn; the children of others were chosen.
    `survivals`: how likely the accepted path reaches each node, as the drafter saw it *before* that node was drawn, not
    rising with the index; [] where a drafter does not say.
    """

    tree: Tree
    drawn: Mapping[int, Drawn] = field(default_factory=dict)
    survivals: list[float] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return self.tree.tokens

    @property
    def depth(self) -> int:
        """Most draft tokens that can be accepted."""
        return max(self.tree.depths, default=0)

    @property
    def confidences(self) -> list[float]:
        """What a policy is shown: a chain of the nodes whose survivals c_1 ... c_i are these.

        The sum of survivals is the expected number of accepted drafts for a tree as for a chain, so the schedulers
        need to know of no trees.
        """
        before = [1.0, *self.survivals[:-1]]
        return [min(1.0, s / b) if b > 0 else 0.0 for s, b in zip(self.survivals, before, strict=False)]

    @property
    def row_parents(self) -> list[int] | None:
        """For each row of the target forward its parent row, -1 for the anchor's; None: one after another."""
        parents = [-1, *(parent + 1 for parent in self.tree.parents)]
        return None if parents == list(range(-1, len(parents) - 1)) else parents

    def children(self, node: int) -> list[int]:
        return self.tree.children(node)

    def tokens_before(self, row: int) -> list[int]:
        """The draft tokens on the way to a row of the target forward."""
        return [self.tokens[node] for node in self.tree.path(row - 1)]

    def truncated(self, length: int | None) -> TreeProposal:
        """Its first `length` nodes."""
        return TreeProposal(self.tree.truncated(length), self.drawn, self.survivals[:length])


def without(probs_V: Tensor, token: int) -> Tensor:
    """p given that it is not `token`: renormalised; all zero where nothing else was possible."""
    rest_V = probs_V.clone()
    rest_V[token] = 0.0
    mass = rest_V.sum()
    return rest_V / mass if mass > 0 else rest_V


def draw_siblings(
    probs_V: Tensor,
    count: int,
    source: RandomSource,
    noise: PositionNoise | None = None,
    position: int = 0,
    ids: Tensor | None = None,
) -> list[int]:
    """Up to `count` indices without replacement, in drawing order; fewer where the support is smaller.

    With `noise` (coupled sampling) they are the first of p_d's race at `position`; the target's own pick wins p_t's
    race with the same noise. That is drawing without replacement too: behind the winner the others race on.
    """
    if noise is not None:
        return noise.ranking(probs_V, position, count, ids)
    drawn: list[int] = []
    while len(drawn) < count and bool(probs_V.any()):
        drawn.append(source.choose(probs_V))
        probs_V = without(probs_V, drawn[-1])
    return drawn


def rerank(proposal: TreeProposal, nodes: int) -> TreeProposal:
    """The `nodes` most likely nodes by survival, most likely first: EAGLE-2's second phase. Chosen nodes only.

    A node's survival must not exceed its parent's, so parents are kept before their children.
    """
    assert not proposal.drawn, "reranking drawn nodes by what was drawn changes the output's distribution"
    tree, survivals = proposal.tree, proposal.survivals
    assert len(survivals) == len(tree.tokens), "reranking needs a survival per node"
    assert all(p < 0 or survivals[i] <= survivals[p] for i, p in enumerate(tree.parents)), "a child outlives its parent"
    kept = sorted(range(len(survivals)), key=lambda i: (-survivals[i], i))[:nodes]
    place = {-1: -1, **{node: i for i, node in enumerate(kept)}}
    reranked = Tree([tree.tokens[node] for node in kept], [place[tree.parents[node]] for node in kept])
    return TreeProposal(reranked, survivals=[survivals[node] for node in kept])


@dataclass(frozen=True)
class Proposal:
    """Draft tokens of one request.

    `drafted_with` holds p_k(x_k); `row(k)` gives p_k over the target's vocabulary [V], whatever the drafter's own, and
    is asked only where a residual is needed. `confidences` c_k were known before x_k was drawn; [] if there are none.
    """

    tokens: list[int]
    drafted_with: list[float]
    row: Callable[[int], Tensor]
    confidences: list[float]

    @staticmethod
    def certain(tokens: list[int], vocab_size: int, device: torch.device | str | None = None) -> Proposal:
        """Tokens that chance had no part in: every p_k is one-hot."""

        def row(k: int) -> Tensor:
            one_hot_V = torch.zeros(vocab_size, device=device)
            one_hot_V[tokens[k]] = 1.0
            return one_hot_V

        return Proposal(tokens, [1.0] * len(tokens), row, [])

    @staticmethod
    def empty() -> Proposal:
        """No draft: the target's own token is all the round gives."""

        def row(k: int) -> Tensor:
            raise IndexError(k)

        return Proposal([], [], row, [])

    @property
    def depth(self) -> int:
        """Most draft tokens that can be accepted."""
        return len(self.tokens)

    @property
    def row_parents(self) -> None:
        """The rows of the target forward follow one another."""

    def children(self, node: int) -> list[int]:
        """The positions that may come after position `node`, -1 being the anchor."""
        return [node + 1] if node + 1 < len(self.tokens) else []

    def tokens_before(self, row: int) -> list[int]:
        """The draft tokens on the way to a row of the target forward."""
        return self.tokens[:row]

    def truncated(self, length: int | None) -> Proposal:
        return Proposal(self.tokens[:length], self.drafted_with[:length], self.row, self.confidences[:length])


Draft = Proposal | TreeProposal
