"""Verification: accept draft token x with min(1, p_t(x) / p_d(x)); if not, go on with the residual norm (p_t - p_d)_+.

    anchor -+- a -+- c      p_t(. | anchor):  a? no -> residual:  b? yes -> p_t(. | b):  e? no -> draw from its residual
            |     +- d
            +- b --- e      accepted: the path to b;   next token: what the last residual gave

A rejected child leaves a problem of the same kind, a residual to be drawn from and one more candidate. What changes is
which p_d the next candidate came from:

    drawn without replacement   p_d given that it is none of the siblings before
    drawn with replacement      p_d (a duplicate is then accepted with probability 0: its residual is 0)
    chosen, nothing drawn       one-hot at the candidate: accepted with p_t(x), then x leaves p_t

In a chain every node has one child, which is speculative sampling (Leviathan et al., arXiv 2211.17192, algorithm 1):
the first rejection draws from (p_t - p_d)_+, no rejection from p_t. Temperature 0 needs no case of its own: one-hot
distributions turn the ratio into "equal or not" and the residual into the target's argmax.

Sources: SpecInfer, arXiv 2305.09781 (multi-round sampling); EAGLE, 2401.15077; without replacement: Jeon et al.,
2402.14160. Shapes: V vocab.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from outrider.drafters.draft import Draft, DraftRow, without
from outrider.sampling import RandomSource, choose_together, residual
from outrider.utils.measure import on_device


@dataclass(frozen=True)
class TargetRows:
    """The target's distributions for one draft: row 0 follows the anchor, row i + 1 follows node i and its ancestors.

    `row(k)` is the warped distribution [V]. `pick(k)` is the token that the target emits whatever was drafted, in
    greedy decoding and coupled sampling (sampling.py); else None. `node_probs`: for each node the probability of its
    token in the row of its parent, if a GPU was asked for those of all nodes at once.
    """

    row: Callable[[int], Tensor]
    pick: Callable[[int], int] | None = None
    node_probs: Sequence[float] | None = None


@dataclass(frozen=True)
class Verdict:
    """What verification gives: the accepted nodes from the anchor on, and the correction or bonus token after them."""

    path: list[int]
    next_token: int

    @property
    def accepted(self) -> int:
        """Draft tokens kept."""
        return len(self.path)


Origin = Literal["draft", "correction", "bonus"]


@dataclass(frozen=True)
class RoundResult:
    """A request's share of a round: its draft in full, the nodes of it that the target verified, and the verdict."""

    draft: Draft
    verified: Draft
    verdict: Verdict

    @property
    def tokens(self) -> list[int]:
        """To commit: the accepted draft tokens and the next token."""
        return [*(self.draft.tokens[node] for node in self.verdict.path), self.verdict.next_token]

    def reach(self, committed: int) -> int:
        """Positions for which the target judged a draft, where `committed` of `tokens` were kept: fewer at a stop."""
        depth = self.verified.depth
        return min(depth, committed) if self.verdict.accepted >= committed else depth

    @property
    def rejected(self) -> bool:
        """Whether drafts were tried where the path ends: the next token then is a correction, else a bonus."""
        return bool(self.verified.children(self.verdict.path[-1] if self.verdict.path else -1))

    @property
    def origins(self) -> list[Origin]:
        """Where each of `tokens` comes from; a bonus is also what plain decoding gives."""
        own: Origin = "correction" if self.rejected else "bonus"
        return [*["draft"] * self.verdict.accepted, own]  # type: ignore[list-item]


@dataclass(frozen=True)
class Rejected:
    """What is left to draw from after a rejection, not yet computed: several requests' are computed together.

    `target_V`: p_t, or what siblings before left of it. `draft`: p_d, or the token that was chosen.
    """

    target_V: Tensor
    draft: Callable[[], Tensor] | Tensor | int

    def left(self) -> Tensor:
        """The residual [V]."""
        if isinstance(self.draft, int):
            return _without_chosen(self.target_V, self.draft)
        return residual(self.target_V, self.draft if isinstance(self.draft, Tensor) else self.draft())


@dataclass(frozen=True)
class PendingVerdict:
    """An accepted path, and the next token or what it is still to be drawn from: a distribution [V], or a residual."""

    path: list[int]
    rest: int | Tensor | Rejected


