"""A draft: draft tokens of one request as a tree, in which a chain is the tree of only children.

    anchor -+- 0 "the" -+- 2 "cat"          tokens   the  a  cat  dog  red
            |           +- 3 "dog"          parents   -1 -1    0    0    1
            +- 1 "a" ----- 4 "red"          row 0 of the target follows the anchor, row i + 1 follows node i

Children of one node (siblings) are tried one after another (decoding/verification.py), and how they came about decides
how. *Drawn* ones come from a known p_d, with or without replacement. *Chosen* ones (greedy and copied tokens; the top-k
of EAGLE-2 and Medusa) are a function of the tokens before them: p_d is one-hot at each, and p_t(x) is the acceptance.

Only chosen nodes may be reranked by how probable they turned out (EAGLE-2, arXiv 2406.16858): nothing was drawn, so
keeping the likely ones favours no outcome of a draw. Of drawn nodes it would keep lucky draws and throw unlucky ones
away, and the rule would still count both. What admits a drawn node may therefore depend on the nodes before it,
never on itself, on later siblings or on what follows them; nodes stand in the order in which they were drawn, and any
beginning of a tree is a tree. Sources: SpecInfer, arXiv 2305.09781; EAGLE, 2401.15077; Medusa, 2401.10774.
Shapes: V target vocab.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from operator import mul

import torch
from torch import Tensor

from outrider.sampling import Constraint, PositionNoise, RandomSource


@dataclass(frozen=True)
class Siblings:
    """How the children of one node were drawn: one after another, the first from `row()`.

    `row()` [V] is a distribution over the target's vocabulary, warps included, whatever the drafter's own vocabulary.
    It is asked only where verification needs it.
    `replaced`: each sibling is drawn from the same distribution (duplicates happen); otherwise each from what is left
    of it without the tokens before, renormalised.
    `first`: the probability that the first was drawn with, where it is known without `row()`.
    """

    row: Callable[[], Tensor]
    replaced: bool = False
    first: float | None = None


@dataclass(frozen=True)
class Draft:
    """Draft tokens: node i is `tokens[i]` after node `parents[i] < i`, or after the anchor (-1).

    Children of one node are tried in the order of their indices. The same token twice among them does no harm.

    Attributes:
        siblings: by node (-1: the anchor), how its children were drawn; the children of other nodes were chosen.
        confidences: c_1, c_2, ... of the nodes; [] where a drafter has none. c_1 ... c_i is the probability that the
            accepted path reaches node i, as the drafter saw it *before* that node was drawn. The sum of these products
            is the expected number of accepted drafts of a tree as of a chain, so policies need to know of no trees.
    """

    tokens: list[int]
    parents: list[int]
    siblings: Mapping[int, Siblings] = field(default_factory=dict)
    confidences: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        assert len(self.tokens) == len(self.parents), f"{len(self.tokens)} tokens, {len(self.parents)} parents"
        assert all(-1 <= parent < i for i, parent in enumerate(self.parents)), f"parents {self.parents}"

    @staticmethod
    def chain(
        tokens: list[int], siblings: Mapping[int, Siblings] | None = None, confidences: Sequence[float] = ()
    ) -> Draft:
        """Each token after the one before; position k was drawn as `siblings[k - 1]` says, or chosen."""
        return Draft(tokens, list(range(-1, len(tokens) - 1)), siblings or {}, confidences=list(confidences))

    @staticmethod
    def empty() -> Draft:
        """No draft: the target's own token is all the round gives."""
        return Draft([], [])

    @cached_property
    def _children(self) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in range(len(self.tokens) + 1)]
        for node, parent in enumerate(self.parents):
            found[parent + 1].append(node)
        return found

    def children(self, node: int) -> list[int]:
        """Of a node or, at -1, of the anchor; in the order they are tried."""
        return self._children[node + 1]

    @property
    def is_chain(self) -> bool:
        """Whether every node follows the one before."""
        return self.parents == list(range(-1, len(self.parents) - 1))

    @cached_property
    def depths(self) -> list[int]:
        """Of every node; 1 right after the anchor."""
        found: list[int] = []
        for parent in self.parents:
            found.append(1 if parent < 0 else found[parent] + 1)
        return found

    @property
    def depth(self) -> int:
        """Most draft tokens that can be accepted."""
        return max(self.depths, default=0)

    def path(self, node: int) -> list[int]:
        """The nodes from the anchor (excluded) to this one (included); [] at -1."""
        found: list[int] = []
        while node >= 0:
            found.append(node)
            node = self.parents[node]
        return found[::-1]

    def tokens_before(self, row: int) -> list[int]:
        """The draft tokens on the path to a row of the target forward."""
        return [self.tokens[node] for node in self.path(row - 1)]

    @property
    def row_parents(self) -> list[int] | None:
        """For each row of the target forward its parent row, -1 for the anchor's; None for a chain."""
        return None if self.is_chain else [-1, *(parent + 1 for parent in self.parents)]

    def truncated(self, nodes: int | None) -> Draft:
        """Its first `nodes` nodes."""
        return Draft(self.tokens[:nodes], self.parents[:nodes], self.siblings, confidences=self.confidences[:nodes])


def conditional_confidences(survivals: Sequence[float]) -> list[float]:
    """The confidences c_i whose products c_1 ... c_i are `survivals`, which must not rise."""
    before = [1.0, *survivals[:-1]]
    return [min(1.0, s / b) if b > 0 else 0.0 for s, b in zip(survivals, before, strict=False)]


