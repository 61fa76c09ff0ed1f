"""At a node try its children in turn:   accept x with min(1, p_t(x) / p_d(x));   if not,  p_t <- norm (p_t - p_d)_+

    anchor -+- a -+- c      p_t(. | anchor):  a? no -> residual:  b? yes -> p_t(. | b):  e? no -> draw from its residual
            |     +- d
            +- b --- e      accepted: the path to b;   next token: what the last residual gave

A rejected child leaves a problem of the same kind, a residual to be drawn from and one more candidate, so the rule of
chains (verification/chain.py) applies again; all that changes is which p_d the next candidate came from:

    drawn without replacement   p_d given that it is none of the siblings before
    drawn with replacement      p_d (a duplicate is then accepted with probability 0: its residual is 0)
    chosen, nothing drawn       one-hot at the candidate: accepted with p_t(x), then x leaves p_t

A chain is the tree with one child each. Sources: SpecInfer, arXiv 2305.09781 (multi-round sampling); EAGLE, 2401.15077;
without replacement: Jeon et al., 2402.14160. Shapes: V vocab.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from outrider.drafters.tree import Tree, TreeProposal, without
from outrider.sampling import RandomSource, residual


@dataclass(frozen=True)
class TreeVerdict:
    path: list[int]  # accepted nodes, from the anchor on
    next_token: int  # the correction or the bonus: the next anchor

    @property
    def accepted(self) -> int:
        """Draft tokens kept."""
        return len(self.path)


def verify_tree_picks(tree: Tree, pick: Callable[[int], int]) -> TreeVerdict:
    """Follow the child that is what the target itself emits, where that is settled without the draft (`verify_picks`).

    Args:
        pick: the token after row k; row 0 follows the anchor, row i + 1 node i.
    """
    path: list[int] = []
    node = -1
    while True:
        own = pick(node + 1)
        found = [child for child in tree.children(node) if tree.tokens[child] == own]
        if not found:
            return TreeVerdict(path, own)
        node = found[0]
        path.append(node)


def verify_tree(proposal: TreeProposal, target_row: Callable[[int], Tensor], source: RandomSource) -> TreeVerdict:
    """Rows (row 0 follows the anchor, row i + 1 node i) are asked for along the accepted path only."""
    path: list[int] = []
    node = -1
    while True:
        target_V = target_row(node + 1)
        child, target_V = _try_children(proposal, node, target_V, source)
        if child is None:
            return TreeVerdict(path, source.choose(target_V))
        node = child
        path.append(node)


def _try_children(
    proposal: TreeProposal, node: int, target_V: Tensor, source: RandomSource
) -> tuple[int | None, Tensor]:
    """The accepted child, or None and the distribution that is left to draw from."""
    drawn = proposal.drawn.get(node)
    children = proposal.children(node)
    draft_V = drawn.row() if drawn is not None and children else None
    for child in children:
        token = proposal.tokens[child]
        if draft_V is None:
            if source.accept(target_V[token].item()):
                return child, target_V
            target_V = _without_chosen(target_V, token)
            continue
        assert draft_V[token] > 0, f"node {child}: token {token} has probability 0 in what it was drawn from"
        if source.accept((target_V[token] / draft_V[token]).item()):
            return child, target_V
        target_V = residual(target_V, draft_V)
        if drawn is not None and not drawn.replaced:
            draft_V = without(draft_V, token)
    return None, target_V


def _without_chosen(target_V: Tensor, token: int) -> Tensor:
    """The residual under a one-hot p_d. Where nothing else is possible only rounding can have rejected the token."""
    rest_V = without(target_V, token)
    return rest_V if rest_V.any() else target_V