def verify(draft: Draft, rows: TargetRows, source: RandomSource, typical: TypicalAcceptance | None = None) -> Verdict:
    """Accept a path of the draft and emit one more token, which together are distributed as the target's own.

    Args:
        typical: accept by this lossy rule instead, unless `rows.pick` settles the tokens.
    """
    (verdict,) = verify_all([draft], [rows], [source], typical=typical)
    if isinstance(verdict, Exception):
        raise verdict
    return verdict


def verify_all(
    drafts: Sequence[Draft],
    rows: Sequence[TargetRows],
    sources: Sequence[RandomSource],
    typical: TypicalAcceptance | None = None,
) -> list[Verdict | Exception]:
    """`verify` of several requests, whose residuals are computed and next tokens drawn together: a GPU is read once for
    all, and many requests take as many launches as one.

    What goes wrong for one request is its result, so that the others have theirs.
    """
    verdicts: list[Verdict | Exception] = []
    rests: dict[int, Tensor | Rejected] = {}
    for place, (draft, its_rows, source) in enumerate(zip(drafts, rows, sources, strict=True)):
        try:
            pending = accept(draft, its_rows, source, typical=typical)
        except Exception as error:
            verdicts.append(error)
            continue
        if isinstance(pending.rest, Tensor | Rejected):
            rests[place] = pending.rest
            verdicts.append(Verdict(pending.path, -1))
        else:
            verdicts.append(Verdict(pending.path, pending.rest))
    drawn: dict[int, Tensor] = {}
    for place, rest in zip(rests, _computed(list(rests.values())), strict=True):
        if isinstance(rest, Exception):
            verdicts[place] = rest
        else:
            drawn[place] = rest
    tokens = choose_together(list(drawn.values()), [sources[place] for place in drawn])
    for place, token in zip(drawn, tokens, strict=True):
        verdict = verdicts[place]
        assert isinstance(verdict, Verdict)
        verdicts[place] = token if isinstance(token, Exception) else replace(verdict, next_token=token)
    return verdicts


def _computed(rests: Sequence[Tensor | Rejected]) -> list[Tensor | Exception]:
    """The distributions [V] that next tokens are drawn from; on a GPU the residuals are computed together."""
    found: dict[int, Tensor | Exception] = {}
    groups: dict[object, list[int]] = {}  # chosen ones, and drawn ones by the tokens that they are over
    for place, rest in enumerate(rests):
        if isinstance(rest, Tensor):
            found[place] = rest
        elif rest.target_V.is_cuda and isinstance(rest.draft, int | DraftRow):
            key = "chosen" if isinstance(rest.draft, int) else id(rest.draft.ids_C)
            groups.setdefault(key, []).append(place)
        else:
            try:
                found[place] = rest.left()
            except Exception as error:
                found[place] = error
    for places in groups.values():
        own = [rest for place in places if isinstance(rest := rests[place], Rejected)]
        target_AV = torch.stack([rest.target_V for rest in own])
        if rows := [rest.draft for rest in own if isinstance(rest.draft, DraftRow)]:
            draft_AV = DraftRow.together(rows)
        else:  # one-hot: the token leaves p_t, as `_without_chosen` says
            tokens_A1 = on_device([[rest.draft] for rest in own], target_AV.device)
            draft_AV = torch.zeros_like(target_AV).scatter_(1, tokens_A1, 1.0)
        found.update(zip(places, residual(target_AV, draft_AV), strict=True))
    return [found[place] for place in range(len(rests))]


def accept(
    draft: Draft, rows: TargetRows, source: RandomSource, typical: TypicalAcceptance | None = None
) -> PendingVerdict:
    """The path of the draft that is accepted, and what the next token is drawn from.

    Rows are asked for along the accepted path only, so that nothing is warped after the last rejection. If the
    target's token is settled without the draft (`rows.pick`), the child that equals it is accepted: that is the rule
    above at temperature 0, and the definition of coupled sampling.
    """
    if typical is not None and rows.pick is None:
        return _accept_typical(draft, rows.row, typical)
    path: list[int] = []
    node = -1
    while True:
        if rows.pick is not None:
            token = rows.pick(node + 1)
            child = next((child for child in draft.children(node) if draft.tokens[child] == token), None)
            if child is None:
                return PendingVerdict(path, token)
        else:
            child, rest = _try_children(draft, node, rows, source=source)
            if child is None:
                assert rest is not None, "neither a child nor what to draw from"
                return PendingVerdict(path, rest)
        node = child
        path.append(node)