def rerank(draft: Draft, survivals: Sequence[float], nodes: int) -> Draft:
    """The `nodes` most likely nodes by survival, most likely first: EAGLE-2's second phase. Chosen nodes only.

    Args:
        survivals: probability that the accepted path reaches each node; a node's must not exceed its parent's, so
            parents are kept before their children.
    """
    assert not draft.siblings, "reranking drawn nodes by what was drawn changes the output's distribution"
    assert len(survivals) == len(draft.tokens), "reranking needs a survival per node"
    assert all(p < 0 or survivals[i] <= survivals[p] for i, p in enumerate(draft.parents)), (
        "a child outlives its parent"
    )
    return _part(draft, sorted(range(len(survivals)), key=lambda i: (-survivals[i], i))[:nodes], survivals)


def allowed_part(draft: Draft, constraint: Constraint) -> Draft:
    """A draft without chosen nodes that the constraint rules out, and without what comes behind them.

    A draft with drawn nodes stays: how many there are must not depend on what was drawn. Our drafters draw from a
    masked p_d (`DraftCall.constrained`); what another drafter draws and may not come has p_t = 0.
    """
    if draft.siblings:
        return draft
    kept: list[int] = []
    for node, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
        if parent < 0 or parent in kept:
            allowed_V = constraint.allowed(draft.tokens_before(parent + 1))
            if allowed_V is None or bool(allowed_V[token]):
                kept.append(node)
    if kept == list(range(len(kept))):
        return draft.truncated(len(kept))
    return _part(draft, kept, list(accumulate(draft.confidences, mul)))


def _part(draft: Draft, nodes: Sequence[int], survivals: Sequence[float]) -> Draft:
    """These nodes, parents before their children; `survivals` of all nodes, [] where there are no confidences."""
    place = {-1: -1, **{node: i for i, node in enumerate(nodes)}}
    return Draft(
        [draft.tokens[node] for node in nodes],
        [place[draft.parents[node]] for node in nodes],
        confidences=conditional_confidences([survivals[node] for node in nodes] if survivals else []),
    )


def without(probs_V: Tensor, token: int) -> Tensor:
    """p given that it is not `token`: renormalised; all zero where nothing else was possible."""
    rest_V = probs_V.clone()
    rest_V[token] = 0.0
    mass = rest_V.sum()
    return torch.where(mass > 0, rest_V / mass, rest_V)


@dataclass(frozen=True)
class DraftRow:
    """A distribution over the tokens `ids_C`, None: all; called, it is one over the target's vocabulary, [V]."""

    probs_C: Tensor
    ids_C: Tensor | None
    vocab_size: int

    def __call__(self) -> Tensor:
        return self._spread(self.probs_C)

    @staticmethod
    def together(rows: Sequence[DraftRow]) -> Tensor:
        """Several of them over the same tokens, [A, V]."""
        return rows[0]._spread(torch.stack([row.probs_C for row in rows]))

    def _spread(self, probs: Tensor) -> Tensor:
        if self.ids_C is None:
            return probs
        zeros = probs.new_zeros(*probs.shape[:-1], self.vocab_size)
        return zeros.scatter_(-1, self.ids_C.expand(probs.shape), probs)


def draw_siblings(
    probs_V: Tensor,
    count: int,
    source: RandomSource,
    *,
    noise: PositionNoise | None = None,
    position: int = 0,
    ids: Tensor | None = None,
) -> list[int]:
    """Up to `count` indices without replacement, in drawing order; fewer where the support is smaller.

    With `noise` (coupled sampling) they are the first of p_d's race at `position`; the target's own pick wins p_t's
    race with the same noise. That is drawing without replacement too: behind the winner the others race on.
    """
    if noise is not None:
        return noise.ranking(probs_V, position, count, ids=ids)
    drawn: list[int] = []
    while len(drawn) < count and bool(probs_V.any()):
        drawn.append(source.choose(probs_V))
        probs_V = without(probs_V, drawn[-1])
    return drawn


TREE_FORM = "NODES[,depth=D][,top_k=K]"
_NAMES = ("depth", "top_k")


@dataclass(frozen=True)
class TreeSize:
    """Size of the trees that a user wants: `60`, or `60,depth=8,top_k=10`.

    A tree of fixed shape has neither depth nor top_k to choose: its shape follows from how often its candidates are
    right.

    Attributes:
        nodes: draft tokens of a tree, the anchor not among them.
        depth: draft tokens one after another, of trees that grow while they are drafted (EAGLE-2); None: the method's.
        top_k: nodes per depth and children per node of such trees; None: the method's.
    """

    nodes: int
    depth: int | None = None
    top_k: int | None = None

    @staticmethod
    def parse(text: str) -> TreeSize:
        """The inverse of `str`.

        Raises:
            ValueError: not of that form, a field twice, or a number below 1.
        """
        nodes, *rest = text.replace(" ", "").split(",")
        pairs = [field.partition("=")[::2] for field in rest]
        fields = dict(pairs)
        numbers = [nodes, *fields.values()]
        if len(fields) < len(pairs) or not set(fields) <= set(_NAMES) or not all(map(_positive, numbers)):
            raise ValueError(
                f"tree {text!r}: write {TREE_FORM} with whole numbers from 1, as 60 or 60,depth=8,top_k=10."
            )
        return TreeSize(int(nodes), **{name: int(number) for name, number in fields.items()})

    def __str__(self) -> str:
        chosen = {name: getattr(self, name) for name in _NAMES}
        return ",".join([str(self.nodes), *(f"{name}={number}" for name, number in chosen.items() if number)])

    @property
    def shaped(self) -> bool:
        """Whether more than the number of nodes is asked for."""
        return self.depth is not None or self.top_k is not None

    @property
    def setting(self) -> int | str:
        """As results keep it: a number where that says all."""
        return str(self) if self.shaped else self.nodes


def _positive(text: str) -> bool:
    return re.fullmatch("0*[1-9][0-9]*", text) is not None
