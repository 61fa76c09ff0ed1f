"""The trace of a round: every draft with its confidences and what became of it, every token with where it comes from.

It is made after a round, for requests that ask for it, from what the round has computed: it changes no token. What
confidences there are of a draft:

    raw         of the drafter's head                   sigmoid(s_k)
    calibrated  what the drafter hands over             sigmoid(s_k / T_k + b_k), as `outrider calibrate` fitted them
    believed    as earlier outcomes have corrected it   what the policy reads

Shapes: P tokens of the accepted path and the one behind it, V target vocab.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from outrider.decoding.round import Origin, RoundResult
from outrider.drafters.draft import Draft
from outrider.sampling import at_least_float32

Outcome = Literal["accepted", "rejected", "unread", "left out"]
Source = Literal["drafter", "copy"]
_TOP = 5  # of the target's likeliest tokens


@dataclass(frozen=True)
class DraftTrace:
    """A draft token: a node after node `parent` (-1: the anchor).

    `outcome`: "unread" where the round ended before it, "left out" where the policy did not have it verified.
    `p_draft`: the probability that it was drawn with; 1 where it was chosen, as at temperature 0. `p_target`: what
    verification held against that, 1 or 0 where the target's token is settled without the draft. `target`: the target's
    probability of it at temperature 1, before penalties and top-p. None: there is none, or it was not looked at.
    """

    token: int
    parent: int
    outcome: Outcome
    p_draft: float
    p_target: float | None
    target: float | None
    raw: float | None
    calibrated: float | None
    believed: float | None


@dataclass(frozen=True)
class TokenTrace:
    """A committed token: node `node` of the draft, or the target's own (None). "plain": nothing was verified.

    `target` is as of `DraftTrace`; `top` are the likeliest tokens in its place (id, the same probability).
    """

    token: int
    origin: Origin | Literal["plain"]
    node: int | None
    target: float
    top: list[tuple[int, float]]


@dataclass(frozen=True)
class RoundTrace:
    """A round of a request.

    Attributes:
        number: among the request's rounds, from 1.
        source: who drafted; None: nobody.
        reason: why no more drafts were verified, for people.
        drafts: all nodes of the draft, verified or not.
        tokens: what was committed.
    """

    number: int
    source: Source | None
    reason: str
    drafts: list[DraftTrace]
    tokens: list[TokenTrace]


def trace_round(
    result: RoundResult,
    tokens: Sequence[int],
    logits_NV: Tensor,
    *,
    compared: Mapping[int, Tensor],
    number: int,
    source: Source | None,
    reason: str,
    raw: Callable[[float, int], float] | None,
    believed: Sequence[float],
) -> RoundTrace:
    """The trace of one round.

    Args:
        tokens: committed; fewer than `result.tokens` where the response ended among them.
        logits_NV: the target's, after the anchor and every verified node.
        compared: the rows [V] that verification read, 0 the anchor's; none where it picked the target's token.
        raw: from a confidence and its position, counted from 0; None: the drafter has no head for them.
        believed: of the draft's first nodes.
    """
    draft, path = result.draft, result.verdict.path
    logprobs_PV = at_least_float32(logits_NV[[0, *(node + 1 for node in path)]]).log_softmax(-1)
    row_of = {node: row for row, node in enumerate([-1, *path])}
    drafts = []
    for node, (token, parent, outcome) in enumerate(
        zip(draft.tokens, draft.parents, _outcomes(result, len(tokens)), strict=True)
    ):
        p_target = target = None
        if outcome in ("accepted", "rejected"):
            row_V = compared.get(parent + 1)
            p_target = float(outcome == "accepted") if row_V is None else row_V[token].item()
            target = logprobs_PV[row_of[parent], token].exp().item()
        confidence = draft.confidences[node] if node < len(draft.confidences) and source == "drafter" else None
        drafts.append(
            DraftTrace(
                token,
                parent,
                outcome,
                p_draft=_drawn_with(draft, node),
                p_target=p_target,
                target=target,
                raw=None if confidence is None or raw is None else raw(confidence, node),
                calibrated=confidence,
                believed=_known(believed, node),
            )
        )
    nodes: list[int | None] = [*path, None]
    values, ids = (found.tolist() for found in logprobs_PV.topk(min(_TOP, logprobs_PV.shape[1])))
    committed = []
    for row, (token, origin) in enumerate(zip(tokens, result.origins, strict=False)):
        top = [(id, math.exp(value)) for id, value in zip(ids[row], values[row], strict=True)]
        probability = logprobs_PV[row, token].exp().item()
        shown: Origin | Literal["plain"] = origin if result.verified.tokens else "plain"
        committed.append(TokenTrace(token, shown, nodes[row], target=probability, top=top))
    return RoundTrace(number, source, reason, drafts=drafts, tokens=committed)


def _outcomes(result: RoundResult, committed: int) -> list[Outcome]:
    """What became of every node of the draft."""
    draft, verified = result.draft, len(result.verified.tokens)
    path = result.verdict.path[:committed]
    ended = committed <= result.verdict.accepted  # with an accepted draft: nothing behind it counts
    compared_with = {-1, *path} - ({path[-1]} if ended and path else set())
    found: list[Outcome] = []
    for node, parent in enumerate(draft.parents):
        if node >= verified:
            found.append("left out")
        elif node in path:
            found.append("accepted")
        elif parent in compared_with and not _settled(draft, node, path):
            found.append("rejected")
        else:
            found.append("unread")
    return found


def _settled(draft: Draft, node: int, path: Sequence[int]) -> bool:
    """Whether a sibling before this node was accepted."""
    return any(sibling < node and sibling in path for sibling in draft.children(draft.parents[node]))


def _drawn_with(draft: Draft, node: int) -> float:
    """The probability of a node in the distribution that its siblings were drawn from; 1 where it was chosen."""
    siblings = draft.siblings.get(draft.parents[node])
    if siblings is None:
        return 1.0
    if siblings.first is not None and draft.children(draft.parents[node])[0] == node:
        return siblings.first
    return float(siblings.row()[draft.tokens[node]])


def _known(values: Sequence[float], place: int) -> float | None:
    return values[place] if place < len(values) and not math.isnan(values[place]) else None