def _try_children(
    draft: Draft, node: int, rows: TargetRows, source: RandomSource
) -> tuple[int | None, Tensor | Rejected | None]:
    """The accepted child and None, or None and the distribution that is left to draw from."""
    siblings, children = draft.siblings.get(node), draft.children(node)
    place = node + 1  # the row that they are judged by
    draft_V: Tensor | None = None  # what the next child was drawn from
    target_V: Tensor | None = None  # what rejected children left of the row; None: it has not been needed yet
    for child in children:
        token = draft.tokens[child]
        if target_V is None and rows.node_probs is not None:
            probability = rows.node_probs[child]
        else:
            target_V = rows.row(place) if target_V is None else target_V
            probability = target_V[token].item()
        drawn_with = 1.0
        if siblings is not None:
            if draft_V is None and siblings.first is not None:
                drawn_with = siblings.first
            else:
                draft_V = siblings.row() if draft_V is None else draft_V
                drawn_with = draft_V[token].item()
            assert drawn_with > 0, f"node {child}: token {token} has probability 0 in what it was drawn from"
        if source.accept(probability / drawn_with):
            return child, None
        target_V = rows.row(place) if target_V is None else target_V
        last = child == children[-1]
        if siblings is not None and draft_V is None and not last:
            draft_V = siblings.row()
        rejected = Rejected(target_V, token if siblings is None else siblings.row if draft_V is None else draft_V)
        if last:
            return None, rejected
        target_V = rejected.left()
        if siblings is not None and draft_V is not None and not siblings.replaced:
            draft_V = without(draft_V, token)
    return None, rows.row(place)


def _without_chosen(target_V: Tensor, token: int) -> Tensor:
    """The residual under a one-hot p_d. Where nothing else is possible only rounding can have rejected the token."""
    rest_V = without(target_V, token)
    return torch.where(rest_V.any(), rest_V, target_V)


# ----------------------------------------------------------------------------
# Typical acceptance: keep what the target finds plausible. **Lossy**: the output is not the target's distribution.
#
#     keep x_k  if  p_t(x_k) >= min(epsilon, delta exp(-H(p_t)))          H: entropy of the target's row, in nats
#
# The more certain the target, the closer to delta itself a token's probability must be; where it is undecided, less
# will do, and epsilon is the most ever asked for. Neither p_d nor chance plays a part, so tokens are accepted more
# often than exactness allows; a caller has to ask for it. The paper's inequality is strict; here equality keeps the
# token.
#
# At temperature 0 the row is one-hot, H = 0, and exactly the target's argmax is kept: the lossless rule. Of several
# kept paths the longest wins; of equally long ones that of the largest product of p_t. The token after the path is
# drawn from the target's row, as after any accepted draft; also where drafts were turned down, for no residual is owed.
#
# Source: Medusa, arXiv 2401.10774, section 2.3.1; the defaults are those of its release. Shapes: V vocab.
# ----------------------------------------------------------------------------


@dataclass(frozen=True)
class TypicalAcceptance:
    """The thresholds of typical acceptance, a *lossy* rule: the output is not distributed as the target's.

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
    """The line that results of a lossy rule carry; "" for the exact one."""
    if not settings:
        return ""
    return "LOSSY: " + ", ".join(
        str(value) if name == "rule" else f"{name} {value:g}" for name, value in settings.items()
    )


def _accept_typical(draft: Draft, target_row: Callable[[int], Tensor], rule: TypicalAcceptance) -> PendingVerdict:
    """The longest path that the rule keeps, and the target's row after it.

    Rows are asked for of kept nodes that have children, and at the path's end.
    """
    rows: dict[int, Tensor] = {}
    kept: dict[int, tuple[int, float]] = {-1: (0, 0.0)}  # node -> (depth, log of the product of p_t)
    for parent in range(-1, len(draft.tokens)):
        if parent not in kept or not draft.children(parent):
            continue
        row_V = rows[parent] = target_row(parent + 1)
        least, (depth, likelihood) = rule.threshold(row_V), kept[parent]
        for node in draft.children(parent):
            probability = row_V[draft.tokens[node]].item()
            if probability >= least:
                kept[node] = depth + 1, likelihood + math.log(probability)
    last = max(kept, key=lambda node: (*kept[node], -node))
    return PendingVerdict(draft.path(last), rows[last] if last in rows else target_row(last + 1))
