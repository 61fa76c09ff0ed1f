"""accept x_k with min(1, p_t(x_k) / p_d(x_k)); the first rejection draws from (p_t - p_d)_+, no rejection from p_t.

    anchor  x_1  x_2  x_3         rows of the target: row k is its distribution after anchor, x_1..x_k
    row 0   row 1  row 2  row 3   row k judges x_{k+1}; the last row gives the bonus token

Speculative sampling, Leviathan et al., arXiv 2211.17192, algorithm 1. Temperature 0 needs no case of its own: one-hot
distributions turn the ratio into "equal or not" and the residual into the target's argmax. Shapes: K, V vocab.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.drafters.draft import Proposal, Tree, TreeProposal, without
from outrider.sampling import RandomSource, residual


@dataclass(frozen=True)
class Verdict:
    accepted: int  # draft tokens kept
    next_token: int  # the correction or the bonus: the next anchor

    @property
    def path(self) -> list[int]:
        """The positions kept, as a `TreeVerdict` names nodes."""
        return list(range(self.accepted))


def verify_picks(tokens: Sequence[int], pick: Callable[[int], int]) -> Verdict:
    """Accept while the draft is what the target itself emits at row k.

    That is the same rule where the target's token is settled without the draft: at temperature 0 (both distributions
    one-hot), and in coupled sampling (sampling.py).
    """
    for k, token in enumerate(tokens):
        own = pick(k)
        if own != token:
            return Verdict(k, own)
    return Verdict(len(tokens), pick(len(tokens)))


def verify_chain(proposal: Proposal, target_row: Callable[[int], Tensor], source: RandomSource) -> Verdict:
    """Rows are asked for one by one, so that nothing is warped behind the first rejection."""
    for k, token in enumerate(proposal.tokens):
        target_V, drafted_with = target_row(k), proposal.drafted_with[k]
        assert drafted_with > 0.0, f"draft token {token} at position {k} has probability 0 in its own proposal"
        if not source.accept(target_V[token].item() / drafted_with):
            return Verdict(k, source.choose(residual(target_V, proposal.row(k))))
    return Verdict(len(proposal.tokens), source.choose(target_row(len(proposal.tokens))))


# ----------------------------------------------------------------------------
# At a node try its children in turn:   accept x with min(1, p_t(x) / p_d(x));   if not,  p_t <- norm (p_t - p_d)_+
#
#     anchor -+- a -+- c      p_t(. | anchor):  a? no -> residual:  b? yes -> p_t(. | b):  e? no -> draw from its
#     residual
#             |     +- d
#             +- b --- e      accepted: the path to b;   next token: what the last residual gave
#
# A rejected child leaves a problem of the same kind, a residual to be drawn from and one more candidate, so the rule of
# chains (verification.py) applies again; all that changes is which p_d the next candidate came from:
#
#     drawn without replacement   p_d given that it is none of the siblings before
#     drawn with replacement      p_d (a duplicate is then accepted with probability 0: its residual is 0)
#     chosen, nothing drawn       one-hot at the candidate: accepted with p_t(x), then x leaves p_t
#
# A chain is the tree with one child each. Sources: SpecInfer, arXiv 2305.09781 (multi-round sampling); EAGLE,
# 2401.15077; without replacement: Jeon et al., 2402.14160. Shapes: V vocab.
# ----------------------------------------------------------------------------


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


# ----------------------------------------------------------------------------
# Typical acceptance: keep what the target finds plausible. **Lossy**: the output is not the target's distribution.
#
#     keep x_k  if  p_t(x_k) >= min(epsilon, delta exp(-H(p_t)))          H: entropy of the target's row, in nats
#
# The more certain the target, the closer to delta itself a token's probability must be; where it is undecided, less
# will do, and epsilon is the most ever asked for. How likely the *drafter* found x_k plays no part, and neither does
# chance: that is why tokens are accepted more often than exactness allows, and why nobody gets this without asking for
# it. The paper's inequality is strict; here equality keeps the token.
#
# At temperature 0 the row is one-hot, H = 0, and exactly the target's argmax is kept: the lossless rule. Of several
# kept paths the longest wins; of equally long ones that of the largest product of p_t. The token after the path is
# drawn from the target's row, as after any accepted draft; also where drafts were turned down, for no residual is owed.
#
# Source: Medusa, arXiv 2401.10774, section 2.3.1; the defaults are those of its release. Shapes: V vocab.
# ----------------------------------------------------------------------------


@dataclass(frozen=True)
class TypicalAcceptance:
    """The thresholds.

    Raises:
        ValueError: one of them is outside (0, 1].
    """

    epsilon: float = 0.09
    delta: float = 0.3

    def __post_init__(self) -> None:
        for name in ("epsilon", "delta"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(
                    f"typical acceptance: {name}={getattr(self, name)} must be in (0, 1]: at 0 every draft is kept, "
                    "above 1 none is."
                )

    @property
    def settings(self) -> dict[str, Any]:
        """How results name it (`lossy_note`)."""
        return {"rule": "typical acceptance", **asdict(self)}

    def threshold(self, target_V: Tensor) -> float:
        """The probability a token needs, given the target's row."""
        entropy = torch.special.entr(target_V).sum().item()
        return min(self.epsilon, self.delta * math.exp(-entropy))


def lossy_note(settings: Mapping[str, Any] | None) -> str:
    """What every result of a lossy rule says of itself; nothing where there is none."""
    if not settings:
        return ""
    return "LOSSY: " + ", ".join(
        str(value) if name == "rule" else f"{name} {value:g}" for name, value in settings.items()
    )


def verify_typical(
    tree: Tree, target_row: Callable[[int], Tensor], source: RandomSource, rule: TypicalAcceptance
) -> TreeVerdict:
    """The longest path that the rule keeps, and the next token; a chain is `Tree.chain(tokens)`.

    Args:
        target_row: the target's warped distribution [V]: row 0 follows the anchor, row i + 1 node i. Asked only of kept
            nodes that have children, and of the path's end.
    """
    rows: dict[int, Tensor] = {}
    kept: dict[int, tuple[int, float]] = {-1: (0, 0.0)}  # node -> (depth, log of the product of p_t)
    for parent in range(-1, len(tree.tokens)):
        if parent not in kept or not tree.children(parent):
            continue
        row_V = rows[parent] = target_row(parent + 1)
        least, (depth, likelihood) = rule.threshold(row_V), kept[parent]
        for node in tree.children(parent):
            probability = row_V[tree.tokens[node]].item()
            if probability >= least:
                kept[node] = depth + 1, likelihood + math.log(probability)
    last = max(kept, key=lambda node: (*kept[node], -node))
    return TreeVerdict(tree.path(last), source.choose(rows[last] if last in rows else target_row(last + 1)))
